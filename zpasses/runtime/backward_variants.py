"""Deferred reductions: forms of one backward graph that leave gradients unreduced, or take in what earlier calls left.

A backward graph has one slot a parameter gradient that it reduces. In a variant a slot is reduced as in the graph itself, together with
what was given; or deferred: nothing communicates, the shard's gradient leaves as None and the full gradient as an extra output, or is
added in place to what was given; or dropped. Pending gradients that are given come as extra inputs behind the graph's own, extra outputs
behind its own, both in slot order. They are contiguous, in the accumulation dtype, and written in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.nodes import Editor, append_placeholder, erase_dead, value_of
from zpasses.graph.ops import REDUCE_GRAD
from zpasses.graph.tags import REDUCE_ROLES, Reduction, Tag, retag, tag_of

__all__ = ["BackwardVariant", "GradSlot", "always_reduced", "cut_backward", "grad_slots", "mark_deferrable"]

aten = torch.ops.aten


@dataclass(frozen=True)
class GradSlot:
    """One full gradient of a backward graph that is reduced there, and may be elsewhere."""

    param: str
    """Name of the parameter."""
    dtype: torch.dtype
    """Dtype of the gradient, before it is cast for its reduction."""
    shape: tuple[int, ...]
    reduction: Reduction | None
    """None in graphs that zpasses did not capture."""


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
        return self.accum_dtype if self.accum_dtype is not None and slot.dtype.is_floating_point else slot.dtype


@dataclass(frozen=True)
class _Reader:
    """A node of a reduction, and where in its list of tensors it reads a gradient; None where it reads it anywhere else."""

    node: fx.Node
    place: int | None = None

    def read(self, old: fx.Node, new: fx.Node) -> None:
        """Read `new` instead. Other parameters may have the same gradient, in other places of the list."""
        if self.place is None:
            self.node.replace_input_with(old, new)
            return
        args: list[Any] = list(self.node.args)
        at = next(i for i, arg in enumerate(args) if isinstance(arg, (list, tuple)))
        args[at] = [new if i == self.place else item for i, item in enumerate(args[at])]
        self.node.args = tuple(args)


@dataclass(frozen=True)
class _Source:
    """A full gradient, and who reads it for its reduction."""

    node: fx.Node
    readers: tuple[_Reader, ...]


@dataclass
class _Site:
    """Where a slot lies in a graph."""

    sources: list[_Source] = field(default_factory=list)
    leaves: list[fx.Node] = field(default_factory=list)
    """Reduced gradients, one a source."""

    def nodes(self) -> list[fx.Node]:
        return [source.node for source in self.sources]


# --- finding ---------------------------------------------------------------------------------------------------------------------
def mark_deferrable(graph: fx.Graph) -> int:
    """Mark the reductions of a backward graph that can be deferred; returns how many."""
    found = 0
    for leaves in _returned_gradients(graph).values():
        if all(_source(leaf) for leaf in leaves):
            for leaf in leaves:
                retag(leaf, deferrable=True)
                found += 1
    return found


def grad_slots(graph: fx.Graph) -> list[GradSlot]:
    """The deferrable gradients of a backward graph, in graph order of their parameters' outputs."""
    return list(_sites(graph))


def always_reduced(graph: fx.Graph) -> list[str]:
    """Parameters whose gradients a backward graph reduces and cannot leave unreduced."""
    tags = [tag for node in graph.nodes if (tag := tag_of(node)) is not None and tag.role in REDUCE_ROLES]
    deferrable = {slot.param for slot in grad_slots(graph)}
    return [name for name in dict.fromkeys(tag.params[0] for tag in tags) if name not in deferrable]


