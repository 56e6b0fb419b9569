"""Gradient slots: the parameter gradients that a backward graph reduces and that another call may
reduce instead.

A slot knows the full gradient, the nodes of its reduction that read it, and the reduced gradients
that the graph returns."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.nodes import value_of
from zpasses.graph.ops import REDUCE_GRAD
from zpasses.graph.tags import REDUCE_ROLES, Reduction, Tag, retag, tag_of

__all__ = [
    "GradReader",
    "GradSite",
    "GradSlot",
    "GradSource",
    "always_reduced",
    "grad_sites",
    "grad_slots",
    "mark_deferrable",
    "returned_gradients",
]

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
class GradReader:
    """A node of a reduction, and where in its list of tensors it reads a gradient; None where it
    reads it anywhere else."""

    node: fx.Node
    place: int | None = None

    def read(self, old: fx.Node, new: fx.Node) -> None:
        """Read `new` instead. Other parameters may have the same gradient, in other places of the
        list."""
        if self.place is None:
            self.node.replace_input_with(old, new)
            return
        args: list[Any] = list(self.node.args)
        at = next(i for i, arg in enumerate(args) if isinstance(arg, (list, tuple)))
        args[at] = [new if i == self.place else item for i, item in enumerate(args[at])]
        self.node.args = tuple(args)


@dataclass(frozen=True)
class GradSource:
    """A full gradient, and who reads it for its reduction."""

    node: fx.Node
    readers: tuple[GradReader, ...]


@dataclass
class GradSite:
    """Where a slot lies in a graph."""

    sources: list[GradSource] = field(default_factory=list)
    leaves: list[fx.Node] = field(default_factory=list)
    """Reduced gradients, one a source."""

    def nodes(self) -> list[fx.Node]:
        return [source.node for source in self.sources]


def mark_deferrable(graph: fx.Graph) -> int:
    """Mark the reductions of a backward graph that can be deferred; returns how many."""
    found = 0
    for leaves in returned_gradients(graph).values():
        if all(_source(leaf) for leaf in leaves):
            for leaf in leaves:
                retag(leaf, deferrable=True)
                found += 1
    return found


def grad_slots(graph: fx.Graph) -> list[GradSlot]:
    """The deferrable gradients of a backward graph, in graph order of their parameters' outputs."""
    return list(grad_sites(graph))


def always_reduced(graph: fx.Graph) -> list[str]:
    """Parameters whose gradients a backward graph reduces and cannot leave unreduced."""
    tags = [
        tag
        for node in graph.nodes
        if (tag := tag_of(node)) is not None and tag.role in REDUCE_ROLES
    ]
    deferrable = {slot.param for slot in grad_slots(graph)}
    return [name for name in dict.fromkeys(tag.params[0] for tag in tags) if name not in deferrable]


def grad_sites(graph: fx.Graph) -> dict[GradSlot, GradSite]:
    found: dict[GradSlot, GradSite] = {}
    for leaves in returned_gradients(graph).values():
        for leaf in leaves:
            tag = tag_of(leaf)
            source = _source(leaf) if tag is not None and tag.deferrable else None
            if tag is None or source is None:
                continue
            value = value_of(source.node)
            slot = GradSlot(tag.params[0], value.dtype, tuple(value.shape), _reduction(leaf, tag))
            site = found.setdefault(slot, GradSite())
            if leaf not in site.leaves:
                site.sources.append(source)
                site.leaves.append(leaf)
    return found


def _reduction(leaf: fx.Node, tag: Tag) -> Reduction | None:
    if leaf.target is REDUCE_GRAD:
        arguments: Any = leaf.args
        return Reduction(arguments[1], arguments[3], arguments[4], compat.group_name(arguments[5]))
    return tag.reduction


def returned_gradients(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Position of an output -> the reduced gradients whose sum it is; outputs that are anything
    else are missing."""
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


def _source(leaf: fx.Node) -> GradSource | None:
    """The full gradient that a reduced one is made of; None if it is unclear."""
    tag = tag_of(leaf)
    assert tag is not None
    if leaf.target is REDUCE_GRAD:
        return GradSource(leaf.all_input_nodes[0], (GradReader(leaf),))
    found: dict[fx.Node, dict[GradReader, None]] = {}
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
    return GradSource(source, tuple(readers)) if isinstance(value_of(source), Tensor) else None


def _whole(
    node: fx.Node, reader: GradReader, reduction: Reduction | None
) -> tuple[fx.Node, GradReader]:
    """A gradient and its reader, from in front of views that packed it."""
    while (
        reduction is not None
        and reduction.rows
        and _is_view(node)
        and _rows(node) != reduction.rows
    ):
        node, reader = node.all_input_nodes[0], GradReader(node)
    return node, reader


def _rows(node: fx.Node) -> int:
    shape = value_of(node).shape
    return shape[0] if shape else 0


def _belongs(node: fx.Node, param: str) -> bool:
    """Whether a node is part of the reduction of a parameter's gradient: it is tagged so, or a view
    of such a node."""
    tag = tag_of(node)
    if tag is not None:
        return tag.role in REDUCE_ROLES and param in tag.params
    return _is_view(node) and _belongs(node.all_input_nodes[0], param)


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, compat.OpOverload)
        and node.target.is_view
        and len(node.all_input_nodes) == 1
    )


def _inputs_of(node: fx.Node, param: str) -> list[tuple[fx.Node, GradReader]]:
    """What a node of a reduction reads for one parameter, where it may read other gradients for
    others."""
    if node.target is operator.getitem:
        several, place = cast(tuple[fx.Node, int], node.args)
        listed = _listed(several)
        return (
            [(listed[place], GradReader(several, place))]
            if listed is not None
            else [(several, GradReader(node))]
        )
    listed = _listed(node)
    if listed is None:
        return [(item, GradReader(node)) for item in node.all_input_nodes]
    found = [(item, GradReader(node, i)) for i, item in enumerate(listed)]
    own = [(item, reader) for item, reader in found if _belongs(item, param)]
    tag = tag_of(node)
    if own or tag is None:
        return own
    return [found[tag.params.index(param)]] if len(tag.params) == len(listed) else []


def _listed(node: fx.Node) -> list[fx.Node] | None:
    """The tensors of a call that takes a list of them."""
    for arg in node.args:
        if (
            isinstance(arg, (list, tuple))
            and arg
            and all(isinstance(item, fx.Node) for item in arg)
        ):
            return list(arg)
    return None
