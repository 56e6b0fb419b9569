"""Plan which collectives share a bucket, under a limit on peak memory.

The pass `bucket` executes the plan. Buckets are formed greedily, in graph order, from collectives
with equal bucket keys. A collective joins the open bucket if the memory curve of the graph stays
within its limit.

A collective occupies memory over a span of the graph: a gather from its start until its wait (its
full tensor lives on as before), a reduction from its start until its wait. All members of a bucket
have the same span. If `overlap` follows, a longer bucket also moves the spans of its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from zpasses.cost.memory.collective_moves import MemoryCurve, SchedulableCollective
from zpasses.cost.memory.liveness import gloo_packing_bytes, scratch_bytes

Mode = Literal["single", "coalesced", "flat"]


@dataclass(frozen=True)
class BucketKey:
    """How a collective may be bucketed. Members of a bucket have equal mode and compatibility."""

    mode: Mode
    """"single" is no bucket, "coalesced" one launch of several tensors, "flat" one packed tensor.
    """
    compatibility: Hashable
    """Equal for collectives that one bucket may contain."""
    gloo_ranks: int = 0
    """Size of the group if gloo runs the collective, else 0. Over gloo, the small tensors of one
    launch are packed."""


@dataclass(eq=False)
class PlannedBucket:
    """Collectives that are merged into one."""

    key: BucketKey
    items: list[SchedulableCollective]
    start: int
    """Position in the memory curve of the node that starts the collective."""
    end: int
    """Position after the collective's wait."""

    @property
    def mode(self) -> Mode:
        return self.key.mode

    @property
    def is_gather(self) -> bool:
        return self.items[0].is_gather

    @property
    def full_bytes(self) -> int:
        return sum(item.full_bytes for item in self.items)


def plan_buckets(
    items: Sequence[SchedulableCollective],
    bucket_key: Callable[[SchedulableCollective], BucketKey],
    curve: MemoryCurve,
    cap_bytes: float,
    *,
    plan_for_overlap: bool,
) -> list[PlannedBucket]:
    """Plans the buckets with two or more members. The curve then includes their memory.

    Args:
        items: collectives of one tensor each, in graph order.
        bucket_key: returns the key of a collective.
        curve: the memory curve of the graph without buckets, which is changed in place.
        cap_bytes: largest size of the full tensors in one bucket, in bytes.
        plan_for_overlap: assume that the pass `overlap` follows. It starts each gather after the
            previous one has arrived, and awaits each reduction after the next one has started. The
            limit of the curve is then relative to the graph in which every single collective is
            overlapped this way.
    """
    options = (bucket_key, curve, cap_bytes, plan_for_overlap)
    gathers = _GatherPlanner([item for item in items if item.is_gather], *options)
    reductions = _ReductionPlanner([item for item in items if not item.is_gather], *options)
    if plan_for_overlap:
        gathers.simulate_overlap()
        reductions.simulate_overlap()
        curve.reset_limit()
    return [*gathers.plan(), *reductions.plan()]


_Change = tuple[int, int, int]
"""(start, end, bytes): from position `start` until before `end`, so many bytes more (or fewer)."""


class _BucketPlanner:
    """Forms buckets of either gathers or reductions, in graph order."""

    def __init__(
        self,
        items: Sequence[SchedulableCollective],
        bucket_key: Callable[[SchedulableCollective], BucketKey],
        curve: MemoryCurve,
        cap_bytes: float,
        plan_for_overlap: bool,
    ) -> None:
        self._items, self._bucket_key, self._curve = items, bucket_key, curve
        self._cap_bytes, self._plan_for_overlap = cap_bytes, plan_for_overlap
        self._starts = [curve.position[item.started] for item in items]
        self._ends = [curve.position[item.wait] + 1 for item in items]
        self._buckets: list[PlannedBucket] = []
        """Planned so far, in the order in which they start."""
        self._allocations: dict[fx.Node, list[_Change]] = {}

    def plan(self) -> list[PlannedBucket]:
        """Returns the buckets with two or more members."""
        open_buckets: dict[Hashable, PlannedBucket] = {}
        for number, item in enumerate(self._items):
            key = self._bucket_key(item)
            compatible = (key.compatibility, key.mode)
            bucket = open_buckets.get(compatible) if key.mode != "single" else None
            if (
                bucket is not None
                and bucket.full_bytes + item.full_bytes <= self._cap_bytes
                and self._try_join(bucket, number)
            ):
                continue
            new = PlannedBucket(key, [item], self._starts[number], self._ends[number])
            self._buckets.append(new)
            open_buckets[compatible] = new
        return [each for each in self._buckets if len(each.items) > 1]

    def _try_join(self, bucket: PlannedBucket, number: int) -> bool:
        """Adds a collective to a bucket unless the limit forbids it; returns whether it did."""
        raise NotImplementedError

    def _try_changes(self, changes: Sequence[_Change]) -> bool:
        """Applies the changes unless they exceed the curve's limit; returns whether it did."""
        real = [each for each in changes if each[0] < each[1] and each[2]]
        for change in real:
            self._curve.add(*change)
        low = min((each[0] for each in real), default=0)
        high = max((each[1] for each in real), default=0)
        if max(self._curve.live_bytes[low:high], default=0) <= self._curve.limit_bytes:
            return True
        for start, end, more in real:
            self._curve.add(start, end, -more)
        return False


