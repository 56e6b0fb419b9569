"""Blocks that are compiled one by one, of which what they save rests on the host until backward."""

import contextlib
import functools
import gc
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.frozen_training import assert_same
from tests.host_stream import HostStream
from tests.on_ranks import on_ranks
from tests.zpasses.backend import test_per_block
from tests.zpasses.backend.blocks_on_host import (
    EAGER,
    TARGET,
    plan,
    plans,
    train,
)
from tests.zpasses.backend.blocks_on_host import build as build_model
from tests.zpasses.backend.cache.starts import COLD, on_fresh_ranks, said_by_cache, words
from tests.zpasses.backend.values_on_host import WIDTH, Block, batch, steps_of
from tests.zpasses.cost.memory.allocations import allocated
from tests.zpasses.layered_models import Checkpointed
from zpasses.backend import partitioner
from zpasses.backend.block_steps import BlockStep
from zpasses.cost.plan.prefetch import step_cost
from zpasses.graph import host_copies
from zpasses.host import saved_values
from zpasses.host.saved_arenas import host
from zpasses.pipeline import events
from zpasses.runtime.block_schedule import block_schedule, own_block_schedule
from zpasses.runtime.planned_blocks import PlannedBlocks
from zpasses.runtime.platform import register_platform
from zpasses.runtime.started_gathers import Starter
from zpasses.testing import world_mesh

ROWS, LAYERS = 1024, 6
ONE = ROWS * 4 * WIDTH * 4
"""Bytes of the largest value that a block saves."""
INPUT = ONE // 4
"""Bytes of what it gets from the one before, and saves, too."""
MOVED = 3 * ONE + 3 * INPUT
"""What the plan of most of these tests moves."""


class Net(nn.Module):
    """Blocks, with code that is not compiled between them."""

    def __init__(self, layers=LAYERS, rank=0):
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, rank) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 8)
        self.between = lambda number, x: None
        self.checkpointed = ()
        for name, param in self.named_parameters():
            param.requires_grad_(not rank or ".a." in name or ".b." in name)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            again = number in self.checkpointed
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            self.between(number, x)
        return self.head(x).square().mean()


build = functools.partial(build_model, Net)


@pytest.fixture(scope="module")
def blocks(one_rank_of_module):
    """A model, the results and the bytes on the host of its first steps, the results of steps that
    keep everything on the device, and the step that was planned.
    """
    steps = []
    with own_block_schedule(), events.listen(BlockStep, steps.append):
        model = build("6.5MiB", **EAGER)
        first = train(model, batch)
        model.zero_grad()
        with mock.patch.object(saved_values, "values_may_move", return_value=False):
            expected, held = train(model, batch)
        assert held == [0] * 3
        yield SimpleNamespace(
            expected=expected, model=model, first=first, step=steps[0], checkpointed=[]
        )


@pytest.fixture
def lean(blocks):
    """The same, without gradients."""
    blocks.model.zero_grad()
    blocks.model.between, blocks.model.checkpointed = (lambda number, x: None), ()
    return blocks


# --- what moves -----------------------------------------------------------------------------------
def test_what_the_plan_says_rests_on_the_host_and_the_bits_are_the_same(lean):
    results, held = lean.first
    assert_same(results, lean.expected)
    runs, limit = lean.step.runs, lean.step.limit_bytes("6.5MiB")
    whole, found = step_cost(runs, 0), plan()
    assert found == lean.step.planned(limit)
    # The caller holds the batch, and values of the last blocks would come back at once.
    assert found.moved[:LAYERS] == (1, 2, 2, 1, 0, 0)
    assert held == [LAYERS * (ONE + INPUT), MOVED, MOVED]  # without a plan, everything
    assert host.live == 0
    assert found.peak_bytes == whole.peak_bytes - MOVED <= limit < whole.peak_bytes
    assert found.total_us == pytest.approx(whole.total_us)  # copies are beside compute


