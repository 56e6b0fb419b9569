"""Merge neighbouring collectives of one group and dtype into fewer, larger ones.

Before                                   After, mode=coalesced
  a = wait_tensor(all_gather(shard_a))     s = all_gather_coalesced([shard_a, shard_b])
  y = mm(x, a)                             a = wait_tensor(s[0])
  b = wait_tensor(all_gather(shard_b))     b = wait_tensor(s[1])
  z = mm(y, b)                             y = mm(x, a);  z = mm(y, b)
                                         After, mode=flat
                                           flat = cat([view(shard_a), view(shard_b)])
                                           all = view(wait_tensor(all_gather(flat)), [ranks, -1])
                                           a = view(clone(all[:, :n]), ...)
                                           b = view(clone(all[:, n:]), ...)
                                           y = mm(x, a);  z = mm(y, b)

Contract: a bucket of gathers starts where its first member started. A bucket of reductions starts
where its last member started. Results stay equal bit for bit. No bucket raises the graph's peak
memory above the budget, as modelled by `zpasses.cost.memory`. A gathered parameter is a view of the
flat buffer if its rows are contiguous there; otherwise it is copied out. Gradients whose rows have
the same shape are concatenated along dimension 0, so Inductor can let each producer write into the
bucket. Other gradients are packed by one kernel.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.bucket_planner import BucketKey, Mode, PlannedBucket, plan_buckets
from zpasses.cost.collective_moves import (
    MemoryCurve,
    SchedulableCollective,
    movable_gathers,
    movable_reductions,
)
from zpasses.cost.roofline import copy_us, latency_us
from zpasses.cost.target import current_target
from zpasses.errors import OptionError
from zpasses.graph.nodes import Editor, collective_of, nbytes, value_of
from zpasses.graph.ops import group_size
from zpasses.graph.patterns import tag_foreign_gathers
from zpasses.graph.tags import Role, Tag, add_tag, retag, tag_of
from zpasses.option_values import parse_budget
from zpasses.pipeline.pipeline import Level, Pass
from zpasses.pipeline.recorder import note
from zpasses.ranks.vote import exchange

aten = torch.ops.aten
_MIB = 1 << 20
_log = logging.getLogger("zpasses")


@dataclass(frozen=True)
class Bucket(Pass):
    """Merge neighbouring collectives under a memory budget."""

    name: ClassVar[str] = "bucket"
    level: ClassVar[Level] = Level.PARTITIONED

    cap_mb: float = 25.0
    """Largest size of the full tensors in one bucket, in MiB; 0 disables bucketing."""
    mode: Literal["auto", "coalesced", "flat"] = "auto"
    """`coalesced` starts several tensors in one launch, and `flat` packs them into one tensor.
    `auto` takes the cheapest choice by the cost model of the target, which may be no bucket.
    """
    memory_budget: str = "5%"
    """By how much the graph's peak memory may rise (`5%`), or the peak that it may reach (`300MiB`,
    but never below the peak without buckets).
    """
    plan_for_overlap: bool = False
    """Compare the peaks after `overlap`, with and without buckets, because `overlap` lets buckets
    live longer. Set it if `overlap` follows in the pipeline."""

    def __post_init__(self) -> None:
        parse_budget(self.memory_budget, f"pass {self.name!r}, option 'memory_budget'")
        if self.cap_mb < 0:
            raise OptionError(
                f"pass {self.name!r}, option 'cap_mb': got {self.cap_mb}; expected MiB >= 0 (0: no "
                "buckets)."
            )

    def votes(self) -> bool:
        return self.cap_mb > 0

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of collectives saved."""
        if self.cap_mb == 0:
            return 0
        tag_foreign_gathers(graph, origin=self.name)
        gathers, reductions = movable_gathers(graph), movable_reductions(graph)
        if len(gathers) < 2 and len(reductions) < 2:
            return 0
        items = [*gathers, *reductions]
        planned, curve = self.plan(graph, items)
        adopted = _agree_on_buckets(planned, items, str(self))
        if adopted != [(bucket.mode, bucket.items) for bucket in planned]:
            self._warn_over_budget(graph, items, adopted, curve.limit_bytes)
        for number, (mode, members) in enumerate(adopted):
            _WRITERS[members[0].tag.role == "gather", mode](
                _BucketWriter(graph, members, number, self.name)
            )
        note(
            f"{self.name}: {_summary(gathers, adopted, 'gathers')}; "
            f"{_summary(reductions, adopted, 'reductions')}"
        )
        return sum(len(members) - 1 for _, members in adopted)

    def plan(
        self, graph: fx.Graph, items: Sequence[SchedulableCollective]
    ) -> tuple[list[PlannedBucket], MemoryCurve]:
        """Returns the buckets that this rank would make of these collectives, and the graph's
        memory curve with them.
        """
        curve = MemoryCurve(graph, parse_budget(self.memory_budget, self.name))
        choose = functools.partial(_bucket_key, options=self)
        return plan_buckets(
            items, choose, curve, self.cap_mb * _MIB, plan_for_overlap=self.plan_for_overlap
        ), curve

    def _warn_over_budget(
        self,
        graph: fx.Graph,
        items: Sequence[SchedulableCollective],
        adopted: Sequence[tuple[Mode, list[SchedulableCollective]]],
        limit_bytes: int,
    ) -> None:
        """Warn if the shared plan raises the peak above this rank's budget. The plan was made for
        other shapes, but ranks must still follow it.
        """
        taken = {
            item: (mode, number)
            for number, (mode, members) in enumerate(adopted)
            for item in members
        }

        def choose(item: SchedulableCollective) -> BucketKey:
            mode, number = taken.get(item, ("single", -1))
            return BucketKey(mode, number, compat.is_gloo(str(_compatibility_key(item)[1])))

        curve = MemoryCurve(graph, sys.maxsize)
        plan_buckets(items, choose, curve, math.inf, plan_for_overlap=self.plan_for_overlap)
        peak = max(curve.live_bytes)
        if peak > limit_bytes:
            _log.warning(
                "%s: all ranks use the bucket plan that the first rank made when these collectives "
                "were first compiled, for other shapes. For this graph, the plan raises the peak "
                "to %.1f MiB, %.1f MiB above the budget. Compile shapes with a small peak first, "
                "or set memory_budget in bytes.",
                self.name,
                peak / _MIB,
                (peak - limit_bytes) / _MIB,
            )


