"""Which operators Inductor fuses, so that a value that only one kernel's operators read is never
written to memory.

An elementwise operator has no kernel of its own if all of its readers are elementwise operators or
reductions. What it would read is then read where its own result would be. Inductor gives up on
expressions that read many tensors (`config.realize_reads_threshold`), and so does this model. Two
kernels that read the same values count them twice, although Inductor fuses some of these, too.

Without this, a graph with Inductor's decompositions would count each of them as a pass over memory:
on an H200, 73 ms for a step that takes 43, and 149 for a loss that takes 40 (docs/measurements.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.aliases import is_view
from zpasses.graph.queries import nbytes, value_of

aten, prims = torch.ops.aten, torch.ops.prims

_MOST_READS = 4
"""Tensors that an expression reads at most before it becomes a kernel."""

_ELEMENTWISE = frozenset(
    {
        prims.convert_element_type.default,
        prims.iota.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.full.default,
        aten.full_like.default,
        aten.scalar_tensor.default,
    }
)
"""Elementwise operators that torch does not tag as such."""

_REDUCTIONS = frozenset(
    {
        aten.amax.default,
        aten.amin.default,
        aten.mean.dim,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.var.correction,
        aten.var_mean.correction,
    }
)


class FusedKernels:
    """What the kernels of a graph read and write. It holds while the graph does not change."""

    def __init__(self) -> None:
        self._leaves: dict[fx.Node, frozenset[fx.Node]] = {}
        """Node -> the values that a kernel loads which reads this one."""

    def moved_bytes(self, node: fx.Node) -> int | None:
        """Returns the bytes that the kernel of a call reads and writes; None if it has none of its
        own.
        """
        if not _is_fusible(node):
            return nbytes(value_of(node)) + _bytes(node.all_input_nodes)
        leaves = self._leaves_of(node)
        if node not in leaves:
            return None
        return nbytes(value_of(node)) + _bytes(self._inputs(node))

    def _inputs(self, node: fx.Node) -> frozenset[fx.Node]:
        return frozenset().union(*map(self._leaves_of, node.all_input_nodes))

    def _leaves_of(self, node: fx.Node) -> frozenset[fx.Node]:
        pending = [node]  # no recursion, because chains may be long
        while pending:
            each = pending[-1]
            passes = each.all_input_nodes if is_view(each) or _is_fusible(each) else ()
            missing = [source for source in passes if source not in self._leaves]
            if missing and each not in self._leaves:
                pending += missing
                continue
            if each not in self._leaves:
                self._leaves[each] = self._found(each)
            pending.pop()
        return self._leaves[node]

    def _found(self, node: fx.Node) -> frozenset[fx.Node]:
        itself = frozenset({node})
        if is_view(node):
            base = node.all_input_nodes[0]
            leaves = self._leaves[base]
            # A part of a tensor is less than it, and an expanded one more.
            smaller = nbytes(value_of(node)) <= nbytes(value_of(base))
            return itself if base in leaves and smaller else leaves
        if not _is_elementwise(node) or not node.users or not all(map(_is_fusible, _readers(node))):
            return itself
        leaves = self._inputs(node)
        return leaves if len(leaves) <= _MOST_READS else itself


def _bytes(nodes: Any) -> int:
    return sum(nbytes(value_of(each)) for each in nodes)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_fusible(node: fx.Node) -> bool:
    return node.target in _REDUCTIONS or _is_elementwise(node)


def _is_elementwise(node: fx.Node) -> bool:
    call = node.target
    if not isinstance(call, compat.OpOverload):
        return False
    if call is aten.scatter.value:  # Inductor compares positions, if it writes into a constant
        base = node.args[0]
        return isinstance(base, fx.Node) and base.target is aten.full.default
    return torch.Tag.pointwise in call.tags or call in _ELEMENTWISE
