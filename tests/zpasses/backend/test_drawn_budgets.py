"""Property tests of memory budgets: what a step keeps, caches and moves, for drawn models."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.graphs import drawn_examples, few_examples
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.step_time import step_time
from zpasses.cost.time.target import Target
from zpasses.runtime.forward_variants import (
    ForwardVariant,
    build_forward_variant,
    param_slots,
)
from zpasses.testing import assert_step_equals_reference, capture_graphs, capture_ranks, fake_world

WIDTHS = st.lists(st.sampled_from([1, 8, 24, 65, 129]), min_size=3, max_size=6)
TARGETS = st.sampled_from(
    ["h100", "mi300x", "h100,link_gb_s=0.05,network_gb_s=0.05", "h100,ranks_per_node=1"]
)
WORLD = 2


class Stack(nn.Module):
    def __init__(self, widths, frozen):
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        for number, layer in enumerate(self.layers):
            layer.requires_grad_(number not in frozen)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@st.composite
def steps(draw):
    widths = draw(WIDTHS)
    frozen = draw(st.sets(st.integers(0, len(widths) - 3), max_size=2))
    rows = draw(st.sampled_from([2, 40]))
    return Stack(widths, frozen), torch.linspace(-1, 1, rows * widths[0]).view(rows, widths[0])


def figures(after, target, frozen=(), backwards_per_step=1):
    """Returns the mean duration of a forward and its backward, and the peak, by the model."""
    with fake_world(WORLD):
        graphs = [each.graph for each in (after.forward, after.backward)]
        slots = param_slots(graphs[0])
        always = [number for number, slot in enumerate(slots) if slot.param in frozen]
        forwards = [
            build_forward_variant(after.forward, ForwardVariant(frozenset(given)))[0].graph
            for given in (always, *[range(len(slots))] * (backwards_per_step - 1))
        ]
        times = [step_time([each, graphs[1]], Target.parse(target)).total_us for each in forwards]
        return sum(times) / len(times), max(liveness(graph).peak_bytes for graph in graphs)


@settings(few_examples, max_examples=drawn_examples(8))
@given(
    steps(),
    TARGETS,
    st.sampled_from(["zero3", "zero3", "zero2"]),
    st.sampled_from([0.0, 0.01, 1.0, None]),
    st.sampled_from([1, 3]),
)
def test_plans_keep_the_bits_and_the_budget_and_are_never_slower_than_one_ahead(
    step, target, stage, more, backwards_per_step
):
    """`more` is how much memory the plan may use beyond that of one gather and one reduction ahead;
    None plans without a budget.
    """
    model, batch = step
    about = {"pipeline": f"{stage}-one-ahead", "options": {"target": target}}
    one_ahead = capture_graphs(model, (batch,), world_size=WORLD, **about)
    time_us, peak_bytes = figures(one_ahead.after, target)
    options = {"target": target}
    if more is not None:
        budget = int(peak_bytes * (1 + more))
        options |= {"memory_budget": f"{budget}B", "backwards_per_step": backwards_per_step}
    planned = capture_ranks(model, (batch,), world_size=WORLD, pipeline=stage, options=options)
    assert_step_equals_reference(planned)
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    repeats = 1 if more is None else backwards_per_step
    planned_us, planned_bytes = figures(planned[0].after, target, frozen, repeats)
    assert more is None or planned_bytes <= budget, (planned_bytes, budget)
    assert planned_us <= time_us * (1 + 1e-9), (planned_us, time_us)