def _summary(
    items: Sequence[SchedulableCollective],
    adopted: Sequence[tuple[Mode, list[SchedulableCollective]]],
    what: str,
) -> str:
    buckets = [
        (mode, members)
        for mode, members in adopted
        if (members[0].tag.role == "gather") == (what == "gathers")
    ]
    modes = ", ".join(dict.fromkeys(mode for mode, _ in buckets)) or "none"
    merged = sum(len(members) for _, members in buckets)
    return f"{merged} of {len(items)} {what} in {len(buckets)} buckets ({modes})"


# --- planning -------------------------------------------------------------------------------------
def _bucket_key(item: SchedulableCollective, options: Bucket) -> BucketKey:
    gathers, key = item.tag.role == "gather", _compatibility_key(item)
    mode: Mode = options.mode if options.mode != "auto" else _cheapest_mode(item, gathers)
    if value_of(item.source).dim() == 0:
        mode = "single"  # scalars are few, and have no rows to be cut by
    width = _row_shape(item) if mode == "flat" and "all_reduce" in key else None
    return BucketKey(mode, (*key, width), compat.is_gloo(key[1]))


def _agree_on_buckets(
    planned: list[PlannedBucket], items: Sequence[SchedulableCollective], options: str
) -> list[tuple[Mode, list[SchedulableCollective]]]:
    """Returns the bucket plan of each group's first rank.

    Which buckets fit the budget depends on shapes, and ranks may have different shapes. A rank may
    also recompile when the other ranks do not. The same collectives therefore always get the same
    buckets, as long as the target is the same.
    """
    adopted: list[tuple[Mode, list[SchedulableCollective]]] = []
    for group in dict.fromkeys(str(_compatibility_key(item)[1]) for item in items):
        own = [item for item in items if str(_compatibility_key(item)[1]) == group]
        numbers = {item: number for number, item in enumerate(own)}
        mine = [
            (bucket.mode, [numbers[item] for item in bucket.items])
            for bucket in planned
            if bucket.items[0] in numbers
        ]
        described = [
            (*map(str, _compatibility_key(item)), item.tag.params, item.full_bytes) for item in own
        ]
        signature = hashlib.sha256(repr((options, described)).encode()).hexdigest()
        answers = exchange(
            group,
            "the bucket plan",
            [signature, mine],
            remember=f"{signature} {current_target()!r}",
        )
        # If another rank has other collectives, the agreement check on collectives reports it
        # later.
        agreed = answers[0][1] if all(answer[0] == signature for answer in answers) else mine
        adopted += [(mode, [own[number] for number in members]) for mode, members in agreed]
    return adopted


def _compatibility_key(item: SchedulableCollective) -> tuple[Any, ...]:
    collective = collective_of(item.started)
    assert collective is not None
    return (
        collective.op,
        collective.group,
        collective.dtypes,
        collective.reduce_op,
        value_of(item.source).device,
    )


def _row_shape(item: SchedulableCollective) -> tuple[int, ...] | None:
    """Row shape of a gradient that can be concatenated with others along dimension 0 and
    all-reduced with them; None if it cannot.
    """
    shape = value_of(item.source).shape
    return (
        tuple(shape[1:])
        if len(shape) > 1 and all(isinstance(size, int) for size in shape)
        else None
    )


