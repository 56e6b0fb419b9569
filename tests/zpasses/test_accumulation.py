"""Gradient windows on real ranks: the gradients are bit-identical to those of one reduction per
backward, and to those of the unsharded model.

Data are small integers, so that every order of summation gives the same bits. The flight recorder
of the process group counts collectives.
"""

import contextlib
import copy
import itertools
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.training_programs import act, check, program
from tests.zpasses.models import assert_same_values, full_gradients, integers, with_integer_weights
from zpasses import AgreementError, Level, Pass, Pipeline, compat
from zpasses.runtime.windows import grad_state_of
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh
from zpasses.tools.bench.measure import traffic

pytestmark = pytest.mark.processes

EAGER = {"codegen": "eager"}
N = 3


class Net(nn.Module):
    """Uneven rows, a parameter read twice, a scalar; a frozen, an empty and an unused parameter."""

    def __init__(self, graph_break=False):
        super().__init__()
        self.graph_break = graph_break
        self.wide = nn.Linear(4, 5, bias=False)
        self.deep = nn.Linear(5, 4)
        self.side = nn.Linear(5, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Parameter(torch.ones(3))
        with torch.no_grad():
            for seed, param in enumerate(
                (self.wide.weight, self.deep.weight, self.deep.bias, self.side.weight)
            ):
                param.copy_(integers(*param.shape, seed=seed).sign())

    def forward(self, x):
        x = self.wide(x)
        x = self.deep(x) + self.side(x)
        if self.graph_break:
            torch._dynamo.graph_break()
            x = x * self.scale  # by eager code, between two graphs
        return self.wide(x * self.scale + self.frozen).sum() + self.empty.sum()


def data(rank=None, count=N):
    rank = dist.get_rank() if rank is None else rank
    return [integers(1, 4, seed=10 * rank + i).sign() for i in range(count)]


def unsharded(model, dtype):
    """Mean over ranks of the sum over batches."""
    model = copy.deepcopy(model)
    for rank in range(dist.get_world_size()):
        for x in data(rank):
            cast = {name: param.to(dtype) for name, param in model.named_parameters()}
            torch.func.functional_call(model, cast, (x.to(dtype),)).backward()
    return {
        name: None if param.grad is None else param.grad / dist.get_world_size()
        for name, param in model.named_parameters()
    }


def reductions():
    """Count the reductions that have run so far."""
    return sum(count for kind, count in traffic().counts.items() if "reduce" in kind)


def per_backward(step, batches, **options):
    for x in batches:
        step(x).backward()


def flushed(step, batches, **options):
    with zpasses.coalesce_grad_reduction(step, **options):
        per_backward(step, batches)
        assert all(param.grad is None for param in step.parameters())


def counted(step, batches, **options):
    with zpasses.coalesce_grad_reduction(step, backwards=len(batches), **options):
        for x in batches:
            assert all(param.grad is None for param in step.parameters())
            step(x).backward()


def announced(step, batches, **options):
    with zpasses.coalesce_grad_reduction(step, **options) as window:
        per_backward(step, batches[:-1])
        assert all(param.grad is None for param in step.parameters())
        window.last()
        step(batches[-1]).backward()


WAYS = (flushed, counted, announced)
DTYPES = {
    "float32": {},
    "bfloat16": {"param_dtype": torch.bfloat16},
    "mixed": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}


def pipeline(stage, form):
    """Return the named pipeline with single collectives, or with buckets of one form at any
    cost.
    """
    changes = {"cap_mb": 0.0} if form == "single" else {"mode": form, "memory_budget": "1GiB"}
    return ",".join(
        str(replace(each, **changes) if each.name == "schedule" else each)
        for each in Pipeline.parse(f"zero{max(stage, 2)}-one-ahead")
    )


FORMS = ("single", "coalesced", "flat")
MATRIX = [
    (1, "flat", "float32", False),  # stage 1 is made of the passes of stage 2
    *itertools.product((2, 3), FORMS, ("mixed",), (False,)),
    *((3, form, "float32", False) for form in ("single", "coalesced")),
    *((stage, "single", "bfloat16", False) for stage in (2, 3)),
    (2, "single", "float32", True),
    (3, "coalesced", "mixed", True),
]
"""Stage, form of collectives, dtype, and whether there is a graph break."""


def _matrix():
    """For each cell, count the reductions of N backwards, and of windows of N backwards."""
    counts = {}
    for stage, form, dtype, graph_break in MATRIX:
        torch._dynamo.reset()
        reference, shard = Net(graph_break), DTYPES[dtype]
        low = shard.get("param_dtype", torch.float32)
        batches, expected = [x.to(low) for x in data()], unsharded(reference, low)
        options, found = {"pipeline": pipeline(stage, form), "codegen": "eager"}, []
        for per_step in (1, N) if dtype == "float32" else (1,):
            model = zpasses.shard(copy.deepcopy(reference), mesh=world_mesh(), **shard)
            given = {**options, "backwards_per_step": per_step}
            step = torch.compile(model, backend="zpasses", options=given)
            ways = [(per_backward, None), *itertools.product(WAYS, (None, torch.float32))]
            for way, accum in ways if per_step == 1 else [(per_backward, None)] * 2:
                model.zero_grad()
                before = reductions()
                way(step, batches, grad_accum_dtype=accum)
                found.append(reductions() - before)
                assert_same_values(full_gradients(model), expected)
                assert not any(grad_state_of(param).pending for param in model.parameters())
        counts[stage, form, dtype, graph_break] = found
    return counts


@pytest.mark.slow(quick="test_training_with_windows_equals_the_unsharded_model")
def test_every_window_gives_the_gradients_of_single_backwards_with_one_reduction():
    outcomes = run_in_fresh_ranks(_matrix, env={"TORCH_FR_BUFFER_SIZE": "100000"}, timeout_s=280)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    counts = outcomes[0].result
    for (stage, form, dtype, graph_break), (each, *windows) in counts.items():
        cell = stage, form, dtype, graph_break
        assert each > 0, cell
        assert each % N == 0, cell
        # With a graph break, a flush reduces once for both graphs.
        once = set(range(1, each // N + 1)) if graph_break else {each // N}
        assert set(windows) <= once, (cell, each, windows)
        if form != "single" and (stage, "single", dtype, graph_break) in counts:
            assert each < counts[stage, "single", dtype, graph_break][0], "no buckets"


@pytest.mark.slow(
    quick="test_backwards_that_keep_gradients_compile_where_outputs_are_padded, and "
    "test_inductor_computes_gradients_into_their_slices_of_a_flat_bucket"
)
@pytest.mark.inductor
@on_ranks(2, timeout_s=240)
def test_windows_through_inductor():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2, bias=False))
    with_integer_weights(model)
    zpasses.shard(model, mesh=world_mesh(), **DTYPES["mixed"])
    step = torch.compile(model, backend="zpasses")
    batches = [x.bfloat16() for x in data()]
    for x in batches:
        step(x).sum().backward()
    expected = full_gradients(model)
    for backwards in (N, None):
        model.zero_grad()
        how = {"backwards": backwards, "grad_accum_dtype": torch.float32}
        with zpasses.coalesce_grad_reduction(model, **how):
            for x in batches:
                assert all(param.grad is None for param in model.parameters())
                step(x).sum().backward()
        assert_same_values(full_gradients(model), expected)


# --- ranks that differ ----------------------------------------------------------------------------
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(4))

    def forward(self, x, which):
        outputs = [tower(x).sum() for tower in self.towers]  # every rank runs the same gathers
        return sum(outputs[i] for i in which)


