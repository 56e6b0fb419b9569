"""Steps of several graphs: how far ahead gathers start."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpasses.cost.plan.prefetch import (
    MOST_AHEAD,
    GraphRun,
    plan_prefetch,
    step_bound_us,
    step_cost,
)

FORWARD = GraphRun("forward", False, 100.0, 60.0, 0.0, 10, 0, 5, 3)
BACKWARD = GraphRun("backward", True, 200.0, 60.0, 50.0, 10, 8, 7, 0)
STEP = [FORWARD] * 4 + [BACKWARD] * 4


def test_without_prefetching_every_gather_is_waited_for():
    cost = step_cost(STEP, 0)
    # A reduction ends while the next backward computes, and delays its gather.
    assert cost.waited_us == 4 * 60 + 60 + 3 * (50 + 60) + 50
    assert cost.total_us == 4 * 100 + 4 * 200 + cost.waited_us


def test_one_graph_ahead_hides_gathers_that_are_shorter_than_compute():
    cost = step_cost(STEP, 1)
    assert cost.waited_us == 60 + 50  # the first gather and the last reduction
    assert plan_prefetch(STEP, None) == cost


def test_long_gathers_before_short_graphs_need_more_than_one():
    short = replace(FORWARD, compute_us=10.0, gather_us=10.0)
    long = replace(FORWARD, compute_us=10.0, gather_us=100.0)
    runs = [replace(FORWARD, compute_us=100.0), short, short, long] * 4
    assert plan_prefetch(runs, None).ahead > 1


def test_memory_counts_what_is_saved_gathered_and_reduced():
    assert step_cost([FORWARD], 0).peak_bytes == 10 + 5
    assert step_cost([FORWARD, FORWARD], 1).peak_bytes == 20 + 5
    assert step_cost([FORWARD, FORWARD], 0).peak_bytes == 3 + 10 + 5
    assert step_cost([FORWARD, BACKWARD], 0).peak_bytes == 10 + 7


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
    assert step_cost([late] * 4, 1).waited_us == step_cost([TURNING] * 4, 1).waited_us == 60 + 50
    slow = replace(late, gather_us=180.0)
    assert step_cost([slow] * 4, 1).waited_us == 180 + 3 * (50 + 180 - 200) + 50


def test_reductions_are_waited_for_at_the_turning_point():
    slow = replace(TURNING, gather_us=0.0, reduce_us=70.0)
    assert step_cost([slow] * 3, 1).waited_us == 2 * (70 - 50) + 70
    # One more graph ahead leaves one more reduction in flight.
    assert step_cost([slow] * 3, 2).waited_us == 70


sizes, no = st.integers(0, 100), st.just(0)
kind = st.just("forward"), st.just(False)
graphs = st.builds(GraphRun, *kind, sizes, sizes, no, sizes, no, sizes, sizes)


@given(st.lists(graphs, min_size=1, max_size=6))
def test_no_number_of_graphs_ahead_beats_the_bound(forwards):
    runs = forwards + [
        replace(each, is_backward=True, reduce_us=each.gather_us) for each in forwards[::-1]
    ]
    times = [step_cost(runs, ahead).total_us for ahead in range(MOST_AHEAD + 1)]
    assert step_bound_us(runs) <= min(times) + 1e-9


def test_the_bound_has_what_cannot_run_beside_compute():
    assert step_bound_us(STEP) == step_cost(STEP, 1).total_us == 60 + 4 * 100 + 4 * 200 + 50
    long = [replace(each, compute_us=1.0) for each in STEP]
    assert step_bound_us(long) == 8 * 60 + 4 * 50  # the channel is never idle
    inside = replace(FORWARD, waited_us=40.0)  # kernels may run beside what is awaited
    assert step_bound_us([inside]) == 60 + 60
    assert step_cost([inside], 0).waited_us == 60 + 40


@given(st.lists(graphs, min_size=1, max_size=6), st.integers(0, 500))
def test_chosen_steps_are_never_slower_than_without_prefetching(forwards, limit):
    backward = {"is_backward": True}
    runs = forwards + [replace(f, reduce_us=f.gather_us, **backward) for f in forwards[::-1]]
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
