"""Plans of steps whose blocks run in graphs for several lengths, or of which a forward is dropped:
what each rank plans by itself.
"""

from dataclasses import replace

import pytest

from zpasses import compat
from zpasses.backend.block_steps import BlockStep, _in_common, agreed_prefetch
from zpasses.cost.plan.prefetch import Agreed, GraphRun, MovableValue, StepCost, step_cost
from zpasses.cost.time.clock import CollectiveTiming
from zpasses.runtime import block_schedule, planned_blocks
from zpasses.runtime.block_schedule import BlockSchedule
from zpasses.runtime.param_conversion import await_backward, bound_call
from zpasses.runtime.planned_blocks import Forward, RunKey
from zpasses.runtime.started_gathers import Gathered

BLOCKS, LIMIT = 6, 2500
TRANSFERS = CollectiveTiming(1.0), CollectiveTiming(0.0)


def forward(size):
    """A graph that may move one value, and returns another one."""
    value = MovableValue(size, 1.0, 1.0, at=1)
    sizes = (0, 8), (1, size)
    return GraphRun(
        *("forward", False, 9.0, CollectiveTiming(1.0), CollectiveTiming(0.0), 0, 0, 0, size + 8),
        movable=(value,),
        returned=sizes,
    )


def backward(size):
    return GraphRun(
        "backward", True, 9.0, CollectiveTiming(1.0), CollectiveTiming(0.0), 0, 0, size, 0
    )


class Node:
    """An autograd node."""


class Rank:
    """The schedule of a rank, and what it asked others."""

    def __init__(self, monkeypatch):
        self.schedule, self.asked, self.plans = BlockSchedule(), 0, []
        self.monkeypatch = monkeypatch

    def step(self, size, blocks=BLOCKS, silent=()):
        """Runs a step of equal blocks. Returns their forwards.

        Args:
            silent: "forward" and "backward", if they communicate nothing.
        """
        held = self.forward(size, blocks, "forward" in silent)
        self.backward(size, blocks, "backward" in silent)
        del held
        return [self.schedule.plans.forward_of(block) for block in range(blocks)]

    def forward(self, size, blocks=BLOCKS, silent=False):
        """Runs forwards. Returns what keeps their autograd nodes."""
        held = Node()
        with bound_call(None):
            await_backward(held)
            self.run(False, forward(size), range(blocks), silent)
        return held

    def backward(self, size, blocks=BLOCKS, silent=False, of=None):
        """Runs backwards, after which the step is planned.

        Args:
            of: what `forward` returned, if the runtime knows whose backwards these are.
        """
        self.monkeypatch.setattr(planned_blocks, "values_used", lambda: of)
        self.run(True, backward(size), reversed(range(blocks)), silent)
        self.schedule.plans._asks = not silent
        self.schedule.plans._plan(self.plan)

    def run(self, is_backward, graph, blocks, silent=False):
        self.monkeypatch.setattr(compat, "in_backward", lambda: is_backward)
        for block in blocks:
            key = RunKey("collectives", block, is_backward)
            number = self.schedule.plans.number_of(graph)
            if silent:
                self.schedule.plans.add_silent(key, number)
            else:
                self.schedule.begin(key, None, 0, number)
        self.monkeypatch.setattr(compat, "in_backward", lambda: False)

    def plan(self, runs, ahead):
        self.asked += ahead is None
        self.plans.append(runs)
        return BlockStep(runs, host_bytes=1 << 20).planned(LIMIT, ahead)

    def moves(self, forwards):
        return [self.schedule.plans.moved_by(each) for each in forwards]


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.setattr(block_schedule, "_place", lambda: "here")
    return Rank(monkeypatch)


def test_another_length_is_planned_anew_and_no_rank_is_asked(rank):
    short = rank.step(100)
    assert rank.moves(short) == [()] * BLOCKS
    long = rank.step(1000)
    assert rank.asked == 1
    assert rank.moves(long) == [(1,)] * 4 + [()] * 2
    assert rank.moves(short) == [()] * BLOCKS
    # Equal graphs that are compiled again have the plans.
    assert rank.step(100) == short
    assert rank.step(1000) == long
    assert len(rank.plans) == 2


