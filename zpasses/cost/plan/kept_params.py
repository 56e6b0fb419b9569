"""Which full parameters to keep, instead of gathering them again.

A parameter that is kept until backward occupies memory from its last use in forward to its first
use in backward, and saves its gather in backward. A parameter that is cached occupies memory
throughout the step, and also saves the gathers of the forwards in which it has not changed: those
after the first of an accumulation window, and all forwards if it is frozen. Parameters are ranked
by the time that they save per byte and time held. Forward and backward are
`zpasses.cost.plan.schedule_problem.ScheduleProblem`s, so the memory of a choice is known without
building its graphs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.one_ahead import OneAheadPeak
from zpasses.cost.plan.schedule_evaluation import Plan, live_bytes
from zpasses.cost.plan.schedule_planner import PRICE, plan_schedule
from zpasses.cost.plan.schedule_problem import Job, ScheduleProblem
from zpasses.cost.plan.simple_plans import one_ahead_plan
from zpasses.cost.time.roofline import compute_us
from zpasses.cost.time.target import current_target
from zpasses.graph.aliases import buffer_readers, memory_base
from zpasses.graph.queries import nbytes, value_of
from zpasses.graph.tags import full_param, tag_of


@dataclass(frozen=True)
class Repetition:
    """How often a step runs its graphs while parameters do not change."""

    backwards_per_step: int = 1
    """Number of forwards, each with its backward, from one optimizer step to the next."""
    frozen: tuple[str, ...] = ()
    """Names of the parameters that no optimizer changes."""

    def unchanged(self, params: Collection[str]) -> float:
        """Returns the share of forwards that find these parameters as the forward before left
        them, from 0 to 1.
        """
        return 1.0 if set(params) <= set(self.frozen) else 1.0 - 1.0 / self.backwards_per_step


@dataclass(frozen=True)
class KeptParam:
    """A parameter that forward and backward gather, and that may be kept instead."""

    name: str
    """Name of the node with the full parameter; equal in the joint graph, forward and backward."""
    params: tuple[str, ...]
    nbytes: int
    """Bytes of the full parameter."""
    saved_us: float
    """Duration of its gather in backward, and of the copy of its shard from the host."""
    held_us: float
    """Duration of the kernels between its last use in forward and its first use in backward."""
    forward_slot: int
    """First segment of forward after its last use."""
    backward_slot: int
    """First segment of backward after its last use."""
    forward_job: int
    backward_job: int
    """Numbers of its gathers in the two problems."""
    unchanged: float
    """Share of forwards whose gather caching it saves, from 0 to 1."""
    forward_us: float
    """As `saved_us`, in forward."""
    part_bytes: int = 0
    """Bytes of the part that forward saves instead, if backward would gather the parameter from
    fewer ranks (`zpasses.graph.regathers`)."""
    part_slot: int = 0
    """Segment of forward that copies the part."""
    part_us: float = 0.0
    """Duration of the copy."""

    @property
    def value(self) -> float:
        """Microseconds saved per byte and microsecond held, if it is kept until backward."""
        return self.saved_us / max(1e-9, self.nbytes * self.held_us)

    @property
    def cached_value(self) -> float:
        """Microseconds saved per byte, if it is cached. All cached parameters are held as long."""
        return (self.saved_us + self.unchanged * self.forward_us) / max(1, self.nbytes)


@dataclass(frozen=True)
class StepProblem:
    """Forward and backward of one graph, with some parameters kept between them or cached."""

    forward: ScheduleProblem
    """The forward that gathers all parameters. Cached ones count as live in all of it, because
    other forwards find them there."""
    backward: ScheduleProblem
    repetition: Repetition = field(default_factory=Repetition)
    cached: tuple[KeptParam, ...] = ()

    @property
    def is_small(self) -> bool:
        """Whether there is time to compare plans of it thoroughly."""
        return _size(self.forward) + _size(self.backward) <= _SMALL

    def peak_bytes(self, plan: Callable[[ScheduleProblem], Plan] = one_ahead_plan) -> int:
        """Returns the larger peak of the two graphs under a plan, which is by default that with one
        gather and one reduction in flight."""
        return max(
            int(live_bytes(problem, plan(problem)).max(initial=0))
            for problem in (self.forward, self.backward)
        )

    def mean_us(self, duration_us: Callable[[ScheduleProblem], float]) -> float:
        """Returns the mean duration of a forward and its backward.

        Args:
            duration_us: returns the duration of one graph.
        """
        repeated = 1.0 - 1.0 / self.repetition.backwards_per_step
        always = {each.forward_job for each in self.cached if each.unchanged == 1.0}
        total = duration_us(self.backward)
        if repeated < 1.0:
            total += (1.0 - repeated) * duration_us(self.forward.without(always))
        if repeated > 0.0:
            cached = {each.forward_job for each in self.cached}
            total += repeated * duration_us(self.forward.without(cached))
        return total

    def added_bytes(
        self, kept: Collection[KeptParam], cached: Collection[KeptParam]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many bytes more are alive in each segment of forward and of backward, if
        parameters stay in memory as in `keeping`. int64.
        """
        forward = np.zeros(len(self.forward.slots) + 1, dtype=np.int64)
        backward = np.zeros(len(self.backward.slots) + 1, dtype=np.int64)
        for each in (*kept, *cached):
            forward[each.forward_slot] += each.nbytes
            forward[each.part_slot] -= each.part_bytes
            backward[0] += each.nbytes - each.part_bytes
            backward[self.backward.jobs[each.backward_job].latest] -= each.nbytes - each.part_bytes
        for each in cached:
            forward[0] += each.nbytes
            forward[self.forward.jobs[each.forward_job].latest] -= each.nbytes
            backward[each.backward_slot] += each.nbytes
        return np.cumsum(forward[:-1]), np.cumsum(backward[:-1])

    def keeping(
        self, kept: Collection[KeptParam], cached: Collection[KeptParam] = ()
    ) -> StepProblem:
        """Returns the step in which the given parameters stay in memory.

        Args:
            kept: stay until backward.
            cached: stay throughout the step; none of them is in `kept`.
        """
        forward, backward = self.added_bytes(kept, cached)
        resident = {each.forward_job for each in cached}
        work_us = list(self.forward.work_us)
        for each in (*kept, *cached):
            work_us[each.part_slot] -= each.part_us
        return replace(
            self,
            forward=replace(
                self.forward,
                work_us=tuple(work_us),
                live_bytes=self.forward.live_bytes + forward,
                jobs=tuple(
                    replace(job, resident=job.number in resident) for job in self.forward.jobs
                ),
            ),
            backward=replace(
                self.backward,
                live_bytes=self.backward.live_bytes + backward,
            ).without({each.backward_job for each in (*kept, *cached)}),
            cached=tuple(cached),
        )


