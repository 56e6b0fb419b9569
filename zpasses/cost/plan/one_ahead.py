"""The peak with one gather and one reduction in flight, of many forms of one graph.

`live_bytes(problem, one_ahead_plan(problem))` says the same of one form. It builds problem and plan
anew, which takes too long for the thousands of sets of kept parameters of a large graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from zpasses.cost.plan.schedule_evaluation import launch_cost
from zpasses.cost.plan.schedule_problem import Job, ScheduleProblem


class OneAheadPeak:
    """Peaks of a graph that lacks some of its gathers, or that finds their results cached.

    Args:
        problem: the graph with all of its collectives.
    """

    def __init__(self, problem: ScheduleProblem) -> None:
        self._problem, self._live = problem, problem.live_bytes
        gathers = [job for job in problem.jobs if job.is_gather]
        self._numbers = np.array([job.number for job in gathers], dtype=np.int64)
        self._latest = _integers(job.latest for job in gathers)
        self._ahead = _integers(job.ahead_bytes for job in gathers)
        self._launch = _integers(self._launch_bytes(job) for job in gathers)
        self._end = problem.end
        reductions = [job for job in problem.jobs if not job.is_gather]
        self._reductions = self._held_by_reductions(reductions)
        self._last = reductions[-1] if reductions else None

    def peak_bytes(
        self, more: np.ndarray, gone: np.ndarray | None = None, cached: np.ndarray | None = None
    ) -> int:
        """Returns the peak in bytes.

        Args:
            more: bytes that are alive in each segment in addition to those of the problem. int64.
            gone: for each job whether it does not run; only gathers may be gone. None is none.
            cached: for each job whether its full tensor counts in `more` instead. None is none.
        """
        changes = self._reductions.copy()
        latest, ahead, launch = self._latest, self._ahead, self._launch
        if cached is not None:
            ahead = np.where(cached[self._numbers], 0, ahead)
        if gone is not None:
            stays = ~gone[self._numbers]
            latest, ahead, launch = latest[stays], ahead[stays], launch[stays]
        # Each gather starts where the one before it is awaited.
        starts = np.concatenate([np.zeros(1, dtype=np.int64), latest])[: len(latest)]
        np.add.at(changes, starts, launch + ahead)
        np.subtract.at(changes, latest + 1, launch)
        np.subtract.at(changes, np.maximum(starts, latest), ahead)
        last = self._last
        if last is not None:
            # What starts in the last segment exists beside the input that its wait frees.
            beside = last.earliest != self._end and bool((starts == self._end).any())
            after = self._end + int(beside)
            if after > last.held_from:
                changes[last.held_from] += last.full_bytes
                changes[after] -= last.full_bytes
        live = self._live + more + np.cumsum(changes[:-1])
        return int(live.max(initial=0))

    def _held_by_reductions(self, reductions: list[Job]) -> np.ndarray:
        """Changes of what reductions hold besides the problem's bytes, without the input of the
        last one. Each is awaited where the next one has started.
        """
        changes = np.zeros(len(self._live) + 1, dtype=np.int64)
        for job, after in zip(reductions, [*reductions[1:], None], strict=False):
            wait = after.earliest if after is not None else self._end
            held = self._launch_bytes(job)
            changes[job.earliest] += held
            changes[wait + 1] -= held
            if after is None:
                continue
            if wait >= job.held_from:
                changes[job.held_from] += job.full_bytes
                changes[wait + 1] -= job.full_bytes
        return changes

    def _launch_bytes(self, job: Job) -> int:
        return launch_cost(self._problem, (job.number,)).held_bytes


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)
