"""Which operators Inductor fuses, so that a value that only one kernel's operators read is never
written to memory.

An elementwise operator has no kernel of its own if all of its readers are elementwise operators or
reductions. What it would read is then read where its own result would be. Inductor gives up on
expressions that read many tensors (`config.realize_reads_threshold` for those with several readers,
`realize_acc_reads_threshold` for all), and so does this model. Two kernels that read the same
values count them twice, although Inductor fuses some of these, too.

Only what runs operator by operator (`codegen="eager"`) does not count so, inside `use_fusion`.

Without this, a graph with Inductor's decompositions would count each of them as a pass over memory:
on an H200, 73 ms for a step that takes 43, and 149 for a loss that takes 40 (docs/measurements.md).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.aliases import elements_of, is_view, view_base
from zpasses.graph.queries import nbytes, value_of

aten, prims = torch.ops.aten, torch.ops.prims

_MOST_READS = 8
"""Tensors that an expression reads at most before it becomes a kernel."""
_MOST_SHARED_READS = 4
"""The same for an expression with several readers."""

_ELEMENTWISE = frozenset(
    {
        prims.convert_element_type.default,
        prims.iota.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.full.default,
        aten.full_like.default,
        aten.gather.default,
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


_fusion: contextvars.ContextVar[bool] = contextvars.ContextVar("zpasses.fusion", default=True)


@contextlib.contextmanager
def use_fusion(fuses: bool) -> Iterator[None]:
    """Context manager in which the models of time and memory count the kernels of Inductor's code,
    or operators that run one by one.
    """
    token = _fusion.set(fuses)
    try:
        yield
    finally:
        _fusion.reset(token)


def fuses() -> bool:
    """Whether the models count fused kernels."""
    return _fusion.get()


class FusedKernels:
    """What the kernels of a graph read and write. It holds while the graph does not change, and is
    equal on ranks that hold parts of other sizes.
    """

    def __init__(self) -> None:
        self._fuses = fuses()
        self._leaves: dict[fx.Node, Mapping[fx.Node, bool]] = {}
        """Node -> the values that a kernel loads which reads this one, and whether it loads the
        elements of each where it would write them."""

    def moved_bytes(self, node: fx.Node) -> int | None:
        """Returns the bytes that the kernel of a call reads and writes; None if it has none of its
        own.
        """
        written = nbytes(value_of(node))
        if not self._fuses or not _is_fusible(node):
            return written + sum(nbytes(value_of(each)) for each in node.all_input_nodes)
        if self.is_inlined(node):
            return None
        return written + sum(map(_loaded_bytes, self.inputs(node)))

    def is_inlined(self, node: fx.Node) -> bool:
        """Whether a call is computed where it is read, so that its value is in no memory."""
        return self._fuses and _is_elementwise(node) and node not in self._leaves_of(node)

    def has_kernel(self, node: fx.Node) -> bool:
        """Whether a call is an elementwise operator, or a reduction, that is not inlined."""
        return _is_fusible(node) and not self.is_inlined(node)

    def inputs(self, node: fx.Node) -> Mapping[fx.Node, bool]:
        """Returns the values that a call loads, through those that are inlined in it, and whether
        it loads elements of each only where it writes them, if both have one shape.
        """
        found: dict[fx.Node, bool] = {}
        for source in node.all_input_nodes:
            for leaf, in_place in self._leaves_of(source).items():
                in_place = in_place and node.target is not aten.gather.default
                found[leaf] = found.get(leaf, True) and in_place
        return found

    def _leaves_of(self, node: fx.Node) -> Mapping[fx.Node, bool]:
        pending = [node]  # no recursion, because chains may be long
        while pending:
            each = pending[-1]
            if each not in self._leaves:
                passes = each.all_input_nodes if is_view(each) or _is_fusible(each) else ()
                missing = [source for source in passes if source not in self._leaves]
                if missing:
                    pending += missing
                    continue
                self._leaves[each] = self._found(each)
            pending.pop()
        return self._leaves[node]

    def _found(self, node: fx.Node) -> Mapping[fx.Node, bool]:
        itself = {node: True}
        if is_view(node):
            base = node.all_input_nodes[0]
            whole = elements_of(node) is not node
            if base in self._leaves[base]:
                return {node: whole and self._leaves[base][base]}
            return {leaf: whole and in_place for leaf, in_place in self._leaves[base].items()}
        if not _is_elementwise(node) or not node.users or not all(map(_is_fusible, _readers(node))):
            return itself
        leaves = self.inputs(node)
        most = _MOST_SHARED_READS if len(node.users) > 1 else _MOST_READS
        return leaves if len(leaves) <= most else itself


def _loaded_bytes(node: fx.Node) -> int:
    """A kernel loads a part of a tensor alone, and what is expanded once."""
    return min(nbytes(value_of(node)), nbytes(value_of(view_base(node))))


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
