"""Which saved values leave the device, and which way."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zpasses.backend.budgets import within_compile
from tests.zpasses.backend.values_on_host import Net, X
from zpasses.cost.plan import leaving_values
from zpasses.cost.plan.leaving_values import Recompute, rank_leaving
from zpasses.cost.plan.offloaded_values import SavedValue
from zpasses.cost.time.target import Target, use_target

times = st.integers(0, 50).map(float)


def awaited(copies):
    """How long copies of one link are awaited: pairs of the time when each must have ended and its
    duration.
    """
    now, late = 0.0, 0.0
    for until, took in sorted(copies):
        now += took
        late = max(late, now - until)
    return late


@given(st.lists(st.tuples(times, times, st.booleans()), min_size=1, max_size=8))
def test_a_copy_takes_what_it_delays_those_that_share_its_link(drawn):
    link = leaving_values._Link(*(np.array([each[at] for each in drawn]) for at in (0, 1)))
    chosen = [at for at, each in enumerate(drawn) if each[2]]
    for at in chosen:
        link.add(at)
    copies = [drawn[at][:2] for at in chosen]
    for at in set(range(len(drawn))) - set(chosen):
        expected = awaited([*copies, drawn[at][:2]]) - awaited(copies)
        assert link.more_us()[at] == pytest.approx(expected)


# --- which way ------------------------------------------------------------------------------------
SHARE = 0.8


def at_speeds(speeds, check):
    """Calls `check` for links to the host of some speeds, in GB/s: with the trials of a step, the
    share of its peak that it must fit, and a function that ranks what leaves.
    """

    def run(trials):
        for speed in speeds:
            text = f"h100,tflops=1,host_out_gb_s={speed},host_in_gb_s={speed}"
            with use_target(Target.parse(text)):
                again = trials.again(False)
                again.host_bytes = 1 << 30
                step = again.trial(1.0).step
                limit = int(SHARE * step.peak_bytes())
                given = step, step, *again._all_leaving(), limit
                check(speed, again, limit, functools.partial(rank_leaving, *given))

    options = {"memory_budget": "1GiB", "host_memory": "1GiB"}
    within_compile(run, Net(64, 4), target="h100", x=X, **options)


def test_values_rest_on_the_host_while_their_copies_hide_and_are_computed_again_after_that():
    ways = {}

    def check(speed, trials, limit, ranked):
        found = ranked(1 << 30)
        assert found.fewest == len(found.ranked)  # the rich step is the same
        ways[speed] = [each.on_host for each in found.ranked]
        assert len({each.value.name for each in found.ranked}) == len(found.ranked)
        assert not any(each.on_host for each in ranked(0).ranked)

    at_speeds((2000, 5, 0.1), check)
    assert ways == {2000: [True] * 3, 5: [True, True, False], 0.1: [False] * 2}


@pytest.mark.slow(
    quick="test_values_rest_on_the_host_while_their_copies_hide_and_are_computed_again_after_that"
)
def test_a_plan_with_both_ways_is_faster_than_either_alone():
    def check(speed, trials, limit, ranked):
        both = trials.fastest(limit)
        assert both.fits
        assert both.trial.offloaded
        assert both.trial.recomputed
        moved = list(trials._with_offloads(trials.trial(1.0), limit))
        trials.host_bytes = 0
        again = trials._fastest(limit)
        alone = [again, *(trials._planned(each, limit) for each in moved)]
        fitting = [each.total_us for each in alone if each.fits]
        assert len(fitting) > 1
        assert min(fitting) > 1.02 * both.total_us

    at_speeds((5,), check)


def test_a_value_that_another_one_is_computed_from_must_be_there_before():
    side = SimpleNamespace(slots=range(6), work_us=(1.0,) * 5)
    step = SimpleNamespace(forward=side, backward=side)
    # Backward reads the later value first.
    values = [SavedValue("source", 64, 0, 1, 4, 9.0), SavedValue("reader", 32, 2, 3, 2, 4.0)]
    again = {
        "source": Recompute({"first": 1.0}, frozenset()),
        "reader": Recompute({"second": 1.0}, frozenset({"source"})),
    }
    ranking = leaving_values._Ranking(step, values, again, 0)
    places = [ranking._places[each.name] for each in values]
    ranking._leave(places[0], False)
    assert ranking._freed[1].tolist() == [64, 64, 64, 64, 0, 0]
    ranking._leave(places[1], False)
    assert ranking._freed[1].tolist() == [96, 96, 0, 0, 0, 0]
    assert ranking._freed[0].tolist() == [0, 64, 64, 96, 96, 96]
