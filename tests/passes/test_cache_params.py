import pytest
import torch
from torch import nn

from tests.graphs import Param, expect_listing, for_each_world_size, joint, rewritten
from zpasses import Level, Pipeline
from zpasses.graph.queries import collectives
from zpasses.graph.tags import tagged
from zpasses.passes import ZERO2, CacheParams, GatherParams, MergeReads, ReduceGrads
from zpasses.runtime.forward_variants import ForwardVariant, build_forward_variant, param_slots
from zpasses.testing import (
    assert_equal_bits,
    assert_step_equals_reference,
    capture_graphs,
    capture_ranks,
    fake_world,
    listing,
    random_inputs,
    simulate,
)

X = torch.zeros(2, 6)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 5, bias=False), nn.Linear(5, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.up.weight.requires_grad_(False)

    def forward(self, x):
        return self.down(self.up(x).relu()) * self.scale


def test_full_parameters_are_marked_where_they_are_read():
    captured = capture_graphs(
        nn.Linear(6, 4, bias=False),
        (X,),
        world_size=3,
        pipeline=Pipeline((GatherParams(), CacheParams())),
    )
    expect_listing(
        listing(captured.before.forward),
        """\
primals_1: f32[2, 6]                                                        # shard: weight
primals_2: f32[2, 6]
all_gather_into_tensor_default = all_gather_into_tensor(primals_1, 3, '0')  # f32[6, 6]; gather: weight
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)           # f32[6, 6]; gathered: weight
slice_tensor = slice(wait_tensor_default, 0, 0, 4)                          # f32[4, 6]; full: weight
t = t(slice_tensor)                                                         # f32[6, 4]
mm = mm(primals_2, t)                                                       # f32[2, 4]
return (mm, primals_2)
""",  # noqa: E501
    )
    expect_listing(
        listing(captured.after.forward),
        """\
primals_1: f32[2, 6]                                                        # shard: weight
primals_2: f32[2, 6]
all_gather_into_tensor_default = all_gather_into_tensor(primals_1, 3, '0')  # f32[6, 6]; gather: weight
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)           # f32[6, 6]; gathered: weight
slice_tensor = slice(wait_tensor_default, 0, 0, 4)                          # f32[4, 6]; full: weight; cached
t = t(slice_tensor)                                                         # f32[6, 4]
mm = mm(primals_2, t)                                                       # f32[2, 4]
return (mm, primals_2)
""",  # noqa: E501
    )


def test_every_parameter_of_a_forward_graph_has_a_slot():
    captured = capture_graphs(Mlp(), (X,), world_size=2, pipeline="zero2")
    assert {slot.param for slot in param_slots(captured.after.forward.graph)} == {
        "up.weight",
        "down.weight",
        "scale",
    }


def test_without_the_pass_there_is_no_slot():
    captured = capture_graphs(
        Mlp(), (X,), world_size=2, pipeline=Pipeline((GatherParams(), ReduceGrads()))
    )
    assert param_slots(captured.after.forward.graph) == []


def test_marking_adds_no_node_and_no_collective():
    captured = capture_graphs(Mlp(), (X,), world_size=2, pipeline="zero2")
    (record,) = (record for record in captured.records if record.name == "cache-params")
    assert record.changes == 3
    assert (record.nodes_before, record.collectives_before) == (
        record.nodes_after,
        record.collectives_after,
    )


def test_backward_does_not_gather():
    captured = capture_graphs(Mlp(), (X,), world_size=2, pipeline="zero2")
    assert not [
        each
        for _, each in collectives(captured.after.backward.graph)
        if each.op == "all_gather_into_tensor"
    ]


@for_each_world_size
def test_partitioned_step_equals_the_dialect_on_all_ranks(world_size):
    captures = capture_ranks(
        Mlp(),
        (X,),
        world_size=world_size,
        pipeline=Pipeline((MergeReads(), GatherParams(), ReduceGrads(), CacheParams())),
    )
    assert_step_equals_reference(captures)


@pytest.mark.parametrize("world_size", [1, 3])
def test_cached_variant_equals_the_fresh_one_and_does_not_communicate(world_size):
    captures = capture_ranks(Mlp(), (X,), world_size=world_size, pipeline="zero2")
    graphs = [each.after.forward for each in captures]
    everything = frozenset(range(len(param_slots(graphs[0].graph))))
    fresh = [build_forward_variant(graph, ForwardVariant(kept=everything))[0] for graph in graphs]
    cached = [build_forward_variant(graph, ForwardVariant(given=everything))[0] for graph in graphs]
    inputs = random_inputs(graphs)
    first = simulate(fresh, inputs)
    plain = simulate(graphs, inputs)
    kept = [run.outputs[-len(everything) :] for run in first]
    again = simulate(cached, [[*values, *full] for values, full in zip(inputs, kept, strict=True)])
    assert all(run.collectives == () for run in again)
    for ours, theirs, reference in zip(again, first, plain, strict=True):
        for got, once, wanted in zip(ours.outputs, theirs.outputs, reference.outputs, strict=False):
            assert got is wanted is None or (torch.equal(got, wanted) and torch.equal(once, wanted))


def test_inference_caches_parameters_too():
    captures = capture_ranks(Mlp(), (X,), world_size=2, pipeline="zero2", train=False)
    before, after = (
        [each.before.inference for each in captures],
        [each.after.inference for each in captures],
    )
    assert {slot.param for slot in param_slots(after[0].graph)} == {
        "up.weight",
        "down.weight",
        "scale",
    }
    assert_equal_bits(before, after, random_inputs(before))


def test_unlowered_graph_has_nothing_to_cache():
    with fake_world(2):
        gm = joint([Param((4, 2))], 0, 2)
        assert CacheParams().rewrite(gm.graph) == 0
    assert list(tagged(gm.graph, "full")) == []


def test_marking_twice_is_the_same_as_once():
    with fake_world(2):
        once = rewritten(joint([Param((4, 2))], 0, 2), GatherParams(), CacheParams())
        twice = rewritten(once, CacheParams())
    assert listing(once) == listing(twice)


def test_pass_belongs_to_the_forward_level():
    assert CacheParams() in ZERO2.at(Level.FORWARD)
    assert CacheParams() not in ZERO2.at(Level.BACKWARD)
