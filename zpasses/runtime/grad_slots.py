"""Gradient slots: the parameter gradients of a backward graph whose reduction can be deferred to a
later call.

This module finds them in a lowered graph. A slot has one or more full gradients, each with the
nodes of its reduction that read it, and as many reduced gradients, whose sum the graph returns.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.aliases import is_view
from zpasses.graph.dialect import AVERAGE_GRAD, REDUCE_GRAD, TO_HOST
from zpasses.graph.host_copies import on_device
from zpasses.graph.queries import returned_values, value_of
from zpasses.graph.tags import REDUCE_ROLES, Reduction, Tag, retag, tag_of

aten = torch.ops.aten


@dataclass(frozen=True)
class GradSlot:
    """One parameter gradient that a backward graph reduces and may defer."""

    param: str
    """Name of the parameter."""
    dtype: torch.dtype
    """Dtype of the full gradient, before it is cast for its reduction."""
    shape: tuple[int, ...]
    reduction: Reduction | None
    """How to reduce the gradient; None in graphs that zpasses did not capture."""

    @property
    def key(self) -> PendingKey:
        """Which pending gradient of the parameter the slot adds to."""
        return pending_key(self.dtype, self.reduction)


PendingKey = tuple[torch.dtype, bool]
"""Dtype of a gradient, and whether it is the gradient of the shard, reduced within its replica."""


def pending_key(dtype: torch.dtype, reduction: Reduction | None) -> PendingKey:
    """Returns which pending gradient of a parameter a gradient adds to."""
    return dtype, reduction is not None and reduction.group is None


@dataclass(frozen=True)
class GradReader:
    """A node of a reduction that reads a full gradient."""

    node: fx.Node
    list_index: int | None = None
    """Index of the gradient in the node's list of tensors; None if the gradient is not in a
    list."""

    def replace_input(self, old: fx.Node, new: fx.Node) -> None:
        """Read `new` instead of `old`.

        In a list, only the item at `list_index` changes, because `old` may also be the gradient of
        other parameters in the list.
        """
        if self.list_index is None:
            self.node.replace_input_with(old, new)
            return
        args: list[Any] = list(self.node.args)
        at = next(i for i, arg in enumerate(args) if isinstance(arg, (list, tuple)))
        args[at] = [new if i == self.list_index else item for i, item in enumerate(args[at])]
        self.node.args = tuple(args)


@dataclass(frozen=True)
class GradSource:
    """A gradient before what is deferred, and the nodes of its reduction that read it."""

    node: fx.Node
    readers: tuple[GradReader, ...]


@dataclass
class GradSlotNodes:
    """The nodes of a slot in a graph."""

    sources: list[GradSource] = field(default_factory=list)
    reduced: list[fx.Node] = field(default_factory=list)
    """Reduced gradients, one per source."""

    def full_grads(self) -> list[fx.Node]:
        return [source.node for source in self.sources]


def mark_deferrable(graph: fx.Graph, *, only_average: bool = False) -> int:
    """Mark the reductions of a backward graph that can be deferred; returns their number.

    Args:
        graph: a backward graph.
        only_average: defer only the average over replicas, where there are replicas.
    """
    found = 0
    for grads in returned_gradients(graph).values():
        part = only_average and all(map(_has_replicas, grads))
        if all(_find_source(grad, only_average=part) for grad in grads):
            for grad in grads:
                retag(grad, deferrable=True, defers_average=part)
                found += 1
    return found


def _has_replicas(grad: fx.Node) -> bool:
    tag = tag_of(grad)
    reduction = _reduction(grad, tag) if tag is not None else None
    return reduction is not None and reduction.replicate_group is not None


def grad_slots(graph: fx.Graph) -> list[GradSlot]:
    """Return the deferrable gradients of a backward graph, in the order of its outputs."""
    return list(grad_sites(graph))


def always_reduced(graph: fx.Graph) -> list[str]:
    """Return the names of parameters whose gradients a backward graph reduces and cannot defer."""
    tags = [
        tag
        for node in graph.nodes
        if (tag := tag_of(node)) is not None and tag.role in REDUCE_ROLES
    ]
    deferrable = {slot.param for slot in grad_slots(graph)}
    return [name for name in dict.fromkeys(tag.params[0] for tag in tags) if name not in deferrable]


def grad_sites(graph: fx.Graph) -> dict[GradSlot, GradSlotNodes]:
    found: dict[GradSlot, GradSlotNodes] = {}
    for grads in returned_gradients(graph).values():
        for grad in grads:
            tag = tag_of(grad)
            if tag is None or not tag.deferrable:
                continue
            source, reduction = _find_source(grad), _reduction(grad, tag)
            if source is None:
                continue
            if tag.defers_average and reduction is not None:
                reduction = replace(reduction, group=None)
            value = value_of(source.node)
            slot = GradSlot(tag.params[0], value.dtype, tuple(value.shape), reduction)
            site = found.setdefault(slot, GradSlotNodes())
            if grad not in site.reduced:
                site.sources.append(source)
                site.reduced.append(grad)
    return found


def _reduction(grad: fx.Node, tag: Tag) -> Reduction | None:
    source = on_device(grad)
    if source is not grad:
        found = _reduction(source, tag_of(source) or tag)
        return found and replace(found, to_host=True)
    arguments: Any = grad.args
    if grad.target is AVERAGE_GRAD and tag.reduction is None:
        inner, dtype, replicas = arguments[:3]
        found = _reduction(inner, tag) if inner.target is REDUCE_GRAD else None
        return found and replace(found, dtype=dtype, replicate_group=compat.group_name(replicas))
    if grad.target is REDUCE_GRAD:
        return Reduction(arguments[1], arguments[3], arguments[4], compat.group_name(arguments[5]))
    return tag.reduction


def returned_gradients(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Return the outputs that are sums of reduced gradients.

    Returns:
        Position of the output -> the reduced gradients that it sums. Other outputs are left out.
    """
    outputs = enumerate(returned_values(graph))
    found = {i: summands(value) for i, value in outputs if isinstance(value, fx.Node)}
    return {i: grads for i, grads in found.items() if grads}


