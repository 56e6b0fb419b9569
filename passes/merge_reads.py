"""Gather a parameter once for several reads, and reduce the sum of its gradients once.

Before                                        After
  w1 = zpasses.unshard(shard, ...)              w = zpasses.unshard(shard, ...)
  y = mm(x, w1)                                 y = mm(x, w)
  w2 = zpasses.unshard(shard, ...)              z = mm(y, w)
  z = mm(y, w2)                                 ...
  ...                                           g = add(g2, g1)
  s2 = zpasses.reduce_grad(g2, ...)             s = zpasses.reduce_grad(g, ...)
  s1 = zpasses.reduce_grad(g1, ...)
  s = add(s2, s1)

Contract: runs on the dialect, before it is lowered. A merged parameter stays gathered from its
first read to its last. Two reads are therefore merged only if that is free (no other parameter is
gathered between them) or cheap (the parameter has at most `max_hold_mb`). Gradients are always
summed before their reduction, in the reduction dtype. That keeps one full gradient alive from the
first summand to the last. Two reads that the graph returns, itself or as views, stay two: for its
caller they share no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from zpasses.graph.aliases import memory_base
from zpasses.graph.dialect import AVERAGE_GRAD, REDUCE_GRAD, TO_HOST, UNSHARD
from zpasses.graph.queries import Editor, calls, nbytes, replace_node, returned_values, value_of
from zpasses.graph.tags import Tag, add_tag, tag_of
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.facts import Facts

aten = torch.ops.aten
_MIB = 1 << 20


@dataclass(frozen=True)
class MergeReads(Pass):
    """Merge the reads of one parameter, or of tied parameters."""

    name: ClassVar[str] = "merge-reads"
    level: ClassVar[Level] = Level.JOINT
    facts: ClassVar[Facts] = Facts(reorders_sums=True)

    max_hold_mb: float | None = None
    """Largest parameter, in MiB, that may stay gathered while other parameters are gathered; `none`
    sets no limit.
    """

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of gathers and reductions saved."""
        return self._merge_gathers(graph) + _sum_gradients(graph)

    def _merge_gathers(self, graph: fx.Graph) -> int:
        saved = 0
        outputs = (each for each in returned_values(graph) if isinstance(each, fx.Node))
        returned = set(map(memory_base, outputs))
        holders: dict[Any, fx.Node] = {}
        last: Any = None
        for read in calls(graph, UNSHARD):
            key = (read.args[0], *read.args[1:])
            holder = holders.get(key)
            both_returned = returned.issuperset((holder, read))
            if holder is not None and not both_returned and (last == key or self._cheap(read)):
                _move_users(read, holder)
                saved += 1
                if read in returned:
                    returned.add(holder)
            else:
                holders[key] = read
            last = key
        return saved

    def _cheap(self, read: fx.Node) -> bool:
        return self.max_hold_mb is None or nbytes(value_of(read)) <= self.max_hold_mb * _MIB


def _move_users(read: fx.Node, holder: fx.Node) -> None:
    mine, theirs = tag_of(read), tag_of(holder)
    if mine is not None and theirs is not None:
        names = tuple(dict.fromkeys(theirs.params + mine.params))
        add_tag(holder, Tag(theirs.role, names, theirs.nbytes, theirs.bucket, theirs.origin))
    replace_node(read, holder)


def _sum_gradients(graph: fx.Graph) -> int:
    """Rewrite add(reduce(a), reduce(b)) to reduce(add(a, b)) until no such pair is left."""
    saved = 0
    for total in calls(graph, aten.add.Tensor):
        if total.kwargs:
            continue
        for last in (TO_HOST, AVERAGE_GRAD):
            equal = _equal_calls(last, *total.args[:2])
            # Those without a tag are of values that the model made whole (`param.full_tensor()`).
            if equal is not None and all(map(tag_of, equal)):
                total = _sum_before(graph, total, *equal)
        if (reductions := _equal_calls(REDUCE_GRAD, *total.args[:2])) is not None:
            _reduce_sum(graph, total, *reductions)
            saved += 1
    return saved


def _equal_calls(target: object, left: object, right: object) -> tuple[fx.Node, fx.Node] | None:
    """Returns two calls of `target` that differ in their first argument only and are read once."""
    for node in (left, right):
        if not isinstance(node, fx.Node) or node.target is not target or len(node.users) != 1:
            return None
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    return (left, right) if left is not right and left.args[1:] == right.args[1:] else None


def _sum_before(graph: fx.Graph, total: fx.Node, left: fx.Node, right: fx.Node) -> fx.Node:
    """Rewrites add(call(a), call(b)) to call(add(a, b)), and returns the sum."""
    edit = Editor(graph, before=total, like=left)
    parts: Any = left.args[0], right.args[0]
    summed = edit.call(aten.add.Tensor, *parts)
    target: Any = left.target
    of_sum = edit.call(target, summed, *left.args[1:])
    tag = tag_of(left)
    if tag is not None:
        add_tag(of_sum, tag)
    replace_node(total, of_sum)
    graph.erase_node(left)
    graph.erase_node(right)
    return summed


def _reduce_sum(graph: fx.Graph, total: fx.Node, left: fx.Node, right: fx.Node) -> None:
    edit = Editor(graph, before=total, like=left)
    reduce_dtype = left.args[4]
    parts: list[Any] = [left.args[0], right.args[0]]
    if isinstance(reduce_dtype, torch.dtype):
        parts = [
            part
            if value_of(part).dtype == reduce_dtype
            else edit.call(aten._to_copy.default, part, dtype=reduce_dtype)
            for part in parts
        ]
    summed = edit.call(aten.add.Tensor, *parts)
    reduced = edit.call(REDUCE_GRAD, summed, *left.args[1:])
    names = dict.fromkeys(name for part in (left, right) for name in _params(part))
    add_tag(reduced, Tag("reduce", tuple(names), nbytes(value_of(summed)), origin=MergeReads.name))
    replace_node(total, reduced)
    graph.erase_node(left)
    graph.erase_node(right)


def _params(reduction: fx.Node) -> tuple[str, ...]:
    tag = tag_of(reduction)
    return tag.params if tag else (reduction.name,)
