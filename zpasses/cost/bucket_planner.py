"""Which collectives share a bucket: neighbours that pay and fit, in the order of the graph.

A collective holds memory over a span of the graph: a gather from its start until its wait (its full
tensor lives on as before), a reduction from its start until it is awaited. The members of a bucket
have one span, and where `overlap` follows, a longer bucket moves the spans of its neighbours as
well. A member joins if the memory curve stays within its limit with all of that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from zpasses.cost.collective_moves import MemoryCurve, SchedulableCollective
from zpasses.cost.memory import scratch_bytes
from zpasses.graph.tags import tag_of

__all__ = ["Bucketed", "Choice", "Mode", "plan_buckets"]

Mode = Literal["single", "coalesced", "flat"]


@dataclass(frozen=True)
class Choice:
    """What becomes of one collective."""

    mode: Mode
    key: Hashable
    """What it shares with others of its bucket."""
    gloo: bool
    """Whether gloo runs it, which copies what it communicates together."""


@dataclass(eq=False)
class Bucketed:
    """Collectives that will be one."""

    choice: Choice
    items: list[SchedulableCollective]
    start: int
    end: int
    """Behind its wait."""

    @property
    def mode(self) -> Mode:
        return self.choice.mode

    @property
    def gathers(self) -> bool:
        return self.items[0].tag.role == "gather"

    @property
    def full_bytes(self) -> int:
        return sum(item.full_bytes for item in self.items)


def plan_buckets(
    items: Sequence[SchedulableCollective],
    choose: Callable[[SchedulableCollective], Choice],
    curve: MemoryCurve,
    cap_bytes: float,
    *,
    plan_for_overlap: bool,
) -> list[Bucketed]:
    """Buckets of two and more; the curve is left as they make it.

    Args:
        items: collectives of one tensor each, in graph order.
        cap_bytes: most bytes of full tensors in one bucket.
        plan_for_overlap: a gather will start once the one before it has arrived, a reduction be
            awaited once the next has started. The limit of the curve then follows from the graph in
            which each collective by itself does so.
    """
    gathers = _Gathers(
        [item for item in items if item.tag.role == "gather"],
        choose,
        curve,
        cap_bytes,
        plan_for_overlap,
    )
    reductions = _Reductions(
        [item for item in items if item.tag.role == "reduce"],
        choose,
        curve,
        cap_bytes,
        plan_for_overlap,
    )
    if plan_for_overlap:
        gathers.spread()
        reductions.spread()
        curve.rebase()
    return [*gathers.plan(), *reductions.plan()]


_Change = tuple[int, int, int]
"""From a position until before another: bytes more, or less."""


class _Planner:
    def __init__(
        self,
        items: Sequence[SchedulableCollective],
        choose: Callable[[SchedulableCollective], Choice],
        curve: MemoryCurve,
        cap_bytes: float,
        plan_for_overlap: bool,
    ) -> None:
        self._items, self._choose, self._curve, self._cap_bytes, self._plan_for_overlap = (
            items,
            choose,
            curve,
            cap_bytes,
            plan_for_overlap,
        )
        self._starts = [curve.position[item.started] for item in items]
        self._ends = [curve.position[item.wait] + 1 for item in items]
        self._launches: list[Bucketed] = []
        """As planned so far, in the order in which they start."""
        self._made: dict[fx.Node, list[_Change]] = {}

    def plan(self) -> list[Bucketed]:
        open_: dict[Hashable, Bucketed] = {}
        for number, item in enumerate(self._items):
            choice = self._choose(item)
            key = (choice.key, choice.mode)
            bucket = open_.get(key) if choice.mode != "single" else None
            if (
                bucket is not None
                and bucket.full_bytes + item.full_bytes <= self._cap_bytes
                and self._joins(bucket, number)
            ):
                continue
            made = Bucketed(choice, [item], self._starts[number], self._ends[number])
            self._launches.append(made)
            open_[key] = made
        return [each for each in self._launches if len(each.items) > 1]

    def _joins(self, bucket: Bucketed, number: int) -> bool:
        raise NotImplementedError

    def _takes(self, changes: Sequence[_Change]) -> bool:
        """Make these changes to the curve, unless they lift it above its limit."""
        real = [each for each in changes if each[0] < each[1] and each[2]]
        for change in real:
            self._curve.add(*change)
        low, high = (
            min((each[0] for each in real), default=0),
            max((each[1] for each in real), default=0),
        )
        if max(self._curve.live_bytes[low:high], default=0) <= self._curve.limit_bytes:
            return True
        for start, end, more in real:
            self._curve.add(start, end, -more)
        return False


class _Gathers(_Planner):
    """A bucket starts where its first member does, and is awaited there."""

    def spread(self) -> None:
        """Start each once the one before has arrived."""
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
            self._curve.add(early, max(early, made), _beside(item) - scratch_bytes(item.started))
            self._starts[number], arrived = early, self._ends[number]

    def _joins(self, bucket: Bucketed, number: int) -> bool:
        item, start, end = self._items[number], self._starts[number], self._ends[number]
        old, new = bucket.items, [*bucket.items, item]
        flat = bucket.mode == "flat"
        changes = [
            (bucket.start, start, item.full_bytes),
            (bucket.start, bucket.end, _beside(item) + _packed(bucket, new) - _packed(bucket, old)),
            # Copied out while the next gather is under way already.
            (bucket.end - 1, bucket.end + 1, _unpacked(new) - _unpacked(old) if flat else 0),
            (start, end, -_beside(item)),
        ]
        arrived = self._launches[-1].end
        follows = self._plan_for_overlap and number + 1 < len(self._items)
        if follows:  # the next one starts earlier, as there is no wait for this one before it
            following = self._items[number + 1]
            changes.append(
                (arrived, self._starts[number + 1], following.full_bytes + _beside(following))
            )
        if not self._takes(changes):
            return False
        bucket.items.append(item)
        if follows:
            self._starts[number + 1] = min(self._starts[number + 1], arrived)
        return True


class _Reductions(_Planner):
    """A bucket starts where its last member did."""

    def spread(self) -> None:
        """Await each once the next one has started, the last one at the end."""
        for number, item in enumerate(self._items):
            end, last = self._ends[number], number + 1 == len(self._items)
            late = max(
                end, len(self._curve.base.nodes) - 1 if last else self._starts[number + 1] + 1
            )
            for change in self._awaited([item], end, late):
                self._curve.add(*change)
            self._ends[number] = late

    def _joins(self, bucket: Bucketed, number: int) -> bool:
        item, start, end = self._items[number], self._starts[number], self._ends[number]
        changes = [
            *self._awaited(bucket.items, bucket.end, end),
            (bucket.start, bucket.end, -_packed(bucket, bucket.items)),
            (start, end, _packed(bucket, [*bucket.items, item])),
        ]
        at = self._launches.index(bucket)
        before = self._launches[at - 1] if self._plan_for_overlap and at else None
        after = self._launches[at + 1].start if at + 1 < len(self._launches) else start
        if before is not None:  # is awaited once that has started which now comes next
            changes += self._awaited(before.items, before.end, after + 1)
            changes.append((before.end, after + 1, _packed(before, before.items)))
        if not self._takes(changes):
            return False
        if before is not None:
            before.end = max(before.end, after + 1)
        bucket.items.append(item)
        bucket.start, bucket.end = start, end
        self._launches.append(self._launches.pop(at))
        return True

    def _awaited(
        self, items: Sequence[SchedulableCollective], old: int, new: int
    ) -> Iterator[_Change]:
        """What changes if these are awaited before `new` and not before `old`: what they read lives
        longer, their results come later."""
        if new <= old:
            return
        for item in items:
            yield old, new, item.full_bytes + _beside(item)
            for _, end, made in self._allocated(item.started):
                yield max(old, end), new, made
            for node in item.results:
                for first, end, made in self._allocated(node):
                    yield max(first, old), min(max(first, new), end), -made

    def _allocated(self, node: fx.Node) -> Sequence[_Change]:
        """What a node allocates, and where that is alive in the graph as it is."""
        if not self._made:
            for buffer in self._curve.base.buffers:
                self._made.setdefault(buffer.node, []).append(
                    (buffer.first, buffer.last + 1, buffer.nbytes)
                )
        return self._made.get(node, ())


def _beside(item: SchedulableCollective) -> int:
    """What one collective holds besides its full tensor: what was cast or padded for it, and its
    backend's scratch memory."""
    return scratch_bytes(item.started) + sum(
        tag.block_bytes for node in item.inputs if (tag := tag_of(node)) is not None
    )


def _packed(bucket: Bucketed, items: Sequence[SchedulableCollective]) -> int:
    """What members are copied into together, by the graph or by gloo."""
    if len(items) < 2 or not (bucket.mode == "flat" or bucket.choice.gloo):
        return 0
    return sum(item.tag.nbytes if bucket.gathers else item.full_bytes for item in items)


def _unpacked(items: Sequence[SchedulableCollective]) -> int:
    """Full tensors that are copied out of a flat bucket."""
    return sum(item.full_bytes for item in items) if len(items) > 1 else 0
