"""What the partitioner leaves to forward and backward."""

import torch
from torch import fx

from zpasses import compat

aten = torch.ops.aten


def _module(graph):
    return fx.GraphModule({}, graph)


def _halves(views, *, also_input=False, change=False):
    """A forward that saves views of its input, and a backward that multiplies by them.

    Args:
        views: how many.
        also_input: whether it saves the input, too.
        change: whether it writes to the input.
    """
    forward, backward = fx.Graph(), fx.Graph()
    x, buffer = forward.placeholder("x"), forward.placeholder("buffer")
    saved = [buffer] if also_input else []
    value = buffer
    for _ in range(views):
        value = forward.call_function(aten.t.default, (value,))
    out = forward.call_function(aten.mm.default, (x, value))
    if change:
        forward.call_function(aten.copy_.default, (buffer, out))
    forward.output((out, *saved, value))
    places = [backward.placeholder(each.name) for each in (*saved, value)]
    grad = backward.placeholder("tangents_1")
    backward.output((backward.call_function(aten.mm.default, (grad, places[-1])), None))
    return _module(forward), _module(backward)


def _names(module):
    return [node.name for node in module.graph.find_nodes(op="placeholder")]


def test_an_input_is_saved_in_place_of_its_views():
    x, buffer, grad = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3)
    for views, also_input in ((1, False), (2, False), (1, True)):
        forward, backward = _halves(views, also_input=also_input)
        expected = backward(*forward(x, buffer)[1:], grad)[0]
        compat.save_inputs_of_views(forward, backward, 1)
        saved = forward(x, buffer)[1:]
        assert len(saved) == 1
        assert saved[0] is buffer
        assert _names(backward) == ["buffer", "tangents_1"]
        assert torch.equal(backward(*saved, grad)[0], expected)


def test_views_of_an_input_that_forward_changes_and_other_values_stay():
    for forward, backward in (_halves(1, change=True), _halves(0)):
        before = [str(each.graph) for each in (forward, backward)]
        compat.save_inputs_of_views(forward, backward, 1)
        assert [str(each.graph) for each in (forward, backward)] == before


def test_zeros_of_derivatives_become_memory_that_may_be_written_to():
    graph = fx.Graph()
    x = graph.placeholder("x")
    zeros = graph.call_function(
        aten._efficientzerotensor.default, ([3],), {"dtype": torch.float64, "device": "cpu"}
    )
    graph.output((x, zeros))
    compat.materialize_zeros(graph)
    made = _module(graph)(torch.ones(1))[1]
    made.add_(1)
    assert torch.equal(made, torch.ones(3, dtype=torch.float64))
