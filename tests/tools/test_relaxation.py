"""The least time of a step: no plan is below it, and it is that of steps that one can count."""

from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs import drawn_examples, few_examples
from tests.tools.equal_layers import ROWS, WIDTH, Net
from tests.zpasses.backend.budgets import TARGETS, Stack, steps, within_compile
from tests.zpasses.models import Blocks
from zpasses.backend import step_trials
from zpasses.backend.partition_plan import Choice
from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.kept_params import StepProblem, keepable_params
from zpasses.cost.plan.schedule_problem import problem_of
from zpasses.cost.plan.simple_plans import single_plan
from zpasses.cost.time.target import current_target
from zpasses.graph.host_copies import offloadable_values
from zpasses.tools.plan.linear_program import LinearProgram
from zpasses.tools.plan.relaxation import LeastTimes

ROUNDING = 1 - 1e-6
FRACTIONS = (1.0, 0.7, 0.4, 0.2, 0.1)
HOSTS = st.sampled_from(["1MiB", None])


def test_program_takes_the_cheapest_that_keeps_to_a_limit():
    program = LinearProgram()
    cheap, dear = program.variable(1.0, cost=2.0), program.variable(1.0, cost=5.0)
    program.at_least({cheap: 1.0, dear: 1.0}, 1.0)
    program.at_most({cheap: 4.0}, 0.0, limits=1.0)
    assert program.least(4.0) == pytest.approx(2.0)
    assert program.least(2.0) == pytest.approx(0.5 * 2.0 + 0.5 * 5.0)
    program.at_least({dear: 1.0}, 2.0)
    assert program.least(4.0) is None


def drawn_choice(draw, trials):
    """Any partition with any parameters kept and values on the host, whether or not it is good."""
    activations = draw(st.sampled_from(FRACTIONS))
    trial = trials.trial(activations)
    params = keepable_params(trial.step)
    kept = draw(st.lists(st.sampled_from(params), unique=True)) if params else []
    cached = [each for each in kept if each.unchanged > 0 and draw(st.booleans())]
    kept = [each for each in kept if each not in cached]
    values = trials.saved_values(activations)
    out = draw(st.lists(st.sampled_from(values), unique=True)) if values else []
    names = (frozenset(each.name for each in some) for some in (kept, cached, out))
    return Choice(activations, *names), trials.offloading(trial, out).step.keeping(kept, cached)


@pytest.fixture(autouse=True, scope="module")
def small_values_may_leave():
    """Drawn steps have no value of `LEAST_BYTES`."""
    small = partial(offloadable_values, least_bytes=64)
    with mock.patch.object(step_trials, "offloadable_values", small):
        yield


@pytest.mark.slow(quick="test_less_memory_takes_longer_until_nothing_fits")
@settings(few_examples, max_examples=drawn_examples(6))
@given(steps(), TARGETS, st.sampled_from([1, 3]), HOSTS, st.booleans(), st.data())
def test_no_choice_is_faster_than_the_least_time_at_its_peak(
    step, target, repeats, host, fake, data
):
    """Not even with the duration that none of its schedules can beat."""
    model, batch = step

    def check(trials):
        for _ in range(2):
            choice, planned = drawn_choice(data.draw, trials)
            peak = planned.peak_bytes(single_plan)
            graphs = trials.graphs(choice)
            step = StepProblem(*(problem_of(each.graph, current_target()) for each in graphs))
            assert step.peak_bytes(single_plan) <= peak
            least = LeastTimes(trials).least_us(peak)
            assert least is not None
            assert least * ROUNDING <= planned.mean_us(schedule_bound_us)

    more = {"host_memory": host} if host else {}
    within_compile(
        check,
        model,
        x=batch,
        fake=fake,
        target=target,
        backwards_per_step=repeats,
        memory_budget="1GiB",
        **more,
    )


@pytest.mark.slow(quick="test_less_memory_takes_longer_until_nothing_fits")
@settings(few_examples, max_examples=drawn_examples(5))
@given(steps(), TARGETS, st.floats(0, 1), st.booleans())
def test_no_plan_is_faster_than_the_least_time_of_its_budget(step, target, share, fake):
    model, batch = step

    def check(trials):
        least, most = trials.least_bytes(), trials.most_bytes()
        limit = int(least + share * (most - least))
        plan = trials.fastest(limit)
        assert plan.fits
        assert LeastTimes(trials).least_us(limit) * ROUNDING <= plan.total_us

    options = {"target": target, "memory_budget": "1GiB", "host_memory": "1MiB"}
    within_compile(check, model, x=batch, fake=fake, **options)


def test_less_memory_takes_longer_until_nothing_fits():
    def check(trials):
        limits = [trials.most_bytes(), trials.least_bytes(), 1 << 14]
        rich, lean, none = map(LeastTimes(trials).least_us, limits)
        assert rich < lean <= trials.fastest(limits[1]).total_us
        assert none is None

    within_compile(check, Blocks(), memory_budget="1GiB")


def test_a_step_of_a_few_bytes_has_a_least_limit():
    def check(trials):
        assert 0 < trials.least_bytes() <= trials.most_bytes() < 200

    options = {"memory_budget": "1GiB", "host_memory": "1MiB"}
    within_compile(check, Stack([1, 1, 1], ()), x=torch.ones(2, 1), **options)


SLOW = "h100,tflops=0.1,launch_us=0.1,hop_us=0.1,kernel_us=0.1,host_out_gb_s=0.2,host_in_gb_s=0.2"
"""Recomputation and copies take long, so that memory counts."""


@pytest.mark.slow(quick="test_less_memory_takes_longer_until_nothing_fits")
def test_least_time_of_further_layers_is_that_of_a_capture():
    limits, captured, estimated, ignored = [1_150_000, 1_400_000, 2_500_000], [], [], []

    def of_six(trials):
        captured.extend(map(LeastTimes(trials).least_us, limits))

    def of_four(trials):
        estimated.extend(map(LeastTimes(trials, 2).least_us, limits))
        ignored.extend(map(LeastTimes(trials).least_us, limits))

    given = {"x": torch.zeros(ROWS, WIDTH), "memory_budget": "1GiB", "target": SLOW}
    within_compile(of_six, Net(6), **given)
    within_compile(of_four, Net(4), **given)
    assert captured[0] > captured[1] > captured[2]
    assert estimated == pytest.approx(captured, rel=0.005)
    assert ignored != pytest.approx(captured, rel=0.2)