def test_ranks_ask_at_the_same_steps_whatever_their_lengths(monkeypatch, rank):
    monkeypatch.setattr(planned_blocks, "_MAX_PLANS", 2)
    other, asked = Rank(monkeypatch), []
    for number, blocks in enumerate((6, 6, 6, 5, 6, 4, 6, 5, 6)):
        rank.step(100, blocks)
        other.step(100 + number, blocks)
        assert other.asked == rank.asked
        asked.append(rank.asked)
    # Two steps are remembered. The third one has all forgotten.
    assert asked == [1, 1, 1, 2, 2, 3, 4, 5, 6]
    assert len(other.plans) == 9 > len(rank.plans)


def test_silent_graphs_are_planned_and_no_rank_is_asked_because_of_them(monkeypatch, rank):
    """A window of two micro-batches. Another rank runs one more."""
    for each, micros in ((rank, 2), (Rank(monkeypatch), 3)):
        first = [each.moves(each.step(1000, silent=["backward"])) for _ in range(micros - 1)]
        assert first[0] == [(1,)] * 4 + [()] * 2
        assert each.asked == 0
        last = each.step(1000, silent=["forward"])
        assert each.moves(last) == first[0]
        each.step(1000, silent=["forward"])
        assert each.asked == 1
        assert [len(runs) for runs in each.plans] == [2 * BLOCKS] * 2
        assert [runs[0].movable for runs in each.plans] == [forward(1000).movable] * 2


def test_what_is_known_of_one_graph_is_not_said_of_another(rank):
    (first, *_), (other, *_) = rank.step(100), rank.step(1000)
    assert first != other
    rank.schedule.plans.note_returned(first, 0, dropped=True)
    rank.schedule.plans.note_returned(other, 0, dropped=False)
    rank.schedule.plans._plans.clear()
    rank.step(100)
    rank.step(1000)
    dropped = [runs[0].dropped_bytes for runs in rank.plans]
    assert dropped == [0, 0, 8, 0]


def test_an_input_that_found_no_room_is_as_that_of_the_last_equal_graph(rank):
    plans = rank.schedule.plans
    for block, graph, freed in ((0, 1, True), (1, 2, False)):
        plans.note_input(Forward(block, graph), 0, freed, counted=True)
    assert plans._seen(Forward(3, 1), 0).freed
    assert not plans._seen(Forward(3, 2), 0).freed
    assert plans._seen(Forward(3, 3), 0) is None


def test_a_length_that_exceeds_the_budget_is_said_on_this_rank_only(caplog):
    runs = [forward(100)] * 4 + [backward(100)] * 4
    step = BlockStep([replace(each, movable=()) for each in runs])
    chosen = agreed_prefetch(step, "1B", None, ["no group is asked"], 1.0, agreed=Agreed(1, {}))
    assert chosen.ahead == 1
    (said,) = caplog.messages
    assert "memory_budget='1B': with the sizes of this step, its graphs hold" in said


def test_ranks_take_the_smallest_number_ahead_and_the_routes_that_all_have_chosen():
    answers = [2, [[0, "mori"], [1, "mori"], [2, "mori"]]], [1, [[0, "mori"], [1, "nccl_zero"]]]
    assert _in_common(answers) == [1, [[0, "mori"]]]


def test_gathers_start_by_the_routes_of_the_last_plan(rank):
    started = []

    class Recorded:
        def __init__(self, block):
            self.block = block

        def is_fresh(self, gathered):
            return True

        def start(self, route):
            started.append((self.block, route))
            return Gathered([], (), [])

    def planned(runs, agreed):
        rank.asked += agreed is None
        routes = {run.number: "mori" for run in runs if run.params != 1 and not run.is_backward}
        return StepCost(1, 1.0, 0.0, 1, routes=routes)

    rank.plan = planned
    begin = rank.schedule.begin
    rank.schedule.begin = lambda key, _, ahead, graph: begin(
        key, Recorded(key.params), ahead, graph
    )
    rank.step(100, 2)
    assert {route for _, route in started} == {""}
    started.clear()
    rank.step(100, 2)
    assert started[:2] == [(0, "mori"), (1, "")]
    assert rank.asked == 1


# --- forwards without a backward ------------------------------------------------------------------
def kinds(runs):
    return "".join(run.name[0] for run in runs)


def test_a_forward_that_was_dropped_is_no_part_of_the_next_step(rank):
    rank.step(100)
    rank.forward(1000)  # its backward failed, or was skipped
    rank.step(100)
    assert [kinds(runs) for runs in rank.plans] == ["f" * BLOCKS + "b" * BLOCKS] * 2
    assert rank.plans[0] == rank.plans[1]


