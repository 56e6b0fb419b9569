"""Blocks that are compiled one by one: same numbers as one graph, gathers ahead of their blocks."""

import contextlib
import copy
import gc
import random
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.zpasses.layered_models import (
    DEPTH,
    VOCAB,
    WIDTH,
    Attention,
    Checkpointed,
    Dropout,
    Frozen,
    Layer,
    Net,
    Pair,
    Pairs,
    ReadTwice,
    Recurrent,
    Repeated,
    Shared,
    Statistics,
    trained,
)
from zpasses import compat
from zpasses.backend import block_steps as planning
from zpasses.dumps import read
from zpasses.errors import AgreementError, MemoryBudgetError, OptionError
from zpasses.runtime import block_schedule
from zpasses.runtime.late_reductions import LateReductions
from zpasses.testing import fake_world, run_in_fresh_ranks, run_on_ranks, world_mesh

EAGER = {"codegen": "eager"}


@pytest.fixture(autouse=True)
def new_schedule(monkeypatch):
    monkeypatch.setattr(block_schedule, "_schedule", block_schedule.BlockSchedule())


def build_step(build, options, *, per_block, mesh=None):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    zpasses.shard(model, mesh=mesh or world_mesh())
    if not per_block:
        return model, torch.compile(model, backend="zpasses", options=options)
    zpasses.compile_blocks(model, "layers.*", **options)
    return model, model


class Reentrant(Net):
    def call(self, layer, x):
        return checkpoint(layer, x, use_reentrant=True)


def train(build, options, steps=4, *, per_block, **how):
    """Returns losses and full parameters of this rank after some steps."""
    return trained(*build_step(build, options, per_block=per_block), steps, **how)


def compare(build, options, *, one_graph=True, **how):
    """Train block by block, and as one graph or with all collectives inside their blocks.

    Returns the number of graphs whose gathers started ahead, and of those that did not run next.
    """
    inside = {**EAGER, **options, "prefetch": 0}
    losses, params = train(build, inside, per_block=not one_graph, **how)
    block_schedule._schedule = block_schedule.BlockSchedule()
    found, others = train(build, {**EAGER, "prefetch": 1, **options}, per_block=True, **how)
    assert found == losses
    for other, param in zip(others, params, strict=True):
        assert torch.equal(other, param)
    schedule = block_schedule.block_schedule()
    return schedule.started_ahead, schedule.dropped


class FrozenBlock(Net):
    """One block in the middle is not trained at all: its gathers for backward are in a backward."""

    def __init__(self):
        super().__init__()
        self.layers[2].requires_grad_(False)


DROP = {"depths": [4, 2, 3, 4]}
CASES = {
    "plain": (Net, {}),
    "attention": (partial(Net, Attention), {}),
    "read twice": (partial(Net, ReadTwice), {}),
    "dropout": (partial(Net, Dropout), {}),
    "several results": (partial(Pairs, Pair), {}),
    "checkpoint": (Checkpointed, {}),
    "reentrant checkpoint": (Reentrant, {}),
    # Each of several blocks reduces its own gradient of a weight: sums round in another order.
    "shared weight": (Shared, {"one_graph": False}),
    "frozen": (Frozen, {}),
    "frozen block": (FrozenBlock, {}),
    "statistics": (partial(Net, Statistics), {}),
    "autocast": (Net, {"autocast": True}),
    "window": (Net, {"window": True}),
    "evaluation": (Net, {"evaluate": True}),
    "clipping": (Net, {"clip": True}),
    "repeated": (Repeated, {"one_graph": False}),
    "recurrent": (Recurrent, {"one_graph": False}),
    "layer drop": (Net, DROP),
    "stage 1, window": (Net, {"stage": 1, "window": True}),
    "stage 2, window": (Net, {"stage": 2, "window": True}),
    "stage 2, layer drop": (Net, {"stage": 2, **DROP}),
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "prefetch"),
    some_quick(
        [
            *((case, 1) for case in CASES),
            *((case, "auto") for case in ("plain", "checkpoint", "frozen block", "layer drop")),
            *((case, 3) for case in ("plain", "reentrant checkpoint", "window", "recurrent")),
        ],
        [("checkpoint", 1)],
    ),
)
def test_blocks_of_all_kinds_train_to_the_same_bits(case, prefetch):
    build, how = CASES[case]
    how = dict(how)
    options = {"prefetch": prefetch, "zero_stage": how.pop("stage", 3)}
    ((started, dropped), second) = run_on_ranks(compare, build, options, **how)
    assert (started, dropped) == second
    assert started > 0 or prefetch == "auto"
    if case.startswith("stage"):  # layers that are left out waste gathers, and nothing else
        assert (dropped > 0) == ("depths" in how)


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)