@on_ranks(2)
def test_ranks_agree_on_the_set_of_gradients_to_reduce():
    """Rank 0 trains towers 0 and 1, rank 1 towers 1 and 2, in different numbers of backwards. Some
    towers are compiled, some eager.
    """
    model = zpasses.shard(Towers(), mesh=world_mesh())
    rank, x = dist.get_rank(), torch.ones(1, 4)
    for compiled in range(3):
        for tower in model.towers[:compiled]:
            tower.compile(backend="zpasses", options={"zero_stage": 2, **EAGER})
        model.zero_grad()
        with zpasses.coalesce_grad_reduction(model, timeout_s=200):
            losses = [model(x, (0, 1) if rank == 0 else (1, 2)), model(x, (2,))]
            for loss in losses[: rank + 1]:
                loss.backward()
        grads = full_gradients(model).values()
        found = [None if grad is None else grad[0, 0].item() for grad in grads]
        assert found == [0.5, 1.0, 1.0, None], compiled


# --- failures -------------------------------------------------------------------------------------
_PLACES = (
    "before the first forward",
    "before the second forward",
    "before the first backward",
    "before the second backward",
    "at the end",
)


def _one_rank_fails(stage):
    """Rank 1 fails at different places of a window. Returns the errors of this rank, and checks
    that the next window is correct.
    """
    rank, x = dist.get_rank(), torch.ones(1, 4)
    model = zpasses.shard(nn.Linear(4, 3), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"zero_stage": stage, **EAGER})
    step(x).sum().backward()
    model.zero_grad()
    errors = []

    def attempt(backwards, fail_at):
        def reach(place):
            if rank == 1 and place == fail_at:
                raise ValueError(place)

        with zpasses.coalesce_grad_reduction(model, backwards=backwards, timeout_s=200):
            losses = []
            for place in _PLACES[:2]:
                reach(place)
                losses.append(step(x).sum())
            for place, loss in zip(_PLACES[2:4], losses, strict=True):
                reach(place)
                loss.backward()
            reach(_PLACES[4])

    cases = [(None, place) for place in _PLACES] + [
        (2, place) for place in _PLACES[:4]
    ]  # of two, the second reduces already
    for backwards, fail_at in cases:
        started = time.monotonic()
        with pytest.raises(ValueError if rank == 1 else AgreementError) as caught:
            attempt(backwards, fail_at)
        assert time.monotonic() - started < 100, (
            f"{fail_at}: released by the limit of 200 s, not by the other rank"
        )
        errors.append(str(caught.value))
        assert all(
            param.grad is None and not grad_state_of(param).pending for param in model.parameters()
        )
        with zpasses.coalesce_grad_reduction(model, backwards=backwards):
            step(x).sum().backward()
            step(x).sum().backward()
        assert torch.equal(model._parameters["weight"].grad.full_tensor(), torch.full((3, 4), 2.0))
        model.zero_grad()
    return errors