def keepable_params(step: StepProblem) -> list[KeptParam]:
    """Returns the parameters that both graphs gather, the most worthwhile first."""
    forward, backward = step.forward, step.backward
    gathered = dict(_gathers(forward))
    work = np.concatenate([[0.0], np.cumsum(forward.work_us)])
    before = np.concatenate([[0.0], np.cumsum(backward.work_us)])
    slot_after_use, slot_after_backward = _last_uses(forward), _last_uses(backward)
    parts = _parts(forward)
    found = []
    for name, job in _gathers(backward):
        if name not in gathered:
            continue
        first, source = gathered[name], backward.items[job.number].source
        slot = slot_after_use(first)
        held = float(work[-1] - work[slot] + before[job.latest])
        params = forward.items[first.number].tag.params
        found.append(
            KeptParam(
                name,
                params,
                job.full_bytes,
                job.timing.duration_us + job.reload_us,
                held,
                slot,
                slot_after_backward(job),
                first.number,
                job.number,
                step.repetition.unchanged(params),
                first.timing.duration_us + first.reload_us,
                *parts.get(source.name, ()),
            )
        )
    return sorted(found, key=lambda each: (-each.value, each.name))


def _parts(forward: ScheduleProblem) -> dict[str, tuple[int, int, float]]:
    """Returns the parts of parameters that a forward saves: name of the node -> bytes, segment,
    duration of the copy.
    """
    target = current_target()
    return {
        node.name: (
            nbytes(value_of(node)),
            bisect_right(forward.slots, index) - 1,
            compute_us(node, target),
        )
        for index, node in enumerate(forward.nodes)
        if (tag := tag_of(node)) is not None and tag.role == "part"
    }