def train_own_batches(build, options, sizes, evaluations):
    """Train on batches whose sizes differ between ranks, and compare with the unsharded model."""
    torch._dynamo.reset()
    block_schedule._schedule = block_schedule.BlockSchedule()
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    zpasses.shard(model, mesh=world_mesh())
    zpasses.compile_blocks(model, "layers.*", **options)
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, plain)]
    for number, step in enumerate(sizes):
        batches = [torch.arange(5 * size).view(size, 5) % VOCAB for size in step]
        if number < evaluations:
            with torch.no_grad():
                model(batches[dist.get_rank()])
            continue
        model(batches[dist.get_rank()]).backward()
        (sum(map(plain, batches)) / len(batches)).backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    return block_schedule.block_schedule().started_ahead


@pytest.mark.processes
@pytest.mark.parametrize(
    ("build", "options", "evaluations"),
    [
        # Rank 1 knows that sizes differ when it first compiles for gradients, in a backward.
        (Reentrant, {**EAGER, "prefetch": 4, "zero_stage": 2}, 2),
        (partial(Net, Encoder), {**EAGER, "prefetch": 4, "zero_stage": 3}, 0),
        (Reentrant, {"prefetch": "auto"}, 2),
    ],
    ids=["in a backward", "other turning points", "Inductor"],
)
@pytest.mark.slow(quick="test_twenty_lengths_take_two_compiles_and_a_dump_says_why")
def test_a_rank_recompiles_alone_for_batches_of_its_own_size(build, options, evaluations):
    (first, second) = run_on_ranks(
        train_own_batches, build, options, [(2, 2), (2, 400), (2, 3), (3, 2)], evaluations
    )
    assert first == second > 0


def at_turning_points(options, **how):
    """Train with turning points in all backwards, of which the cache does not know.

    Returns for each of them how many reductions were in flight before and after it, and how many
    graphs it let gather.
    """
    seen = []
    schedule = block_schedule.BlockSchedule()
    turn = block_schedule.BlockSchedule.turn

    def observed(self):
        before = schedule.reductions.in_flight, schedule.started_ahead
        turn(self)
        seen.append((before[0], schedule.reductions.in_flight, schedule.started_ahead - before[1]))

    with (
        patch.object(planning, "_MARGIN", 0.0),
        patch.object(block_schedule, "_schedule", schedule),
        patch.object(block_schedule.BlockSchedule, "turn", observed),
    ):
        return *train(Net, {**options, "cache": False}, per_block=True, **how), seen


def compare_turns(options, **how):
    losses, params, seen = at_turning_points({**EAGER, **options}, **how)
    inside, others = train(Net, {**EAGER, **options, "prefetch": 0}, per_block=True, **how)
    assert losses == inside
    assert all(map(torch.equal, params, others))
    return seen


@pytest.mark.processes
@pytest.mark.parametrize(
    ("prefetch", "how", "left"), some_quick([(1, {}, 0), (1, DROP, 0), (3, {}, 2)], [(1, {}, 0)])
)
def test_backwards_end_reductions_and_start_gathers_at_their_turning_point(prefetch, how, left):
    (first, second) = run_on_ranks(compare_turns, {"prefetch": prefetch}, **how)
    assert first == second
    assert max(after for _, after, _ in first) == left
    assert any(started for _, _, started in first)
    assert any(before for before, _, _ in first)