class Delayed(HostStream):
    """A stream that says what it does, and takes its time."""

    def __init__(self, name, said):
        super().__init__(10.0)
        self.name, self.said = name, said

    def run(self, work):
        self.said.append(f"{self.name} starts")
        super().run(lambda: time.sleep(0.01))
        super().run(work)

    def record(self):
        event = super().record()
        wait = event.wait

        def said():
            wait()
            self.said.append(f"{self.name} ended")

        event.wait = said
        return event


@pytest.fixture
def said(monkeypatch):
    """Makes this process a device; what its two streams do."""
    found, names = [], iter(["out", "in"])

    class Device:
        def side_stream(self):
            return Delayed(next(names), found)

    register_platform("cpu", Device())
    yield found
    register_platform("cpu", None)


def test_copies_run_beside_the_next_block_and_end_where_they_are_needed(lean, said):
    def between(number, x):
        said.append(f"forward {number}")
        x.register_hook(lambda grad: said.append(f"backward {number + 1}"))

    model = lean.model
    train(model, batch, 2)
    said.clear()
    model.between = between
    model(batch(2)).backward()
    assert_same([param.grad.to_local() for param in model.parameters()], lean.expected[3:])
    # Of the four blocks, the first and the last one move one value, and the others two.
    assert said == [
        *("out starts", "forward 0"),
        *("out ended", *["out starts"] * 2, "forward 1"),
        *(*["out ended"] * 2, *["out starts"] * 2, "forward 2"),
        *(*["out ended"] * 2, "out starts", "forward 3"),
        *("out ended", "forward 4", "forward 5"),
        *("backward 6", "backward 5"),
        *("in starts", "backward 4"),
        *(*["in starts"] * 2, "in ended", "backward 3"),
        *(*["in starts"] * 2, *["in ended"] * 2, "backward 2"),
        *("in starts", *["in ended"] * 2, "backward 1"),
        "in ended",
    ]


class StopError(Exception):
    pass


def stop(grad=None):
    raise StopError


@pytest.mark.slow(quick="test_copies_run_beside_the_next_block_and_end_where_they_are_needed")
def test_a_step_that_failed_leaves_nothing_behind(lean, said):
    model = lean.model
    train(model, batch, 1)  # compiles
    for where in (0, 2, 4):
        for ahead in (True, False):

            def failing(number, x, where=where, ahead=ahead):
                if number == where:
                    stop() if ahead else x.register_hook(stop)

            model.between = failing
            with pytest.raises(StopError):
                model(batch(5)).backward()
            gc.collect()
            assert host.live == 0
    model.zero_grad()
    model.between = lambda number, x: None
    results, held = train(model, batch)
    assert held == [MOVED] * 3
    assert_same(results, lean.expected)
    gc.collect()
    assert host.live == 0
    assert saved_values._moves.leaving == []


def test_forwards_whose_backward_never_runs_are_no_part_of_the_next_plan(lean):
    model, steps, before = lean.model, [], plan()
    for skipped in ("caught", "skipped", "evaluated"):
        with contextlib.suppress(StopError):
            loss = model(batch(6))
            if skipped == "caught":
                loss.register_hook(stop)
                loss.backward()
            elif skipped == "evaluated":
                loss = loss.detach()
        with events.listen(BlockStep, steps.append):
            loss = model(batch(7))  # the one before is freed when this one has run
            loss.backward()
    # Ranks ask once for how many graphs ahead gathers start, as this is another sequence of runs.
    assert [len(each.runs) for each in steps] == [2 * LAYERS]
    assert plan() == before
    del loss
    gc.collect()
    assert host.live == 0


@pytest.mark.slow(quick="test_what_the_plan_says_rests_on_the_host_and_the_bits_are_the_same")
def test_what_checkpoints_save_stays_and_what_they_compute_again_too(lean):
    lean.model.checkpointed = (1, 2)
    with events.listen(BlockStep, lambda step: lean.checkpointed.append(step.runs)):
        results, held = train(lean.model, batch)
    assert_same(results, lean.expected)
    assert held[1:] == [ONE + INPUT] * 2  # so there is more room
    (runs,) = lean.checkpointed
    kept = runs[0].saved_bytes
    assert [run.saved_bytes for run in runs] == [
        *(kept, 0, 0, kept, kept, kept, 0, 0, 0, kept, 0, kept, 0, 0)
    ]
    assert [len(run.movable) for run in runs[:LAYERS]] == [1, 0, 0, 2, 2, 2]
    whole, without = (step_cost(each, 0).peak_bytes for each in (lean.step.runs, runs))
    assert without == whole - 2 * kept


