"""What blocks get from code before them rests on the host until backward, where that frees it."""

import contextlib
import gc
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from tests.frozen_training import assert_same
from tests.on_ranks import on_ranks
from tests.zpasses.backend.blocks_on_host import EAGER, build, plan, train
from tests.zpasses.cost.memory.allocations import allocated
from zpasses.backend.block_steps import BlockStep
from zpasses.cost.plan.prefetch import step_cost
from zpasses.errors import MemoryBudgetError, ZpassesError
from zpasses.host import saved_values
from zpasses.host.locked_memory import LockedMemory
from zpasses.host.saved_arenas import SavedArenas, host
from zpasses.pipeline import events
from zpasses.runtime.block_schedule import own_block_schedule

ROWS, WIDTH, LAYERS = 8192, 64, 8
ONE = ROWS * WIDTH * 4
"""Bytes of what a block gets from the one before."""
LIMIT = 1 << 20
"""The most that forwards which run by themselves may put on the host."""


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """Saves only what it gets."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Net(nn.Module):
    """Blocks, with code between them that is not compiled.

    Args:
        kind: "direct", "norms", "scales", "sums", "holds", "twice" or "writes".
    """

    def __init__(self, kind="direct"):
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        norms = LAYERS if kind == "norms" else 0
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(norms))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        held = []
        layers = iter(self.layers)
        for number, layer in enumerate(layers):
            before, x = x, layer(x)
            if self.kind == "norms":
                x = self.norms[number](x)
            elif self.kind == "scales":
                x = x * 1.5
            elif self.kind == "sums":
                x = before + x
            elif self.kind == "twice":
                x = x + next(layers)(before)
            elif self.kind == "writes" and number == 2:
                before.add_(1.0)
            elif self.kind == "holds":
                held.append(before)
            del before
        return self.head(x).square().mean()


def batch(number):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


@pytest.fixture(scope="module")
def trained(one_rank_of_module):
    """A model, the results of its first steps, those of steps that keep everything, what rested on
    the host, and the step that was planned.
    """
    steps = []
    with own_block_schedule(), events.listen(BlockStep, steps.append):
        model = build(Net, "17MiB", **EAGER)
        results, held = train(model, batch)
        model.zero_grad()
        with mock.patch.object(saved_values, "values_may_move", return_value=False):
            expected, _ = train(model, batch)
        yield SimpleNamespace(
            model=model, results=results, held=held, expected=expected, runs=steps[0].runs
        )


@pytest.fixture
def lean(trained):
    """The same, without gradients."""
    trained.model.zero_grad()
    yield trained
    trained.model.kind = "direct"


def test_what_blocks_get_rests_on_the_host_and_the_bits_are_the_same(lean):
    assert_same(lean.results, lean.expected)
    found, whole = plan(), step_cost(lean.runs, 0)
    # The caller holds the batch.
    assert [run.held_bytes for run in lean.runs] == [ONE, *[0] * 15]
    assert found.moved[:LAYERS] == (0, 1, 1, 1, 0, 0, 0, 0)
    assert lean.held == [LAYERS * ONE, 3 * ONE, 3 * ONE]  # the first step finds out
    assert found.peak_bytes == whole.peak_bytes - 3 * ONE
    assert found.total_us == pytest.approx(whole.total_us)


def test_an_input_that_is_changed_while_it_leaves_is_an_error_as_without_moves(lean):
    lean.model.kind = "writes"
    for moves, error in ((True, ZpassesError), (False, RuntimeError)):
        may = mock.patch.object(saved_values, "values_may_move", return_value=False)
        with contextlib.nullcontext() if moves else may:
            loss = lean.model(batch(0))
        with pytest.raises(error, match="modified"):
            loss.backward()
        del loss
    gc.collect()
    assert host.live == 0


def test_a_step_that_holds_what_it_did_not_hold_before_says_so_once(lean, caplog):
    saved_values._warn_once_of_held.cache_clear()
    lean.model.kind = "holds"
    results, held = train(lean.model, batch)
    assert held == [3 * ONE] * 3
    assert_same(results, lean.expected)
    (said,) = [each.getMessage() for each in caplog.records if "was not freed" in each.message]
    assert "The step takes more memory than planned." in said


@pytest.mark.slow(quick="test_what_blocks_get_rests_on_the_host_and_the_bits_are_the_same")
def test_what_something_else_holds_does_not_move_and_the_error_says_so(one_rank_of_module):
    for kind, stay in (("holds", LAYERS - 1), ("twice", LAYERS)):
        with own_block_schedule():
            model = build(partial(Net, kind), "8MiB", **EAGER)
            loss = model(batch(0))
            with pytest.raises(MemoryBudgetError, match="something else holds them") as error:
                loss.backward()
        assert f"{stay * ONE >> 20} MiB of what graphs get from code before them" in str(
            error.value
        )


@pytest.mark.slow(quick="test_what_blocks_get_rests_on_the_host_and_the_bits_are_the_same")
def test_inputs_that_found_no_room_in_the_first_step_are_as_those_of_equal_graphs(lean):
    with own_block_schedule():
        results, held = train(build(Net, "17MiB", f"{3 * ONE}B", **EAGER), batch)
        assert held == [3 * ONE] * 3
        assert plan().moved[:LAYERS] == (0, 1, 1, 1, 0, 0, 0, 0)
    assert_same(results, lean.expected)


# --- on ranks -------------------------------------------------------------------------------------
def measured(kind, budget=None, **options):
    """Trains. Returns the results, the plan, the graphs of the step, and the peak of a step that a
    profiler sees.
    """
    profiler, steps = profile(activities=[ProfilerActivity.CPU], profile_memory=True), []
    with profiler, own_block_schedule(), events.listen(BlockStep, steps.append):
        model = build(partial(Net, kind), budget, **options)
        results, held = train(model, batch)
        model.zero_grad()
        gc.collect()
        x = batch(3)
        with record_function("measured"):
            model(x).backward()
        found = plan()
    assert held[1:] == [found.host_bytes] * 2
    return results, found, steps[0].runs, allocated(profiler, "measured")[1]


@pytest.mark.slow(quick="test_what_blocks_get_rests_on_the_host_and_the_bits_are_the_same")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("direct", {}, marks=pytest.mark.inductor),
        *((kind, EAGER) for kind in ("direct", "norms", "scales", "sums")),
    ],
)
@on_ranks(2, timeout_s=600)
def test_measured_bytes_of_the_device_fall_by_what_the_plan_says(kind, options):
    expected, _, _, most = measured(kind, **options)
    for share in (0.9, 0.8, 0.7):
        results, found, runs, peak = measured(kind, f"{int(share * most)}B", **options)
        assert_same(results, expected)
        whole = step_cost(runs, 0).peak_bytes
        assert most - peak == pytest.approx(whole - found.peak_bytes, rel=0.02)
        assert most - peak == pytest.approx(found.host_bytes, rel=0.02)
        assert found.host_bytes > 0
        assert kind == "norms" or peak <= 1.01 * found.peak_bytes  # norms are not compiled


@pytest.mark.slow(quick="test_what_blocks_get_rests_on_the_host_and_the_bits_are_the_same")
@on_ranks(2, timeout_s=300)
def test_bytes_that_something_else_holds_are_not_planned_to_fall():
    for kind in ("holds", "twice"):
        expected, _, _, most = measured(kind, **EAGER)
        results, found, runs, peak = measured(kind, f"{int(1.1 * most)}B", **EAGER)
        assert_same(results, expected)
        assert (found.host_bytes, found.peak_bytes) == (0, step_cost(runs, 0).peak_bytes)
        assert peak == most


def test_a_call_that_begins_unobserved_says_nothing_of_the_call_before(monkeypatch):
    """What that one returned has been freed since, whoever held it."""
    noted = []
    moves = saved_values._Moves()
    monkeypatch.setattr(saved_values, "_moves", moves)
    monkeypatch.setattr(saved_values, "place_of_call", lambda: "now")
    monkeypatch.setattr(saved_values, "block_schedule", lambda: mock.Mock(moved_by=lambda _: None))
    monkeypatch.setattr(saved_values, "values_may_move", lambda: False)
    freed = saved_values._Memory(lambda: True)
    with FakeTensorMode():
        values = [torch.zeros(4)]
        for place, expected in (("before", 0), ("now", 2)):
            moves.returned = [[(freed, noted.append)] for _ in range(2)]
            moves._place = place
            for _ in range(2):
                saved_values._ValuesOut(lambda args: values, "forward", (), (), None)([])
            assert len(noted) == expected


@pytest.fixture
def forwards(monkeypatch):
    """Forwards of one call of the model: runs one with a plan of what moves, of values of which the
    first is returned, and the second an input. Returns it; what was noted is its attribute.
    """
    noted, plan = [], []
    plans = SimpleNamespace(
        moved_by=lambda forward: plan[0],
        is_planned=lambda forward: plan[0] is not None,
        forward_of=lambda params: len(noted),
        note_returned=lambda forward, at, dropped: noted.append(dropped),
        note_input=lambda forward, number, freed, counted: None,
    )
    monkeypatch.setattr(saved_values, "_moves", saved_values._Moves())
    monkeypatch.setattr(saved_values, "place_of_call", lambda: "here")
    monkeypatch.setattr(saved_values, "block_schedule", lambda: SimpleNamespace(plans=plans))

    def run(given, returned, planned=None, kind="forward"):
        plan[:] = [planned]
        arenas = SavedArenas(LIMIT)
        values = [returned] if given is None else [returned, given]
        movable = [1] if given is not None and kind == "forward" else []
        return saved_values._ValuesOut(lambda _: values, kind, movable, movable, arenas)([])

    return SimpleNamespace(run=run, noted=noted)


@pytest.mark.parametrize("between", [((), "forward"), (None, "inference"), (None, "forward")])
def test_forwards_of_all_kinds_count_in_what_code_between_graphs_drops(forwards, between):
    forwards.run(None, torch.zeros(4))
    forwards.run(None, held := torch.zeros(4), *between)
    assert forwards.noted == []
    forwards.run(None, torch.zeros(4), *between)
    assert forwards.noted == [True]
    forwards.run(None, torch.zeros(4))
    assert forwards.noted == ([True, False] if between[1] == "forward" else [True])
    del held


def test_what_a_forward_with_a_plan_moves_is_not_dropped(forwards):
    """It would count twice: as moved by the one, and as dropped after the other."""
    saved = [forwards.run(None, torch.zeros(4))]
    saved.append(forwards.run(saved.pop()[0], torch.zeros(4), (1,)))
    saved.append(forwards.run(None, torch.zeros(4), ()))
    assert forwards.noted == [False]


@pytest.mark.parametrize("planned", [None, (1,)])
def test_a_host_that_is_full_and_a_system_that_refuses_are_told_apart(
    forwards, planned, monkeypatch, caplog
):
    saved_values._warn_of_full.cache_clear()

    def said():
        for nbytes in (LIMIT + 4, LIMIT, LIMIT // 2):
            value = torch.zeros(nbytes // 4)
            assert forwards.run(value, torch.zeros(4), planned)[1] is value
        return [each.getMessage() for each in caplog.records]

    def refuse(*_):
        raise OSError(12, "Cannot allocate memory")

    taken = host.reserve(LIMIT, torch.device("cpu"), None)
    full = said()
    assert len(full) == (planned is not None)  # without a plan, all moves that finds room
    assert all("take all of host_memory. Run backward before" in text for text in full)
    del taken
    caplog.clear()
    monkeypatch.setattr(LockedMemory, "__new__", refuse)
    (refused,) = said()
    assert "although host_memory has room for them: the system does not give 1 MiB" in refused
    assert "[Errno 12] Cannot allocate memory" in refused
    assert "ulimit -v" in refused