@pytest.mark.slow(
    quick="test_backwards_end_reductions_and_start_gathers_at_their_turning_point",
)
@pytest.mark.inductor
@on_ranks(2)
def test_generated_code_keeps_the_turning_point_inside_the_backward():
    *found, seen = at_turning_points({"prefetch": 1})
    assert_near(found, train(Net, {"prefetch": 0}, per_block=True))
    assert any(before and not after and started for before, after, started in seen)


def assert_near(found, expected):
    """Compares losses and parameters."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_hooks_of_nodes_that_accumulate_are_called_once_and_after_the_gradient():
    model, _ = build_step(Net, {**EAGER, "prefetch": 1}, per_block=True)
    tokens, seen, later = torch.arange(VOCAB).view(2, -1), [], LateReductions
    with patch.object(later, "add", autospec=True, side_effect=later.add) as wait:
        model(tokens).backward()
        assert wait.called, "reductions wait where the program holds no node"
        model.zero_grad()
        nodes = []
        for name, param in model.named_parameters():
            nodes.append(param.expand_as(param).grad_fn.next_functions[0][0])
            nodes[-1].register_hook(
                lambda inputs, outputs, name=name, param=param: seen.append(
                    (name, param.grad is not None)
                )
            )
        wait.reset_mock()
        model(tokens).backward()
        assert not wait.called
    assert sorted(seen) == sorted((name, True) for name, _ in model.named_parameters())


@pytest.mark.slow(quick="test_blocks_of_all_kinds_train_to_the_same_bits")
@on_ranks(4)
def test_gradients_are_averaged_over_replicas_after_their_block():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for prefetch in (0, 1):
        options = {**EAGER, "prefetch": prefetch}
        losses, params = trained(*build_step(Net, options, per_block=True, mesh=mesh), 4)
        found.append((losses, [param.tolist() for param in params]))
    assert found[0] == found[1]
    everywhere = [None] * 4
    dist.all_gather_object(everywhere, found[0][1])
    assert everywhere == everywhere[:1] * 4


@pytest.mark.skipif(not compat.recompile_limit(2), reason="torch.compile takes no recompile_limit")
def test_a_block_is_compiled_for_more_variants_than_dynamo_allows_of_one_function(one_rank):
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    zpasses.shard(model, mesh=one_rank)
    zpasses.compile_blocks(model, **EAGER)
    before = compat.compile_counts()["captured"]
    for length in (6, 9, 1):  # as it is, for any other, and torch compiles for 1 apart
        model(torch.randn(length, 8)).sum().backward()
        with torch.no_grad():
            model(torch.randn(length, 8))
    # In training, the input of the first block needs no gradient.
    assert compat.compile_counts()["captured"] - before == 3 * 3 > 8


def test_equal_modules_of_torch_share_a_compile(one_rank):
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, 0.0) for _ in range(3)))
    zpasses.shard(model, mesh=one_rank)
    given = torch.ones(2, 3, 8, requires_grad=True)  # as what a block before it returns
    expected = model(given)
    zpasses.compile_blocks(model, **EAGER)
    before = compat.compile_counts()["captured"]
    assert torch.equal(model(given), expected)
    assert compat.compile_counts()["captured"] - before == 1


class Numbered(nn.Module):
    """A block that knows its number, and computes with it."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.scale = nn.Parameter(torch.ones(17))

    def forward(self, x):
        return x * self.scale / self.number


class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Numbered(number) for number in range(1, 12)))

    def forward(self, x):
        return self.layers(x).sum()


