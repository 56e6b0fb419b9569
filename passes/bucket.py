"""Merge neighbouring collectives of one group and dtype into fewer, larger ones.

Before
  a = wait_tensor(all_gather(shard_a));  y = mm(x, a)
  b = wait_tensor(all_gather(shard_b));  z = mm(y, b)
After, mode=coalesced
  s = all_gather_coalesced([shard_a, shard_b])
  a = wait_tensor(s[0]);  b = wait_tensor(s[1])
  y = mm(x, a);  z = mm(y, b)
After, mode=flat
  flat = cat([view(shard_a), view(shard_b)])
  all = view(wait_tensor(all_gather(flat)), [ranks, -1])
  a = view(clone(all[:, :n]), ...);  b = view(clone(all[:, n:]), ...)
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
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from zpasses.cost.memory.collective_moves import (
    MemoryCurve,
    SchedulableCollective,
    movable_gathers,
    movable_reductions,
)
from zpasses.cost.memory.liveness import NOTABLE_BYTES
from zpasses.cost.plan.bucket_keys import bucket_key, compatibility_key, gloo_ranks
from zpasses.cost.plan.bucket_planner import BucketKey, Mode, PlannedBucket, plan_buckets
from zpasses.cost.time.target import current_target
from zpasses.errors import OptionError
from zpasses.graph.patterns import tag_foreign_gathers
from zpasses.graph.reduction_groups import replicate_groups
from zpasses.option_values import MemoryBudget, parse_budget
from zpasses.passes.writers.bucket_writer import merge_collectives
from zpasses.pipeline.events import note
from zpasses.pipeline.facts import Facts
from zpasses.pipeline.passes import Level, Pass
from zpasses.ranks.agree import adopt

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

    @property
    def facts(self) -> Facts:
        return Facts(votes=self.cap_mb > 0)

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
            merge_collectives(graph, members, mode, number, self.name)
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
        choose = functools.partial(bucket_key, wanted=self.mode)
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
            return BucketKey(mode, number, gloo_ranks(str(compatibility_key(item)[1])))

        curve = MemoryCurve(graph, MemoryBudget(most_bytes=sys.maxsize))
        plan_buckets(items, choose, curve, math.inf, plan_for_overlap=self.plan_for_overlap)
        peak = max(curve.live_bytes)
        if peak > limit_bytes + NOTABLE_BYTES:
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
        if (members[0].is_gather) == (what == "gathers")
    ]
    modes = ", ".join(dict.fromkeys(mode for mode, _ in buckets)) or "none"
    merged = sum(len(members) for _, members in buckets)
    return f"{merged} of {len(items)} {what} in {len(buckets)} buckets ({modes})"


# --- planning -------------------------------------------------------------------------------------
def _agree_on_buckets(
    planned: list[PlannedBucket], items: Sequence[SchedulableCollective], options: str
) -> list[tuple[Mode, list[SchedulableCollective]]]:
    """Returns the bucket plan of each group's first rank.

    Which buckets fit the budget depends on shapes. The same collectives always get the same
    buckets.
    """
    adopted: list[tuple[Mode, list[SchedulableCollective]]] = []
    replicas = replicate_groups(items[0].started.graph)
    for group in dict.fromkeys(str(compatibility_key(item)[1]) for item in items):
        own = [item for item in items if str(compatibility_key(item)[1]) == group]
        numbers = {item: number for number, item in enumerate(own)}
        mine = [
            (bucket.mode, [numbers[item] for item in bucket.items])
            for bucket in planned
            if bucket.items[0] in numbers
        ]
        keys = [compatibility_key(item) for item in own]
        described = [
            (key[0], *map(str, key[2:]), item.tag.params, item.full_bytes)
            for key, item in zip(keys, own, strict=True)
        ]
        # Replicas reduce in one order, so they share the plan, too.
        plan, _ = adopt(
            (group, *replicas),
            "the bucket plan",
            (options, described),
            mine,
            planned_for=current_target(),
        )
        adopted += [(mode, [own[number] for number in members]) for mode, members in plan]
    return adopted
