"""The clock of the timing model: kernels one after another, and transfers beside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Link = Literal["node", "network", "host-out", "host-in"]
"""What bytes cross: the links within a node, the network between nodes, or the way to the host and
the one back."""
Queue = Literal["groups", "beside", "engines"]


class Channel(NamedTuple):
    """A queue of transfers, which run one after another in the order of their starts.

    Channels of one link run beside each other and share its bandwidth: together they move what the
    fastest of them would alone, each in proportion to its speed. So what kernels slow down leaves
    the link to others. Different links do not delay each other.
    """

    link: Link
    queue: Queue = "groups"
    """Who runs them: the process groups of parameters, groups with a stream of their own beside
    these, or copy engines."""


_GROUPS = Channel("node")


@dataclass(frozen=True)
class CollectiveTiming:
    """Duration of a collective by one route, and its interference with kernels."""

    duration_us: float
    """Duration with nothing running beside it."""
    compute_slowdown: float = 1.0
    """Factor by which kernels beside it take longer."""
    collective_slowdown: float = 1.0
    """Factor by which it takes longer beside kernels."""
    channel: Channel = _GROUPS
    issue_us: float = 0.0
    """Time for which its start keeps the device from computing."""


def in_sequence(timings: Iterable[CollectiveTiming]) -> CollectiveTiming:
    """Returns transfers that run one after another as one, on the channel of the longest of them
    and with its interference.
    """
    each = tuple(timings)
    longest = max(each, key=lambda timing: timing.duration_us, default=CollectiveTiming(0.0))
    return replace(
        longest,
        duration_us=sum(timing.duration_us for timing in each),
        issue_us=sum(timing.issue_us for timing in each),
    )


class Clock:
    """Kernels one after another, and the transfers of all channels beside them."""

    def __init__(self) -> None:
        self.now_us = self.exposed_us = 0.0
        self.done_us: dict[int, float] = {}
        """Number of a transfer -> the time at which it ended."""
        self.busy: dict[Channel, deque[list[float]]] = {}
        """Channels with transfers in flight: [remaining duration by itself, slowdown of kernels,
        slowdown beside kernels, number] of each."""

    def enqueue(self, number: int, duration_us: float, timing: CollectiveTiming) -> None:
        """Starts a transfer with a timing and another duration."""
        entry = [duration_us, timing.compute_slowdown, timing.collective_slowdown, number]
        self.busy.setdefault(timing.channel, deque()).append(entry)

    def work(self, left: float) -> None:
        """Runs a kernel that takes `left` microseconds with nothing beside it."""
        while left > _EPSILON_US:
            if not self.busy:
                self.now_us += left
                return
            if len(self.busy) == 1:  # as below, in a fraction of the time
                ((channel, queue),) = self.busy.items()
                head = queue[0]
                spent = min(left * head[1], head[0] * head[2])
                left -= spent / head[1]
                self.now_us += spent
                self._move(channel, queue, spent / head[2])
                continue
            factors = self._factors(beside_compute=True)
            slows = max([queue[0][1] for queue in self.busy.values()])
            spent = min(left * slows, self._next_end_us(factors))
            left -= spent / slows
            self._advance(spent, factors)

    def wait(self, number: int) -> None:
        """Waits for a transfer that has started."""
        while number not in self.done_us:
            if len(self.busy) == 1:  # as below, in a fraction of the time
                ((channel, queue),) = self.busy.items()
                late = queue[0][0]
                self.now_us += late
                self.exposed_us += late
                self._move(channel, queue, late)
                continue
            factors = self._factors(beside_compute=False)
            late = self._next_end_us(factors)
            self.exposed_us += late
            self._advance(late, factors)

    def idle_until(self, time_us: float) -> None:
        """Lets time pass in which no kernel runs, if it is earlier."""
        while (left := time_us - self.now_us) > _EPSILON_US:
            factors = self._factors(beside_compute=False)
            spent = min(left, self._next_end_us(factors)) if factors else left
            self.exposed_us += spent
            self._advance(spent, factors)

    def _factors(self, *, beside_compute: bool) -> list[float]:
        """Returns by how much the first transfer of each busy channel takes longer than alone."""
        slowed = [queue[0][2] if beside_compute else 1.0 for queue in self.busy.values()]
        if len(slowed) == len({channel.link for channel in self.busy}):
            return slowed  # none shares its link
        speeds: dict[str, list[float]] = {}
        for channel, factor in zip(self.busy, slowed, strict=True):
            speeds.setdefault(channel.link, []).append(1.0 / factor)
        shares = {link: sum(each) / max(each) for link, each in speeds.items()}
        return [
            shares[channel.link] * factor for channel, factor in zip(self.busy, slowed, strict=True)
        ]

    def _next_end_us(self, factors: list[float]) -> float:
        """Time until the first transfer in flight ends."""
        queues = self.busy.values()
        return min([queue[0][0] * factor for queue, factor in zip(queues, factors, strict=True)])

    def _advance(self, spent: float, factors: list[float]) -> None:
        """Lets time pass in which at most the first transfer of each channel ends, given by how
        much each takes longer than alone.
        """
        self.now_us += spent
        for (channel, queue), factor in zip(list(self.busy.items()), factors, strict=True):
            self._move(channel, queue, spent / factor)

    def _move(self, channel: Channel, queue: deque[list[float]], alone_us: float) -> None:
        """Lets the first transfer of a channel go on by what takes so long by itself."""
        head = queue[0]
        head[0] -= alone_us
        if head[0] <= _EPSILON_US:
            self.done_us[int(head[3])] = self.now_us
            queue.popleft()
            if not queue:
                del self.busy[channel]


_EPSILON_US = 1e-9
"""Shorter remaining durations are rounding errors."""
