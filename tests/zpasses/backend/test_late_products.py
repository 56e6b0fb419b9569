"""Products of a backward that run after the next one, which frees what lived beside them."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from zpasses.backend.late_products import _move_after, run_late
from zpasses.cost.memory.liveness import liveness

aten = torch.ops.aten
HIDDEN, WEIGHT, GRAD = (8, 16), (64, 16), (8, 64)


def backward(function, hidden=HIDDEN, grad=GRAD):
    """A backward graph of two saved values and a gradient."""

    def with_names(hidden, weight, tangents):
        return function(hidden, weight, tangents)

    graph = make_fx(with_names)(*(torch.randn(each) for each in (hidden, WEIGHT, grad))).graph
    names = ("hidden", "weight", "tangents_1")
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = name
    return graph


def head(hidden, weight, grad):
    """Of a linear layer without bias, as autograd computes it."""
    return (grad.t() @ hidden).t().t(), grad @ weight


def test_the_gradient_of_a_weight_is_made_after_the_weight_is_free():
    graph = backward(head)
    before = liveness(graph).peak_bytes
    run = torch.fx.GraphModule({}, graph)
    given = [torch.randn(each) for each in (HIDDEN, WEIGHT, GRAD)]
    wanted = run(*given)
    (moved,) = run_late(graph)
    graph.lint()
    first, second = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert second is moved
    assert moved.all_input_nodes[1].name == "hidden"
    assert first.next is not graph.output_node()  # nor do its views stay
    assert liveness(graph).peak_bytes == before - 4 * (64 * 16 - 8 * 16)
    run.recompile()
    for ours, theirs in zip(run(*given), wanted, strict=True):
        assert torch.equal(ours, theirs)


def waits(hidden, weight, grad):
    weight_grad = grad.t() @ hidden
    return weight_grad, torch.ops._c10d_functional.wait_tensor(hidden.sum(0)), grad @ weight


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (head, {"hidden": (128, 16), "grad": (128, 64)}),  # lives longer, and is larger
        (lambda hidden, weight, grad: (*head(hidden, weight, grad), weight), {}),
        (lambda hidden, weight, grad: (hidden.t() @ hidden, grad @ weight), {}),
        (waits, {}),
    ],
    ids=["large input", "weight stays", "other gradient", "collective"],
)
def test_nothing_moves_that_frees_no_memory_or_delays_a_wait(function, shapes):
    graph = backward(function, **shapes)
    order = list(graph.nodes)
    assert not run_late(graph)
    assert list(graph.nodes) == order


def written(hidden, weight, grad):
    weight_grad = grad.t() @ hidden
    hidden.copy_(hidden.sin())
    return weight_grad, grad @ weight


@pytest.mark.parametrize(
    ("function", "moves"),
    [
        (head, True),
        (
            lambda hidden, weight, grad: ((found := grad.t() @ hidden), grad @ (weight + found)),
            False,
        ),
        (lambda hidden, weight, grad: (grad.t() @ hidden, torch.rand(4), grad @ weight), False),
        (written, False),
    ],
    ids=["free", "depends", "draws", "writes"],
)
def test_a_product_moves_past_what_it_does_not_change(function, moves):
    graph = backward(function)
    order = list(graph.nodes)
    products = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert _move_after(*products) is moves
    assert (list(graph.nodes) != order) is moves