def _sites(graph: fx.Graph) -> dict[GradSlot, _Site]:
    found: dict[GradSlot, _Site] = {}
    for leaves in _returned_gradients(graph).values():
        for leaf in leaves:
            tag = tag_of(leaf)
            source = _source(leaf) if tag is not None and tag.deferrable else None
            if tag is None or source is None:
                continue
            value = value_of(source.node)
            slot = GradSlot(tag.params[0], value.dtype, tuple(value.shape), _reduction(leaf, tag))
            site = found.setdefault(slot, _Site())
            if leaf not in site.leaves:
                site.sources.append(source)
                site.leaves.append(leaf)
    return found


def _reduction(leaf: fx.Node, tag: Tag) -> Reduction | None:
    if leaf.target is REDUCE_GRAD:
        arguments: Any = leaf.args
        return Reduction(arguments[1], arguments[3], arguments[4], compat.group_name(arguments[5]))
    return tag.reduction


def _returned_gradients(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Position of an output -> the reduced gradients whose sum it is; outputs that are anything else are missing."""
    outputs: Any = graph.output_node().args[0]
    found = {i: _leaves(value) for i, value in enumerate(outputs) if isinstance(value, fx.Node)}
    return {i: leaves for i, leaves in found.items() if leaves}


def _leaves(node: fx.Node) -> list[fx.Node]:
    tag = tag_of(node)
    if tag is not None and (tag.role == "shard_grad" or node.target is REDUCE_GRAD):
        return [node]
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2:
        return []
    parts = [_leaves(item) for item in node.all_input_nodes]
    return [leaf for part in parts for leaf in part] if all(parts) else []


def _source(leaf: fx.Node) -> _Source | None:
    """The full gradient that a reduced one is made of; None if it is unclear."""
    tag = tag_of(leaf)
    assert tag is not None
    if leaf.target is REDUCE_GRAD:
        return _Source(leaf.all_input_nodes[0], (_Reader(leaf),))
    found: dict[fx.Node, dict[_Reader, None]] = {}
    queue, seen = [leaf], {leaf}
    while queue:
        node = queue.pop()
        inputs = _inputs_of(node, tag.params[0])
        if not inputs:
            return None
        for item, through in inputs:
            if not _belongs(item, tag.params[0]):
                source, reader = _whole(item, through, tag.reduction)
                found.setdefault(source, {})[reader] = None
            elif item not in seen:
                seen.add(item)
                queue.append(item)
    if len(found) != 1:
        return None
    ((source, readers),) = found.items()
    return _Source(source, tuple(readers)) if isinstance(value_of(source), Tensor) else None


def _whole(node: fx.Node, reader: _Reader, reduction: Reduction | None) -> tuple[fx.Node, _Reader]:
    """A gradient and its reader, from in front of views that packed it."""
    while reduction is not None and reduction.rows and _is_view(node) and _rows(node) != reduction.rows:
        node, reader = node.all_input_nodes[0], _Reader(node)
    return node, reader


def _rows(node: fx.Node) -> int:
    shape = value_of(node).shape
    return shape[0] if shape else 0


def _belongs(node: fx.Node, param: str) -> bool:
    """Whether a node is part of the reduction of a parameter's gradient: it is tagged so, or a view of such a node."""
    tag = tag_of(node)
    if tag is not None:
        return tag.role in REDUCE_ROLES and param in tag.params
    return _is_view(node) and _belongs(node.all_input_nodes[0], param)


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, compat.OpOverload) and node.target.is_view and len(node.all_input_nodes) == 1


def _inputs_of(node: fx.Node, param: str) -> list[tuple[fx.Node, _Reader]]:
    """What a node of a reduction reads for one parameter, where it may read other gradients for others."""
    if node.target is operator.getitem:
        several, place = cast(tuple[fx.Node, int], node.args)
        listed = _listed(several)
        return [(listed[place], _Reader(several, place))] if listed is not None else [(several, _Reader(node))]
    listed = _listed(node)
    if listed is None:
        return [(item, _Reader(node)) for item in node.all_input_nodes]
    found = [(item, _Reader(node, i)) for i, item in enumerate(listed)]
    own = [(item, reader) for item, reader in found if _belongs(item, param)]
    tag = tag_of(node)
    if own or tag is None:
        return own
    return [found[tag.params.index(param)]] if len(tag.params) == len(listed) else []