def _last_uses(problem: ScheduleProblem) -> Callable[[Job], int]:
    """Returns a function: the first segment after the last use of what a gather produces."""
    position = {node: index for index, node in enumerate(problem.nodes)}

    def slot_after_use(job: Job) -> int:
        readers = buffer_readers(memory_base(problem.items[job.number].wait))
        found = [position.get(node, 0) for node in readers]
        last = max((at for at in found if at < len(position) - 1), default=0)
        return min(bisect_right(problem.slots, last), problem.end)

    return slot_after_use


def _gathers(problem: ScheduleProblem) -> list[tuple[str, Job]]:
    """Returns the gathers of one parameter each, with the name of the node that is the full
    parameter.
    """
    found = []
    for job in problem.jobs:
        full = full_param(problem.items[job.number].wait) if job.is_gather else None
        if full is not None:
            found.append((full.name, job))
    return found


@dataclass(frozen=True)
class KeptChoice:
    """Parameters to keep, and what the step then costs."""

    kept: tuple[KeptParam, ...]
    """Stay until backward."""
    cached: tuple[KeptParam, ...]
    """Stay throughout the step."""
    total_us: float
    """Mean duration of a forward and its backward."""
    peak_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.kept, *self.cached))


def choose_kept(
    step: StepProblem,
    candidates: Sequence[KeptParam],
    limit_bytes: int,
    *,
    caches: bool = False,
    asked: bool = True,
) -> KeptChoice:
    """Returns the parameters to keep with which the step is fastest within a memory limit.

    Memory is shared between kept parameters, cached parameters and collectives in flight; several
    shares are compared.

    Args:
        step: the step in which nothing is kept.
        candidates: in the order of preference.
        limit_bytes: the largest allowed peak of either graph.
        caches: whether parameters may be cached throughout the step.
        asked: whether it is the option `memory_budget`. Else, memory above that of one gather and
            one reduction in flight must gain time, only schedules of few changes are compared, and
            none if all that can be kept would gain little.
    """
    search = _KeptSearch(step, limit_bytes, 0.0 if asked else _KEPT_PRICE)
    search.offer_shares(candidates, (), most=0.0)
    if not asked:
        bound_us = step.keeping(candidates).mean_us(schedule_bound_us)
        if search.best(thorough=False).total_us <= bound_us * (1 + PRICE):
            return search.best(thorough=False)
    search.offer_shares(candidates, ())
    cacheable = sorted(
        (each for each in candidates if caches and each.unchanged > 0),
        key=lambda each: (-each.cached_value, each.name),
    )
    if cacheable and limit_bytes > search.lean_bytes:
        for share in _SHARES[1:]:
            cached = fitting_params(step, cacheable, search.limit(share), caches=True)
            if cached:
                gone = {each.name for each in cached}
                others = [each for each in candidates if each.name not in gone]
                search.offer_shares(others, cached, least=share)
    return search.best(thorough=step.is_small and asked)


class _KeptSearch:
    def __init__(self, step: StepProblem, limit_bytes: int, price: float) -> None:
        self._step, self._limit, self._price = step, limit_bytes, price
        self.lean_bytes = step.peak_bytes()
        self._choices: dict[tuple[tuple[KeptParam, ...], tuple[KeptParam, ...]], KeptChoice] = {}

    def limit(self, share: float) -> int:
        """Returns the peak with a share of the memory above that of one gather and one reduction
        in flight.
        """
        more = max(0, self._limit - self.lean_bytes)
        return min(self.lean_bytes, self._limit) + int(share * more)

    def offer_shares(
        self,
        candidates: Sequence[KeptParam],
        cached: Sequence[KeptParam],
        least: float = 0.0,
        most: float = 1.0,
    ) -> None:
        """Compares shares of the memory for kept parameters, beside cached ones.

        Args:
            least: the share that the cached parameters may have.
            most: the largest share to compare.
        """
        self._offer((), cached)
        shares = [each for each in _SHARES if least <= each <= most]
        for share in shares if self._limit > self.lean_bytes else shares[:1]:
            kept = fitting_params(self._step, candidates, self.limit(share), beside=cached)
            self._offer(kept, cached)

    def _offer(self, kept: Sequence[KeptParam], cached: Sequence[KeptParam]) -> None:
        key = tuple(kept), tuple(cached)
        if key not in self._choices:
            self._choices[key] = _cost(self._step, *key, self._limit)

    def best(self, *, thorough: bool) -> KeptChoice:
        ranked = sorted(self._choices.values(), key=self._rank)
        if not thorough:
            return ranked[0]
        finals = [
            _cost(self._step, each.kept, each.cached, self._limit, thorough=True)
            for each in ranked[:_FINALISTS]
            if each.total_us <= _CLOSE * ranked[0].total_us
        ]
        return min(finals, key=self._rank)

    def _rank(self, choice: KeptChoice) -> tuple[int, float, int]:
        excess = max(0, choice.peak_bytes - self._limit)
        more = max(0, choice.peak_bytes - excess - self.lean_bytes)
        share = more / max(1, self._limit - self.lean_bytes)
        return excess, choice.total_us * (1 + self._price * share), choice.nbytes


