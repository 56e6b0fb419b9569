"""Tests of the checks that run after every pass. test_broken_passes.py lists what they find."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.graphs import Param, joint
from tests.zpasses.graph.rewrites import Do
from zpasses import Facts, PassError
from zpasses.graph.queries import Editor, append_placeholder, calls, collectives
from zpasses.graph.verifier import PreviousGraph, check, values
from zpasses.graph.verifier.versions import CurrentGraph
from zpasses.passes import ZERO3, GatherParams, ReduceGrads
from zpasses.testing import capture_graphs, copy_graph, fake_world

aten, F = torch.ops.aten, torch.ops._c10d_functional


def first(graph, target):
    return calls(graph, target)[0]


def test_only_what_changed_is_looked_at():
    with fake_world(2):
        gm = joint([Param((4, 2)), Param((6, 2))], 0, 2)
        before = PreviousGraph(gm.graph)
        assert before.changed(gm.graph) == []
        check(gm.graph, before, "nothing")
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
        pipeline="reshard-after-forward,schedule",
    )
    assert [each.op for _, each in collectives(captured.after.forward.graph)] == ["all_reduce"]
