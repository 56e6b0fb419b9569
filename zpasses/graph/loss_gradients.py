"""Has a region compute its gradients for a gradient of one of the loss.

Backward is linear in the gradient of the loss. For a gradient of one, what it computes of a region
depends on nothing that only backward knows, so it belongs to the phase of forward: nothing wide is
computed again. Backward multiplies what it reads of it by the true gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zpasses.graph.linear_values import NotLinearError, dependences
from zpasses.graph.loss_regions import RowRegion, phase_numbers, tangents_of
from zpasses.graph.queries import Editor, numel, value_of
from zpasses.graph.walks import reachable

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class UnitGradients:
    """A region after its gradients were made independent of the gradient of the loss."""

    region: RowRegion
    scaled: tuple[fx.Node, ...]
    """The calls of backward that multiply by the gradient of the loss. Their first argument is what
    the region returns."""


def with_unit_gradients(region: RowRegion) -> UnitGradients:
    """Rewrites a region, so that its gradients depend on no gradient of a result of the graph.

    Raises:
        NotLinearError: if that would not compute the same, or would save nothing. The graph is then
            as before.
    """
    tangent = _only_tangent(region)
    if tangent is None:
        return UnitGradients(region, ())
    path = _path(region, tangent)
    kinds = dependences(tangent, path)
    _check_phases(region, tangent, path)
    return _Rewrite(region, tangent, path).run({node for node in path if kinds[node] == "linear"})


def _only_tangent(region: RowRegion) -> fx.Node | None:
    """Returns the gradient from which the region's are computed; None if it computes none."""
    found = [
        each
        for each in tangents_of(region.product.graph)
        if any(node in region.steps for node in reachable([each], lambda node: node.users))
    ]
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise NotLinearError(f"they depend on the gradients of {len(found)} results: {names}")
    if not found:
        return None
    value = value_of(found[0])
    if not isinstance(value, Tensor) or numel(value) != 1:
        shape = list(value.shape) if isinstance(value, Tensor) else value
        raise NotLinearError(f"the loss is no single value: {found[0].name} has the shape {shape}")
    return found[0]


def _path(region: RowRegion, tangent: fx.Node) -> list[fx.Node]:
    """Returns the calls through which the gradient of the loss reaches the region, and those of the
    region that depend on it, in graph order.
    """
    dependent = set(reachable([tangent], lambda node: node.users))
    inside = [node for node in region.steps if node in dependent]
    leading = set(
        reachable(inside, lambda node: [each for each in node.all_input_nodes if each in dependent])
    )
    path = [node for node in region.product.graph.nodes if node in leading and node is not tangent]
    for node in path:
        if node not in region.steps and numel(value_of(node)) > region.rows:
            raise NotLinearError(f"{node.name}, which they need, is more than a value per token")
    return path


def _check_phases(region: RowRegion, tangent: fx.Node, path: Sequence[fx.Node]) -> None:
    numbers = phase_numbers(region, given=[tangent])
    late = set(path)
    last = max(
        numbers[node] for node in region.steps if node not in late and node not in region.copied
    )
    for node in path:
        if node in region.steps and numbers[node] > last:
            raise NotLinearError(
                f"{node.name} needs a value of all tokens before, so nothing would be saved"
            )


class _Rewrite:
    def __init__(self, region: RowRegion, tangent: fx.Node, path: Sequence[fx.Node]) -> None:
        self._region, self._tangent = region, tangent
        self._path = dict.fromkeys(path)
        self._graph = region.product.graph
        self._copies: dict[fx.Node, fx.Node] = {}
        """Call of the path -> the same call for a gradient of one."""

    def run(self, linear: Collection[fx.Node]) -> UnitGradients:
        value = value_of(self._tangent)
        self._copies[self._tangent] = Editor(self._graph, before=next(iter(self._path))).call(
            aten.full.default, list(value.shape), 1, dtype=value.dtype, device=value.device
        )
        for node in self._path:
            self._copies[node] = self._copy(node)
        scaled = [self._hand_over(node) for node in self._returned() if node in linear]
        for node in self._returned():  # values that do not depend on the gradient of the loss
            self._replace_outside(node, self._copies[node])
        for node in reversed(self._path):
            if not node.users:
                self._graph.erase_node(node)
        return UnitGradients(self._region.found_again(), tuple(scaled))

    def _copy(self, node: fx.Node) -> fx.Node:
        with self._graph.inserting_after(node):
            copied = self._graph.node_copy(node, lambda each: self._copies.get(each, each))
        for key in ("partitioner_tag", "recompute", "ac_graph_id"):
            copied.meta.pop(key, None)
        return copied

    def _returned(self) -> list[fx.Node]:
        """Values of the region that something outside of it reads. What does not depend on the
        product stays where it is.
        """
        region = self._region
        return [
            node
            for node in self._path
            if node in region.steps and node not in region.copied and self._outside(node)
        ]

    def _outside(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user not in self._path]

    def _replace_outside(self, node: fx.Node, by: fx.Node) -> None:
        for user in self._outside(node):
            user.replace_input_with(node, by)

    def _hand_over(self, node: fx.Node) -> fx.Node:
        """Has all that reads a value outside of the region read it for the true gradient. Returns
        the call that multiplies by that.
        """
        edit = Editor(self._graph, before=self._copies[node].next, like=node)
        gradient = self._tangent
        if value_of(gradient).ndim:
            gradient = edit.call(aten.view.default, gradient, [])
        scaled = result = edit.call(aten.mul.Tensor, self._copies[node], gradient)
        dtype = value_of(node).dtype
        if value_of(scaled).dtype != dtype:  # neither has dimensions
            result = edit.call(prims.convert_element_type.default, scaled, dtype)
        self._replace_outside(node, result)
        return scaled