_KEPT_PRICE = 4 * PRICE
"""Share of its duration by which a step must be faster to be worth the whole of the memory that it
may take without being asked. It is more than for schedules alone, because what is kept is held
where activations are, of which a larger batch could make more use."""
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the memory above that of one gather and one reduction in flight: the part for kept parameters.
"""
_FEWEST_CHANGES, _MOST_CHANGES, _MOST_WORK = 400, 1000, 1_000_000
"""Changes of schedules to draw for each choice, which is only an estimate of what `schedule` will
find; and segments and collectives that all of them have together, for small graphs."""
_SMALL, _FINALISTS, _CLOSE, _THOROUGH_CHANGES = 2_000, 3, 1.01, 3000
"""Segments and collectives up to which a graph is small, and how many choices are then compared
again, if they are nearly as fast as the first, by so many changes each."""


def _size(problem: ScheduleProblem) -> int:
    return len(problem.slots) + 8 * len(problem.jobs)


def _cost(
    step: StepProblem,
    kept: tuple[KeptParam, ...],
    cached: tuple[KeptParam, ...],
    limit_bytes: int,
    *,
    thorough: bool = False,
) -> KeptChoice:
    peaks: list[int] = []

    def planned_us(problem: ScheduleProblem) -> float:
        changes = min(max(_FEWEST_CHANGES, _MOST_WORK // _size(problem)), _MOST_CHANGES)
        changes = _THOROUGH_CHANGES if thorough else changes
        cost = plan_schedule(problem, limit_bytes, most=changes).cost
        peaks.append(cost.peak_bytes)
        return cost.total_us

    total = step.keeping(kept, cached).mean_us(planned_us)
    return KeptChoice(kept, cached, total, max(peaks))


class _StepPeaks:
    """Says of many choices what `StepProblem.keeping(...).peak_bytes()` says of one."""

    def __init__(self, step: StepProblem) -> None:
        self._step = step
        self._forward, self._backward = OneAheadPeak(step.forward), OneAheadPeak(step.backward)

    def peak_bytes(self, kept: Collection[KeptParam], cached: Collection[KeptParam]) -> int:
        forward, backward = self._step.added_bytes(kept, cached)
        gone = np.zeros(len(self._step.backward.jobs), dtype=bool)
        gone[[each.backward_job for each in (*kept, *cached)]] = True
        resident = np.zeros(len(self._step.forward.jobs), dtype=bool)
        resident[[each.forward_job for each in cached]] = True
        return max(
            self._forward.peak_bytes(forward, cached=resident),
            self._backward.peak_bytes(backward, gone),
        )


def fitting_params(
    step: StepProblem,
    candidates: Sequence[KeptParam],
    limit_bytes: int,
    *,
    beside: Sequence[KeptParam] = (),
    caches: bool = False,
) -> list[KeptParam]:
    """Returns as many of the candidates as fit, in their order.

    What stays in memory leaves room for one gather and one reduction in flight.

    Args:
        step: the step in which nothing is kept.
        candidates: in the order of preference.
        limit_bytes: the largest allowed peak of either graph.
        beside: parameters that are cached in any case.
        caches: whether the candidates are cached, too, instead of kept until backward.
    """
    kept: list[KeptParam] = []
    peaks = _StepPeaks(step)

    def add(chunk: Sequence[KeptParam]) -> None:
        more = [*kept, *chunk]
        kept_now, cached = ((), [*beside, *more]) if caches else (more, beside)
        if peaks.peak_bytes(kept_now, cached) <= limit_bytes:
            kept.extend(chunk)
        elif len(chunk) > 1:
            half = len(chunk) // 2
            add(chunk[:half])
            add(chunk[half:])

    if candidates:
        add(candidates)
    return kept