@pytest.mark.slow(quick="test_what_the_plan_says_rests_on_the_host_and_the_bits_are_the_same")
@torch._functorch.config.patch(donated_buffer=False)
def test_a_second_backward_of_one_forward_and_a_forward_without_one(lean):
    model = lean.model

    def twice(number):
        loss = model(batch(number))
        held = host.live
        loss.backward(retain_graph=True)
        loss.backward()
        return held

    twice(0)
    model.zero_grad()
    assert [twice(number) for number in range(3)] == [MOVED] * 3
    grads = [param.grad.to_local().clone() for param in model.parameters()]
    model.zero_grad()
    with mock.patch.object(saved_values, "values_may_move", return_value=False):
        assert [twice(number) for number in range(3)] == [0] * 3
    assert_same(grads, [param.grad.to_local() for param in model.parameters()])
    unused = model(batch(4))
    assert host.live == MOVED
    del unused
    gc.collect()
    assert host.live == 0


def said_by_zpasses(caplog):
    return [
        each.getMessage() for each in caplog.records if each.name == "zpasses" and each.levelno > 20
    ]


def test_each_length_that_a_graph_runs_with_is_planned(one_rank_of_module):
    """The second length is compiled with dynamic sizes, and the third run takes that code."""
    with own_block_schedule():
        model, held = build("6.5MiB", **EAGER), []
        for number, rows in enumerate((ROWS, ROWS // 2, ROWS, ROWS // 2)):
            loss = model(batch(number, rows))
            held.append(host.live)
            loss.backward()
        peaks = {each.peak_bytes for each in plans()}
    everything = LAYERS * (ONE + INPUT)
    assert held == [everything, everything // 2, MOVED, 0]
    assert max(peaks) <= 6.5 * (1 << 20)


@pytest.mark.slow(quick="test_host_memory_bounds_what_a_plan_moves")
def test_forwards_for_which_the_host_has_no_room_keep_their_values(lean, caplog):
    saved_values._warn_of_full.cache_clear()
    with own_block_schedule():
        model = build("6.5MiB", f"{5 * ONE}B", **EAGER)
        results, held = train(model, batch)
        assert held == [5 * ONE, MOVED, MOVED]
        assert_same(results, lean.expected)
        assert not said_by_zpasses(caplog)
        losses = [model(batch(number)) for number in range(2)]
        assert MOVED <= host.live <= 5 * ONE
        assert host.reserved <= 5 * ONE
    (text,) = said_by_zpasses(caplog)
    assert "values that forwards of blocks save stay on the device" in text
    del losses


# --- on ranks -------------------------------------------------------------------------------------
_IN_STAGE_2 = "test_in_stage_2_values_move_as_planned_although_a_forward_gathers_nothing"


@dataclass
class Case:
    """A training."""

    options: dict = field(default_factory=dict)
    rank: int = 0
    """Of adapters, below which everything is frozen."""
    lengths: tuple[int, ...] = (ROWS,)
    evaluates: bool = False
    share: float = 0.75


CASES = {
    "stage 3": Case(),
    "stage 2": Case({"zero_stage": 2}),
    "stage 1, a window": Case({"zero_stage": 1, "backwards_per_step": 2}),
    "stage 2, evaluation": Case({"zero_stage": 2}, evaluates=True),
    "stage 3, a window, evaluation": Case({"backwards_per_step": 2}, evaluates=True),
    "LoRA": Case(rank=4),
    "LoRA, a window": Case({"backwards_per_step": 2}, rank=4),
    "lengths": Case(lengths=(ROWS, 640, 800)),
}


def trained(case, budget=None):
    """Trains four steps. Returns losses, gradients and parameters, the bytes on the host between
    forward and backward, and the plan of the last step.
    """
    text = None if budget is None else f"{budget}B"
    model = build_model(functools.partial(Net, rank=case.rank), text, **case.options)
    params = [each for each in model.parameters() if each.requires_grad]
    with own_block_schedule():
        optimizer = torch.optim.AdamW(params, 0.01)
        results, held = steps_of(model, optimizer, case, evaluates=case.evaluates)
        return results, held, plans()


@pytest.mark.slow(quick="test_what_the_plan_says_rests_on_the_host_and_the_bits_are_the_same")
@pytest.mark.inductor
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout_s=600)
def test_trainings_of_all_kinds_have_the_same_bits(name):
    case = CASES[name]
    expected, held, costs = trained(case)
    assert not any(held)
    peak = max(each.peak_bytes for each in costs)
    results, held, costs = trained(case, int(case.share * peak))
    assert_same(results, expected)
    assert all(held)
    assert max(held[case.options.get("backwards_per_step", 1) :]) < held[0]
    assert all(any(each.moved) for each in costs)
    if len(case.lengths) == 1:
        assert held[-1] == costs[-1].host_bytes


@pytest.mark.parametrize(
    ("evaluates", "window"),
    [
        (True, 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow(quick=_IN_STAGE_2))
            for each in ((False, 1), (False, 2), (True, 2))
        ),
    ],
)
@on_ranks(2, timeout_s=300)
def test_in_stage_2_values_move_as_planned_although_a_forward_gathers_nothing(evaluates, window):
    """Its parameters come from the cache, after an evaluation or an earlier micro-batch."""

    def run(budget=None):
        options = {**EAGER, "zero_stage": 2, "backwards_per_step": window}
        results, held, gathers, steps, starts = [], [], [], [], Starter.start

        def start(self, route):
            gathers.append(self)
            return starts(self, route)

        with (
            own_block_schedule(),
            events.listen(BlockStep, steps.append),
            mock.patch.object(Starter, "start", start),
        ):
            model = build(budget, **options)
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            for number in range(3):
                for micro in range(window):
                    if evaluates:
                        with torch.no_grad():
                            results.append(model(batch(10 * number + micro)))
                    loss = model(batch(20 * number + micro))
                    held.append(host.live)
                    loss.backward()
                    results.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
            costs = plans()
        assert len(gathers) == 3 * LAYERS  # once per step
        return results + [p.to_local() for p in model.parameters()], held, costs, steps

    expected, held, costs, steps = run()
    assert not any(held)
    size = sum(each.numel() * 4 for each in Block(WIDTH, 0).parameters())
    for step in steps:
        forwards = [each for each in step.runs if each.name.startswith("forward")]
        assert [each.cached_bytes for each in forwards] == [size] * LAYERS
    peak = max(each.peak_bytes for each in costs)
    results, held, costs, _ = run(f"{int(0.75 * peak)}B")
    assert_same(results, expected)
    assert held[0] == LAYERS * (2 * ONE + INPUT)  # full parameters stay
    # Micro-batches that run the same forward move what the one needs that needs most.
    assert set(held[window:]) <= {each.host_bytes for each in costs}
    assert 0 < max(each.host_bytes for each in costs) == max(held[window:]) < held[0]
    assert len(costs) == window


def measured(budget=None, **options):
    """Trains. Returns the results, the plan, and the peak of a step that a profiler sees."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler, own_block_schedule():
        model = build(budget, **options)
        results, held = train(model, batch)
        for param in model.parameters():
            param.grad = None
        gc.collect()
        x = batch(3)
        with record_function("measured"):
            model(x).backward()
        found = plan()
    assert held[1:] == [found.host_bytes] * 2
    return results, found, allocated(profiler, "measured")[1]


def one_f_one_b(model, first, in_flight=2):
    """Runs four micro-batches as the pipeline schedule 1F1B does. Returns their losses, and the
    bytes on the host before each backward.
    """
    losses, results, held = [], [], []
    for number in range(4):
        losses.append(model(batch(first + number)))
        if len(losses) == in_flight or number == 3:
            held.append(host.live)
            losses[0].backward()
            results.append(losses.pop(0).detach())
    while losses:
        losses[0].backward()
        results.append(losses.pop(0).detach())
    return results, held


def pipelined(budget, in_flight):
    """Trains two steps of 1F1B after one without. Returns losses and gradients, the largest plan,
    the peak of the last step that a profiler sees, and the bytes on the host in that step.
    """
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler, own_block_schedule():
        model = build(budget, **EAGER)
        train(model, batch, 2)
        results, _ = one_f_one_b(model, 2, in_flight)
        for param in model.parameters():
            param.grad = None
        gc.collect()
        with record_function("measured"):
            more, held = one_f_one_b(model, 6, in_flight)
        grads = [param.grad.to_local().clone() for param in model.parameters()]
        largest = max(plans(), key=lambda each: each.peak_bytes)
    assert host.live == 0
    return [*results, *more, *grads], largest, allocated(profiler, "measured")[1], held


@pytest.mark.parametrize(
    "in_flight",
    [
        2,
        pytest.param(
            4, marks=pytest.mark.slow(quick="test_forwards_in_flight_keep_to_the_budget_together")
        ),
    ],
)
def test_forwards_in_flight_keep_to_the_budget_together(one_rank_of_module, in_flight):
    expected, whole, most, _ = pipelined("1GiB", in_flight)
    limit = int(0.8 * whole.peak_bytes)
    results, found, peak, held = pipelined(f"{limit}B", in_flight)
    assert_same(results, expected)
    assert found.peak_bytes <= limit
    assert min(held) > 0
    assert most - peak == pytest.approx(whole.peak_bytes - found.peak_bytes, rel=0.02)


@pytest.mark.slow(quick="test_what_the_plan_says_rests_on_the_host_and_the_bits_are_the_same")
@pytest.mark.parametrize("options", [EAGER, pytest.param({}, marks=pytest.mark.inductor)])
@on_ranks(2, timeout_s=600)
def test_measured_bytes_of_the_device_fall_by_what_the_plan_says(options):
    expected, whole, most = measured(**options)
    for share in (0.9, 0.8, 0.7):
        results, found, peak = measured(f"{int(share * whole.peak_bytes)}B", **options)
        assert_same(results, expected)
        assert most - peak == pytest.approx(whole.peak_bytes - found.peak_bytes, rel=0.02)
        assert found.host_bytes > 0


@pytest.mark.slow(quick="test_each_length_that_a_graph_runs_with_is_planned")
@pytest.mark.inductor
@on_ranks(2, timeout_s=600)
def test_steps_of_each_length_hold_what_their_plan_says():
    """Ranks have other lengths in the same step, and code for each that they compile at once."""
    lengths = [ROWS // 2, ROWS][:: 1 - 2 * dist.get_rank()]

    def run(budget=None):
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        results, plans = [], []
        with profiler, own_block_schedule():
            model = build(budget)
            for number in range(4):
                with torch.no_grad():
                    results.append(model(batch(8, lengths[number % 2])))
                x = batch(number, lengths[number % 2])
                with record_function(f"step {number}"):
                    loss = model(x)
                    loss.backward()
                results.append(loss.detach())
                results += [each.grad.to_local().clone() for each in model.parameters()]
                model.zero_grad()
                plans.append(
                    block_schedule().plans._plans[tuple(block_schedule().plans._step)].cost
                )
        return results, plans, [allocated(profiler, f"step {at}")[1] for at in range(4)]

    expected, whole, most = run()
    limit = int(0.75 * max(each.peak_bytes for each in whole))
    results, plans, peaks = run(f"{limit}B")
    assert_same(results, expected)
    for at in (2, 3):  # in the first two, everything moves
        assert peaks[at] <= 1.02 * plans[at].peak_bytes <= 1.02 * limit
        if lengths[at % 2] == ROWS:  # one rank plans for its longer batches
            fell = whole[at].peak_bytes - plans[at].peak_bytes
            assert most[at] - peaks[at] == pytest.approx(fell, rel=0.02)
    assert max(each.host_bytes for each in plans[2:]) > 0


def _started(folder):
    """A program that starts: two steps. Returns what it computed, the bytes on the host in each,
    and what the compile cache did.
    """
    said, model = said_by_cache(folder), Net()
    zpasses.shard(model, mesh=world_mesh())
    options = {"memory_budget": "9MiB", "host_memory": "1GiB", "target": TARGET}
    zpasses.compile_blocks(model, "layers.*", **options)
    results, held = train(model, batch, 2)
    return [each.tolist() for each in results], held, said


@pytest.mark.slow(quick="test_what_the_plan_says_rests_on_the_host_and_the_bits_are_the_same")
@pytest.mark.inductor
@pytest.mark.processes
def test_a_warm_start_moves_the_same_values(tmp_path):
    cold, warm = on_fresh_ranks(_started, tmp_path), on_fresh_ranks(_started, tmp_path)
    for first, second in zip(cold, warm, strict=True):
        assert set(words(first[2])) == set(COLD)
        assert "hit" in words(second[2])
        assert first[:2] == second[:2]
        assert 0 < first[1][1] < first[1][0]


@pytest.mark.slow(quick="test_what_the_plan_says_rests_on_the_host_and_the_bits_are_the_same")
@pytest.mark.parametrize("case", test_per_block.CASES)
@on_ranks(2, timeout_s=300)
def test_blocks_of_all_kinds_whose_values_all_move_train_to_the_same_bits(case):
    net, how = test_per_block.CASES[case]
    how = {key: value for key, value in how.items() if key != "one_graph"}
    options = {**EAGER, "zero_stage": how.pop("stage", 3), "cache": False}
    with own_block_schedule():
        expected = test_per_block.train(net, options, per_block=True, **how)
    options |= {"memory_budget": "1GiB", "host_memory": "1GiB"}
    movable, given = (
        functools.partial(each, least_bytes=0)
        for each in (host_copies.offloadable_values, host_copies.offloadable_inputs)
    )
    moved, move_out = [], saved_values._Call.move_out

    def counted(self, values, positions, notes):
        moved.append(len(positions))
        move_out(self, values, positions, notes)

    with (
        own_block_schedule(),
        mock.patch.object(partitioner, "offloadable_values", movable),
        mock.patch.object(partitioner, "offloadable_inputs", given),
        mock.patch.object(PlannedBlocks, "moved_by", return_value=None),
        mock.patch.object(saved_values._Call, "move_out", counted),
    ):
        losses, params = test_per_block.train(net, options, per_block=True, **how)
    assert losses == expected[0]
    assert all(map(torch.equal, params, expected[1]))
    assert bool(moved) == (net not in (Checkpointed, test_per_block.Reentrant))
    gc.collect()
    assert host.live == 0


@pytest.mark.slow(quick="test_what_the_plan_says_rests_on_the_host_and_the_bits_are_the_same")
@on_ranks(2)
def test_ranks_with_other_batches_move_what_they_need():
    """Rank 1 needs the host, and rank 0 does not."""
    rank = dist.get_rank()

    def run(budget=None):
        with own_block_schedule():
            model = build(budget, **EAGER)
            results = []
            for number in range(3):
                loss = model(batch(number, ROWS // (2 - rank)))
                held = host.live
                loss.backward()
                results.append(loss.detach())
            return results + [p.grad.to_local().clone() for p in model.parameters()], held, plan()

    expected, _, whole = run()
    peaks = [None, None]
    dist.all_gather_object(peaks, whole.peak_bytes)
    assert peaks[0] < peaks[1]
    results, held, found = run(f"{int(0.75 * peaks[1])}B")
    assert_same(results, expected)
    assert (held > 0) == bool(found.moved) == (rank == 1)
    aheads = [None, None]
    dist.all_gather_object(aheads, found.ahead)
    assert aheads[0] == aheads[1]
