"""Tests of the checks that run after every pass."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.graphs import Param, joint
from zpasses import Facts, Level, Pass, PassError
from zpasses.graph.queries import Editor, append_placeholder, calls, collectives
from zpasses.graph.tags import Tag, add_tag, tagged
from zpasses.graph.verifier import PreviousGraph, check, values
from zpasses.graph.verifier.versions import CurrentGraph
from zpasses.passes import ZERO3, GatherParams, ReduceGrads
from zpasses.testing import capture_graphs, copy_graph, fake_world

aten, F = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class Do(Pass):
    """Runs a function on the graph."""

    name: ClassVar[str] = "do"
    level: ClassVar[Level] = Level.JOINT

    what: Any = field(default=None)

    def rewrite(self, graph):
        self.what(graph)
        return 1


def rewrite(what, lowered=False):
    with fake_world(2):
        gm = joint([Param((4, 2))], 0, 2)
        if lowered:
            GatherParams()(gm.graph)
        Do(what)(gm.graph)
    return gm


def first(graph, target):
    return calls(graph, target)[0]


def test_honest_rewrite_passes():
    def double(graph):
        mul = first(graph, aten.mul.Tensor)
        doubled = Editor(graph, before=mul).call(aten.mul.Tensor, mul.args[0], 2)
        mul.args = (doubled, mul.args[1])

    assert len(calls(rewrite(double).graph, aten.mul.Tensor)) == 3


def test_use_before_definition_is_malformed():
    def swap(graph):
        mul = first(graph, aten.mul.Tensor)
        first(graph, torch.ops.zpasses.unshard.default).prepend(mul)

    with pytest.raises(
        PassError, match=r"pass 'do' left a malformed graph: .*(before|topological)"
    ):
        rewrite(swap)


def test_value_of_the_wrong_shape_is_found():
    def lie(graph):
        mul = first(graph, aten.mul.Tensor)
        mul.meta["val"] = mul.meta["val"].new_empty(3, 5)

    with pytest.raises(
        PassError,
        match=r"node %mul .* computes float32\[4, 2\] on cpu, but meta\['val'\] says float32\[3, 5\] on cpu",  # noqa: E501
    ):
        rewrite(lie)


def test_value_of_the_wrong_dtype_is_found():
    def lie(graph):
        mul = first(graph, aten.mul.Tensor)
        mul.meta["val"] = mul.meta["val"].to(torch.bfloat16)

    with pytest.raises(
        PassError, match=r"computes float32\[4, 2\] on cpu, but meta\['val'\] says bfloat16"
    ):
        rewrite(lie)


def test_changed_arguments_are_propagated_again():
    def transpose(graph):
        mul = first(graph, aten.mul.Tensor)
        flat = Editor(graph, before=mul).call(aten.slice.Tensor, mul.args[0], 0, 0, 1)
        mul.args = (flat, flat)

    with pytest.raises(PassError, match=r"computes float32\[1, 2\]"):
        rewrite(transpose)


def test_node_that_does_not_run_on_its_inputs_is_found():
    def break_shapes(graph):
        mul = first(graph, aten.mul.Tensor)
        narrow = Editor(graph, before=mul).call(aten.slice.Tensor, mul.args[0], 0, 0, 3)
        mul.args = (narrow, mul.args[1])

    with pytest.raises(PassError, match=r"%mul .* does not run on its inputs"):
        rewrite(break_shapes)


def test_node_without_a_value_is_found():
    def forget(graph):
        mul = first(graph, aten.mul.Tensor)
        with graph.inserting_before(mul):
            graph.call_function(aten.mul.Tensor, (mul.args[0], 2))

    with pytest.raises(
        PassError,
        match=r"made node .* without meta\['val'\]; build nodes with zpasses.graph.queries.Editor",
    ):
        rewrite(forget)


def test_missing_wait_is_found():
    def unwait(graph):
        wait = first(graph, F.wait_tensor.default)
        wait.replace_all_uses_with(wait.args[0])
        graph.erase_node(wait)

    with pytest.raises(
        PassError,
        match=r"collective %all_gather_into_tensor_default .* must be read by exactly one wait_tensor, but is read by mul",  # noqa: E501
    ):
        rewrite(unwait, lowered=True)


def test_collective_that_nobody_reads_is_found():
    def lose(graph):
        wait = first(graph, F.wait_tensor.default)
        (shard,) = (node for node, _ in tagged(graph, "shard"))
        wait.replace_all_uses_with(
            Editor(graph, before=wait).call(aten.cat.default, [shard, shard])
        )
        graph.erase_node(wait)

    with pytest.raises(PassError, match=r"is read by nobody"):
        rewrite(lose, lowered=True)


def test_second_reader_of_a_started_collective_is_found():
    def peek(graph):
        wait = first(graph, F.wait_tensor.default)
        mul = first(graph, aten.mul.Tensor)
        peeked = Editor(graph, before=mul).call(aten.mul.Tensor, wait.args[0], 1)
        mul.args = (peeked, mul.args[1])

    with pytest.raises(
        PassError,
        match=r"must be read by exactly one wait_tensor, but is read by wait_tensor_default, mul_tensor",  # noqa: E501
    ):
        rewrite(peek, lowered=True)


def test_untagged_collective_is_found():
    def insert(graph):
        mul = first(graph, aten.mul.Tensor)
        edit = Editor(graph, before=mul)
        started = edit.call(F.all_reduce.default, mul.args[0], "sum", "0")
        mul.args = (edit.call(F.wait_tensor.default, started), mul.args[1])

    with pytest.raises(
        PassError, match=r"%all_reduce_default .* without a tag; use zpasses.graph.tags.add_tag"
    ):
        rewrite(insert)


def test_untagged_wait_is_found():
    def insert(graph):
        mul = first(graph, aten.mul.Tensor)
        edit = Editor(graph, before=mul)
        started = edit.call(F.all_reduce.default, mul.args[0], "sum", "0")
        add_tag(started, Tag("reduce", ("p0",)))
        mul.args = (edit.call(F.wait_tensor.default, started), mul.args[1])

    with pytest.raises(PassError, match=r"%wait_tensor_default .* without a tag"):
        rewrite(insert)


def test_error_names_the_pass_that_did_it_and_not_an_earlier_one():
    def forget(graph):
        graph.call_function(aten.relu.default, (next(iter(graph.nodes)),))

    with pytest.raises(PassError, match=r"^pass 'do'"):
        rewrite(forget, lowered=True)


def test_pass_that_says_it_changed_nothing_is_not_checked_again():
    """Checks cost time only for changes. The next check, or the compiler, finds a pass that
    misreports.
    """
    with fake_world(2):
        gm = joint([Param((4, 2))], 0, 2)
        before = PreviousGraph(gm.graph)
        assert before.changed(gm.graph) == []
        check(gm.graph, before, "nothing")


def test_only_what_changed_is_looked_at():
    with fake_world(2):
        gm = joint([Param((4, 2)), Param((6, 2))], 0, 2)
        before = PreviousGraph(gm.graph)
        mul = first(gm.graph, aten.mul.Tensor)
        added = Editor(gm.graph, before=mul).call(aten.neg.default, mul.args[1])
        changed = before.changed(gm.graph)
    assert added in changed
    assert before.is_new(added)
    assert set(changed) == {added, mul.args[1]}


def test_graphs_with_dynamic_sizes_pass():
    captured = capture_graphs(
        torch.nn.Linear(6, 4), (torch.zeros(2, 6),), world_size=2, pipeline="zero3", dynamic=True
    )
    assert {record.name for record in captured.records} == {each.name for each in ZERO3}


# --- declared changes -----------------------------------------------------------------------------
@dataclass(frozen=True)
class DoToInputs(Do):
    facts: ClassVar[Facts] = Facts(changes_inputs=True)


@dataclass(frozen=True)
class DoToOutputs(Do):
    facts: ClassVar[Facts] = Facts(changes_outputs=True)


def _add_input(graph):
    append_placeholder(graph, "extra").meta["val"] = next(iter(graph.nodes)).meta["val"]


def _write_to_input(graph):
    mul = first(graph, aten.mul.Tensor)
    Editor(graph, before=mul).call(aten.mul_.Tensor, mul.args[1], 2)


def _drop_gradient(graph):
    output = graph.output_node()
    output.args = (output.args[0][:-1],)


@pytest.mark.parametrize(
    ("declares", "change"),
    [(DoToInputs, _add_input), (DoToInputs, _write_to_input), (DoToOutputs, _drop_gradient)],
)
def test_pass_that_declares_a_change_of_the_calling_convention_may_make_it(declares, change):
    with fake_world(2):
        gm = joint([Param((4, 2))], 0, 2)
        with pytest.raises(PassError, match="declare"):
            Do(change)(copy_graph(gm).graph)
        declares(change)(gm.graph)


# --- cost -----------------------------------------------------------------------------------------
def _looked_at(monkeypatch, params, edit):
    """How many nodes are propagated, and followed backwards, after one change."""
    counts = dict.fromkeys(("propagated", "followed"), 0)
    propagate, inputs = values.propagate, CurrentGraph.inputs

    def count(what, function):
        def counted(*args):
            counts[what] += 1
            return function(*args)

        return counted

    with fake_world(2):
        gm = joint([Param((4, 2))] * params, 0, 2)
        GatherParams()(gm.graph)
        ReduceGrads("reduce_scatter")(gm.graph)
        before = PreviousGraph(gm.graph)
        edit(gm.graph)
        monkeypatch.setattr(values, "propagate", count("propagated", propagate))
        monkeypatch.setattr(CurrentGraph, "inputs", count("followed", inputs))
        check(gm.graph, before, "edit")
        monkeypatch.undo()
    return counts


def _negate_twice(graph):
    mul = first(graph, aten.mul.Tensor)
    edit = Editor(graph, before=mul)
    negative = edit.call(aten.neg.default, mul.args[1])
    mul.args = (mul.args[0], edit.call(aten.neg.default, negative))


def _copy_shard(graph):
    started = first(graph, F.all_gather_into_tensor.default)
    edit = Editor(graph, before=started)
    started.args = (edit.call(aten.clone.default, started.args[0]), *started.args[1:])


@pytest.mark.parametrize("edit", [_negate_twice, _copy_shard])
def test_cost_of_a_check_grows_with_the_change_and_not_with_the_graph(monkeypatch, edit):
    small, large = (_looked_at(monkeypatch, params, edit) for params in (4, 40))
    assert small == large
    assert 0 < small["propagated"] <= 3
    assert small["followed"] <= 20


# --- graphs of others -----------------------------------------------------------------------------
def test_tensor_parallel_graphs_raise_no_false_alarm():
    """Its collectives have no tags, and its in-place and repeated waits are its own matter."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    def parallel(model, mesh):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)

    captured = capture_graphs(
        Block(),
        (torch.ones(2, 4),),
        world_size=2,
        shard=parallel,
        pipeline="reshard-after-forward,bucket,overlap",
    )
    assert [each.op for _, each in collectives(captured.after.forward.graph)] == ["all_reduce"]
