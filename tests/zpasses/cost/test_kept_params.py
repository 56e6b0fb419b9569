"""Which parameters are kept until backward, and what that costs by the memory model."""

import itertools

import pytest
import torch
from torch import nn

from zpasses.cost.kept_params import StepProblem, choose_kept, fitting_params, keepable_params
from zpasses.cost.schedule_evaluation import one_ahead_plan, single_plan
from zpasses.cost.schedule_problem import problem_of
from zpasses.cost.target import Target, use_target
from zpasses.graph.tags import tagged
from zpasses.testing import capture_graphs, fake_world

LOWER = "merge-reads{max_hold_mb=1},gather-params,reduce-grads,reshard-after-forward{keep=%s}"


class Stack(nn.Module):
    """Layers of the given widths, and a head."""

    def __init__(self, widths, classes):
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.head = nn.Linear(widths[-1], classes, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).logsumexp(-1)


def captured(widths, classes, rows, world_size, keep, rank=0):
    x = torch.zeros(rows, widths[0])
    pipeline = LOWER % keep
    return capture_graphs(
        Stack(widths, classes), (x,), world_size=world_size, rank=rank, pipeline=pipeline
    ).after


def step_of(graphs, world_size, rank=0):
    with fake_world(world_size, rank):
        target = Target.parse("h100")
        return StepProblem(
            problem_of(graphs.forward.graph, target), problem_of(graphs.backward.graph, target)
        )


WIDTHS = [48, 64, 64, 96]


def test_head_comes_first_because_its_backward_follows_its_forward_at_once():
    step = step_of(captured([1024] * 4, 1024, 16, 2, "nothing"), 2)
    found = [each.params[0] for each in keepable_params(step)]
    assert found == ["head.weight", "layers.2.weight", "layers.1.weight"]  # x needs no gradient


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("plan", [single_plan, one_ahead_plan])
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
    with use_target(Target.parse("h100")):
        step = step_of(captured([512] * 8, 1024, 64, 4, "nothing"), 4)
        lean = step.peak_bytes()
        candidates = keepable_params(step)
        choices = [
            choose_kept(step, candidates, int(lean * factor))
            for factor in (0.5, 1.0, 1.2, 1.5, 3.0)
        ]
    sizes = [sum(each.nbytes for each in choice.kept) for choice in choices]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)
    assert len(choices[-1].kept) == len(keepable_params(step))
    times = [choice.total_us for choice in choices]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]
    assert all(
        choice.peak_bytes <= lean * factor
        for choice, factor in zip(choices[1:], (1.0, 1.2, 1.5, 3.0), strict=True)
    )
