"""Steps of several graphs: how far ahead gathers start."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpasses.cost.plan.prefetch import (
    MOST_AHEAD,
    EngineGather,
    GraphRun,
    MovableValue,
    plan_prefetch,
    step_bound_us,
    step_cost,
)
from zpasses.cost.time.clock import Channel, CollectiveTiming

took = CollectiveTiming
FORWARD = GraphRun("forward", False, 100.0, took(60.0), took(0.0), 10, 0, 5, 3)
BACKWARD = GraphRun("backward", True, 200.0, took(60.0), took(50.0), 10, 8, 7, 0)
STEP = [FORWARD] * 4 + [BACKWARD] * 4


def test_without_prefetching_every_gather_is_waited_for():
    cost = step_cost(STEP, 0)
    # A reduction ends while the next backward computes, and delays its gather.
    assert cost.exposed_us == 4 * 60 + 60 + 3 * (50 + 60) + 50
    assert cost.total_us == 4 * 100 + 4 * 200 + cost.exposed_us


def test_one_graph_ahead_hides_gathers_that_are_shorter_than_compute():
    cost = step_cost(STEP, 1)
    assert cost.exposed_us == 60 + 50  # the first gather and the last reduction
    assert plan_prefetch(STEP, None) == cost


def test_long_gathers_before_short_graphs_need_more_than_one():
    short = replace(FORWARD, compute_us=10.0, gather=took(10.0))
    long = replace(FORWARD, compute_us=10.0, gather=took(100.0))
    runs = [replace(FORWARD, compute_us=100.0), short, short, long] * 4
    assert plan_prefetch(runs, None).ahead > 1


def test_memory_counts_what_is_saved_gathered_and_reduced():
    assert step_cost([FORWARD], 0).peak_bytes == 10 + 5
    assert step_cost([FORWARD, FORWARD], 1).peak_bytes == 20 + 5
    assert step_cost([FORWARD, FORWARD], 0).peak_bytes == 3 + 10 + 5
    assert step_cost([FORWARD, BACKWARD], 0).peak_bytes == 10 + 7


def test_cached_parameters_stay_until_their_gradients_are_reduced():
    keeps, given, reads = (
        replace(FORWARD, gathered_bytes=gathered, cached_bytes=10, cached_read_bytes=read, params=1)
        for gathered, read in ((10, 0), (0, 0), (0, 10))
    )
    defers = replace(BACKWARD, reduce=took(0.0), gathered_bytes=0, reduced_bytes=0, params=1)
    reduces = replace(defers, reduce=took(50.0), reduced_bytes=10)
    other = replace(FORWARD, gathered_bytes=0, saved_bytes=0, peak_bytes=50)

    def held(*runs):
        return step_cost([*runs, other], 0).peak_bytes - 50

    assert held(keeps) == held(given) == held(reads) == 3 + 10
    assert held(keeps, given) == 3 + 3 + 10
    assert held(keeps, defers) == held(given, defers) == 10
    assert held(keeps, reduces) == 10 + 10  # in flight
    assert held(keeps, reduces, reduces) == 10
    evaluates = replace(keeps, saved_bytes=0)
    assert held(evaluates) == 10
    frozen = replace(given, cached_bytes=25)
    assert held(frozen, reduces, reduces) == 15 + 10
    peaks = [step_cost([each, defers], 0).peak_bytes for each in (given, reads)]
    assert peaks == [10 + 7, max(10 + 5, 7)]


def test_gathers_of_the_next_forward_wait_for_the_optimizer():
    far, near = (step_cost([BACKWARD, FORWARD], ahead).peak_bytes for ahead in (4, 0))
    assert far == near


def test_a_limit_takes_the_fastest_step_that_fits_or_the_leanest():
    least = step_cost(STEP, 0)
    assert plan_prefetch(STEP, least.peak_bytes).ahead == 0
    assert plan_prefetch(STEP, step_cost(STEP, 1).peak_bytes).ahead == 1
    assert plan_prefetch(STEP, 1) == least


TURNING = replace(BACKWARD, turn_us=50.0, turn_peak_bytes=4)


def test_gradients_are_in_memory_until_the_next_turning_point():
    # What is gathered, what the body needs, and the gradients of the backward before.
    assert step_cost([BACKWARD] * 3, 1).peak_bytes == 20 + 7 + 8
    assert step_cost([TURNING] * 3, 1).peak_bytes == 20 + 4 + 8
    late = replace(TURNING, gathers_at_turn=True)
    assert step_cost([late] * 3, 1).peak_bytes == 20 + 7


def test_gathers_that_start_at_the_turning_point_arrive_in_time_or_are_waited_for():
    late = replace(TURNING, gathers_at_turn=True)
    assert step_cost([late] * 4, 1).exposed_us == step_cost([TURNING] * 4, 1).exposed_us == 60 + 50
    slow = replace(late, gather=took(180.0))
    assert step_cost([slow] * 4, 1).exposed_us == 180 + 3 * (50 + 180 - 200) + 50


def test_reductions_are_waited_for_at_the_turning_point():
    slow = replace(TURNING, gather=took(0.0), reduce=took(70.0))
    assert step_cost([slow] * 3, 1).exposed_us == 2 * (70 - 50) + 70
    # One more graph ahead leaves one more reduction in flight.
    assert step_cost([slow] * 3, 2).exposed_us == 70


# --- routes ---------------------------------------------------------------------------------------
ENGINES = Channel("node", "engines")


def with_engines(runs, *engines):
    """The graphs with a number each, of which those that gather can take routes."""
    return [
        replace(each, number=at, engines=engines if each.gather.duration_us else ())
        for at, each in enumerate(runs)
    ]


def test_gathers_and_kernels_beside_them_slow_each_other():
    slow = CollectiveTiming(60.0, compute_slowdown=1.5, collective_slowdown=2.0)
    runs = [replace(FORWARD, gather=slow)] * 3
    # Beside 100 us of kernels, a gather takes 120 us, in which only 80 us of them are done.
    assert step_cost(runs, 1).total_us == pytest.approx(60 + 2 * (120 + 20) + 100)
    assert step_cost(runs, 0).total_us == 3 * (60 + 100)


def test_graphs_take_engines_where_the_step_gains_and_equal_graphs_the_same():
    slow = CollectiveTiming(60.0, compute_slowdown=1.5)
    runs = [replace(FORWARD, gather=slow)] * 8
    runs += [replace(BACKWARD, gather=slow, reduce=took(0.0), compute_us=40.0)] * 8
    longer = EngineGather("mori", CollectiveTiming(80.0, channel=ENGINES), 4)
    offered = with_engines(runs, longer)
    gaining = dict.fromkeys(range(8), "mori")
    chosen = plan_prefetch(offered, step_cost(offered, 1, (), gaining).peak_bytes)
    # Kernels of 40 us take 60 beside the groups, and wait for 80 us of engines.
    assert chosen.routes == gaining
    assert chosen.total_us < plan_prefetch(runs, None).total_us
    assert chosen == step_cost(offered, chosen.ahead, (), chosen.routes)
    both = with_engines(runs, longer, EngineGather("nccl_zero", took(20.0), 0))
    assert plan_prefetch(both, None).routes == dict.fromkeys(range(16), "nccl_zero")
    # What gains less than a route's price stays, and so does what other ranks may not run.
    little = EngineGather("mori", replace(slow, duration_us=59.9), 0)
    assert plan_prefetch(with_engines(runs, little), None).routes == {}
    unknown = [replace(each, number=-1) for each in both]
    assert plan_prefetch(unknown, None).routes == {}


def test_what_engines_pack_counts_until_the_graph_ends():
    packs = EngineGather("mori", took(10.0), 100)
    (run,) = with_engines([FORWARD], packs)
    assert step_cost([run], 0, (), {0: "mori"}).peak_bytes == 10 + 100 + 5
    runs = with_engines(STEP, packs)
    lean = step_cost(runs, 0).peak_bytes
    assert plan_prefetch(runs, lean + 99).routes == {}
    assert plan_prefetch(runs, lean + 200).routes


def test_without_a_budget_engines_may_raise_the_peak_by_a_third_at_most():
    slow = [replace(each, gather=CollectiveTiming(60.0, compute_slowdown=2.0)) for each in STEP]
    on_units = plan_prefetch(slow, None)
    for packed in (1, 10_000):
        runs = with_engines(slow, EngineGather("mori", took(10.0), packed))
        chosen = plan_prefetch(runs, None)
        assert chosen.peak_bytes <= 1.3 * on_units.peak_bytes
        assert bool(chosen.routes) == (packed == 1)
        ample = plan_prefetch(runs, 1 << 20)
        assert ample.routes
        assert ample.total_us < on_units.total_us


sizes, no = st.integers(0, 100), st.just(0)
factors = st.sampled_from([1.0, 1.3, 2.0])
kind = st.just("forward"), st.just(False)
links = st.sampled_from([Channel("node"), Channel("network"), Channel("node", "beside")])


def transfers(links):
    return st.builds(CollectiveTiming, sizes, factors, factors, links, st.sampled_from([0.0, 3.0]))


engines = st.lists(
    st.builds(EngineGather, st.just("mori"), transfers(st.just(ENGINES)), sizes), max_size=1
)
graphs = st.builds(
    GraphRun, *kind, sizes, transfers(links), st.just(took(0.0)), sizes, no, sizes, sizes
)
local = st.builds(
    GraphRun,
    *(*kind, sizes, transfers(st.just(Channel("node"))), st.just(took(0.0)), sizes, no, sizes),
    saved_bytes=sizes,
    engines=engines.map(tuple),
)


@given(st.lists(graphs | local, min_size=1, max_size=6))
def test_no_number_of_graphs_ahead_beats_the_bound(forwards):
    runs = forwards + [
        replace(each, is_backward=True, reduce=each.gather) for each in forwards[::-1]
    ]
    runs = [replace(each, number=number) for number, each in enumerate(runs)]
    times = [step_cost(runs, ahead).total_us for ahead in range(MOST_AHEAD + 1)]
    best = plan_prefetch(runs, None)
    assert step_bound_us(runs) <= min(*times, best.total_us) + 1e-6
    assert best.total_us <= min(times) * 1.004 + 1e-6


def test_the_bound_has_what_cannot_run_beside_compute():
    assert step_bound_us(STEP) == step_cost(STEP, 1).total_us == 60 + 4 * 100 + 4 * 200 + 50
    long = [replace(each, compute_us=1.0) for each in STEP]
    assert step_bound_us(long) == 8 * 60 + 4 * 50  # the channel is never idle
    inside = replace(FORWARD, exposed_us=40.0)  # kernels may run beside what is awaited
    assert step_bound_us([inside]) == 60 + 60
    assert step_cost([inside], 0).exposed_us == 60 + 40


@given(st.lists(graphs | local, min_size=1, max_size=6), st.integers(0, 500))
def test_chosen_steps_are_never_slower_than_without_prefetching(forwards, limit):
    backward = {"is_backward": True}
    runs = forwards + [replace(f, reduce=f.gather, **backward) for f in forwards[::-1]]
    chosen = plan_prefetch(runs, limit)
    costs = [step_cost(runs, ahead) for ahead in range(MOST_AHEAD + 1)]
    if any(each.peak_bytes <= limit for each in costs):
        assert chosen.peak_bytes <= limit
    assert chosen.total_us >= sum(each.compute_us for each in runs)
    assert step_cost(runs, 0).peak_bytes <= max(each.peak_bytes for each in costs)
    if costs[0].peak_bytes <= limit:
        assert chosen.total_us <= costs[0].total_us * 1.004 or chosen.total_us == pytest.approx(0)


def test_residuals_are_held_all_the_time_and_once_for_each_graph():
    runs = [FORWARD, replace(BACKWARD, residual_bytes=6)]
    again = [*runs, *runs, replace(BACKWARD, name="another", residual_bytes=5)]
    for steps, held in ((runs, 6), (again, 11)):
        plain = [replace(each, residual_bytes=0) for each in steps]
        cost = step_cost(steps, 1)
        assert cost.residual_bytes == held
        assert cost.peak_bytes == step_cost(plain, 1).peak_bytes + held


# --- values on the host ---------------------------------------------------------------------------
SAVING = replace(
    FORWARD,
    gather=took(0.0),
    gathered_bytes=0,
    saved_bytes=400,
    peak_bytes=400,
    movable=(MovableValue(192, 80.0, 90.0), MovableValue(64, 30.0, 40.0)),
)
FREEING = replace(
    BACKWARD, gather=took(0.0), reduce=took(0.0), gathered_bytes=0, reduced_bytes=0, peak_bytes=450
)


def saving(depth, forward=SAVING, backward=FREEING):
    """A step of graphs with different parameters, each of which saves values."""
    forwards = [replace(forward, name=f"forward {at}") for at in range(depth)]
    return [*forwards, *(replace(backward, name=f"backward {at}") for at in range(depth))]


def test_values_move_only_as_far_as_the_limit_needs_and_the_earliest_first():
    runs = saving(6)
    whole = step_cost(runs, 0)
    assert whole.peak_bytes == 5 * 400 + 450
    assert (whole.moved, plan_prefetch(runs, whole.peak_bytes, 1 << 20)) == ((), whole)
    for count in range(1, 5):
        found = plan_prefetch(runs, whole.peak_bytes - 192 * count, 1 << 20)
        assert found.moved == (1,) * count + (0,) * (12 - count)
        assert found.host_bytes == 192 * count
        assert found.peak_bytes == whole.peak_bytes - 192 * count
        assert found.total_us == whole.total_us  # beside compute
    # The copies of two values out take 110 us, and a graph 100.
    found = plan_prefetch(runs, whole.peak_bytes - 192 * 4 - 64, 1 << 20)
    assert found.moved[:6] == (2, 1, 1, 1, 0, 0)
    assert found.exposed_us == pytest.approx(10.0)
    assert found.peak_bytes == whole.peak_bytes - 192 * 4 - 64


def test_the_last_calls_move_nothing_because_their_values_are_needed_at_once():
    runs = saving(6)
    least = plan_prefetch(runs, 0, 1 << 20)
    assert least.moved == (2, 2, 2, 2, 0, 0) + (0,) * 6
    assert plan_prefetch(saving(2), 0, 1 << 20).moved == ()
    assert step_cost(runs, 0, (0, 0, 0, 0, 2, 2)).peak_bytes == step_cost(runs, 0).peak_bytes


def pipelined(micro_batches):
    """A stage of two blocks with the schedule GPipe. Equal graphs are one object."""
    forwards = saving(2)[:2]
    ran = 2 * micro_batches
    last, first = (replace(FREEING, since_forward=ran - 1), replace(FREEING, since_forward=ran + 1))
    return [*forwards * micro_batches, *[last, first] * micro_batches]


def test_values_move_if_backwards_of_other_micro_batches_run_before_their_own():
    """Those of the last block are moved last, as nothing computes beside some of their copies."""
    runs = pipelined(3)
    whole = step_cost(runs, 0)
    assert whole.peak_bytes == 5 * 400 + 450
    few = plan_prefetch(runs, whole.peak_bytes - 1, 1 << 20)
    assert few.moved == (1, 0) * 3 + (0,) * 6
    # In the first backward, the value of the next one comes back.
    assert few.peak_bytes == whole.peak_bytes - 2 * 192
    most = plan_prefetch(runs, 0, 1 << 20)
    assert most.moved == (2, 2) * 3 + (0,) * 6
    assert most.exposed_us > few.exposed_us == 0
    # All but those of the first two backwards rest.
    assert most.peak_bytes == 450 + 400 + 4 * (400 - 256)
    assert plan_prefetch(pipelined(1), 0, 1 << 20).moved == ()


def test_values_are_back_one_graph_before_their_backward():
    runs = saving(6)
    moved = (2, 0, 0, 0, 0, 0)
    peaks = [step_cost(runs[:count], 0, moved).peak_bytes for count in range(1, 13)]
    # The copies out end after the next graph.
    assert peaks[:3] == [400, 800, 400 * 3 - 256]
    assert max(peaks) == 5 * 400 + 450 - 256
    late = [*runs[:10], replace(runs[10], peak_bytes=1 << 20), runs[11]]
    assert step_cost(late, 0, moved).peak_bytes == (1 << 20) + 400
    earlier = [*runs[:9], replace(runs[9], peak_bytes=1 << 20), *runs[10:]]
    assert step_cost(earlier, 0, moved).peak_bytes == (1 << 20) + 800 - 256


def test_host_memory_bounds_what_a_plan_moves():
    runs = saving(6)
    assert plan_prefetch(runs, 0, 2 * 192).moved[:6] == (1, 1, 0, 0, 0, 0)
    assert plan_prefetch(runs, 0, 191).moved == ()


def test_graphs_that_run_twice_move_equally_or_nothing():
    runs = saving(7)
    again = [runs[0], *runs[1:3], runs[0], *runs[4:]]
    assert plan_prefetch(again, 0, 1 << 20).moved[:7] == (2, 2, 2, 2, 2, 0, 0)
    last = [*runs[:6], runs[0], *runs[7:]]
    assert plan_prefetch(last, 0, 1 << 20).moved[:7] == (0, 2, 2, 2, 2, 0, 0)


def test_copies_on_a_cpu_take_the_time_of_kernels():
    runs = saving(6, replace(SAVING, copies_compute=True))
    cost = step_cost(runs, 0, (2, 1, 0, 0, 0, 0))
    assert cost.total_us == step_cost(runs, 0).total_us + 110 + 80 + 130 + 90


def test_what_code_between_graphs_drops_is_freed_when_the_next_forward_but_one_has_run():
    runs = saving(6, replace(SAVING, dropped_bytes=300))
    peaks = [step_cost(runs[:count], 0).peak_bytes for count in range(1, 13)]
    assert peaks[:6] == [400, 800, 1200, 1300, 1400, 1500]
    # Of the last two forwards, nothing was seen to be dropped before their backward.
    assert max(peaks) == peaks[5]
    last = [*runs[:-1], replace(runs[-1], peak_bytes=1 << 20)]
    assert step_cost(last, 0).peak_bytes == 1 << 20  # each is freed once


def test_long_copies_are_waited_for_where_they_are_needed():
    slow = replace(SAVING, movable=(MovableValue(192, 250.0, 350.0),))
    cost = step_cost(saving(6, slow), 0, (1, 0, 0, 0, 0, 0))
    assert cost.exposed_us == (250 - 100) + (350 - 200)
