"""Backward variants: forms of one backward graph that leave gradients unreduced, or reduce what
earlier calls left.

In a variant, each gradient slot is handled in one of three ways. It is reduced as in the graph
itself, together with the pending gradient that is given. Or it is deferred: nothing communicates,
the shard's gradient is returned as None, and the full gradient is an extra output, or is added in
place to the pending gradient that is given. Or it is dropped. Pending gradients that are given are
extra inputs after the graph's own inputs, and extra outputs come after its own outputs, both in
slot order. Pending gradients are contiguous, in the accumulation dtype, and written in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.nodes import Editor, append_placeholder, erase_dead, value_of
from zpasses.graph.ops import REDUCE_GRAD
from zpasses.runtime.grad_slots import (
    GradSite,
    GradSlot,
    GradSource,
    grad_sites,
    returned_gradients,
)

__all__ = ["BackwardVariant", "cut_backward"]

aten = torch.ops.aten


@dataclass(frozen=True)
class BackwardVariant:
    """What happens to each slot; those in neither `deferred` nor `dropped` are reduced."""

    given: frozenset[int] = frozenset()
    """Slots whose pending gradient comes in."""
    deferred: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    """Gradients that nobody asked for."""
    accum_dtype: torch.dtype | None = None
    """Dtype of pending gradients; None is the gradient's own."""

    def pending_dtype(self, slot: GradSlot) -> torch.dtype:
        return (
            self.accum_dtype
            if self.accum_dtype is not None and slot.dtype.is_floating_point
            else slot.dtype
        )


def cut_backward(gm: fx.GraphModule, variant: BackwardVariant) -> tuple[fx.GraphModule, list[Any]]:
    """The variant as a graph of its own; `gm` stays as it is.

    Returns:
        The graph, and the fake values of its extra inputs.
    """
    cut = compat.clone_graph_module(gm)
    graph = cut.graph
    output = graph.output_node()
    returned = returned_gradients(graph)
    extra_inputs: list[Any] = []
    extra_outputs: list[fx.Node] = []
    gone: set[fx.Node] = set()
    for number, (slot, site) in enumerate(grad_sites(graph).items()):
        pending = None
        if number in variant.given:
            pending = _add_input(graph, number, site.sources[0].node, variant.pending_dtype(slot))
            extra_inputs.append(value_of(pending))
        if number in variant.deferred:
            gone.update(site.leaves)
            if pending is None:
                extra_outputs.append(
                    _owned_sum(graph, site, variant.pending_dtype(slot), extra_outputs)
                )
            for source in site.nodes() if pending is not None else ():
                _after(source).call(aten.add_.Tensor, pending, source)
        elif number in variant.dropped:
            gone.update(site.leaves)
        elif pending is not None:
            _reduce_with(pending, site.sources[0])
    kept: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for i, leaves in returned.items():
        if gone.intersection(leaves):
            kept[i] = _sum([leaf for leaf in leaves if leaf not in gone], output)
    before = [node for node in output.args[0] if isinstance(node, fx.Node)]  # type: ignore[union-attr]
    output.args = ((*kept, *extra_outputs),)
    erase_dead(graph, before)
    if variant != BackwardVariant(accum_dtype=variant.accum_dtype):
        compat.pin_output_strides(output)
    graph.lint()
    cut.recompile()
    return cut, extra_inputs


def _sum(nodes: Sequence[fx.Node], before: fx.Node) -> fx.Node | None:
    """Of an output that was a sum: what is still reduced here."""
    total: fx.Node | None = None
    for node in nodes:
        total = (
            node
            if total is None
            else Editor(node.graph, before, like=node).call(aten.add.Tensor, total, node)
        )
    return total


def _add_input(graph: fx.Graph, number: int, like: fx.Node, dtype: torch.dtype) -> fx.Node:
    node = append_placeholder(graph, f"pending_{number}")
    value = value_of(like)
    with compat.fake_mode_of([value]) or torch.device(value.device):
        node.meta["val"] = torch.empty(value.shape, dtype=dtype, device=value.device)
    return node


def _after(source: fx.Node) -> Editor:
    """Inserts right behind a gradient, so that it can be freed; behind all inputs if it is one."""
    place = source.next
    while place.op == "placeholder":
        place = place.next
    return Editor(source.graph, place, like=source)


def _reduce_with(pending: fx.Node, source: GradSource) -> None:
    """Reduce the sum of what is pending and a gradient; the sum is made in the pending gradient's
    memory."""
    edit = _after(source.node)
    total = edit.call(aten.add_.Tensor, pending, source.node)
    dtype = value_of(source.node).dtype
    if value_of(total).dtype != dtype and not all(_casts(reader.node) for reader in source.readers):
        total = edit.call(aten._to_copy.default, total, dtype=dtype)
    for reader in source.readers:
        reader.read(source.node, total)


def _casts(reader: fx.Node) -> bool:
    return reader.target is REDUCE_GRAD or (
        reader.target is aten._to_copy.default and "dtype" in reader.kwargs
    )


def _owned_sum(
    graph: fx.Graph, site: GradSite, dtype: torch.dtype, others: Sequence[fx.Node]
) -> fx.Node:
    """The full gradient in memory that nobody else holds, contiguous."""
    first, *rest = site.nodes()
    output = graph.output_node()
    for other in rest:
        first = Editor(graph, output, like=other).call(aten.add.Tensor, first, other)
    value = value_of(first)
    edit = _after(first) if not rest else Editor(graph, output, like=first)
    if value.dtype != dtype:
        return edit.call(
            aten._to_copy.default, first, dtype=dtype, memory_format=torch.contiguous_format
        )
    if _owns_memory(first, [*_nodes(output), *others]) and value.is_contiguous():
        return first
    return edit.call(aten.clone.default, first, memory_format=torch.contiguous_format)


def _nodes(output: fx.Node) -> Iterator[fx.Node]:
    yield from output.all_input_nodes


def _owns_memory(node: fx.Node, returned: Sequence[fx.Node]) -> bool:
    """Whether a value is made here, whole, and not returned under another name: what it is a view
    of was computed in this graph."""
    base = _base(node)
    if base.op == "placeholder" or value_of(base).numel() != value_of(node).numel():
        return False
    made = (
        isinstance(base.target, compat.OpOverload)
        and base.target.namespace == "aten"
        and not _may_alias(base.target)
    )
    return made and all(_base(other) is not base for other in returned)


def _base(node: fx.Node) -> fx.Node:
    while isinstance(node.target, compat.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _may_alias(target: compat.OpOverload) -> bool:
    return target._schema.is_mutable or target in (
        aten.reshape.default,
        aten.contiguous.default,
        aten.clone.default,
    )