def _listed(node: fx.Node) -> list[fx.Node] | None:
    """The tensors of a call that takes a list of them."""
    for arg in node.args:
        if isinstance(arg, (list, tuple)) and arg and all(isinstance(item, fx.Node) for item in arg):
            return list(arg)
    return None


# --- cutting ---------------------------------------------------------------------------------------------------------------------
def cut_backward(gm: fx.GraphModule, variant: BackwardVariant) -> tuple[fx.GraphModule, list[Any]]:
    """The variant as a graph of its own; `gm` stays as it is.

    Returns:
        The graph, and the fake values of its extra inputs.
    """
    cut = compat.clone_graph_module(gm)
    graph = cut.graph
    output = graph.output_node()
    returned = _returned_gradients(graph)
    extra_inputs: list[Any] = []
    extra_outputs: list[fx.Node] = []
    gone: set[fx.Node] = set()
    for number, (slot, site) in enumerate(_sites(graph).items()):
        pending = None
        if number in variant.given:
            pending = _add_input(graph, number, site.sources[0].node, variant.pending_dtype(slot))
            extra_inputs.append(value_of(pending))
        if number in variant.deferred:
            gone.update(site.leaves)
            if pending is None:
                extra_outputs.append(_owned_sum(graph, site, variant.pending_dtype(slot), extra_outputs))
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
        total = node if total is None else Editor(node.graph, before, like=node).call(aten.add.Tensor, total, node)
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


def _reduce_with(pending: fx.Node, source: _Source) -> None:
    """Reduce the sum of what is pending and a gradient; the sum is made in the pending gradient's memory."""
    edit = _after(source.node)
    total = edit.call(aten.add_.Tensor, pending, source.node)
    dtype = value_of(source.node).dtype
    if value_of(total).dtype != dtype and not all(_casts(reader.node) for reader in source.readers):
        total = edit.call(aten._to_copy.default, total, dtype=dtype)
    for reader in source.readers:
        reader.read(source.node, total)


def _casts(reader: fx.Node) -> bool:
    return reader.target is REDUCE_GRAD or (reader.target is aten._to_copy.default and "dtype" in reader.kwargs)


def _owned_sum(graph: fx.Graph, site: _Site, dtype: torch.dtype, others: Sequence[fx.Node]) -> fx.Node:
    """The full gradient in memory that nobody else holds, contiguous."""
    first, *rest = site.nodes()
    output = graph.output_node()
    for other in rest:
        first = Editor(graph, output, like=other).call(aten.add.Tensor, first, other)
    value = value_of(first)
    edit = _after(first) if not rest else Editor(graph, output, like=first)
    if value.dtype != dtype:
        return edit.call(aten._to_copy.default, first, dtype=dtype, memory_format=torch.contiguous_format)
    if _owns_memory(first, [*_nodes(output), *others]) and value.is_contiguous():
        return first
    return edit.call(aten.clone.default, first, memory_format=torch.contiguous_format)


def _nodes(output: fx.Node) -> Iterator[fx.Node]:
    yield from output.all_input_nodes


def _owns_memory(node: fx.Node, returned: Sequence[fx.Node]) -> bool:
    """Whether a value is made here, whole, and not returned under another name: what it is a view of was computed in this graph."""
    base = _base(node)
    if base.op == "placeholder" or value_of(base).numel() != value_of(node).numel():
        return False
    made = isinstance(base.target, compat.OpOverload) and base.target.namespace == "aten" and not _may_alias(base.target)
    return made and all(_base(other) is not base for other in returned)


def _base(node: fx.Node) -> fx.Node:
    while isinstance(node.target, compat.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _may_alias(target: compat.OpOverload) -> bool:
    return target._schema.is_mutable or target in (aten.reshape.default, aten.contiguous.default, aten.clone.default)
