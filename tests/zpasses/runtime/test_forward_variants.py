import itertools

import pytest
import torch
from torch import nn

from zpasses.graph.cached_params import ParamSlot, param_slots
from zpasses.graph.queries import collectives
from zpasses.graph.tags import tagged
from zpasses.runtime.forward_variants import ForwardVariant, build_forward_variant
from zpasses.testing import (
    assert_equal_bits,
    capture_graphs,
    capture_ranks,
    copy_graph,
    listing,
    random_inputs,
    simulate,
)

PIPELINE = "merge-reads,gather-params,reduce-grads,cache-params"
"""Stage 2 without buckets, so that parameters are gathered one by one."""


class Model(nn.Module):
    """One parameter read in two dtypes, one of uneven rows, a scalar."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.scale = (
            nn.Linear(6, 5, bias=False),
            nn.Linear(5, 6, bias=False),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x):
        return self.down(self.up(x)) * self.scale


@pytest.fixture(scope="module")
def graphs():
    """Forward graphs of three ranks."""
    return [
        each.after.forward
        for each in capture_ranks(Model(), (torch.zeros(2, 6),), world_size=3, pipeline=PIPELINE)
    ]


def gathered(gm):
    return [tag.params[0] for _, tag in tagged(gm.graph, "gather")]


def variants(graphs, **slots):
    return [build_forward_variant(graph, ForwardVariant(**slots))[0] for graph in graphs]


def test_slots_name_parameters_and_dtypes_in_graph_order_on_every_rank(graphs):
    expected = [ParamSlot(each, torch.float32) for each in ("up.weight", "down.weight", "scale")]
    assert [param_slots(each.graph) for each in graphs] == [expected] * 3


def test_plain_variant_is_the_graph_itself_which_other_variants_leave_alone(graphs):
    before = listing(graphs[0])
    plain, extra = build_forward_variant(graphs[0], ForwardVariant())
    assert (listing(plain), extra) == (before, [])
    build_forward_variant(graphs[0], ForwardVariant(given=frozenset({0, 1, 2})))
    assert listing(graphs[0]) == before


@pytest.mark.parametrize(
    ("given", "shapes", "left"),
    [
        ([1], [(6, 5)], ["up.weight"]),
        ([2, 0, 1], [(6, 6), (6, 5), ()], []),  # in the order of slots; 5 rows and padding
    ],
)
def test_given_slots_are_inputs_and_are_not_gathered(graphs, given, shapes, left):
    variant, extra = build_forward_variant(graphs[0], ForwardVariant(given=frozenset(given)))
    placeholders = [node.name for node in variant.graph.find_nodes(op="placeholder")]
    assert placeholders[-len(given) :] == [f"kept_{number}" for number in sorted(given)]
    assert [tuple(value.shape) for value in extra] == shapes
    assert gathered(variant) == left


@pytest.mark.parametrize("pipeline", ["zero2", "gather-params,reduce-grads,cache-params"])
def test_given_padded_parameters_are_not_gathered_whatever_backward_saves(pipeline):
    """For some of these layers, the partitioner saves the padded form, and for others its rows."""
    widths = [1, 8, 1, 65, 8, 1]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    forward = capture_graphs(
        model, (torch.ones(4, 1),), world_size=3, pipeline=pipeline
    ).after.forward
    slots = range(len(param_slots(forward.graph)))
    assert len(slots) == 10
    variant, _ = build_forward_variant(forward, ForwardVariant(given=frozenset(slots)))
    assert list(collectives(variant.graph)) == []


def test_kept_slot_is_an_output_after_the_graph_s_own(graphs):
    variant, extra = build_forward_variant(graphs[0], ForwardVariant(kept=frozenset({1})))
    returned = variant.graph.output_node().args[0]
    assert extra == []
    assert len(returned) == len(graphs[0].graph.output_node().args[0]) + 1
    assert tuple(returned[-1].meta["val"].shape) == (6, 5)


@pytest.mark.parametrize("given", [{0}, {2}, {0, 1, 2}])
def test_variant_that_is_given_what_another_kept_equals_the_graph(graphs, given):
    inputs = random_inputs(graphs)
    kept = [
        run.outputs[-len(given) :]
        for run in simulate(variants(graphs, kept=frozenset(given)), inputs)
    ]
    expected = simulate(graphs, inputs)
    actual = simulate(
        variants(graphs, given=frozenset(given)),
        [[*values, *full] for values, full in zip(inputs, kept, strict=True)],
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert all(map(torch.equal, ours.outputs, theirs.outputs))
        assert len(ours.collectives) < len(theirs.collectives) or given == {2}


def test_keeping_changes_nothing_else(graphs):
    kept = variants(graphs, kept=frozenset({0, 1, 2}))
    for gm in kept:
        output = gm.graph.output_node()
        output.args = (output.args[0][:-3],)
        gm.recompile()
    assert_equal_bits(graphs, kept, random_inputs(graphs))


def test_read_in_two_dtypes_has_one_slot_as_there_is_room_for_one_copy():
    model, x = nn.Sequential(nn.Linear(6, 6, bias=False)), torch.zeros(2, 6)
    (capture,) = capture_ranks(model, (x,), world_size=1, pipeline=PIPELINE)
    graph = copy_graph(capture.after.forward).graph
    ((full, _),) = tagged(graph, "full")
    with graph.inserting_after(full):
        second = graph.call_function(
            torch.ops.aten._to_copy.default, (full,), {"dtype": torch.bfloat16}
        )
    second.meta = {**full.meta, "val": full.meta["val"].to(torch.bfloat16)}
    assert param_slots(graph) == [ParamSlot("0.weight", torch.float32)]
