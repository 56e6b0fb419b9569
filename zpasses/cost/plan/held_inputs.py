"""Bytes of the inputs of reductions, kept up to date while a graph is scheduled."""

from __future__ import annotations

import heapq

from zpasses.cost.plan.schedule_problem import Job


class HeldInputs:
    """The inputs of reductions that are ready and not awaited. Slots that are asked for never
    decrease.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        self._later: list[tuple[int, int, Job]] = []
        """Those that others still read, by the slot from which only the reduction does."""
        self._counted: set[int] = set()
        self._removed: set[int] = set()

    def add(self, job: Job) -> None:
        """A reduction is ready."""
        heapq.heappush(self._later, (job.held_from, job.number, job))

    def remove(self, job: Job) -> None:
        """A reduction has been awaited."""
        if job.number in self._counted:
            self._nbytes -= job.full_bytes
        else:
            self._removed.add(job.number)

    def nbytes(self, slot: int) -> int:
        """Bytes in a slot."""
        while self._later and self._later[0][0] <= slot:
            _, number, job = heapq.heappop(self._later)
            if number not in self._removed:
                self._counted.add(number)
                self._nbytes += job.full_bytes
        return self._nbytes