@pytest.mark.skipif(not compat.recompile_limit(2), reason="torch.compile takes no recompile_limit")
def test_more_kinds_of_blocks_than_dynamo_compiles_of_one_function_are_all_compiled(one_rank):
    torch._dynamo.reset()
    model = Count()
    zpasses.shard(model, mesh=one_rank)
    assert len(model.layers) > torch._dynamo.config.recompile_limit
    zpasses.compile_blocks(model, "layers.*", **EAGER)
    before = compat.compile_counts()["captured"]
    model(torch.randn(3, 17)).backward()
    assert compat.compile_counts()["captured"] - before == len(model.layers)


@on_ranks(2)
def test_gradients_are_returned_where_autograd_asks_for_them():
    model, _ = build_step(Net, {**EAGER, "prefetch": 1}, per_block=True)
    tokens = torch.arange(VOCAB).view(2, -1)
    params = list(model.parameters())
    found = torch.autograd.grad(model(tokens), params)
    seen = []
    for param in params:
        param.register_hook(lambda grad: seen.append(grad.shape))
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.shape))
    for _ in range(2):
        model(tokens).backward()
    assert len(seen) == 4 * len(params)
    for grad, param in zip(found, params, strict=True):
        assert torch.equal(param.grad.to_local(), 2 * grad.to_local())


@on_ranks(2)
def test_parameters_that_change_between_evaluations_are_gathered_again():
    model, _ = build_step(Net, {**EAGER, "prefetch": 2}, per_block=True)
    tokens = torch.arange(VOCAB).view(2, -1)
    losses = []
    with torch.no_grad():
        for _ in range(4):
            losses.append(model(tokens).item())
            torch._foreach_mul_([param.data for param in model.parameters()], 0.5)
    torch._dynamo.reset()
    again, _ = build_step(Net, EAGER, per_block=False)
    with torch.no_grad():
        for loss in losses:
            assert again(tokens).item() == loss
            for param in again.parameters():
                param.mul_(0.5)


@on_ranks(2)
def test_a_step_without_backward_leaves_nothing_behind():
    model, _ = build_step(Net, {**EAGER, "prefetch": 1}, per_block=True)
    tokens = torch.arange(VOCAB).view(2, -1)
    for _ in range(2):
        model(tokens).backward()
    model.zero_grad()
    model(tokens)  # the loss was not finite, for example
    model(tokens).backward()
    found = [param.grad.to_local().clone() for param in model.parameters()]
    model.zero_grad()
    model(tokens).backward()
    for param, grad in zip(model.parameters(), found, strict=True):
        assert torch.equal(param.grad.to_local(), grad)


