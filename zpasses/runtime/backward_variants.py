"""Backward variants: forms of one backward graph that defer the reduction of some gradients, or
reduce gradients that earlier calls deferred, or step parameters with them.

A variant handles each gradient slot (zpasses.runtime.grad_slots) in one of four ways:

  - reduced: as in the graph itself, together with the slot's pending gradient if that is an input.
  - deferred: nothing is communicated, and the shard's gradient is returned as None. The full
    gradient is added in place to the pending gradient if that is an input, else it is an extra
    output.
  - dropped: the gradient is not needed.
  - stepped: reduced, and the parameter steps in the graph (zpasses.runtime.graph_steps). The
    gradient is returned as None.

Pending gradients are extra inputs after the graph's own inputs. Extra outputs come after the
graph's own outputs. Both are in slot order. A pending gradient is contiguous, in the accumulation
dtype, and is written in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.aliases import CLONES, view_base
from zpasses.graph.dialect import REDUCE_GRAD
from zpasses.graph.encoding import ENCODE
from zpasses.graph.queries import Editor, append_placeholder, erase_dead, returned_values, value_of
from zpasses.runtime.grad_slots import (
    GradSlot,
    GradSlotNodes,
    GradSource,
    grad_sites,
    returned_gradients,
)
from zpasses.runtime.graph_steps import add_steps

aten = torch.ops.aten


@dataclass(frozen=True)
class BackwardVariant:
    """How a variant handles each slot, by slot number.

    Slots that are neither in `deferred` nor in `dropped` are reduced.
    """

    given: frozenset[int] = frozenset()
    """Slots whose pending gradient is an input."""
    deferred: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()
    """Slots whose gradient autograd does not accumulate."""
    stepped: frozenset[int] = frozenset()
    """Slots that are reduced, whose parameters step in the graph."""
    accum_dtype: torch.dtype | None = None
    """Dtype of pending gradients; None keeps the gradient's dtype."""

    def pending_dtype(self, slot: GradSlot) -> torch.dtype:
        return (
            self.accum_dtype
            if self.accum_dtype is not None and slot.dtype.is_floating_point
            else slot.dtype
        )


def build_backward_variant(
    gm: fx.GraphModule, variant: BackwardVariant, saved: Mapping[str, Sequence[str]] = {}
) -> tuple[fx.GraphModule, list[Any]]:
    """Build a variant as a new graph; `gm` is not changed.

    Args:
        saved: name of an input -> the parameters whose shard or full value it is.

    Returns:
        The graph, and the fake values of its extra inputs.
    """
    built = compat.clone_graph_module(gm)
    graph = built.graph
    output = graph.output_node()
    returned = returned_gradients(graph)
    extra_inputs: list[Any] = []
    extra_outputs: list[fx.Node] = []
    removed: set[fx.Node] = set()
    steps: dict[int, tuple[str, int]] = {}
    for number, (slot, site) in enumerate(grad_sites(graph).items()):
        pending = None
        if number in variant.given:
            pending = _add_pending_input(
                graph, number, site.sources[0].node, variant.pending_dtype(slot)
            )
            extra_inputs.append(value_of(pending))
        if number in variant.deferred:
            removed.update(site.reduced)
            if pending is None:
                extra_outputs.append(
                    _owned_sum(graph, site, variant.pending_dtype(slot), extra_outputs)
                )
            for source in site.full_grads() if pending is not None else ():
                _after(source).call(aten.add_.Tensor, pending, source)
        elif number in variant.dropped:
            removed.update(site.reduced)
        elif pending is not None:
            _add_pending(pending, site.sources[0])
        if number in variant.stepped:
            whole = [i for i, grads in returned.items() if {*grads} == {*site.reduced}]
            # A step may write to its gradient.
            if len(whole) == 1 and [*returned_values(graph)[whole[0]].users] == [output]:
                steps[number] = slot.param, whole[0]
    kept = returned_values(graph)
    for i, grads in returned.items():
        if removed.intersection(grads):
            kept[i] = _sum([grad for grad in grads if grad not in removed], output)
    before = [node for node in returned_values(graph) if isinstance(node, fx.Node)]
    output.args = ((*kept, *extra_outputs),)
    if steps:
        add_steps(graph, steps, saved)
    erase_dead(graph, before)
    strides = {len(kept) + i: value_of(node).stride() for i, node in enumerate(extra_outputs)}
    compat.pin_output_strides(output, strides)
    graph.lint()
    built.recompile()
    return built, extra_inputs