def test_forwards_whose_backward_comes_later_are_a_part_of_the_step(rank):
    """Micro-batches that run forward, forward, backward, backward."""
    first, second = rank.forward(100, 1), rank.forward(100, 1)
    rank.backward(100, 1)
    del second
    rank.backward(100, 1)
    del first
    assert [kinds(runs) for runs in rank.plans] == ["ffb", "ffbb"]


def test_evaluations_of_any_length_leave_the_step_that_follows_them(monkeypatch, rank):
    monkeypatch.setattr(planned_blocks, "_MAX_STEP", 4)
    for _ in range(3):
        rank.forward(100, 3)
    held = rank.forward(100, 2)
    rank.backward(100, 2)
    assert kinds(rank.plans[0]) == "ffbb"
    del held


def test_ranks_ask_at_the_same_steps_whenever_they_free_a_forward(monkeypatch, rank):
    other, asked = Rank(monkeypatch), []
    for dropped in (0, 1, 0, 1, 2, 0):
        held = [other.forward(100) for _ in range(dropped)]  # as until the garbage is collected
        other.step(100)
        for _ in range(dropped):
            rank.forward(100)
        rank.step(100)
        assert other.asked == rank.asked
        asked.append(rank.asked)
        del held
    assert asked == [1, 2, 2, 2, 3, 3]


# --- several forwards before a backward -----------------------------------------------------------
def test_what_forwards_in_flight_saved_counts_until_their_backward(rank):
    """The pipeline schedule 1F1B of six micro-batches with two in flight."""
    size, moved = 300, []
    in_flight = [rank.forward(size)]
    for _ in range(5):
        in_flight.append(rank.forward(size))
        moved.append(rank.moves([rank.schedule.plans.forward_of(0)])[0])
        rank.backward(size)
        in_flight.pop(0)
    rank.backward(size)
    # One is in flight where no plan knows of two. Then the values of both, 3600 bytes, do not fit.
    assert moved == [None, (1,), (1,), (1,), (1,)]
    assert [kinds(runs) for runs in rank.plans] == [
        "f" * 2 * BLOCKS + "b" * BLOCKS,
        "f" * 2 * BLOCKS + "b" * BLOCKS,
        "f" * 2 * BLOCKS + "b" * 2 * BLOCKS,
    ]
    steady = rank.plans[1]
    assert [run.ran_before is not None for run in steady] == [True] * 6 + [False] * 12
    assert rank.asked == 3  # as often as without counting
    assert all(each.cost.peak_bytes <= LIMIT for each in rank.schedule.plans._plans.values())


def test_backwards_free_what_their_own_forwards_saved(rank):
    """GPipe, whose backwards run in the order of their forwards, with two lengths."""
    first, second = rank.forward(100, 2), rank.forward(1000, 2)
    for size, held in ((100, first), (1000, second)):
        rank.backward(size, 2, of=held)
    (_, runs), peak = rank.plans, 2 * 108 + 2 * 1008 - 108 + 100
    assert [run.since_forward for run in runs] == [0, 0, 0, 0, 3, 5, 3, 5]
    assert [step_cost(runs[:count], 0).peak_bytes for count in (5, 6, 7)] == [peak] * 3
    lean = [*runs[:6], replace(runs[6], peak_bytes=9000), runs[7]]
    assert step_cost(lean, 0).peak_bytes == 9000 + 1008  # of the first one, nothing is left


def test_the_last_blocks_of_a_stage_move_if_other_micro_batches_run_before_their_backward(rank):
    for _ in range(2):
        in_flight = [rank.forward(400, 2) for _ in range(4)]
        moved = rank.moves([rank.schedule.plans.forward_of(block) for block in range(2)])
        while in_flight:
            rank.backward(400, 2, of=in_flight.pop(0))
    assert moved == [(1,), ()]
    assert all(each.cost.peak_bytes <= LIMIT for each in rank.schedule.plans._plans.values())


def test_forwards_move_what_the_most_demanding_step_of_the_last_rounds_needs(rank):
    """Rounds with two forwards in flight, and with one, in turn."""

    def of(in_flight):
        held = [rank.forward(300) for _ in range(in_flight)]
        moved = rank.moves([rank.schedule.plans.forward_of(block) for block in range(BLOCKS)])
        while held:
            rank.backward(300, of=held.pop(0))
        return moved

    assert of(2) == [None] * BLOCKS
    most = of(1)
    assert (1,) in most
    assert [of(2), of(1), of(2)] == [most] * 3
    assert [of(1) for _ in range(3)] == [most] * 3
    assert of(1) == [()] * BLOCKS  # the three before had one
