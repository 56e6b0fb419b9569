"""Flatten tensors on the device where a graph flattens them on the host.

Before
  a = _to_copy(p, device=cpu)
  flat = cat([view(a, [-1]), view(q, [-1])])
  out = _to_copy(flat, device=cuda)
After, tier=plain
  b = _to_copy(q, device=cuda)
  out = cat([view(p, [-1]), b])
After, tier=distributed (rank 1 of 2)
  b = _to_copy(slice(q, 2, 6), device=cuda)
  part = cat([b, full([2], 0)])
  started = all_gather_into_tensor(part, 2, group)
  out = slice(wait_tensor(started), 0, 0, 10)

The pass chooses one of three tiers by the free memory of the device. `plain` concatenates
everything on the device. `distributed` lets each rank concatenate its part, and one all-gather
assembles the whole buffer. `host` leaves the graph unchanged. Each tier needs this much device
memory on top of what the device holds already:

- `plain`: the flat buffer, and a copy of every piece that comes from the host or changes its dtype.
- `distributed`: the larger of two sums. The first is this rank's part twice: its pieces, and the
  part itself. The second is the part and the gathered buffer, less those of the device's own pieces
  that nothing reads later.
- `host`: nothing that any rank could save.

Contract: the values, shape and dtype of the result and the offset of every tensor in it stay the
same. The ranks of a group vote, and all take the worst tier that one of them needs. The pass
rewrites graphs of aten ops, and adds nothing that a gradient could flow through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.memory import device_memory
from zpasses.errors import OptionError, PassError
from zpasses.graph.tags import add_tag, tag_of
from zpasses.option_values import format_size
from zpasses.passes.writers.flatten_patterns import find_flattenings
from zpasses.passes.writers.flatten_writer import FlattenPlan, Tier, freed_bytes
from zpasses.pipeline.base_pass import Level, Pass, process_token
from zpasses.pipeline.events import note
from zpasses.pipeline.facts import Facts
from zpasses.ranks.agree import exchange
from zpasses.ranks.vote import has_other_ranks

_TIERS: tuple[Tier, ...] = ("plain", "distributed", "host")

_HEADROOM = 0.1
"""Fraction of the device's free memory that stays unused."""


@dataclass(frozen=True)
class FlattenOnDevice(Pass):
    """Flatten tensors on the device instead of the host if the device has room."""

    name: ClassVar[str] = "flatten-on-device"
    level: ClassVar[Level] = Level.JOINT

    tier: Literal["auto", "plain", "distributed", "host"] = "auto"
    """`auto` takes the first of `plain`, `distributed` and `host` for which every rank has room.
    The others force that tier.
    """
    group: str = ""
    """Process group whose ranks run this graph together and choose the same tier; `0` is the group
    of all ranks. Without a group, this rank chooses on its own.
    """
    replicated: bool = False
    """Whether the flattened tensors hold equal values on all ranks of the group. The distributed
    tier assumes that. A graph cannot prove it.
    """
    free_bytes: int | None = None
    """Free bytes of the device to plan for; `none` queries the device. A tenth stays unused."""

    def __post_init__(self) -> None:
        if self.tier == "distributed" and not (self.group and self.replicated):
            raise OptionError(
                f"{self.name}: tier=distributed gathers parts from other ranks. Set group=... to "
                "name the ranks, and replicated=true to state that they hold the same values."
            )

    @property
    def facts(self) -> Facts:
        return Facts(
            votes=self.tier == "auto" and bool(self.group),
            simulatable=not self.replicated,  # simulated ranks hold different values
            cacheable=self.tier != "auto"
            or self.free_bytes is not None,  # else free memory decides
        )

    def digest(self) -> str:
        """Returns the digest of the pass. With `tier=auto` it also identifies the process, because
        a choice by free memory must not come from another process's cache.
        """
        return super().digest() + (f"-{process_token()}" if self.tier == "auto" else "")

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of flat buffers that are now made on the device."""
        if self.group and self.group not in compat.group_backends():
            known = (
                ", ".join(map(repr, compat.group_backends()))
                or "none; call torch.distributed.init_process_group() first"
            )
            raise PassError(
                f"pass {self}: this process has no process group {self.group!r}. Known: {known}."
            )
        replicas = self.group if self.replicated else ""
        plans = [
            FlattenPlan(each, replicas, freed_bytes(graph, each), self.name)
            for each in find_flattenings(graph)
            if tag_of(each.move) is None
        ]
        if not plans:
            return 0
        for plan, (tier, reason) in zip(plans, self._choose(plans), strict=True):
            flat = plan.flattening.move
            dtype = str(plan.flattening.dtype).removeprefix("torch.")
            what = f"{dtype}[{plan.flattening.numel}] of {len(plan.flattening.names)} tensors"
            note(f"{self.name}: {what} flattened as {tier}: {reason}")
            if tier != "host":
                flat = plan.apply(graph, tier)
            add_tag(flat, plan.tag(f"{tier}: {reason}"))
        return sum(plan.applied for plan in plans)

    # --- choosing ---------------------------------------------------------------------------------
    def _choose(self, plans: Sequence[FlattenPlan]) -> list[tuple[Tier, str]]:
        """Returns the tier of each flat buffer, and why."""
        if self.tier != "auto":
            return [(self.tier, "requested") for _ in plans]
        mine = [
            self._local_vote(plan, sum(each.flattening.nbytes for each in plans[:i]))
            for i, plan in enumerate(plans)
        ]
        if not self.group:
            return [(_TIERS[tier], reason) for tier, reason in mine]
        sizes = ", ".join(f"{plan.flattening.dtype}[{plan.flattening.numel}]" for plan in plans)
        # A rank may recompile for a new batch shape when the other ranks do not. Inside a compile,
        # the answer for the same graph is therefore remembered.
        question = f"{self} of {sizes}"
        remember = question if compat.is_tracing() else None
        me = torch.distributed.get_rank()
        worst = exchange(
            self.group,
            question,
            [(tier, -me, reason) for tier, reason in mine],
            remember=remember,
            merge=lambda votes: [max(column) for column in zip(*votes, strict=True)],
        )
        said = "rank {}: {}" if has_other_ranks(self.group) else "{1}"
        return [(_TIERS[tier], said.format(-rank, reason)) for tier, rank, reason in worst]

    def _local_vote(self, plan: FlattenPlan, spent: int) -> tuple[int, str]:
        free = (
            self.free_bytes
            if self.free_bytes is not None
            else device_memory.free_bytes(plan.flattening.device)
        )
        if free is None:
            device = plan.flattening.device
            return 2, f"the free memory of {device} is unknown; set free_bytes=..."
        usable = int(free * (1 - _HEADROOM)) - spent
        needed = plan.needed_bytes()
        tier = next((i for i, need in enumerate(needed) if need is not None and need <= usable), 2)
        requirements = ", ".join(
            f"{name} needs {format_size(need)}"
            for name, need in zip(_TIERS, needed, strict=False)
            if need is not None
        )
        available = f"{format_size(max(usable, 0))} of {format_size(free)} free are usable"
        return tier, f"{requirements}; {available}"
