"""The clock of the timing model: kernels one after another, and collectives beside them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveTiming:
    """Duration of a collective by one route, and its interference with kernels."""

    duration_us: float
    """Duration with nothing running beside it."""
    compute_slowdown: float = 1.0
    """Factor by which kernels beside it take longer."""
    collective_slowdown: float = 1.0
    """Factor by which it takes longer beside kernels."""
    between_nodes: bool = False
    """Whether it uses the network; else it uses the links of one node."""
    issue_us: float = 0.0
    """Time for which its start keeps the device from computing."""
    second_group: bool = False
    """Whether it runs on a second process group, beside the collectives of the first."""


class Clock:
    """Kernels one after another, and the collectives of two channels beside them, as in `Timeline`.

    The collectives of a channel run in the order of their starts. Those of a second process group
    have a queue of their own. If both queues of a channel have one, each gets half of the
    bandwidth.
    """

    def __init__(self) -> None:
        self.now_us = self.waited_us = 0.0
        self.queues: tuple[tuple[_Queue, _Queue], ...] = ((deque(), deque()), (deque(), deque()))
        """Per channel, of first groups and of second groups: [remaining duration by itself,
        slowdown of kernels, slowdown beside kernels, number]."""
        self.done_us: dict[int, float] = {}
        """Number of a collective -> the time at which it ended."""

    def enqueue(self, number: int, duration_us: float, timing: CollectiveTiming) -> None:
        """Starts a collective with a timing and another duration."""
        self.queues[timing.between_nodes][timing.second_group].append(
            [duration_us, timing.compute_slowdown, timing.collective_slowdown, number]
        )

    def left_us(self, channel: int) -> float:
        """Time until a channel is idle, if nothing runs beside it."""
        return sum(entry[0] for queue in self.queues[channel] for entry in queue)

    def left_by_group(self, channel: int) -> tuple[float, float]:
        """What first groups and second groups still have to do on a channel, by themselves."""
        first, second = self.queues[channel]
        return sum(entry[0] for entry in first), sum(entry[0] for entry in second)

    def work(self, left: float) -> None:
        """Runs a kernel that takes `left` microseconds with nothing beside it."""
        (near, near_second), (far, far_second) = self.queues
        while left > _EPSILON_US:
            if not (near_second or far or far_second):
                if not near:
                    self.now_us += left
                    return
                # By far the most common: one queue, and the same as below.
                head = near[0]
                spent = min(left * head[1], head[0] * head[2])
                left -= spent / head[1]
                self._advance(spent, beside_compute=True)
                continue
            slows, spent = 0.0, math.inf
            for first, second in self.queues:
                share = 2.0 if first and second else 1.0
                for queue in (first, second):
                    if queue:
                        head = queue[0]
                        slows = max(slows, head[1])
                        spent = min(spent, head[0] * head[2] * share)
            if not slows:  # no collective is in flight
                self.now_us += left
                return
            spent = min(left * slows, spent)
            left -= spent / slows
            self._advance(spent, beside_compute=True)

    def wait(self, number: int) -> None:
        """Waits for a collective that has started."""
        while number not in self.done_us:
            queues = next(
                each for each in self.queues if any(e[3] == number for queue in each for e in queue)
            )
            share = 2.0 if all(queues) else 1.0
            late = min(queue[0][0] * share for queue in queues if queue)
            self.waited_us += late
            self._advance(late, beside_compute=False)

    def _advance(self, spent: float, *, beside_compute: bool) -> None:
        end = self.now_us + spent
        for first, second in self.queues:
            left = spent
            if first and second:
                left = self._move_both(first, second, left, end, beside_compute=beside_compute)
            queue = first or second
            while queue and left >= 0:
                head = queue[0]
                slowed = head[2] if beside_compute else 1.0
                moved = min(left, head[0] * slowed)
                head[0] -= moved / slowed
                if head[0] > _EPSILON_US:
                    break
                left -= moved
                queue.popleft()
                self.done_us[int(head[3])] = end - left
        self.now_us = end

    def _move_both(
        self, first: _Queue, second: _Queue, left: float, end: float, *, beside_compute: bool
    ) -> float:
        """Lets both queues of a channel progress until one is empty or no time is left.

        Returns the time that is left for the other queue; negative if neither is empty.
        """
        while first and second:
            takes = [2.0 * (queue[0][2] if beside_compute else 1.0) for queue in (first, second)]
            moved = min(left, first[0][0] * takes[0], second[0][0] * takes[1])
            left -= moved
            ended = False
            for queue, take in zip((first, second), takes, strict=True):
                queue[0][0] -= moved / take
                if queue[0][0] <= _EPSILON_US:
                    self.done_us[int(queue.popleft()[3])] = end - left
                    ended = True
            if not ended:
                return -1.0
        return left


_Queue = deque[list[float]]
_EPSILON_US = 1e-9
"""Shorter remaining durations are rounding errors."""
