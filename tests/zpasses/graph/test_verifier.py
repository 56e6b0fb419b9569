"""Tests of the checks that run after every pass."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from tests.graphs import Param, joint
from zpasses import Level, Pass, PassError
from zpasses.graph.nodes import Editor, calls
from zpasses.graph.tags import Tag, add_tag, tagged
from zpasses.graph.verifier import Snapshot, check
from zpasses.passes import ZERO3, GatherParams
from zpasses.testing import capture_graphs, fake_world

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
        match=r"made node .* without meta\['val'\]; build nodes with zpasses.graph.nodes.Editor",
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
        before = Snapshot(gm.graph)
        assert before.changed(gm.graph) == []
        check(gm.graph, before, "nothing")


def test_only_what_changed_is_looked_at():
    with fake_world(2):
        gm = joint([Param((4, 2)), Param((6, 2))], 0, 2)
        before = Snapshot(gm.graph)
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
