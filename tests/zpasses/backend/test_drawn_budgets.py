"""Property tests of memory budgets: what a step keeps, caches and moves, for drawn models."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs import drawn_examples, few_examples
from tests.zpasses.backend.budgets import TARGETS, steps
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.step_time import step_time
from zpasses.cost.time.target import Target
from zpasses.graph.cached_params import param_slots
from zpasses.runtime.forward_variants import ForwardVariant, build_forward_variant
from zpasses.testing import assert_step_equals_reference, capture_graphs, capture_ranks, fake_world

WORLD = 2


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
