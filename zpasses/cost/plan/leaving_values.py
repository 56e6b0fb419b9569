"""Which saved values leave the device between forward and backward, and which way.

A value that leaves is computed again in backward, or rests on the host until then. Both free its
memory from its last use in forward to its first use in backward, and both take time: the kernels
that compute it, or what its copies cannot hide behind kernels. All ways of all values are one
ranking. The step is taken to its limit peak by peak: of the values that are idle at the largest
peak, the one leaves next that takes the least exposed time per byte.

What a value takes depends on those that have left before it. Copies of one direction share a link,
so the first ones are hidden and later ones are not. Kernels that run again for one value need not
run again for another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zpasses.cost.plan.kept_params import StepProblem
from zpasses.cost.plan.offloaded_values import SavedValue
from zpasses.cost.plan.schedule_evaluation import live_bytes
from zpasses.cost.plan.simple_plans import one_ahead_plan
from zpasses.cost.time.step_time import host_copy_timing
from zpasses.cost.time.target import current_target
from zpasses.graph.host_copies import HostCopy


@dataclass(frozen=True)
class Recompute:
    """What backward runs to have a value again, if it has all other values that forward saves."""

    kernels: Mapping[str, float]
    """Names of nodes of forward, and their durations in microseconds."""
    reads: frozenset[str]
    """Names of the saved values that they read."""


@dataclass(frozen=True)
class Leaving:
    """A value that leaves the device."""

    value: SavedValue
    on_host: bool
    """Whether it rests on the host; else backward computes it again."""


@dataclass(frozen=True)
class LeavingValues:
    """The values that leave, in the order of preference."""

    ranked: tuple[Leaving, ...]
    fewest: int
    """How many of the first ones must leave so that the step without kept parameters fits."""


def rank_leaving(
    step: StepProblem,
    rich: StepProblem,
    values: Sequence[SavedValue],
    recomputes: Mapping[str, Recompute],
    limit_bytes: int,
    host_bytes: int,
) -> LeavingValues:
    """Returns which values leave so that a step fits a limit: those with the least exposed time per
    byte. Only values that lower a peak above the limit leave.

    Args:
        step: the step that keeps no parameters.
        rich: the step that keeps all that it may. What makes it fit comes after what makes `step`
            fit.
        values: the candidates.
        recomputes: for those that backward can compute again.
        limit_bytes: the largest allowed peak of either graph.
        host_bytes: the most that all of them may take of the host; 0 moves none.
    """
    ranking = _Ranking(step, values, recomputes, host_bytes)
    first = list(ranking.fit(step, limit_bytes))
    return LeavingValues((*first, *ranking.fit(rich, limit_bytes)), len(first))


class _Link:
    """Copies in one direction, one after another.

    Args:
        times_us: between the start of the link and the time at which the copy of each value must
            have ended.
        durations_us: of each copy.
    """

    def __init__(self, times_us: np.ndarray, durations_us: np.ndarray) -> None:
        self._durations = durations_us
        self._chosen = np.zeros(len(durations_us), dtype=bool)
        self.use(times_us)

    def use(self, times_us: np.ndarray) -> None:
        """The copies must have ended at other times."""
        self._order = np.argsort(times_us, kind="stable")
        self._times = times_us[self._order]

    def more_us(self) -> np.ndarray:
        """Returns for each value how much longer copies are awaited if it is copied, too."""
        chosen, durations = self._chosen[self._order], self._durations[self._order]
        ends = np.cumsum(np.where(chosen, durations, 0.0))
        late = np.where(chosen, ends - self._times, -np.inf)
        before = np.maximum.accumulate(late)
        later = np.maximum.accumulate(late[::-1])[::-1]  # which one more copy delays
        own = ends + durations - self._times
        now = max(0.0, float(late.max(initial=0.0)))
        found = np.empty(len(late))
        found[self._order] = np.maximum.reduce([before, own, later + durations]).clip(now) - now
        return found

    def add(self, at: int) -> None:
        self._chosen[at] = True


class _Ranking:
    def __init__(
        self,
        step: StepProblem,
        values: Sequence[SavedValue],
        recomputes: Mapping[str, Recompute],
        host_bytes: int,
    ) -> None:
        # Of equal ones, those come first whose copies have most time.
        self._values = sorted(values, key=lambda one: (-one.held_us, -one.nbytes, one.name))
        self._places = {each.name: at for at, each in enumerate(self._values)}
        self._recomputes = recomputes
        self._sizes = np.array([each.nbytes for each in self._values], dtype=np.int64)
        self._forward_slots = np.array([each.forward_slot for each in self._values], dtype=np.int64)
        self._first = np.array([each.backward_slot for each in self._values], dtype=np.int64)
        self._host_bytes = host_bytes
        self._left: dict[int, bool] = {}
        """Places of the values that have left, and whether they rest on the host."""
        self._again: set[str] = set()
        """Kernels that run again."""
        self._remake_us = np.full(len(values), np.inf)
        self._kernels: dict[str, list[int]] = {}
        """Kernel -> places of the values that need it."""
        for at, each in enumerate(self._values):
            if each.name in recomputes:
                self._remake_us[at] = sum(recomputes[each.name].kernels.values())
                for name in recomputes[each.name].kernels:
                    self._kernels.setdefault(name, []).append(at)
        self._freed = (
            np.zeros(len(step.forward.slots), dtype=np.int64),
            np.zeros(len(step.backward.slots), dtype=np.int64),
        )
        work, self._before = (
            np.concatenate([[0.0], np.cumsum(each.work_us)])
            for each in (step.forward, step.backward)
        )
        ready = np.array([each.ready_slot for each in self._values], dtype=np.int64)
        out_us, in_us = (
            np.array([_copy_us(each.nbytes, direction) for each in self._values])
            for direction in ("out", "in")
        )
        self._on_cpu = current_target().architecture == "cpu"
        left_us = work[-1] - work[ready] if len(ready) else np.zeros(0)
        self._out = _Link(0.0 * left_us if self._on_cpu else left_us, out_us)
        self._in = _Link(self._back_us(), in_us)

    def _back_us(self) -> np.ndarray:
        """The time in backward at which each copy back must have ended."""
        found: np.ndarray = self._before[self._first] if len(self._first) else np.zeros(0)
        return 0.0 * found if self._on_cpu else found

    def fit(self, step: StepProblem, limit_bytes: int) -> Iterator[Leaving]:
        """Yields what leaves next until the step fits, or nothing more lowers its peaks."""
        live = [
            live_bytes(each, one_ahead_plan(each)).astype(np.int64)
            for each in (step.forward, step.backward)
        ]
        while True:
            now = [each - freed for each, freed in zip(live, self._freed, strict=True)]
            peaks = [int(each.max(initial=0)) for each in now]
            side = int(peaks[1] > peaks[0])
            if peaks[side] <= limit_bytes:
                return
            segment = int(now[side].argmax())
            found = self._best(side, segment)
            if found is None:
                live[side][self._never_idle(side)] = -(1 << 60)
                continue
            self._leave(*found)
            yield Leaving(self._values[found[0]], found[1])

    def _best(self, side: int, segment: int) -> tuple[int, bool] | None:
        """Returns the place of the value that leaves next, and whether it rests on the host; None
        if no value is idle at the segment.
        """
        idle = self._first > segment if side else self._forward_slots <= segment
        idle &= self._may_leave()
        if not idle.any():
            return None
        on_host = self._out.more_us() + self._in.more_us()
        on_host[self._sizes > self._host_bytes] = np.inf
        per_byte = np.minimum(on_host, self._remake_us) / self._sizes
        per_byte[~idle] = np.inf
        at = int(per_byte.argmin())
        return at, bool(on_host[at] <= self._remake_us[at])

    def _may_leave(self) -> np.ndarray:
        """Whether each value may leave in some way and has not."""
        found: np.ndarray = (self._sizes <= self._host_bytes) | np.isfinite(self._remake_us)
        found[list(self._left)] = False
        return found & (self._sizes > 0)

    def _never_idle(self, side: int) -> slice:
        """The segments at which nothing is idle that may leave."""
        may = self._may_leave()
        if side:
            return slice(int(self._first[may].max(initial=0)), None)
        return slice(0, int(self._forward_slots[may].min(initial=len(self._freed[0]))))

    def _leave(self, at: int, on_host: bool) -> None:
        self._left[at] = on_host
        self._freed[0][self._forward_slots[at] :] += self._sizes[at]
        self._freed[1][: self._first[at]] += self._sizes[at]
        if on_host:
            self._host_bytes -= int(self._sizes[at])
            self._out.add(at)
            self._in.add(at)
            return
        for name, took in self._recomputes[self._values[at].name].kernels.items():
            if name not in self._again:
                self._again.add(name)
                self._remake_us[self._kernels[name]] -= took
        self._need(at)

    def _need(self, at: int) -> None:
        """What backward computes a value of must be there before."""
        changed = [at]
        for each in changed:  # grows
            for name in sorted(self._recomputes[self._values[each].name].reads):
                source = self._places.get(name)
                if source is None or self._first[source] <= self._first[each]:
                    continue
                if source in self._left:
                    early, late = self._first[each], self._first[source]
                    self._freed[1][early:late] -= self._sizes[source]
                self._first[source] = self._first[each]
                if self._left.get(source) is False:
                    changed.append(source)
        self._in.use(self._back_us())


def _copy_us(nbytes: int, direction: str) -> float:
    timing = host_copy_timing(HostCopy(direction, nbytes), current_target())  # type: ignore[arg-type]
    return timing.duration_us + timing.issue_us
