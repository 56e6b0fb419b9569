"""Stacks of layers, and what plans of their steps are made from."""

import itertools

import torch
from torch import nn

from zpasses.cost.plan.kept_params import (
    Repetition,
    StepProblem,
)
from zpasses.cost.plan.schedule_problem import problem_of
from zpasses.cost.time.target import Target
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
    model, x = Stack(widths, classes), torch.zeros(rows, widths[0])
    options = {"world_size": world_size, "rank": rank, "pipeline": LOWER % keep}
    return capture_graphs(model, (x,), **options).after


def step_of(graphs, world_size, rank=0, repetition=None):
    with fake_world(world_size, rank):
        target = Target.parse("h100")
        return StepProblem(
            problem_of(graphs.forward.graph, target),
            problem_of(graphs.backward.graph, target),
            repetition or Repetition(),
        )
