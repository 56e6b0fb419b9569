"""Finds large products whose rows can be computed a chunk after the other.

The head of a language model is a product `hidden[T, D] @ head[D, V]` with V larger than D. What
follows until losses per token is as large as the logits, and so is what leads from there to the
gradients of hidden states and head.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from zpasses.graph.loss_steps import NoRowsError, Read, RowRules, Step
from zpasses.graph.queries import nbytes, numel, value_of
from zpasses.graph.walks import reachable

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default)


@dataclass(frozen=True, eq=False)
class RowRegion:
    """A product and what is computed of it with its rows."""

    product: fx.Node
    rows: int
    inner: int
    """Elements per row of what the product reads. Wider values exist for one chunk at a time."""
    steps: dict[fx.Node, Step]
    copied: frozenset[fx.Node]
    """Values that do not depend on the product: wide ones, and what is made of them. They also stay
    if others read them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the product for all rows."""
        return nbytes(value_of(self.product))

    def is_wide(self, step: Step) -> bool:
        """Whether a value is too large to exist for all rows."""
        return _is_wide(step, self.inner)

    def found_again(self) -> RowRegion:
        """Returns the region of the same product, after other nodes were replaced by equal ones."""
        found = _region(self.product, _of_backward(self.product.graph))
        assert found is not None
        return found


def find_regions(graph: fx.Graph) -> tuple[list[RowRegion], dict[str, str]]:
    """Returns the regions of a joint graph, and why other products are none: name -> reason.

    A region begins with a product of forward that makes its rows wider, and later reduces them.
    """
    regions: list[RowRegion] = []
    reasons = {}
    backward = _of_backward(graph)
    for node in graph.nodes:
        if node.target not in _PRODUCTS or node in backward:
            continue
        if any(node in each.steps for each in regions):
            continue
        try:
            found = _region(node, backward)
        except NoRowsError as error:
            reasons[node.name] = str(error)
            continue
        if found is not None:
            regions.append(found)
    return regions, reasons


def tangents_of(graph: fx.Graph) -> list[fx.Node]:
    """Returns the inputs of a joint graph that are gradients of its results."""
    return [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents")]


def _of_backward(graph: fx.Graph) -> set[fx.Node]:
    return set(reachable(tangents_of(graph), lambda node: node.users))


def _region(product: fx.Node, backward: set[fx.Node]) -> RowRegion | None:
    """Returns the region of a product; None if it is no head."""
    value, hidden = value_of(product), value_of(product.args[-2])  # type: ignore[arg-type]
    (rows, width), inner = value.shape, hidden.shape[1]
    if not _reduces(product, backward):
        return None
    if not all(isinstance(size, int) for size in (rows, width, inner)):
        raise NoRowsError("its sizes are dynamic")
    if width <= inner or rows < 2:
        return None
    steps, copied = _grown(product, rows, inner)
    order = {node: at for at, node in enumerate(product.graph.nodes)}
    sorted_steps = {node: steps[node] for node in sorted(steps, key=order.__getitem__)}
    region = RowRegion(product, rows, inner, sorted_steps, copied)
    _check_reads(region)
    return region


def _grown(
    product: fx.Node, rows: int, inner: int
) -> tuple[dict[fx.Node, Step], frozenset[fx.Node]]:
    """Returns the steps of a region, and which of them do not depend on the product.

    All that reads a wide value is a part of the region. So is, if possible, what a part of it reads
    by rows and is wide or depends on the product.
    """
    rules = RowRules(rows)
    dependent = set(reachable([product], lambda node: node.users))
    steps: dict[fx.Node, Step] = {}
    queue = [(product, True)]
    for node, needed in queue:  # grows
        if node in steps:
            continue
        try:
            step = rules.step(node)
        except NoRowsError:
            if needed:
                raise
            continue
        if step.kind != "rows" and not needed:
            continue
        steps[node] = step
        if node in dependent and (_is_wide(step, inner) or step.kind == "several"):
            if any(user.op == "output" for user in node.users):
                raise NoRowsError(f"the graph returns {node.name}")
            queue += [(user, True) for user in node.users]
        for read in step.reads:
            depends, wide = read.node in dependent, math.prod(read.shape) > inner
            if read.by_rows and (depends or wide or _is_made_of_wide(read, rules, inner)):
                queue.append((read.node, wide and depends))
    return steps, frozenset(steps) - dependent


def _is_made_of_wide(read: Read, rules: RowRules, inner: int) -> bool:
    """Whether a value per row is computed from wide values, such as the sum of a row's mask."""
    per_row = [read]
    for each in per_row:  # grows
        try:
            reads = [one for one in rules.step(each.node).reads if one.by_rows]
        except NoRowsError:
            continue
        if math.prod(each.shape) == 1:
            if any(math.prod(one.shape) > inner for one in reads):
                return True
            per_row += [one for one in reads if one not in per_row]
    return False


def _is_wide(step: Step, inner: int) -> bool:
    return step.kind == "turned" or (step.kind == "rows" and math.prod(step.shape) > inner)


_REDUCTIONS = frozenset(
    {
        aten.sum.dim_IntList,
        aten.amax.default,
        aten.logsumexp.default,
        aten._log_softmax.default,
        aten._softmax.default,
    }
)


def _reduces(product: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether forward reduces or normalizes what is wider than the rows that a product reads."""
    narrow = numel(value_of(product.args[-2]))  # type: ignore[arg-type]

    def following(node: fx.Node) -> Iterable[fx.Node]:
        return node.users.keys() - backward if numel(value_of(node)) > narrow else ()

    return any(node.target in _REDUCTIONS for node in reachable([product], following))


def _check_reads(region: RowRegion) -> None:
    for step in region.steps.values():
        for read in step.reads:
            source = region.steps.get(read.node)
            if source is None or source.kind != "rows":
                continue
            same = source.shape == read.shape if read.by_rows else not region.is_wide(source)
            if not same:
                raise NoRowsError(f"{step.node.name} reads {read.node.name} in another form")


# --- phases ---------------------------------------------------------------------------------------
def phase_numbers(region: RowRegion, given: Collection[fx.Node] = ()) -> dict[fx.Node, int]:
    """Returns the first phase that may read each value of the graph.

    Args:
        given: gradients of results that are known in the first phase.
    """
    number: dict[fx.Node, int] = {}
    for node in region.product.graph.nodes:
        late = node.op == "placeholder" and node.name.startswith("tangents")
        number[node] = int(late and node not in given)
        for item in node.all_input_nodes:
            number[node] = max(number[node], number[item] + _is_for_all_rows(region, item, node))
    return number


def _is_for_all_rows(region: RowRegion, item: fx.Node, user: fx.Node) -> bool:
    """Whether a call needs what a region computes, of more rows than it computes itself."""
    source, reader = region.steps.get(item), region.steps.get(user)
    if source is None or item in region.copied or source.kind in ("several", "whole"):
        return False
    if reader is None:
        return True
    return source.kind == "sum" or any(
        read.node is item and not read.by_rows for read in reader.reads
    )