def train_with_others(how, options):
    """Returns the error of a program in which the second rank does something else."""
    rank = dist.get_rank()
    options = {**EAGER, "agreement_timeout_s": 5.0, **options}
    if how == "at another distance":
        options["prefetch"] = 1 + rank
    model, _ = build_step(Net, options, per_block=True)
    tokens = torch.arange(VOCAB).view(2, -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(4):
            model(tokens).backward()
            optimizer.step()
            if step == 2 and how == "evaluated" and rank == 0:
                with torch.no_grad():
                    model(tokens)
            if step == 2 and how == "in another order" and rank == 1:
                model.layers = nn.ModuleList(reversed(model.layers))
    except AgreementError as error:
        return str(error)
    return ""


OTHERS = {
    "in another order": ({}, ["parameters 'layers.3.norm.weight' to 'layers.3.down.weight'"]),
    "at another distance": ({}, ["1 ahead", "2 ahead"]),
    # What runs between blocks is not compiled. The ranks meet there first.
    "evaluated": ({"zero_stage": 2}, ["in code that is not compiled", " 5 s"]),
}


@pytest.mark.processes
@pytest.mark.parametrize("how", some_quick(OTHERS, ["at another distance"]))
def test_ranks_that_call_blocks_in_another_order_are_told(how):
    options, said = OTHERS[how]
    for outcome in run_in_fresh_ranks(train_with_others, how, options):  # it breaks the group
        assert outcome.ok, str(outcome)
        assert all(words in outcome.result for words in said), outcome.result


def fail_often(options):
    """Every second backward raises in a hook. Returns how many tensors and collectives exist after
    some steps, and after many.
    """
    model, _ = build_step(Net, options, per_block=True)
    failing = False

    def hook(grad):
        if failing:
            raise ZeroDivisionError

    model.layers[1].register_forward_hook(lambda module, args, out: out.register_hook(hook) and out)
    tokens = torch.arange(2 * VOCAB).view(4, 5) % VOCAB
    counts = []
    for step in range(20):
        failing = step % 2 == 1
        with contextlib.suppress(ZeroDivisionError):
            model(tokens).backward()
        model.zero_grad()
        if step in (5, 19):
            gc.collect()
            tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
            counts.append((tensors, torch._C._distributed_c10d._get_work_registry_size()))
    return counts


@pytest.mark.processes
@pytest.mark.parametrize("options", [EAGER, {}], ids=str)
@pytest.mark.slow(quick="test_a_step_without_backward_leaves_nothing_behind")
def test_backwards_that_fail_leave_nothing(options):
    for few, many in run_on_ranks(fail_often, {**options, "zero_stage": 2, "prefetch": 1}):
        assert few == many


def test_hooks_on_the_model_are_set_once():
    model = Net()
    zpasses.compile_blocks(model, "layers.*")
    zpasses.compile_blocks(model, "head")
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1


def under_budget(budget):
    model, _ = build_step(Net, {**EAGER, "memory_budget": budget}, per_block=True)
    tokens = torch.arange(VOCAB).view(2, -1)
    try:
        for _ in range(3):
            model(tokens).backward()
    except MemoryBudgetError as error:
        return str(error)
    return block_schedule.block_schedule().plans.ahead


@pytest.mark.processes
@pytest.mark.slow(quick="test_too_small_budget_says_what_is_missing_and_what_holds_the_memory")
def test_a_budget_that_the_step_exceeds_is_refused_on_all_ranks():
    for text in run_on_ranks(under_budget, "1KiB"):
        assert "hold at least" in text
        assert "1 KiB are allowed" in text
    assert run_on_ranks(under_budget, "1GiB") == run_on_ranks(under_budget, "100%")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"blocks": "layer.*"}, "no module matches 'layer.*'. Modules of the model: tokens"),
        ({"blocks": "layers.*, haed"}, "no module matches 'haed'"),
        ({"blocks": "layers"}, "'layers', a ModuleList, which is never called"),
        ({"blocks": 3}, "got blocks=3; expected names of modules"),
        ({"prefetch": -1}, "prefetch=-1; expected a number of graphs >= 0"),
        ({"prefetch": "deep"}, "prefetch"),
        ({"prefetched": 1}, "prefetch"),
        ({"options": {"zero_stage": 3}}, "expected the options of the backend as arguments"),
        ({"prefetch": 1, "memory_budget": "1GiB"}, "both say how far ahead gathers start"),
        ({"blocks": "auto", "zero_stage": 3, "prefetch": "auto", "dump_ranks": "x"}, "dump_ranks"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said):
    with pytest.raises(OptionError, match=said.replace("*", r"\*")):
        zpasses.compile_blocks(Net(), **arguments)


def test_encodings_name_what_lies_outside_of_the_blocks(caplog):
    with fake_world(2) as mesh:
        model = zpasses.shard(Net(), mesh=mesh)
        zpasses.compile_blocks(model, "layers.*")
        assert not caplog.records
        encoded = "zero3{gather-params.encode=int8}"
        zpasses.compile_blocks(model, "layers.*,tokens,head", pipeline=encoded)
        assert not caplog.records
        zpasses.compile_blocks(model, "layers.*", pipeline=encoded)
    (text,) = (each.getMessage() for each in caplog.records)
    assert "tokens.weight, head.weight move exact values" in text


