"""Kernels of a backward that free memory run before the products they come after."""

from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from zpasses.backend.early_kernels import run_early
from zpasses.cost.memory.liveness import liveness

aten = torch.ops.aten


def backward(function):
    """A backward graph of the saved value, two gradients, and what else the function takes."""

    def with_names(saved, incoming, tangents):
        return function(saved, incoming @ incoming, tangents)

    graph = make_fx(with_names)(*(torch.randn(32, 32) for _ in range(3))).graph
    for node, name in zip(
        graph.find_nodes(op="placeholder"), ("saved", "x", "tangents_1"), strict=True
    ):
        node.name = name
    return graph


def order(graph):
    named = {aten.mm.default: "mm", aten.sin.default: "sin", aten.mul.Tensor: "mul"}
    return [named[node.target] for node in graph.nodes if node.target in named]


def again(saved, grad, tangents):
    """The product reads what is computed again, and the kernel writes over `grad`."""
    return tangents @ saved.sin(), grad * saved


def test_a_kernel_that_frees_what_it_reads_runs_before_the_next_product():
    graph = backward(again)
    before = liveness(graph).peak_bytes
    run = torch.fx.GraphModule({}, graph)
    given = [torch.randn(32, 32) for _ in range(3)]
    wanted = run(*given)
    assert order(graph) == ["mm", "sin", "mm", "mul"]
    (moved,) = run_early(graph)
    assert moved.target is aten.mul.Tensor
    assert order(graph) == ["mm", "sin", "mul", "mm"]
    assert liveness(graph).peak_bytes == before - 4 * 32 * 32  # the saved value
    run.recompile()
    for ours, theirs in zip(run(*given), wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_computed_in_a_kernel_moves_with_it():
    graph = backward(
        lambda saved, grad, tangents: (
            tangents @ saved.sin(),
            grad.view(8, 128) * (saved.cos() + 1).view(8, 128),
        )
    )
    assert run_early(graph)
    graph.lint()
    assert order(graph) == ["mm", "sin", "mul", "mm"]


@pytest.mark.parametrize(
    "function",
    [
        lambda saved, grad, tangents: (*again(saved, grad, tangents), (saved + 1) @ tangents),
        lambda saved, grad, tangents: (*again(saved, grad, tangents), saved),
        lambda saved, grad, tangents: (*again(saved, grad, tangents), grad @ tangents),
        lambda saved, grad, tangents: (saved.sin() + tangents, grad * saved),
        lambda saved, grad, tangents: (saved @ saved.sin(), grad * 2),
        lambda saved, grad, tangents: (tangents @ saved.sin(), grad.t() * saved.t()),
        lambda saved, grad, tangents: (
            tangents @ saved.sin(),
            torch.cat([(grad * saved).view(-1), saved.new_ones(4)]),
        ),
    ],
    ids=[
        "the saved value is read later",
        "it is returned",
        "the gradient is read later",
        "no product in between",
        "it frees no other value",
        "it reads elsewhere",
        "it writes into a cat",
    ],
)
def test_other_kernels_stay(function):
    graph = backward(function)
    before = order(graph)
    assert not run_early(graph)
    assert order(graph) == before


def test_a_part_of_a_saved_value_does_not_free_it():
    """All of it lives until the last part is read."""

    def function(saved, grad, tangents):
        left, right = saved.split(16)
        first, second = grad.split(16)
        return tangents @ saved.sin(), left * first, right @ tangents, second @ tangents

    graph = backward(function)
    before, peak = order(graph), liveness(graph).peak_bytes
    run_early(graph)
    assert order(graph) == before
    assert liveness(graph).peak_bytes == peak


def test_the_order_stays_if_the_peak_would_rise(monkeypatch):
    graph = backward(again)
    before, peaks = list(graph.nodes), iter((2, 1))  # with what moved, and without
    monkeypatch.setattr(
        "zpasses.backend.early_kernels.liveness",
        lambda graph: SimpleNamespace(peak_bytes=next(peaks)),
    )
    assert not run_early(graph)
    assert list(graph.nodes) == before