@pytest.mark.parametrize("stage", some_quick([2, 3], [3]))
def test_an_exception_on_one_rank_raises_on_every_rank(stage):
    reported, raised = run_on_ranks(_one_rank_fails, stage)
    assert raised == [*_PLACES, *_PLACES[:4]]
    for error, mine in zip(reported, raised, strict=True):
        assert f"rank 1 left a window with ValueError: {mine}" in error


@torch.library.custom_op("zpasses_tests::fail_on_rank_1", mutates_args=())
def fail_on_rank_1(x: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1 and float(x.flatten()[0]) < 0:
        raise ValueError("inside")
    return x.clone()


@fail_on_rank_1.register_fake
def _(x):
    return torch.empty_like(x)


fail_on_rank_1.register_autograd(lambda ctx, grad: grad)


class FailsInside(nn.Module):
    """Its compiled forward can fail on rank 1 between two gathers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.second(fail_on_rank_1(self.first(x)))


def _fails_inside():
    """Rank 1 fails inside a graph while rank 0 waits in the same graph. Rank 0 leaves by
    timeout.
    """
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    usual, limits = group.options._timeout, []
    model = FailsInside()
    nn.init.ones_(model.first.weight)
    zpasses.shard(model, mesh=world_mesh())
    pipeline = "gather-params,reduce-grads,reshard-after-forward"
    options = {"pipeline": pipeline, "agreement_timeout_s": 3, **EAGER}
    step = torch.compile(model, backend="zpasses", options=options)
    with zpasses.coalesce_grad_reduction(model):
        step(torch.ones(1, 4)).sum().backward()
    started = time.monotonic()
    window = zpasses.coalesce_grad_reduction(model)  # takes the limit of the compile
    with pytest.raises((RuntimeError, ValueError)) as caught, window:
        limits.append(group.options._timeout) or step(-torch.ones(1, 4)).sum().backward()
    assert limits == [timedelta(seconds=3)]
    assert group.options._timeout == usual
    assert all(not grad_state_of(param).pending for param in model.parameters())
    seconds = time.monotonic() - started
    if dist.get_rank() == 1:
        time.sleep(6)  # ranks that die release the others too
    return seconds, str(caught.value)


@pytest.mark.slow(quick="tests/zpasses/ranks/test_failures.py")
def test_a_rank_that_fails_inside_a_graph_is_waited_for_a_limited_time():
    (seconds, waited), (_, raised) = (
        outcome.result for outcome in run_in_fresh_ranks(_fails_inside, timeout_s=100)
    )
    assert raised == "inside"
    assert 2 < seconds < 100
    assert "rank 0 waited in a collective while running graph" in waited
    assert "rank 1 left a window with ValueError: inside." in waited


@dataclass(frozen=True)
class FailsOnRank1(Pass):
    name: ClassVar[str] = "fails-on-rank-1"
    level: ClassVar[Level] = Level.JOINT

    def rewrite(self, graph):
        if dist.get_rank() == 1:
            raise ValueError("mine")
        return 0


@on_ranks(2)
def test_a_failed_compile_inside_a_window_is_reported_once():
    # A shape that no other test has: ranks do not vote twice on equal collectives.
    model = zpasses.shard(nn.Linear(4, 9), mesh=world_mesh())
    pipeline = Pipeline((FailsOnRank1(), *Pipeline.parse("zero3")))
    options = {"pipeline": pipeline, "agreement_timeout_s": 200, **EAGER}
    step = torch.compile(model, backend="zpasses", options=options)
    said = "mine" if dist.get_rank() else "rank 1 failed while compiling"
    with (
        pytest.raises(Exception, match=said),
        zpasses.coalesce_grad_reduction(model, timeout_s=200),
    ):
        step(torch.ones(1, 4)).sum().backward()
    with zpasses.coalesce_grad_reduction(model, timeout_s=200):
        model(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model._parameters["weight"].grad.full_tensor(), torch.ones(9, 4))


@on_ranks(2)
def test_a_rank_that_fails_before_the_reduction_of_a_window_tells_the_others():
    model = zpasses.shard(nn.Linear(4, 11), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options=EAGER)
    fails = dist.get_rank() == 1
    broken = mock.patch("zpasses.runtime.flush.rows_of", side_effect=MemoryError("no memory"))
    said = "^no memory" if fails else "rank 1 failed while ending a window: MemoryError: no memory"
    with (
        broken if fails else contextlib.nullcontext(),
        pytest.raises(Exception, match=said),
        zpasses.coalesce_grad_reduction(model, timeout_s=200),
    ):
        step(torch.ones(1, 4)).sum().backward()
    dist.barrier()


def _late():
    model = zpasses.shard(nn.Linear(4, 3), mesh=world_mesh())
    loss = model(torch.ones(1, 4)).sum()
    if dist.get_rank() == 0:
        said = "rank 1 of group '0' did not reach the end of a window within 1 s"
        window = zpasses.coalesce_grad_reduction(model, timeout_s=1)
        with pytest.raises(AgreementError, match=said), window:
            loss.backward()


def test_a_rank_that_never_comes_is_waited_for_a_limited_time():
    first, _ = run_in_fresh_ranks(_late, timeout_s=60)
    assert first.ok, first


# --- training -------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    """Only rank 1 overflows, in the second of three steps."""
    model = nn.Linear(4, 3, bias=False)
    zpasses.shard(model, mesh=world_mesh(), param_dtype=torch.float16, reduce_dtype=torch.float32)
    step = torch.compile(model, backend="zpasses", options=EAGER)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    weights = [model._parameters["weight"].full_tensor()]
    for number in range(3):
        with zpasses.coalesce_grad_reduction(model):
            for _ in range(2):
                loss = step(torch.ones(1, 4, dtype=torch.float16)).sum()
                overflows = number == 1 and dist.get_rank() == 1
                scaler.scale(loss * 6e4 * 6e4 if overflows else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (scaler.get_scale() < before) == (number == 1)
        weights.append(model._parameters["weight"].full_tensor())
        assert torch.equal(*weights[-2:]) == (number == 1)


def test_training_with_windows_equals_the_unsharded_model():
    """Trains with windows, clipping, a schedule and edits of the state dict between steps."""
    actions = []
    for window, edited in itertools.product(("exit", "count", "last"), ("state dict", "load own")):
        actions += [act("backward", micro=N, window=window), act("clip"), act("step", rate=0.5)]
        actions += [act("zero_grad"), act("edit", way=edited)]
    check(program(*actions, optimizer=("AdamW", {"lr": 0.1, "eps": 1e-3})), zero_stage=2)


def _keys(steps):
    """Count the keys in the store after each of some windows."""
    model = zpasses.shard(nn.Linear(4, 3), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"zero_stage": 3, **EAGER})
    counts = []
    for _ in range(steps):
        with zpasses.coalesce_grad_reduction(model, timeout_s=200):
            for _ in range(2):
                step(torch.ones(1, 4)).sum().backward()
        dist.barrier()
        counts.append(compat.default_store().num_keys())
        dist.barrier()
    return counts


@pytest.mark.slow(quick="test_a_rank_that_never_comes_is_waited_for_a_limited_time")
def test_barriers_leave_no_keys_in_the_store():
    counts, _ = run_on_ranks(_keys, 6)
    assert len(set(counts[1:])) == 1