class _GatherPlanner(_BucketPlanner):
    """Plans gathers. A bucket starts where its first member starts, and is awaited there."""

    def simulate_overlap(self) -> None:
        """Starts each gather after the previous one has arrived."""
        nodes = self._curve.base.nodes
        arrived = next((index for index, node in enumerate(nodes) if node.op != "placeholder"), 0)
        for number, item in enumerate(self._items):
            while nodes[arrived] in item.inputs:
                arrived += 1
            early = min(arrived, self._starts[number])
            made = min(
                [self._curve.position[node] for node in item.inputs], default=self._starts[number]
            )
            self._curve.add(
                early, self._starts[number], item.full_bytes + scratch_bytes(item.started)
            )
            self._curve.add(
                early, max(early, made), item.prepared_bytes - scratch_bytes(item.started)
            )
            self._starts[number], arrived = early, self._ends[number]

    def _try_join(self, bucket: PlannedBucket, number: int) -> bool:
        item, start, end = self._items[number], self._starts[number], self._ends[number]
        old, new = bucket.items, [*bucket.items, item]
        flat = bucket.mode == "flat"
        changes = [
            (bucket.start, start, item.full_bytes),
            (
                bucket.start,
                bucket.end,
                item.prepared_bytes + _packing_bytes(bucket, new) - _packing_bytes(bucket, old),
            ),
            # Members are copied out while the next gather is already in flight.
            (
                bucket.end - 1,
                bucket.end + 1,
                _unpacking_bytes(new) - _unpacking_bytes(old) if flat else 0,
            ),
            (start, end, -item.prepared_bytes),
        ]
        arrived = self._buckets[-1].end
        follows = self._plan_for_overlap and number + 1 < len(self._items)
        if follows:  # the next gather starts earlier, because this one has no wait of its own
            following = self._items[number + 1]
            changes.append(
                (arrived, self._starts[number + 1], following.full_bytes + following.prepared_bytes)
            )
        if not self._try_changes(changes):
            return False
        bucket.items.append(item)
        if follows:
            self._starts[number + 1] = min(self._starts[number + 1], arrived)
        return True


class _ReductionPlanner(_BucketPlanner):
    """Plans reductions. A bucket starts where its last member starts."""

    def simulate_overlap(self) -> None:
        """Awaits each reduction after the next one has started, and the last one at the end."""
        for number, item in enumerate(self._items):
            end, last = self._ends[number], number + 1 == len(self._items)
            late = max(
                end, len(self._curve.base.nodes) - 1 if last else self._starts[number + 1] + 1
            )
            for change in self._delay_wait([item], end, late):
                self._curve.add(*change)
            self._ends[number] = late

    def _try_join(self, bucket: PlannedBucket, number: int) -> bool:
        item, start, end = self._items[number], self._starts[number], self._ends[number]
        changes = [
            *self._delay_wait(bucket.items, bucket.end, end),
            (bucket.start, bucket.end, -_packing_bytes(bucket, bucket.items)),
            (start, end, _packing_bytes(bucket, [*bucket.items, item])),
        ]
        at = self._buckets.index(bucket)
        before = self._buckets[at - 1] if self._plan_for_overlap and at else None
        after = self._buckets[at + 1].start if at + 1 < len(self._buckets) else start
        if before is not None:  # it is awaited after the start of the bucket that now follows it
            changes += self._delay_wait(before.items, before.end, after + 1)
            changes.append((before.end, after + 1, _packing_bytes(before, before.items)))
        if not self._try_changes(changes):
            return False
        if before is not None:
            before.end = max(before.end, after + 1)
        bucket.items.append(item)
        bucket.start, bucket.end = start, end
        self._buckets.append(self._buckets.pop(at))
        return True

    def _delay_wait(
        self, items: Sequence[SchedulableCollective], old: int, new: int
    ) -> Iterator[_Change]:
        """Yields the memory changes of moving these reductions' waits from `old` to `new`.

        Their inputs, outputs and scratch memory live longer, and their results are allocated later.
        """
        if new <= old:
            return
        for item in items:
            yield old, new, item.full_bytes
            for _, end, made in self._allocated(item.started):
                yield max(old, end), new, made
            for node in item.results:
                for first, end, made in self._allocated(node):
                    yield max(first, old), min(max(first, new), end), -made

    def _allocated(self, node: fx.Node) -> Sequence[_Change]:
        """Returns what a node allocates in the original graph, one change per buffer."""
        if not self._allocations:
            for buffer in self._curve.base.buffers:
                self._allocations.setdefault(buffer.node, []).append(
                    (buffer.first, buffer.last + 1, buffer.nbytes)
                )
        return self._allocations.get(node, ())


def _packing_bytes(bucket: PlannedBucket, items: Sequence[SchedulableCollective]) -> int:
    """Memory of the buffers that the members are packed into."""
    return sum(member_packing_bytes(item, bucket.key) for item in items) if len(items) > 1 else 0


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


def _unpacking_bytes(items: Sequence[SchedulableCollective]) -> int:
    """Memory of the full tensors that are copied out of a flat bucket."""
    return sum(item.full_bytes for item in items) if len(items) > 1 else 0
