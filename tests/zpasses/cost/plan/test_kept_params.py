"""Which parameters are kept until backward, and what that costs by the memory model."""

import itertools

import pytest
import torch
from torch import nn

from tests.zpasses.cost.plan.stacks import LOWER, captured, step_of
from zpasses.cost.plan import kept_params
from zpasses.cost.plan.kept_params import (
    Repetition,
    choose_kept,
    fitting_params,
    keepable_params,
)
from zpasses.cost.plan.schedule_evaluation import evaluate
from zpasses.cost.plan.simple_plans import one_ahead_plan, single_plan
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.tags import tagged
from zpasses.testing import capture_graphs

WIDTHS = [48, 64, 64, 96]


def test_head_comes_first_because_its_backward_follows_its_forward_at_once():
    step = step_of(captured([1024] * 4, 1024, 16, 2, "nothing"), 2)
    found = [each.params[0] for each in keepable_params(step)]
    assert found == ["head.weight", "layers.2.weight", "layers.1.weight"]  # x needs no gradient


@pytest.mark.parametrize(("world_size", "plan"), [(2, one_ahead_plan), (3, single_plan)])
@pytest.mark.slow(quick="test_more_memory_keeps_more_and_is_never_slower")
def test_memory_of_a_choice_is_that_of_its_graphs(world_size, plan):
    """Rows of 64 and 96 are not divisible by 3 and 2 alike, so some gathers are padded."""
    lean = step_of(captured(WIDTHS, 129, 16, world_size, "nothing"), world_size)
    chosen = fitting_params(lean, keepable_params(lean), lean.peak_bytes())
    graphs = captured(WIDTHS, 129, 16, world_size, "fitting")
    again = {name for _, tag in tagged(graphs.backward.graph, "gather") for name in tag.params}
    kept = {name for each in chosen for name in each.params}
    assert kept
    assert again.isdisjoint(kept)
    predicted, actual = lean.keeping(chosen), step_of(graphs, world_size)
    assert predicted.peak_bytes(plan) == actual.peak_bytes(plan)


@pytest.mark.parametrize(
    ("widths", "classes", "rows", "world_size"),
    [([1, 1], 1, 1, 2), ([7, 33, 33, 5], 60, 2, 3), ([16, 40, 3], 3, 24, 2), ([9] * 6, 50, 8, 3)],
)
@pytest.mark.slow(quick="test_more_memory_keeps_more_and_is_never_slower")
def test_what_fits_does_not_raise_the_peak_and_is_equal_on_all_ranks(
    widths, classes, rows, world_size
):
    choices = []
    for rank in range(world_size):
        lean = step_of(captured(widths, classes, rows, world_size, "nothing", rank), world_size)
        kept = fitting_params(lean, keepable_params(lean), lean.peak_bytes())
        choices.append([each.params for each in kept])
        graphs = captured(widths, classes, rows, world_size, "fitting", rank)
        assert step_of(graphs, world_size, rank).peak_bytes() <= lean.peak_bytes()
    assert all(each == choices[0] for each in choices)


def test_more_memory_keeps_more_and_is_never_slower():
    factors = (0.5, 1.0, 1.2, 1.5, 3.0)
    with use_target(Target.parse("h100")):
        step = step_of(captured([512] * 5, 1024, 64, 4, "nothing"), 4)
        lean, candidates = step.peak_bytes(), keepable_params(step)
        choices = [choose_kept(step, candidates, int(lean * factor)) for factor in factors]
    sizes = [sum(each.nbytes for each in choice.kept) for choice in choices]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)
    assert len(choices[-1].kept) == len(keepable_params(step))
    times = [choice.total_us for choice in choices]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]
    for choice, factor in [*zip(choices, factors, strict=True)][1:]:
        assert choice.peak_bytes <= lean * factor


