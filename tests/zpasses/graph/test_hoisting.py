"""Collectives that leave their graph: the parts compute what the whole graph does."""

import pytest
from hypothesis import assume, given, settings
from torch import fx

from tests.graphs import drawn_examples
from zpasses import compat
from zpasses.graph.hoisting import hoist_collectives
from zpasses.graph.queries import collective_of, is_wait
from zpasses.graph.tags import tag_of
from zpasses.runtime.grad_slots import returned_gradients
from zpasses.testing import (
    JointRecipe,
    ParamSpec,
    assert_equal_bits,
    random_inputs,
)
from zpasses.testing.strategies import joint_recipes, pipelines

WAIT = compat.functional.wait_tensor.default


def rejoined(gm, hoisted):
    """The graph that its parts are, one after another."""
    graph = fx.Graph()
    inputs = []
    for node in gm.graph.find_nodes(op="placeholder"):
        inputs.append(graph.placeholder(node.name))
        inputs[-1].meta = dict(node.meta)

    def inline(part, values):
        given = dict(zip(part.graph.find_nodes(op="placeholder"), values, strict=True))
        return list(graph.graph_copy(part.graph, given))

    def of_param(name):
        return next(
            node
            for node in inputs
            if (tag := tag_of(node)) is not None and tag.role == "shard" and tag.params == (name,)
        )

    full = []
    if hoisted.gathers is not None:
        full = inline(hoisted.gathers.graph, list(map(of_param, hoisted.gathers.params)))
        for place in hoisted.gathers.in_flight:
            full[place] = graph.call_function(WAIT, (full[place],))
    values = inline(hoisted.body, [*inputs, *full])
    outputs, extra = values[: hoisted.outputs], values[hoisted.outputs :]
    if hoisted.reductions is not None:
        part = hoisted.reductions
        started = inline(part.start, extra[: part.inputs])
        grads = inline(part.end, [*started, *extra[part.inputs :]])
        for place, grad in zip(part.gradients, grads, strict=True):
            assert outputs[place] is None
            outputs[place] = grad
    graph.output(tuple(outputs))
    return fx.GraphModule(gm, graph)


def hoist(gm):
    return hoist_collectives(gm, returned_gradients(gm.graph))


WORLDS = {"world_sizes": (2, 3, 4), "replicas": (1, 2)}


@given(joint_recipes(max_params=3, **WORLDS), pipelines(lowered=True))
@settings(max_examples=drawn_examples(40), deadline=None)
@pytest.mark.slow(quick="the other tests of test_hoisting.py")
def test_the_parts_of_a_graph_compute_what_it_does(recipe, pipeline):
    _, graphs = recipe.run_pipeline(pipeline)
    parts = list(map(hoist, graphs))
    assume(any(parts))
    assert len({each.summary() for each in parts}) == 1
    again = list(map(rejoined, graphs, parts))
    assert_equal_bits(graphs, again, random_inputs(graphs), recipe.groups())


def lowered(*params, pipeline):
    return JointRecipe(params, 2).run_pipeline(pipeline)[1][0]


def test_gathers_go_before_the_body_and_reductions_after_it():
    gm = lowered(ParamSpec((4, 3)), ParamSpec((2, 3)), pipeline="zero2")
    hoisted = hoist(gm)
    left = [node for node in hoisted.body.graph.nodes if collective_of(node) or is_wait(node)]
    assert left == []
    before = {node.name for node in gm.graph.nodes if collective_of(node)}
    assert {*hoisted.gathers.collectives, *hoisted.reductions.collectives} == before
    assert len(hoisted.params()) == 4
    assert len(hoisted.extra_inputs) >= 1


def test_what_is_not_lowered_stays():
    assert hoist(lowered(ParamSpec((4, 3)), pipeline="")) is None
