"""The backend on real ranks: what compiles, and that training equals that of the unsharded
model.
"""

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from zpasses.graph.queries import collectives
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import listing, run_on_ranks, world_mesh

pytestmark = pytest.mark.processes

EAGER = {"codegen": "eager"}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Uneven rows, tied weights, a scalar, a frozen and an unused parameter."""

    def __init__(self, width=8, depth=2, vocabulary=11, *, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.full((width,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale + self.frozen
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten())


def pair(mesh=None, **options):
    torch.manual_seed(0)
    reference = Net(**options)
    return reference, zpasses.shard(copy.deepcopy(reference), mesh=mesh or world_mesh())


def batches(count, shape=(2, 5)):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randint(0, 11, shape, generator=generator) for _ in range(count)]


def assert_same_gradients(model, reference):
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            expected = theirs.grad.clone()
            dist.all_reduce(expected, op=dist.ReduceOp.AVG)
            torch.testing.assert_close(
                ours.grad.full_tensor(),
                expected,
                rtol=1e-4,
                atol=1e-6,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def train_both(step, model, reference, data, optimizer=torch.optim.SGD, between=lambda net: None):
    """Train both; losses and gradients must agree in every step. `between` runs before steps."""
    optimizers = [optimizer(each.parameters(), lr=0.1) for each in (model, reference)]
    for tokens in data:
        ours, theirs = loss_of(step, tokens), loss_of(reference, tokens)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        ours.backward()
        theirs.backward()
        between(step)
        assert_same_gradients(model, reference)
        for param in reference.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        for each in optimizers:
            each.step()
            each.zero_grad()


def _trains(options, checkpointed=False, depth=2, dynamic=None, shapes=((2, 5),) * 3):
    reference, model = pair(checkpointed=checkpointed, depth=depth)
    graphs = []
    step = torch.compile(model, backend="zpasses", options=options, fullgraph=True, dynamic=dynamic)
    with observe_graphs(graphs.append):
        train_both(step, model, reference, [batches(1, shape)[0] for shape in shapes])
    assert sum(graph.kind == "joint" for graph in graphs) == 1


TRAININGS = [
    {"options": {"zero_stage": 3}},
    {"options": {"zero_stage": 2}, "checkpointed": True},
    {"options": {"zero_stage": 1}},
    {"options": {"zero_stage": 2}},
    {"options": {"zero_stage": 3}, "checkpointed": True},
    {"options": {"pipeline": ""}},  # the unlowered dialect
]


@pytest.mark.parametrize("how", some_quick(TRAININGS, TRAININGS[:2]), ids=str)
def test_training_equals_the_unsharded_model(how):
    run_on_ranks(_trains, **how | {"options": EAGER | how["options"]})


THROUGH_INDUCTOR = [
    {"options": {"zero_stage": 2}, "ranks": 3},
    {"options": {"zero_stage": 3}, "ranks": 3},
    {"options": {}, "dynamic": True, "shapes": ((2, 5), (4, 7), (3, 9))},
]


@pytest.mark.inductor
@pytest.mark.slow(quick="test_sharded_training_equals_unsharded, on two ranks")
@pytest.mark.parametrize("how", THROUGH_INDUCTOR, ids=str)
def test_training_through_inductor_equals_the_unsharded_model(how):
    run_on_ranks(_trains, depth=1, **how, timeout_s=240)


@on_ranks(2)
@pytest.mark.slow(quick="test_a_rank_that_fails_to_compile_is_an_error_on_all_within_a_second")
def test_a_backward_that_failed_to_compile_compiles_again_to_the_same_graph():
    model = zpasses.shard(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"codegen": "eager"}, dynamic=True)
    found = []

    def fail_once(graph):
        if graph.kind == "backward":
            changes = [(record.text, record.changes) for record in graph.records]
            found.append((changes, listing(graph.graph)))
            if len(found) == 1:
                raise ValueError("told to fail")

    with observe_graphs(fail_once):
        with pytest.raises(ValueError, match="told to fail"):
            step(torch.ones(2, 4)).sum().backward()
        step(torch.ones(2, 4)).sum().backward()
    assert found[0] == found[1]


@pytest.mark.inductor
@pytest.mark.parametrize("stage", [2, 3])
def test_a_sharded_model_evaluates_through_inductor(one_rank, stage):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    torch._dynamo.reset()
    _, step = _sharded_copy(reference, codegen="inductor", cache=False, zero_stage=stage)
    x = torch.ones(2, 4)
    with torch.no_grad():
        for _ in range(2):  # stage 2 returns the parameters of the first, which the second is given
            torch.testing.assert_close(step(x), reference(x))


def test_code_does_not_keep_the_inputs_of_the_call_that_compiled_it(one_rank):
    torch._dynamo.reset()
    model = zpasses.shard(nn.Linear(8, 8), mesh=one_rank)
    step = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
    x = torch.ones(4, 8, requires_grad=True) * 2  # as what a block before it returns
    kept = weakref.ref(x)
    step(x).sum().backward()
    del x
    gc.collect()
    assert kept() is None


@pytest.mark.slow(quick="tests/zpasses/backend/test_compiler.py")
@on_ranks(2)
def test_several_sharded_models_in_one_graph():
    first, second = pair(), pair(width=4)
    step = torch.compile(first[1], backend="zpasses", options=EAGER)
    train_both(step, first[1], first[0], batches(2))

    def both(tokens):  # two roots in one graph, with parameters of the same name
        return first[1](tokens) + second[1](tokens)

    options, tokens = {"zero_stage": 2, **EAGER}, batches(1)[0]
    compiled = torch.compile(both, backend="zpasses", options=options, fullgraph=True)
    expected = first[0](tokens) + second[0](tokens)
    torch.testing.assert_close(compiled(tokens), expected, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_parameters_of_two_process_groups_in_one_graph():
    reference = Net()
    other = DeviceMesh.from_group(dist.new_group(list(range(dist.get_world_size()))), "cpu")
    model = copy.deepcopy(reference)
    zpasses.shard(model.blocks[0], mesh=other)
    zpasses.shard(model, mesh=world_mesh())
    graphs = []
    with observe_graphs(graphs.append):
        step = torch.compile(model, backend="zpasses", options=EAGER)
        train_both(step, model, reference, batches(2))
    joint = next(graph for graph in graphs if graph.kind == "joint")
    assert len({each.group for _, each in collectives(joint.graph)}) == 2


@on_ranks(2)
def test_compiled_blocks_in_an_eager_model_share_one_graph():
    reference, model = pair(depth=3)
    graphs = []
    for block in model.blocks:
        block.compile(backend="zpasses", options=EAGER)
    with observe_graphs(graphs.append):
        train_both(model, model, reference, batches(2))
    assert sum(graph.kind == "joint" for graph in graphs) == 1


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(max=1)
        return x * self.weight


class WritesToView(Writes):
    def forward(self, x):
        self.weight.detach().view(2, 2)[0].zero_()
        return x * self.weight


@on_ranks(2)
def test_a_model_that_writes_to_its_parameters_is_refused():
    for build, name in ((Writes, "clamp_"), (WritesToView, "zero_")):
        model = zpasses.shard(build(), mesh=world_mesh())
        with pytest.raises(Exception, match=rf"to parameter weight \({name}\).*would be lost"):
            torch.compile(model, backend="zpasses", options=EAGER)(torch.ones(4))


def _gathers_run(stage):
    """Count the gathers of forwards: at first, again, after a backward, after an edit of a shard,
    again, after an edit through `.data`, and of two evaluations after a step.
    """
    _, model = pair()
    step = torch.compile(model, backend="zpasses", options={"zero_stage": stage, **EAGER})
    optimizer, tokens, counts = torch.optim.AdamW(model.parameters()), batches(1)[0], []

    def forward():
        with torch.profiler.profile() as profile:
            loss = loss_of(step, tokens)
        names = [event.name for event in profile.events()]
        counts.append(sum(name.startswith("zpasses::gloo_all_gather") for name in names))
        return loss

    forward()  # compiles
    zpasses.invalidate(model)
    loss = forward()
    forward()
    loss.backward()
    forward()
    with torch.no_grad():
        model.blocks[0].norm._parameters["weight"].mul_(2)
    forward()
    forward()
    before = loss_of(step, tokens).item()
    model.embed._parameters["weight"].data.mul_(3)
    zpasses.invalidate(model)
    forward()
    loss = loss_of(step, tokens)
    assert loss.item() != before
    loss.backward()
    with torch.no_grad():
        step(tokens)  # compiles
        optimizer.step()
        forward()
        forward()
    return counts[1:]


def test_stage_2_gathers_again_only_after_a_reduction_or_a_change():
    counts = run_on_ranks(_gathers_run, 2)[0]
    fresh, cached, reduced, edited, again, invalidated, stepped, evaluated = counts
    assert fresh == invalidated > 0
    assert cached == again == 0
    assert edited == 1, "only what changed is gathered"
    assert 0 < reduced <= fresh, "frozen parameters stay"
    assert evaluated < stepped


@pytest.mark.slow(quick="test_stage_2_gathers_again_only_after_a_reduction_or_a_change")
def test_stage_3_gathers_in_every_forward():
    assert min(run_on_ranks(_gathers_run, 3)[0][:6]) > 0


@pytest.mark.slow(quick="test_cached_parameters_follow_every_change_of_their_shards")
@pytest.mark.parametrize("inference", [False, True])
@on_ranks(2)
def test_what_runs_between_backward_and_step_gathers_is_not_used_after_the_step(inference):
    reference, model = pair()
    step = torch.compile(model, backend="zpasses", options={"zero_stage": 2, **EAGER})

    def evaluate(net):
        with torch.inference_mode(inference):
            net(batches(1)[0])

    optimizer = functools.partial(torch.optim.AdamW, foreach=True)
    train_both(step, model, reference, batches(3), optimizer, evaluate)


@on_ranks(2)
def test_runs_without_gradients_follow_averages_of_weights():
    """Train a model only by weight averaging with foreach operations, which change no version
    counter.
    """
    reference, model = pair()
    step = torch.compile(model, backend="zpasses", options={"zero_stage": 2, **EAGER})
    tokens = batches(1)[0]
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(step(tokens), reference(tokens), rtol=1e-4, atol=1e-5)
            for net in (model, reference):
                torch._foreach_mul_(list(net.parameters()), 0.5)


CHANGES = {
    "load": lambda net: net.load_state_dict(Net().state_dict()),
    "assign": lambda net: setattr(net, "scale", nn.Parameter(torch.tensor(7.0))),
    # What `model.to` does: the same parameters, other local tensors.
    "swap": lambda net: net._apply(lambda tensor: tensor * 2),
    "edit": lambda net: [param.mul_(0.5) for param in net.parameters()],
    "edit a list": lambda net: torch._foreach_mul_(list(net.parameters()), 0.5),
}


@on_ranks(2)
def test_cached_parameters_follow_every_change_of_their_shards():
    reference, model = pair()
    step = torch.compile(model, backend="zpasses", options={"zero_stage": 2, **EAGER})
    tokens = batches(1)[0]
    before = loss_of(step, tokens)
    for name, change in CHANGES.items():
        for net in (model, reference):
            torch.manual_seed(3)
            with torch.no_grad():
                change(net)
        after = loss_of(step, tokens)
        torch.testing.assert_close(after, loss_of(reference, tokens), rtol=1e-4, atol=1e-5)
        assert abs(after - before) > 1e-3, name
        before = after


@on_ranks(3)
def test_a_rank_with_an_empty_shard_gathers_when_the_others_do():
    """Rank 2 of 3 holds no rows of a parameter with two rows, and must still gather when the others
    do.
    """
    torch.manual_seed(0)
    reference = nn.Linear(3, 2)
    model = zpasses.shard(copy.deepcopy(reference), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"zero_stage": 2, **EAGER})
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.1, foreach=True) for each in (model, reference)
    ]
    for _ in range(3):
        x = torch.ones(2, 3)
        torch.testing.assert_close(step(x), reference(x))
        step(x).sum().backward()
        reference(x).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Gain(nn.Module):
    """Its backward needs only the gain, whose memory Inductor would reuse for the gradient."""

    def __init__(self, frozen=False):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.randn(8, 8), requires_grad=not frozen)

    def forward(self, x):
        return self.linear(x) * self.gain


def _sharded_copy(reference, **options):
    model = zpasses.shard(copy.deepcopy(reference), mesh=world_mesh())
    return model, torch.compile(model, backend="zpasses", options={"zero_stage": 2, **options})


@on_ranks(2)
@pytest.mark.slow(quick="test_cached_parameters_follow_every_change_of_their_shards")
def test_backward_does_not_overwrite_cached_parameters():
    for reference in (Gain(), Gain(frozen=True)):
        model, step = _sharded_copy(reference)
        x = torch.randn(8, 8)
        for _ in range(2):
            ours, theirs = (
                net(x).square().sum() + net(2 * x).square().sum() for net in (step, reference)
            )
            torch.testing.assert_close(ours, theirs)
            ours.backward()
            theirs.backward()
            assert_same_gradients(model, reference)


@on_ranks(2)
def test_training_goes_on_after_inference_mode():
    model, step = _sharded_copy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **EAGER)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4)
    for _ in range(2):
        step(x).sum().backward()
        optimizer.step()
        with torch.inference_mode():
            step(x)


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.high.weight = self.low.weight

    def forward(self, x):
        return self.high(self.low(x.bfloat16()).float())


@on_ranks(2)
def test_tied_parameters_may_be_read_in_two_dtypes():
    reference = TwoDtypes()
    model = copy.deepcopy(reference)
    zpasses.shard(model.low, mesh=world_mesh(), param_dtype=torch.bfloat16)
    zpasses.shard(model.high, mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"zero_stage": 2, **EAGER})
    x = torch.ones(2, 4)
    first = step(x)
    for _ in range(2):
        torch.testing.assert_close(step(x), first)
    first.sum().backward()
    torch.testing.assert_close(step(x), first)


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x @ self.weight + self.bias, self.weight, self.bias.view(2, 2)


@pytest.mark.inductor
@on_ranks(2)
def test_writing_to_a_returned_parameter_does_not_change_the_model():
    reference = Returns()
    _, step = _sharded_copy(reference)
    x = torch.ones(2, 4)
    for _ in range(3):
        out, weight, bias = step(x)
        torch.testing.assert_close(out, reference(x)[0])
        for value in (weight, bias):
            with pytest.raises(zpasses.ShardingError, match=r"write to parameter"):
                value.detach().zero_()
            value.detach().numpy().fill(0)  # unseen


@on_ranks(2)
def test_compiled_code_does_not_hold_the_parameters_of_a_dead_model():
    model = zpasses.shard(nn.Linear(4, 4), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"zero_stage": 2, **EAGER})
    step(torch.ones(2, 4)).sum().backward()
    param = weakref.ref(next(model.parameters()))
    del model, step
    gc.collect()
    assert param() is None
