"""Products that run after the next one at the peak of a backward graph, because that frees memory
for them.

Before                                      After
  hidden = gelu(saved)                        hidden = gelu(saved)
  hidden_grad = mm(grad, weight)              weight_grad = mm(grad.t(), hidden)
  weight_grad = mm(grad.t(), hidden)          hidden_grad = mm(grad, weight)

Two products of a linear layer read one gradient, and autograd computes them in either order: that
of the input first with a bias, and that of the weight first without. In the example, `hidden` is
free before `hidden_grad` is made, which is as large. The other way round, a weight that was kept is
free before its gradient is made. Which order is better is found by trial, where the peak of the
graph is. Nothing moves past a collective: while one product runs, the weight of the other may be
gathered.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.memory.liveness import liveness
from zpasses.graph.aliases import memory_root
from zpasses.graph.queries import collective_of, is_wait, restore_order

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_MOST = 4
"""Products that move. For each, the peak of the graph is counted twice or more."""


def run_late(backward: fx.Graph) -> list[fx.Node]:
    """Moves products of a backward graph while that lowers its peak, and returns them."""
    found = itertools.takewhile(bool, (_move_at_peak(backward) for _ in range(_MOST)))
    return [each for each in found if each is not None]


def _move_at_peak(backward: fx.Graph) -> fx.Node | None:
    """Moves one product so that the peak falls, and returns it."""
    memory, order = liveness(backward), list(backward.nodes)
    peak = memory.peak_node
    for first, second in _pairs(order):
        if first <= peak <= second and _move_after(first, second):
            if liveness(backward).peak_bytes < memory.peak_bytes:
                return first
            restore_order(order)
    return None


def _pairs(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Returns the products that follow each other, and read the same gradient."""
    pairs = itertools.pairwise(node for node in nodes if node.target in _PRODUCTS)
    return [(first, second) for first, second in pairs if _inputs(first) & _inputs(second)]


def _is_pure(node: fx.Node) -> bool:
    """Whether it makes no difference where a node runs."""
    target = node.target
    if isinstance(target, compat.OpOverload):
        draws = torch.Tag.nondeterministic_seeded in target.tags
        return not (draws or target._schema.is_mutable)
    return node.op == "placeholder" or target is operator.getitem


def _inputs(node: fx.Node) -> set[fx.Node]:
    return set(map(memory_root, node.all_input_nodes))


def _move_after(product: fx.Node, other: fx.Node) -> bool:
    """Moves a product, and what it leads to before another one, after that one. Returns False if
    the other one depends on it, or if a collective, or what writes or draws, is between them.
    """
    chain, node = {product}, product.next
    while node is not other:
        if is_wait(node) or collective_of(node) is not None or not _is_pure(node):
            return False
        if not chain.isdisjoint(node.all_input_nodes):
            chain.add(node)
        node = node.next
    if not chain.isdisjoint(other.all_input_nodes):
        return False
    for each in sorted(chain, reverse=True):
        other.append(each)
    return True