def summands(node: fx.Node) -> list[fx.Node]:
    """Returns the reduced gradients of which a value is the sum; none if it is something else."""
    tag = tag_of(node)
    reduces = node.target in (REDUCE_GRAD, AVERAGE_GRAD, TO_HOST)
    if tag is not None and (tag.role == "shard_grad" or reduces):
        return [node]
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2:
        return []
    parts = [summands(item) for item in node.all_input_nodes]
    return [grad for part in parts for grad in part] if all(parts) else []


def _find_source(grad: fx.Node, *, only_average: bool = False) -> GradSource | None:
    """Find the full gradient of a reduced one; None if it cannot be determined.

    Args:
        grad: a gradient that the graph returns.
        only_average: find the gradient of the shard before its average over replicas. It is also
            found if the tag says so.
    """
    tag = tag_of(grad)
    assert tag is not None
    only_average = only_average or tag.defers_average
    grad = on_device(grad)
    tag = tag_of(grad) or tag
    if grad.target is REDUCE_GRAD or (only_average and grad.target is AVERAGE_GRAD):
        return GradSource(grad.all_input_nodes[0], (GradReader(grad),))
    found: dict[fx.Node, dict[GradReader, None]] = {}
    queue, seen = [grad], {grad}
    while queue:
        node = queue.pop()
        inputs = _grad_inputs(node, tag.params[0])
        if not inputs:
            return None
        for item, through in inputs:
            if only_average and _is_shard_grad(item):
                found.setdefault(item, {})[through] = None
            elif not _in_reduction(item, tag.params[0]):
                source, reader = _skip_packing_views(item, through, tag.reduction)
                found.setdefault(source, {})[reader] = None
            elif item not in seen:
                seen.add(item)
                queue.append(item)
    if len(found) != 1:
        return None
    ((source, readers),) = found.items()
    return GradSource(source, tuple(readers)) if isinstance(value_of(source), Tensor) else None


def _is_shard_grad(node: fx.Node) -> bool:
    tag = tag_of(node)
    return tag is not None and tag.role == "shard_grad"


def _skip_packing_views(
    node: fx.Node, reader: GradReader, reduction: Reduction | None
) -> tuple[fx.Node, GradReader]:
    """Walk back from a reader through the views that packed a gradient for its reduction.

    Returns:
        The gradient in its own shape, and the node that reads it.
    """
    while (
        reduction is not None
        and reduction.rows
        and _is_part(node)
        and _rows(node) != reduction.rows
    ):
        node, reader = node.all_input_nodes[0], GradReader(node)
    return node, reader


def _rows(node: fx.Node) -> int:
    shape = value_of(node).shape
    return shape[0] if shape else 0


def _in_reduction(node: fx.Node, param: str) -> bool:
    """Whether a node is part of the reduction of a parameter's gradient: it has such a tag, or is a
    view of such a node.
    """
    tag = tag_of(node)
    if tag is not None:
        return tag.role in REDUCE_ROLES and param in tag.params
    return _is_part(node) and _in_reduction(node.all_input_nodes[0], param)


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem or (is_view(node) and len(node.all_input_nodes) == 1)


def _grad_inputs(node: fx.Node, param: str) -> list[tuple[fx.Node, GradReader]]:
    """Return the inputs of a node of a reduction that belong to one parameter.

    A coalesced reduction also reads the gradients of other parameters.
    """
    if node.target is operator.getitem:
        several, index = cast(tuple[fx.Node, int], node.args)
        listed = _tensor_list_arg(several)
        return (
            [(listed[index], GradReader(several, index))]
            if listed is not None
            else [(several, GradReader(node))]
        )
    listed = _tensor_list_arg(node)
    if listed is None:
        return [(item, GradReader(node)) for item in node.all_input_nodes]
    found = [(item, GradReader(node, i)) for i, item in enumerate(listed)]
    own = [(item, reader) for item, reader in found if _in_reduction(item, param)]
    tag = tag_of(node)
    if own or tag is None:
        return own
    return [found[tag.params.index(param)]] if len(tag.params) == len(listed) else []


def _tensor_list_arg(node: fx.Node) -> list[fx.Node] | None:
    """Return the list of tensors that a node takes as an argument; None if it takes no such
    list.
    """
    for arg in node.args:
        if (
            isinstance(arg, (list, tuple))
            and arg
            and all(isinstance(item, fx.Node) for item in arg)
        ):
            return list(arg)
    return None