def test_blocks_are_found_by_name_or_in_lists():
    nested = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(Layer()), Layer()])})
    assert zpasses.compile_blocks(nested) == ["layers.0", "layers.1"]
    assert zpasses.compile_blocks(Net(), "layers.1, head") == ["layers.1", "head"]
    pairs = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleList([Layer(), Layer()])])})
    assert zpasses.compile_blocks(pairs) == ["layers.0.0", "layers.0.1"]


@pytest.mark.processes
def test_a_dump_has_one_graph_per_distinct_block_and_the_schedule_over_all(tmp_path):
    options = {**EAGER, "dump": str(tmp_path), "dump_ranks": "all"}
    run_on_ranks(train, Net, options, 2, per_block=True)
    for rank in read(tmp_path).ranks.values():
        (compiled,) = rank.compiles  # of all blocks
        assert {"joint", "forward", "backward"} <= set(compiled.graphs)
        (note,) = [each for each in compiled.notes if "graph(s) ahead" in each]
        assert f"a step runs {2 * DEPTH} graphs, {DEPTH} of them backward, from forward" in note


@pytest.mark.inductor
@pytest.mark.slow(quick="test_backwards_end_reductions_and_start_gathers_at_their_turning_point")
@pytest.mark.parametrize("case", ["window", "evaluation"])
@on_ranks(2)
def test_generated_code_of_blocks_computes_the_same(case):
    build, how = CASES[case]
    expected = train(build, EAGER, per_block=False, **how)
    assert_near(train(build, {"prefetch": 1}, per_block=True, **how), expected)


class Drawn(Net):
    """Calls its layers as it is told."""

    def forward(self, tokens, order, saves):
        x = self.tokens(tokens)
        for at, keep in zip(order, saves, strict=True):
            layer = self.layers[at]
            x = layer(x) if keep else checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def drawn_program(seed, options):
    """Runs a program that is drawn, equally on all ranks; returns its losses and parameters."""
    model, _ = build_step(Drawn, {**EAGER, **options}, per_block=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    choose, data = random.Random(seed), torch.Generator().manual_seed(dist.get_rank())
    orders = [choose.choices(range(DEPTH), k=choose.randint(1, 6)) for _ in range(2)]
    orders.append(list(range(DEPTH)))
    losses = []

    def forward():
        order = choose.choice(orders)
        saves = [choose.random() < 0.7 for _ in order]
        tokens = torch.randint(VOCAB, (2, VOCAB // 2), generator=data)
        losses.append(model(tokens, order, saves))
        return losses[-1]

    for _ in range(choose.randint(4, 10)):
        what = choose.randrange(8)
        if what < 3:
            forward().backward()
        elif what == 3:
            (forward() + forward()).backward()
        elif what == 4:
            with torch.no_grad():
                forward()
        elif what == 5:
            forward()  # without a backward
        elif what == 6:
            weight = dict(model.named_parameters())["layers.0.up.weight"]
            (grad,) = torch.autograd.grad(forward(), [weight], allow_unused=True)
            losses.append(grad.full_tensor().sum() if grad is not None else torch.zeros(()))
        else:
            with torch.no_grad(), zpasses.local_shards(model):
                torch._foreach_mul_([layer.down.weight for layer in model.layers], 0.9)
            zpasses.invalidate(model)
        if choose.random() < 0.5:
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses], [
        param.full_tensor().detach() for param in model.parameters()
    ]


@pytest.mark.parametrize("first", range(0, 60, 6))
@pytest.mark.slow(quick="test_blocks_of_all_kinds_train_to_the_same_bits")
@on_ranks(2, timeout_s=300)
def test_drawn_programs_compute_the_same_with_gathers_ahead(first):
    for seed in range(first, first + 6):
        stage = 1 + seed % 3
        losses, params = drawn_program(seed, {"zero_stage": stage, "prefetch": 0})
        for prefetch in (1, 2, "auto"):
            found, others = drawn_program(seed, {"zero_stage": stage, "prefetch": prefetch})
            assert found == losses, (seed, prefetch)
            assert all(map(torch.equal, others, params)), (seed, prefetch)