def _cheapest_mode(item: SchedulableCollective, gathers: bool) -> Mode:
    """The mode that costs a member least: a launch of its own, or the copies that sharing a launch
    needs.
    """
    collective, target = collective_of(item.started), current_target()
    assert collective is not None
    ranks = group_size(collective.group)
    costs: dict[Mode, float] = {"single": latency_us(collective.op, ranks, target)}
    gloo_copies = 2 * copy_us(item.full_bytes, target) if compat.is_gloo(collective.group) else 0.0
    # gloo copies everything it gathers, and copies what it reduces in a coalesced call. Other
    # backends launch a coalesced call without copies.
    costs["coalesced"] = 0.0 if gathers else gloo_copies
    costs["flat"] = copy_us(item.full_bytes, target) + copy_us(item.full_bytes // ranks, target)
    return min(costs, key=lambda mode: costs[mode])


# --- rewriting ------------------------------------------------------------------------------------
class _BucketWriter:
    """Rewrites the graph for one bucket."""

    def __init__(
        self, graph: fx.Graph, items: Sequence[SchedulableCollective], number: int, origin: str
    ) -> None:
        self.items, self._number, self._origin = items, number, origin
        collective = collective_of(items[0].started)
        assert collective is not None
        self._group, self._op, self._reduce_op = (
            collective.group,
            collective.op,
            collective.reduce_op,
        )
        self.ranks = group_size(collective.group)
        self.params = tuple(item.tag.params[0] for item in items)  # one per member, in order
        self.nbytes = sum(item.tag.nbytes for item in items)
        self._graph = graph

    # A bucket of gathers starts where its first member started.
    def gather_coalesced(self) -> None:
        edit = self._gather_at()
        started = edit.call(
            compat.functional.all_gather_into_tensor_coalesced.default,
            [item.source for item in self.items],
            self.ranks,
            self._group,
        )
        self._tag(started, "gather", self.nbytes)
        self._distribute_outputs(edit, started)

    def gather_flat(self) -> None:
        edit = self._gather_at()
        flat = edit.call(
            aten.cat.default,
            [edit.call(aten.reshape.default, item.source, [-1]) for item in self.items],
        )
        self._tag(flat, "gather_input")
        started = edit.call(
            compat.functional.all_gather_into_tensor.default, flat, self.ranks, self._group
        )
        self._tag(started, "gather", self.nbytes)
        gathered = edit.call(compat.functional.wait_tensor.default, started)
        self._tag(gathered, "gathered")
        by_rank = edit.call(aten.view.default, gathered, [self.ranks, -1])
        offset = 0
        for item in self.items:
            shape, count = value_of(item.started).shape, value_of(item.source).numel()
            part = edit.call(aten.slice.Tensor, by_rank, 1, offset, offset + count)
            if self.ranks > 1:
                part = edit.call(aten.clone.default, part, memory_format=torch.contiguous_format)
            full = edit.call(aten.view.default, part, list(shape))
            self._replace_result(full, item)
            offset += count
        self._erase_members()

    def _gather_at(self) -> Editor:
        first = self.items[0].started
        for item in self.items[1:]:
            for node in item.inputs:
                first.prepend(node)
        return Editor(self._graph, before=first)

    # A bucket of reductions starts where its last member started.
    def reduce_coalesced(self) -> None:
        edit = self._reduce_at()
        sources = [item.source for item in self.items]
        if self._op == "all_reduce":
            sources = [self._contiguous(edit, item) for item in self.items]
            started = edit.call(
                compat.functional.all_reduce_coalesced.default,
                sources,
                self._reduce_op,
                self._group,
            )
        else:
            started = edit.call(
                compat.functional.reduce_scatter_tensor_coalesced.default,
                sources,
                self._reduce_op,
                self.ranks,
                self._group,
            )
        self._tag(started, "reduce", self.nbytes)
        self._distribute_outputs(edit, started)

    def reduce_flat(self) -> None:
        edit = self._reduce_at()
        (
            self._reduce_flat_all_reduce
            if self._op == "all_reduce"
            else self._reduce_flat_reduce_scatter
        )(edit)

    def _reduce_flat_all_reduce(self, edit: Editor) -> None:
        sources = [item.source for item in self.items]
        stacked = _row_shape(self.items[0]) is not None
        flat = edit.call(
            aten.cat.default,
            sources if stacked else [self._reshaped(edit, item, [-1]) for item in self.items],
        )
        self._tag(flat, "reduce_input")
        started = edit.call(
            compat.functional.all_reduce.default, flat, self._reduce_op, self._group
        )
        reduced = self._await(edit, started)
        offset = 0
        for item in self.items:
            value = value_of(item.source)
            count = value.shape[0] if stacked else value.numel()
            # A graph output must not keep the whole bucket alive, so it is copied out. Other
            # results are sliced further by the nodes that follow.
            own = any(user.op == "output" for user in item.wait.users)
            part = edit.call(
                aten.slice_copy.Tensor if own else aten.slice.Tensor,
                reduced,
                0,
                offset,
                offset + count,
            )
            if not stacked:
                part = edit.call(aten.view.default, part, list(value.shape))
            self._replace_result(part, item)
            offset += count
        self._erase_members()

    def _reduce_flat_reduce_scatter(self, edit: Editor) -> None:
        """Pack the bucket so that each rank's block consists of its block of every gradient. The
        reduced block then splits into views.
        """
        packed = edit.call(
            aten.cat.default,
            [self._reshaped(edit, item, [self.ranks, -1]) for item in self.items],
            1,
        )
        flat = edit.call(aten.view.default, packed, [-1])
        for node in (packed, flat):
            self._tag(node, "reduce_input")
        started = edit.call(
            compat.functional.reduce_scatter_tensor.default,
            flat,
            self._reduce_op,
            self.ranks,
            self._group,
        )
        reduced = self._await(edit, started)
        offset = 0
        for item in self.items:
            value = value_of(item.wait)
            part = edit.call(aten.slice.Tensor, reduced, 0, offset, offset + value.numel())
            self._replace_result(edit.call(aten.view.default, part, list(value.shape)), item)
            offset += value.numel()
        self._erase_members()

    def _contiguous(self, edit: Editor, item: SchedulableCollective) -> fx.Node:
        """The member's input with the strides of its result: the fake all_reduce returns contiguous
        tensors, as the real ones do, but the fake all_reduce_coalesced keeps strides.
        """
        if value_of(item.source).is_contiguous():
            return item.source
        dense = torch.contiguous_format
        node = edit.call(aten.clone.default, item.source, memory_format=dense)
        add_tag(node, Tag("reduce_input", item.tag.params, 0, self._number, self._origin))
        return node

    def _reshaped(self, edit: Editor, item: SchedulableCollective, shape: list[int]) -> fx.Node:
        node = edit.call(aten.reshape.default, item.source, shape)
        add_tag(node, Tag("reduce_input", item.tag.params, 0, self._number, self._origin))
        return node

    def _reduce_at(self) -> Editor:
        """Move the waits and results of all members to a place after the last member starts."""
        moving = {node: None for item in self.items for node in (item.wait, *item.results)}
        after = self.items[-1].started.next
        while after in moving:
            after = after.next
        for node in moving:
            after.prepend(node)
        return Editor(self._graph, before=self.items[0].wait, like=self.items[-1].started)

    # Gathers and reductions.
    def _await(self, edit: Editor, started: fx.Node) -> fx.Node:
        self._tag(started, "reduce", self.nbytes)
        done = edit.call(compat.functional.wait_tensor.default, started)
        self._tag(done, "reduced")
        return done

    def _distribute_outputs(self, edit: Editor, started: fx.Node) -> None:
        """Let each member's wait read its output of the coalesced collective. All waits move to the
        first one, because nothing is freed before the last wait.
        """
        after = self.items[0].wait
        for at, item in enumerate(self.items):
            part = edit.call(operator.getitem, started, at)
            role: Role = "gathered" if item.tag.role == "gather" else "reduced"
            add_tag(part, Tag(role, item.tag.params, 0, self._number, self._origin))
            item.wait.replace_input_with(item.started, part)
            if tag_of(item.wait) is not None:
                retag(item.wait, bucket=self._number)
            if at:
                after.append(item.wait)
                after = item.wait
        self._erase_members()

    def _replace_result(self, node: fx.Node, item: SchedulableCollective) -> None:
        """Replace the result of `item` by `node`, which holds the same value."""
        tag = tag_of(item.wait)
        if tag is not None:
            add_tag(node, replace(tag, bucket=self._number, origin=self._origin))
        item.wait.replace_all_uses_with(node)

    def _erase_members(self) -> None:
        """Erase the members' own collectives. Runs last, because the first member's nodes mark
        where new nodes are inserted.
        """
        for item in self.items:
            if not item.wait.users:
                self._graph.erase_node(item.wait)
            self._graph.erase_node(item.started)

    def _tag(self, node: fx.Node, role: Role, sent_bytes: int = 0) -> None:
        whole = nbytes(value_of(node)) if role == "gather_input" else 0
        add_tag(
            node, Tag(role, self.params, sent_bytes, self._number, self._origin, block_bytes=whole)
        )


_WRITERS: dict[tuple[bool, str], Any] = {
    (True, "coalesced"): _BucketWriter.gather_coalesced,
    (True, "flat"): _BucketWriter.gather_flat,
    (False, "coalesced"): _BucketWriter.reduce_coalesced,
    (False, "flat"): _BucketWriter.reduce_flat,
}
