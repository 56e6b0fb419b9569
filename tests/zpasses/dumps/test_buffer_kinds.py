"""What the buffers of a graph hold."""

import operator

import torch
from torch import fx

from zpasses.dumps.buffer_kinds import _gradients
from zpasses.graph.tags import Tag, add_tag


def test_each_gradient_of_a_coalesced_reduction_has_its_parameter():
    graph = fx.Graph()
    x = graph.placeholder("x")
    gradients = [graph.call_function(torch.ops.aten.mm.default, (x, x)) for _ in range(2)]
    reduction = graph.call_function(
        torch.ops._c10d_functional.reduce_scatter_tensor_coalesced.default,
        (gradients, "sum", 2, "0"),
    )
    reduction.meta["val"] = [torch.ones(1, 2), torch.ones(1, 2)]
    add_tag(reduction, Tag("reduce", ("up", "down"), origin="test"))
    for place, name in enumerate(("up", "down")):
        part = graph.call_function(operator.getitem, (reduction, place))
        add_tag(part, Tag("reduce", (name,), origin="test"))
    found = _gradients(list(graph.nodes))
    assert [found[each] for each in gradients] == [("up",), ("down",)]
