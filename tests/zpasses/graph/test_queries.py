import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graphs import Param, joint, rewritten
from zpasses.graph.queries import (
    Collective,
    Editor,
    calls,
    collective_of,
    collectives,
    erase_dead,
    is_dialect,
    is_wait,
    nbytes,
    propagate,
    replace_node,
    value_of,
)
from zpasses.graph.tags import Tag, add_tag, tag_of
from zpasses.passes import GatherParams, ReduceGrads
from zpasses.testing import capture_graphs, fake_world

aten, F = torch.ops.aten, torch.ops._c10d_functional


@pytest.fixture
def gm():
    with fake_world(3):
        yield joint([Param((7, 2), reduce_dtype=torch.float64), Param(())], 0, 3)


def lowered(gm):
    return rewritten(gm, GatherParams(), ReduceGrads())


def test_calls_are_found_in_graph_order(gm):
    names = [node.name for node in calls(gm.graph, aten.mul.Tensor)]
    assert names == ["mul", "mul_1", "mul_2", "mul_3"]
    assert calls(gm.graph, aten.mm.default) == []


def test_collectives_are_described(gm):
    found = [each for _, each in collectives(lowered(gm).graph)]
    assert found[0] == Collective("all_gather_into_tensor", "0", ((3, 2),), ("float32",), None, 24)
    assert Collective("reduce_scatter_tensor", "0", ((9, 2),), ("float64",), "avg", 144) in found
    assert Collective("all_reduce", "0", ((),), ("float32",), "avg", 4) in found


def test_unshard_has_the_same_description_on_ranks_with_different_rows():
    found = []
    for rank in range(3):
        with fake_world(3, rank):
            found.append([each for _, each in collectives(joint([Param((7, 2))], rank, 3).graph)])
    assert found[0] == found[1] == found[2]
    assert found[0][0] == Collective("unshard", "0", ((7, 2),), ("float32",), None, 56)


def test_dynamic_sizes_are_described_by_their_expression_and_counted_by_their_hint():
    def fn(x):
        return F.wait_tensor(F.all_reduce(x, "sum", "0"))

    captured = capture_graphs(fn, (torch.zeros(5, 2),), world_size=2, dynamic=True, train=False)
    ((_, each),) = collectives(captured.after.inference.graph)
    ((rows, columns),) = each.shapes
    assert isinstance(rows, str)
    assert columns in (2, rows) or isinstance(columns, str)
    assert each.nbytes == 40


def test_waits_methods_and_computation_are_not_collectives(gm):
    graph = lowered(gm).graph
    waits = [node for node in graph.nodes if is_wait(node)]
    assert len(waits) == 3
    x = graph.find_nodes(op="placeholder")[0]
    with graph.inserting_before(graph.output_node()):
        others = [x, graph.call_method("relu", (x,)), graph.output_node()]
    for node in [*waits, *calls(graph, aten.mul.Tensor), *others]:
        assert collective_of(node) is None


def test_dialect_ops_are_recognised(gm):
    assert sum(map(is_dialect, gm.graph.nodes)) == 4
    assert not any(map(is_dialect, lowered(gm).graph.nodes))


def test_bytes_are_counted_over_lists_and_nothing_else():
    assert nbytes([torch.zeros(3), (torch.zeros(2, dtype=torch.bfloat16), None)]) == 16
    assert nbytes(torch.zeros(3, 1).expand(3, 9)) == 108
    assert nbytes(torch.zeros(3, 3).to_sparse()) == 36
    dynamic = make_fx(torch.relu, tracing_mode="symbolic")(torch.zeros(5, 7))
    value = next(iter(dynamic.graph.nodes)).meta["val"]
    assert isinstance(value.shape[0], torch.SymInt)
    assert nbytes(value) == 140
    assert not value.fake_mode.shape_env.guards
    assert nbytes(None) == nbytes(3) == nbytes("x") == 0


def test_editor_sets_values_and_provenance_but_no_tag(gm):
    mul, *_, last = calls(gm.graph, aten.mul.Tensor)
    add_tag(mul, Tag("full", ("p0",)))
    mul.meta["stack_trace"], last.meta["stack_trace"] = "here", "there"
    node = Editor(gm.graph, before=mul).call(aten.add.Tensor, mul.args[0], 1)
    assert (tuple(value_of(node).shape), node.meta["stack_trace"]) == ((7, 2), "here")
    assert (tag_of(node), tag_of(mul)) == (None, Tag("full", ("p0",)))
    assert node.next is mul
    like = Editor(gm.graph, before=last, like=mul).call(aten.neg.default, last.args[0])
    assert like.meta["stack_trace"] == "here"


def test_call_without_tensor_inputs_gets_a_fake_value(gm):
    node = Editor(gm.graph, before=gm.graph.output_node()).call(
        aten.empty.memory_format, [2, 3], dtype=torch.float32, device=torch.device("cpu")
    )
    assert isinstance(value_of(node), torch._subclasses.FakeTensor)


def test_propagation_recomputes_a_value(gm):
    mul = calls(gm.graph, aten.mul.Tensor)[0]
    mul.meta["val"] = None
    assert tuple(propagate(mul).shape) == (7, 2)


def test_replaced_node_is_erased_and_its_users_are_moved(gm):
    mul = calls(gm.graph, aten.mul.Tensor)[0]
    users = set(mul.users)
    new = Editor(gm.graph, before=mul).call(aten.neg.default, mul.args[0])
    replace_node(mul, new)
    assert mul not in gm.graph.nodes
    assert set(new.users) == users


def test_dead_collectives_are_erased_with_nodes_that_only_they_used(gm):
    graph = lowered(gm).graph
    wait = next(node for node in graph.nodes if is_wait(node))
    full = next(iter(wait.users))
    inputs = graph.find_nodes(op="placeholder")
    full.replace_all_uses_with(inputs[1])
    assert erase_dead(graph, [full]) == 3  # slice, wait, gather
    graph.lint()
    assert graph.find_nodes(op="placeholder") == inputs


def test_used_nodes_are_not_erased(gm):
    before = len(gm.graph.nodes)
    assert erase_dead(gm.graph, calls(gm.graph, aten.mul.Tensor)[:1]) == 0
    assert len(gm.graph.nodes) == before