def test_memory_that_nobody_asked_to_use_must_gain_time(monkeypatch):
    step = step_of(captured([512] * 6, 512, 16, 2, "nothing"), 2)

    def chosen(*, asked):
        limit = int(1.6 * step.peak_bytes())
        return choose_kept(step, keepable_params(step), limit, asked=asked)

    assert len(chosen(asked=True).kept) == len(chosen(asked=False).kept) == 5
    monkeypatch.setattr(kept_params, "_KEPT_PRICE", 10.0)
    assert len(chosen(asked=True).kept) == 5
    assert 0 < len(chosen(asked=False).kept) < 5
    assert chosen(asked=False).peak_bytes < 0.9 * chosen(asked=True).peak_bytes


# --- parameters that are cached throughout the step -----------------------------------------------
def test_caching_saves_the_gathers_of_forwards_that_find_a_parameter_unchanged():
    graphs = captured([512] * 4, 1024, 64, 4, "nothing")
    durations = {}
    for backwards in (1, 2, 8):
        step = step_of(graphs, 4, repetition=Repetition(backwards))
        kept = keepable_params(step)
        durations[backwards] = [
            chosen.mean_us(lambda problem: evaluate(problem, single_plan(problem)).total_us)
            for chosen in (step.keeping(kept), step.keeping((), kept))
        ]
        gathers = sum(each.forward_us for each in kept)
        saved = durations[backwards][0] - durations[backwards][1]
        assert saved == pytest.approx((1 - 1 / backwards) * gathers, rel=0.2)
    assert durations[1][0] == durations[1][1]


def test_frozen_parameters_are_never_gathered_again():
    graphs = captured([512] * 4, 1024, 64, 4, "nothing")
    step = step_of(graphs, 4, repetition=Repetition(1, ("layers.1.weight",)))
    unchanged = {each.params[0]: each.unchanged for each in keepable_params(step)}
    assert unchanged == {"layers.1.weight": 1.0, "layers.2.weight": 0.0, "head.weight": 0.0}
    cached = [each for each in keepable_params(step) if each.unchanged]
    seen = []
    step.keeping((), cached).mean_us(lambda problem: seen.append(len(problem.jobs)) or 0.0)
    assert seen == [len(step.backward.jobs) - 1, len(step.forward.jobs) - 1]


@pytest.mark.parametrize("backwards", [None, 4])
def test_all_that_a_graph_gathers_can_be_kept(backwards):
    """Kept, nothing is left to gather in the backward of frozen layers; cached, in a forward."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    model.requires_grad_(backwards is not None)
    x = torch.zeros(8, 64, requires_grad=True)
    graphs = capture_graphs(model, (x,), world_size=4, pipeline=LOWER % "nothing").after
    step = step_of(graphs, 4, repetition=None if backwards is None else Repetition(backwards))
    choice = choose_kept(step, keepable_params(step), 1 << 30, caches=True)
    assert len(choice.kept) + len(choice.cached) == 3


@pytest.mark.slow(quick="test_more_memory_keeps_more_and_is_never_slower")
def test_memory_is_given_to_caching_where_it_saves_time():
    with use_target(Target.parse("h100")):
        graphs = captured([512] * 5, 1024, 64, 4, "nothing")
        lean = step_of(graphs, 4).peak_bytes()
        found = {}
        for backwards, factor in itertools.product((1, 16), (1.0, 1.6, 4.0)):
            step = step_of(graphs, 4, repetition=Repetition(backwards))
            limit = int(lean * factor)
            choice = choose_kept(step, keepable_params(step), limit, caches=True)
            found[backwards, factor] = choice
            assert choice.peak_bytes <= limit
            assert not {n.name for n in choice.kept} & {n.name for n in choice.cached}
    assert not any(choice.cached for (backwards, _), choice in found.items() if backwards == 1)
    counts = [len(found[16, factor].cached) for factor in (1.0, 1.6, 4.0)]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == len(keepable_params(step_of(graphs, 4)))
    times = [found[16, factor].total_us for factor in (1.0, 1.6, 4.0)]
    assert times == sorted(times, reverse=True)
    assert found[16, 4.0].total_us < found[1, 4.0].total_us
