"""Which values are linear in one input."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from zpasses.graph.linear_values import NotLinearError, dependences

X, Y = torch.tensor(1.5), torch.linspace(1, 2, 6).view(2, 3)

LINEAR = {
    "products": lambda x, y: -(x * y / 3) * 2,
    "casts": lambda x, y: (x * y).bfloat16().double(),
    "sums": lambda x, y: (x * y - x.expand(2, 3)).sum(0).mean(),
    "views": lambda x, y: (x * y).t().reshape(6)[1:4].unsqueeze(0),
    "matrix products": lambda x, y: torch.addmm(x * y[:, :2], x * y, y.t()),
    "masks": lambda x, y: torch.where(y > 1.5, x * y, 0.0).masked_fill(y < 1.5, 0.0),
    "zeros": lambda x, y: torch.zeros_like(x * y) + x,
    "scattered": lambda x, y: torch.zeros(2, 3).scatter(1, torch.ones(2, 1).long(), (x * y)[:, :1]),
    "of softmax": lambda x, y: torch.ops.aten._softmax_backward_data(x * y, y, 1, y.dtype),
}
NOT_LINEAR = {
    "squared": lambda x, y: x * x,
    "constant added": lambda x, y: x + y,
    "divisor": lambda x, y: y / x,
    "output of softmax": lambda x, y: torch.ops.aten._softmax_backward_data(y, x * y, 1, y.dtype),
    "condition": lambda x, y: torch.where(x * y > 1, x * y, 0.0),
    "other branch": lambda x, y: torch.where(y > 1.5, x * y, 1.0),
    "maximum": lambda x, y: (x * y).amax(),
    "rounded": lambda x, y: (x * y).long(),
    "both factors": lambda x, y: (x * y) @ (x * y).t(),
    "random": lambda x, y: torch.rand_like(x * y),
    "bias": lambda x, y: torch.addmm(y[:, :2], x * y, y.t()),
    "padded": lambda x, y: torch.nn.functional.pad(x * y, (0, 1), value=1.0),
}


def found(fn):
    gm = make_fx(fn, tracing_mode="fake")(X, Y)
    x = next(iter(gm.graph.nodes))
    dependent = {x}
    for node in gm.graph.nodes:
        if dependent & set(node.all_input_nodes) and node.op != "output":
            dependent.add(node)
    kinds = dependences(x, [node for node in gm.graph.nodes if node in dependent - {x}])
    returned = gm.graph.output_node().args[0]
    assert isinstance(returned, fx.Node)
    return gm, kinds[returned]


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name):
    gm, kind = found(LINEAR[name])
    assert kind == "linear"
    for factor in (0.0, -2.0, 0.5):
        torch.testing.assert_close(gm(factor * X, Y), factor * gm(X, Y), check_dtype=False)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_not_linear(name):
    with pytest.raises(NotLinearError):
        found(NOT_LINEAR[name])


def test_what_reads_only_shapes_does_not_depend():
    assert found(lambda x, y: torch.ones_like(x * y) * y)[1] == "constant"
    assert found(lambda x, y: torch.zeros_like(x * y) * y)[1] == "zero"


def test_narrow_dtypes_are_refused():
    with pytest.raises(NotLinearError, match="float16, whose small values are lost without"):
        found(lambda x, y: (x * y).half())
