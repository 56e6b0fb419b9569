"""Code generation without a compiler."""

import pytest
import torch
from torch import fx

from zpasses import compat
from zpasses.runtime.codegen import eager_codegen

aten = torch.ops.aten


def _never(x):
    raise AssertionError("a node ran")


def _graph(mode, *, turn=aten.t.default, sizes=(4, 6)):
    """x -> (x, x.t() + 1, None), with metadata."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    turned = graph.call_function(turn, (x,))
    added = graph.call_function(aten.add.Tensor, (turned, 1))
    graph.output((x, added, None))
    with mode:
        x.meta["val"] = torch.empty(sizes)
        turned.meta["val"] = x.meta["val"].t()
        added.meta["val"] = turned.meta["val"] + 1
    return fx.GraphModule({}, graph)


def test_fake_inputs_get_outputs_of_the_metadata_without_running_a_node():
    mode = compat.FakeTensorMode()
    run = eager_codegen(_graph(mode, turn=_never), [])
    with mode:
        x = torch.empty(4, 6)
        args = [x]
        returned, added, nothing = run(args)
    assert returned is x
    assert nothing is None
    assert isinstance(added, compat.FakeTensor)
    assert (added.shape, added.stride(), added.dtype) == ((6, 4), (1, 6), torch.float32)
    assert args == []
    with mode:
        assert run([x])[1] is not added


def test_real_inputs_run_the_graph():
    run = eager_codegen(_graph(compat.FakeTensorMode()), [])
    x = torch.arange(24.0).reshape(4, 6)
    returned, added, _ = run([x])
    assert returned is x
    assert torch.equal(added, x.t() + 1)


def test_fake_inputs_of_unknown_outputs_run_the_graph():
    mode = compat.FakeTensorMode()
    gm = _graph(mode)
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    with mode:
        _, added, _ = eager_codegen(gm, [])([torch.empty(2, 3)])
    assert added.shape == (3, 2)


def test_calls_with_stack_room_return_and_raise():
    assert compat.call_with_stack_room(lambda: 7) == 7

    def deep(left):
        return 0 if left == 0 else 1 + deep(left - 1)

    assert compat.call_with_stack_room(lambda: deep(500)) == 500
    with pytest.raises(ZeroDivisionError):
        compat.call_with_stack_room(lambda: 1 / 0)
