"""Variants of backward graphs: what they leave, take in and reduce, on simulated ranks."""

import pytest
import torch
from torch import nn

from tests.zpasses.models import Odd, Tied, with_integer_weights
from zpasses.deferral import BackwardVariant, cut_backward, grad_slots
from zpasses.graph import collectives
from zpasses.testing import capture_ranks, listing, random_inputs, simulate

EVERY = {
    "zero3": "zero3",
    "reference": "defer-reduction",
    "reduce_scatter": "gather-params,reduce-grads{form=reduce_scatter},defer-reduction",
}


def backwards(model, inputs, world_size=2, pipeline="zero3", **shard):
    ranks = capture_ranks(model, inputs, world_size=world_size, pipeline=pipeline, shard=shard or None)
    return [each.after.backward for each in ranks]


def variants(graphs, **choices):
    return [cut_backward(graph, BackwardVariant(**choices))[0] for graph in graphs]


def slots_of(graphs):
    return grad_slots(graphs[0].graph)


def run(graphs, inputs, pending=None):
    """(the graph's own outputs, extra outputs, collectives) of each rank; inputs are not written to, pending gradients are."""
    own = len(inputs[0])
    given = [[*values, *(extra or ())] for values, extra in zip(inputs, pending or [None] * len(inputs), strict=True)]
    assert all(len([n for n in g.graph.nodes if n.op == "placeholder"]) == len(v) for g, v in zip(graphs, given, strict=True)), own
    return simulate(graphs, given)


def in_a_window(graphs, inputs, count, dtype=None):
    """Outputs of the last of `count` backwards that were deferred, and how many collectives each ran."""
    slots = slots_of(graphs)
    everything = frozenset(range(len(slots)))
    own = len(graphs[0].graph.output_node().args[0])
    first = run(variants(graphs, deferred=everything, accum_dtype=dtype), inputs)
    pending = [list(each.outputs[own:]) for each in first]
    assert all(len(each) == len(slots) for each in pending)
    ran = [len(first[0].collectives)]
    for _ in range(count - 2):
        following = run(variants(graphs, given=everything, deferred=everything, accum_dtype=dtype), inputs, pending)
        assert all(len(each.outputs) == own for each in following)
        ran.append(len(following[0].collectives))
    last = run(variants(graphs, given=everything, accum_dtype=dtype), inputs, pending)
    return [each.outputs for each in last], [*ran, len(last[0].collectives)], [each.outputs[:own] for each in first]


def is_gradient(graph, position):
    return any(node is graph.output_node().args[0][position] for node in graph.nodes)


@pytest.mark.parametrize("pipeline", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_window_gives_the_sum_of_its_backwards(pipeline, world_size):
    graphs = backwards(Odd(), (torch.zeros(2, 7),), world_size, pipeline)
    inputs = random_inputs(graphs)
    plain = run(graphs, inputs)
    outputs, ran, first = in_a_window(graphs, inputs, 3)
    regathers = sum("all_gather" in each.op or each.op == "unshard" for each in plain[0].collectives)
    assert ran == [regathers, regathers, len(plain[0].collectives)]
    for ours, theirs, deferred in zip(outputs, plain, first, strict=True):
        for got, once, none in zip(ours, theirs.outputs, deferred, strict=True):
            assert (got is None) == (once is None)
            assert none is None or torch.equal(none, once)
            assert got is None or torch.equal(got, once * 3) or torch.equal(got, once)


def test_listing():
    (graph,) = backwards(nn.Linear(3, 2, bias=False), (torch.zeros(2, 3),), 1)
    for choice in ({}, {"given": {0}}, {"deferred": {0}}, {"given": {0}, "deferred": {0}}, {"dropped": {0}}):
        print(choice)
        print(listing(variants([graph], **{key: frozenset(value) for key, value in choice.items()})[0]))
    _ = (Tied, with_integer_weights, collectives)
