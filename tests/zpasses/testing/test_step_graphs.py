import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests.graphs import Param, joint
from zpasses.graph.dialect import REDUCE_GRAD, UNSHARD
from zpasses.graph.queries import calls, collectives
from zpasses.graph.tags import tagged
from zpasses.passes import GatherParams
from zpasses.testing import (
    capture_graphs,
    capture_ranks,
    copy_graph,
    fake_world,
    listing,
    simulate,
    trace_joint,
)

X = torch.zeros(2, 6)


def test_reference_is_captured_unlowered_and_the_model_is_unchanged():
    model = nn.Linear(6, 4)
    captured = capture_graphs(model, (X,), world_size=3)
    assert type(model) is nn.Linear
    assert model.weight.grad is None
    assert not dist.is_initialized()
    for graphs in (captured.before, captured.after):
        for op in (UNSHARD, REDUCE_GRAD):
            assert len(calls(graphs.joint.graph, op)) == 2
        assert len(calls(graphs.forward.graph, UNSHARD)) == 2
        assert len(calls(graphs.backward.graph, REDUCE_GRAD)) == 2
        assert graphs.inference is None
    assert captured.records == ()


def test_graphs_before_and_after_the_passes_differ_by_the_passes():
    captured = capture_graphs(nn.Linear(6, 4), (X,), world_size=3, pipeline="gather-params")
    assert len(calls(captured.before.joint.graph, UNSHARD)) == 2
    assert calls(captured.after.joint.graph, UNSHARD) == []
    assert [record.name for record in captured.records] == ["gather-params"]
    with fake_world(3):
        rewritten = copy_graph(captured.before.joint)
        GatherParams()(rewritten.graph)
    assert listing(rewritten) == listing(captured.after.joint)


def test_call_without_gradients_has_one_graph():
    options = {"world_size": 3, "pipeline": "gather-params", "train": False}
    captured = capture_graphs(nn.Linear(6, 4), (X,), **options)
    assert captured.before.joint is captured.after.forward is captured.after.backward is None
    assert calls(captured.before.inference.graph, UNSHARD)
    assert not calls(captured.after.inference.graph, UNSHARD)


def test_each_rank_holds_its_rows():
    captures = capture_ranks(nn.Linear(6, 4, bias=False), (X,), world_size=3)
    shards = [next(tagged(each.before.joint.graph, "shard"))[0] for each in captures]
    assert [each.rank for each in captures] == [0, 1, 2]
    assert [tuple(shard.meta["val"].shape) for shard in shards] == [(2, 6), (2, 6), (0, 6)]


def test_sharding_options_are_passed_on():
    shard, x = {"param_dtype": torch.bfloat16}, X.bfloat16()
    captured = capture_graphs(nn.Linear(6, 4), (x,), world_size=2, shard=shard)
    (first, _) = calls(captured.before.joint.graph, UNSHARD)
    assert first.meta["val"].dtype == torch.bfloat16


def test_sharding_by_a_function_may_use_several_groups_and_simulates():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))

    def shard(model, mesh):
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        zpasses.shard(model[0], mesh=both["shard"])
        zpasses.shard(model[1], mesh=mesh)

    captures = capture_ranks(model, (X,), world_size=4, shard=shard)
    graphs = [captured.before.joint for captured in captures]
    groups = {name: ranks for captured in captures for name, ranks in captured.groups.items()}
    used = {each.group for gm in graphs for _, each in collectives(gm.graph)}
    assert {groups[name] for name in used} == {(0, 1), (2, 3), (0, 1, 2, 3)}
    inputs = [
        [torch.ones(node.meta["val"].shape) for node in gm.graph.find_nodes(op="placeholder")]
        for gm in graphs
    ]
    for run in simulate(graphs, inputs, groups):
        assert run.outputs[0].tolist() == [[29.0] * 6] * 2


def test_function_is_captured_as_it_is():
    captured = capture_graphs(lambda x: (x * 2).relu(), (X.clone().requires_grad_(),), world_size=2)
    assert list(collectives(captured.after.joint.graph)) == []


def test_dynamic_batch_is_captured_with_symbolic_sizes():
    captured = capture_graphs(nn.Linear(6, 4), (X,), world_size=2, dynamic=True)
    sizes = {
        str(size)
        for node in captured.before.joint.graph.nodes
        for size in getattr(node.meta.get("val"), "shape", ())
    }
    assert any(size.startswith("s") for size in sizes), sizes


def test_capture_inside_a_world_is_of_that_rank():
    with fake_world(3, 2):
        captured = capture_graphs(nn.Linear(6, 4), (X,))
        assert dist.is_initialized()
    assert (captured.rank, captured.world_size, captured.groups) == (2, 3, {"0": (0, 1, 2)})


def test_capture_needs_one_world():
    message = r"inside fake_world, or outside with world_size"
    with pytest.raises(ValueError, match=message):
        capture_graphs(nn.Linear(6, 4), (X,))
    with fake_world(3), pytest.raises(ValueError, match=message):
        capture_graphs(nn.Linear(6, 4), (X,), world_size=3)


def test_traced_graph_is_the_one_that_the_backend_captures():
    captured = capture_graphs(nn.Linear(6, 4, bias=False), (X,), world_size=2)

    def fn(shard, x):
        return torch.nn.functional.linear(x, torch.ops.zpasses.unshard(shard, 4, None, None, "0"))

    with fake_world(2):
        traced = trace_joint(fn, [torch.zeros(2, 6, requires_grad=True), X], {0: "weight"})
    assert listing(traced) == listing(captured.before.joint)


def test_trace_propagates_errors():
    with pytest.raises(ValueError, match=r"no output depends on an input that requires gradients"):
        trace_joint(lambda x: x * 2, [torch.ones(3)])
    with pytest.raises(KeyError, match=r"mine"):
        trace_joint(lambda x: {}["mine"], [torch.ones(3, requires_grad=True)])


def test_rewriting_a_copy_leaves_the_original_unchanged():
    with fake_world(2):
        gm = joint([Param((4, 2))], 0, 2)
        before = listing(gm)
        copied = copy_graph(gm)
        assert listing(copied) == before
        GatherParams()(copied.graph)
    assert listing(gm) == before
    assert listing(copied) != before