def _sum(nodes: Sequence[fx.Node], before: fx.Node) -> fx.Node | None:
    """Sum the reduced gradients that remain of an output; None if there are none."""
    total: fx.Node | None = None
    for node in nodes:
        total = (
            node
            if total is None
            else Editor(node.graph, before, like=node).call(aten.add.Tensor, total, node)
        )
    return total


def _add_pending_input(graph: fx.Graph, number: int, like: fx.Node, dtype: torch.dtype) -> fx.Node:
    node = append_placeholder(graph, f"pending_{number}")
    value = value_of(like)
    with compat.fake_mode_of([value]) or torch.device(value.device):
        node.meta["val"] = torch.empty(value.shape, dtype=dtype, device=value.device)
    return node


def _after(source: fx.Node) -> Editor:
    """Return an editor that inserts right after a gradient, so that the gradient can be freed
    early.

    If the gradient is a placeholder, insert after the placeholders.
    """
    before = source.next
    while before.op == "placeholder":
        before = before.next
    return Editor(source.graph, before, like=source)


def _add_pending(pending: fx.Node, source: GradSource) -> None:
    """Replace a gradient in its reduction by its sum with the pending gradient.

    The sum is computed in the pending gradient's memory.
    """
    edit = _after(source.node)
    total = edit.call(aten.add_.Tensor, pending, source.node)
    dtype = value_of(source.node).dtype
    if value_of(total).dtype != dtype and not all(_casts(reader.node) for reader in source.readers):
        total = edit.call(aten._to_copy.default, total, dtype=dtype)
    for reader in source.readers:
        reader.replace_input(source.node, total)


def _casts(reader: fx.Node) -> bool:
    return reader.target in (REDUCE_GRAD, ENCODE) or (
        reader.target is aten._to_copy.default and "dtype" in reader.kwargs
    )


def _owned_sum(
    graph: fx.Graph, site: GradSlotNodes, dtype: torch.dtype, others: Sequence[fx.Node]
) -> fx.Node:
    """Return a slot's full gradient, contiguous and in memory that no other value shares."""
    first, *rest = site.full_grads()
    output = graph.output_node()
    for other in rest:
        first = Editor(graph, output, like=other).call(aten.add.Tensor, first, other)
    value = value_of(first)
    edit = _after(first) if not rest else Editor(graph, output, like=first)
    if value.dtype != dtype:
        return edit.call(
            aten._to_copy.default, first, dtype=dtype, memory_format=torch.contiguous_format
        )
    if _owns_memory(first, [*output.all_input_nodes, *others]) and value.is_contiguous():
        return first
    return edit.call(aten.clone.default, first, memory_format=torch.contiguous_format)


def _owns_memory(node: fx.Node, returned: Sequence[fx.Node]) -> bool:
    """Whether a value has storage of its own: this graph computes the value that it is a view of,
    that value has no further elements, and it is not returned otherwise.
    """
    base = view_base(node)
    if base.op == "placeholder" or value_of(base).numel() != value_of(node).numel():
        return False
    made = (
        isinstance(base.target, compat.OpOverload)
        and base.target.namespace == "aten"
        and not base.target._schema.is_mutable
        and base.target not in CLONES
    )
    return made and all(view_base(other) is not base for other in returned)
