import pytest
import torch

from tests.graphs import Param, joint, rewritten
from zpasses import OptionError
from zpasses.cost.memory.collective_moves import (
    equal_liveness,
    movable_collectives,
)
from zpasses.graph.queries import Editor
from zpasses.option_values import MemoryBudget, parse_budget
from zpasses.passes import GatherParams, ReduceGrads, Schedule
from zpasses.testing import fake_world

LOWER = (GatherParams(), ReduceGrads("reduce_scatter"))


def lowered(*params, world_size=3, rank=2, passes=LOWER):
    with fake_world(world_size, rank):
        return rewritten(joint(params, rank, world_size), *passes).graph


def names(nodes):
    return [node.target._opname for node in nodes]


# --- budgets --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("5%", MemoryBudget(rise=0.05)),
        ("0%", MemoryBudget()),
        ("2.5 %", MemoryBudget(rise=0.025)),
        ("300MiB", MemoryBudget(300 << 20)),
        ("1.5KiB", MemoryBudget(1536)),
        (" 7 B ", MemoryBudget(7)),
        ("2GiB", MemoryBudget(2 << 30)),
        ("+16MiB", MemoryBudget(rise_bytes=16 << 20)),
        ("25% up to 16MiB", MemoryBudget(rise=0.25, most_rise_bytes=16 << 20)),
        ("5% of 2KiB", MemoryBudget(rise=0.05, of_bytes=2048)),
        ("25% up to 16MiB of 1GiB", MemoryBudget(None, 0.25, 0, 16 << 20, 1 << 30)),
        ("+3B of 2KiB", MemoryBudget(rise_bytes=3, of_bytes=2048)),
    ],
)
def test_budget_is_a_share_or_bytes(text, budget):
    assert parse_budget(text, "here") == budget


@pytest.mark.parametrize(
    "text",
    ["", "5", "-5%", "++1B", "-1MiB", "5 percent", "300MB", "MiB", "1e3B", "none", "6B of 2B"],
)
def test_wrong_budget_says_where_and_what_is_expected(text):
    message = r"pass 'x': got .*; expected how far the peak may rise \('5%', '\+300MiB' or"
    with pytest.raises(OptionError, match=message):
        parse_budget(text, "pass 'x'")


def test_a_budget_counts_from_the_peak_of_a_graph_or_from_a_given_one():
    assert parse_budget("50%", "here").limit_bytes(1000) == 1500
    assert parse_budget("50% of 2000B", "here").limit_bytes(1000) == 3000
    assert parse_budget("50% up to 9B of 2000B", "here").limit_bytes(1000) == 2009
    assert parse_budget("+9B of 2000B", "here").limit_bytes(1000) == 2009


# --- what can move --------------------------------------------------------------------------------
def movable(graph, *, gathers):
    return [each for each in movable_collectives(graph) if each.is_gather == gathers]


def test_gathers_of_parameters_move_with_their_cast_and_padding():
    items = movable(lowered(Param((7, 2), param_dtype=torch.bfloat16), Param((6, 2))), gathers=True)
    assert [names(item.inputs) for item in items] == [["_to_copy", "constant_pad_nd"], []]
    assert [item.source.name for item in items] == ["constant_pad_nd_default", "primals_3"]
    assert [item.full_bytes for item in items] == [9 * 2 * 2, 6 * 2 * 4]
    assert [item.wait for item in items] == [next(iter(item.started.users)) for item in items]


def test_reductions_move_with_their_epilogue():
    items = movable(
        lowered(Param((7, 2), reduce_dtype=torch.float64), Param((6, 2))), gathers=False
    )
    assert [item.tag.params for item in items] == [("p1",), ("p0",)]
    assert [names(item.results) for item in items] == [[], ["slice", "_to_copy"]]
    assert [item.full_bytes for item in items] == [6 * 2 * 4, 9 * 2 * 8]


def test_a_gather_of_a_computed_value_cannot_move():
    graph = lowered(Param((6, 2)))
    (gather,) = movable(graph, gathers=True)
    shard = gather.source
    edit, add = Editor(graph, before=gather.started), torch.ops.aten.add.Tensor
    other = edit.call(add, shard, edit.call(add, shard, shard))
    gather.started.replace_input_with(shard, other)
    assert movable(graph, gathers=True) == []


def test_a_reduction_that_the_graph_reads_cannot_move():
    graph = lowered(Param((6, 2)))
    (reduction,) = movable(graph, gathers=False)
    output, shard = graph.output_node(), graph.find_nodes(op="placeholder")[0]
    mixed = Editor(graph, before=output).call(torch.ops.aten.add.Tensor, reduction.wait, shard)
    output.args = ([mixed, *output.args[0]],)
    assert movable(graph, gathers=False) == []


def test_untagged_collectives_cannot_move():
    graph = lowered(Param((6, 2)))
    for node in graph.nodes:
        node.meta.pop("zpasses", None)
        node.meta.pop("custom", None)
    assert movable_collectives(graph) == []


def test_a_launch_of_several_tensors_cannot_move_again():
    coalesced = Schedule("single", mode="coalesced", memory_budget="1GiB")
    graph = lowered(Param((7, 2)), Param((6, 2)), passes=(*LOWER, coalesced))
    assert movable_collectives(graph) == []


# --- memory ---------------------------------------------------------------------------------------
def test_ranks_whose_rows_differ_plan_with_the_same_bytes():
    """The ranks have a full, a partly filled and an empty shard.

    One parameter has a cast, whose input and output differ in size between ranks.
    """
    for form in ("all_reduce", "reduce_scatter"):
        cast = Param((4, 2), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        params = [cast, Param((4, 3))]
        found = []
        for rank in range(3):
            graph = lowered(*params, rank=rank, passes=(GatherParams(), ReduceGrads(form)))
            memory = equal_liveness(graph)
            moved = [each.started for each in movable_collectives(graph)]
            live = [memory.live_bytes[memory.nodes.index(each)] for each in moved]
            found.append((memory.peak_bytes, live))
        assert found[0] == found[1] == found[2], form
