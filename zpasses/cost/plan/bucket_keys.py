"""Which collectives can share a launch, and in which form that is cheapest."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from zpasses import compat
from zpasses.cost.memory.collective_memory import gloo_packing_bytes
from zpasses.cost.memory.collective_moves import SchedulableCollective
from zpasses.cost.time.roofline import copy_us, latency_us, nodes_of
from zpasses.cost.time.target import current_target
from zpasses.graph.queries import collective_of, value_of

Mode = Literal["single", "coalesced", "flat"]


@dataclass(frozen=True)
class BucketKey:
    """How a collective may share a launch. Members have equal mode and compatibility."""

    mode: Mode
    """"single" shares no launch, "coalesced" is one launch of several tensors, "flat" one packed
    tensor."""
    compatibility: Hashable
    """Equal for collectives that one launch may contain."""
    gloo_ranks: int = 0
    """Size of the group if gloo runs the collective, else 0. Over gloo, the small tensors of one
    launch are packed."""


def bucket_key(
    item: SchedulableCollective, wanted: Literal["auto", "coalesced", "flat"]
) -> BucketKey:
    """Returns how a collective may be bucketed on the current target.

    Args:
        item: a collective of one tensor.
        wanted: the form of a bucket; "auto" takes the one that costs the collective least, which
            may be no bucket.
    """
    if item.is_host_copy:
        return BucketKey("single", item.tag.role)
    key = compatibility_key(item)
    mode: Mode = wanted if wanted != "auto" else _cheapest_mode(item)
    if mode == "coalesced" and "all_to_all" in key[0]:
        mode = "flat"  # no functional collective takes several
    if value_of(item.source).dim() == 0:
        mode = "single"  # scalars are few, and have no rows to be cut by
    width = row_shape(item) if mode == "flat" and "all_reduce" in key else None
    return BucketKey(mode, (*key, width), gloo_ranks(key[1]))


def gloo_ranks(group: str) -> int:
    """Returns the size of a group of gloo, and 0 for groups of other backends."""
    return len(compat.group_ranks(group)) if compat.is_gloo(group) else 0


def compatibility_key(item: SchedulableCollective) -> tuple[Any, ...]:
    """Returns what members of one bucket have in common: operator, group, dtypes, reduce operator,
    encoding, device.
    """
    collective = collective_of(item.started)
    assert collective is not None
    return (
        collective.op,
        collective.group,
        collective.dtypes,
        collective.reduce_op,
        collective.encoding,
        value_of(item.source).device,
    )


def row_shape(item: SchedulableCollective) -> tuple[int, ...] | None:
    """Row shape of a gradient that can be concatenated with others along dimension 0 and
    all-reduced with them; None if it cannot.
    """
    shape = value_of(item.source).shape
    return (
        tuple(shape[1:])
        if len(shape) > 1 and all(isinstance(size, int) for size in shape)
        else None
    )


def _cheapest_mode(item: SchedulableCollective) -> Mode:
    """The mode that costs a member least: a launch of its own, or the copies that sharing a launch
    needs.
    """
    collective, target = collective_of(item.started), current_target()
    assert collective is not None
    group = compat.group_ranks(collective.group)
    ranks, nodes = len(group), nodes_of(group, target)
    costs: dict[Mode, float] = {"single": latency_us(collective.op, ranks, target, nodes)}
    # A coalesced call starts without copies, except that gloo packs what it all-reduces.
    packs = "all_reduce" in collective.op and compat.is_gloo(collective.group)
    costs["coalesced"] = 2 * copy_us(item.full_bytes, target) if packs else 0.0
    if "all_to_all" in collective.op:
        del costs["coalesced"]
    costs["flat"] = copy_us(item.full_bytes, target) + copy_us(item.full_bytes // ranks, target)
    return min(costs, key=lambda mode: costs[mode])


def member_packing_bytes(item: SchedulableCollective, key: BucketKey) -> int:
    """Returns the bytes that a member of a merged collective adds to the buffers of packed tensors.

    The graph packs the members of a flat bucket. gloo packs what it all-reduces, and small tensors.
    """
    if key.mode == "flat":
        return item.tag.nbytes if item.is_gather else item.full_bytes
    if key.mode == "coalesced" and key.gloo_ranks:
        if "all_reduce" in str(item.started.target):
            return item.full_bytes
        return gloo_packing_bytes(item.full_bytes // key.gloo_ranks, key.gloo_ranks)
    return 0
