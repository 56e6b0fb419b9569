"""Which full parameters to keep from forward to backward, instead of gathering them again.

A kept parameter occupies memory from its last use in forward to its first use in backward, and
saves its gather in backward. The parameters are ranked by the time that they save per byte and time
held. Forward and backward are `zpasses.cost.schedule_problem.ScheduleProblem`s, so the memory of a
choice is known without building its graphs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from zpasses.cost.memory import buffer_readers, memory_base
from zpasses.cost.schedule_evaluation import Plan, live_bytes, one_ahead_plan
from zpasses.cost.schedule_planner import plan_schedule
from zpasses.cost.schedule_problem import Job, ScheduleProblem
from zpasses.graph.tags import tag_of

__all__ = [
    "KeptChoice",
    "KeptParam",
    "StepProblem",
    "choose_kept",
    "fitting_params",
    "keepable_params",
]


@dataclass(frozen=True)
class KeptParam:
    """A parameter that forward and backward gather, and that may be kept instead."""

    name: str
    """Name of the node with the full parameter; equal in the joint graph, forward and backward."""
    params: tuple[str, ...]
    nbytes: int
    """Bytes of the full parameter."""
    saved_us: float
    """Duration of its gather in backward."""
    held_us: float
    """Duration of the kernels between its last use in forward and its first use in backward."""
    forward_slot: int
    """First segment of forward after its last use."""
    forward_job: int
    backward_job: int
    """Numbers of its gathers in the two problems."""

    @property
    def value(self) -> float:
        """Microseconds saved per byte and microsecond held."""
        return self.saved_us / max(1e-9, self.nbytes * self.held_us)


@dataclass(frozen=True)
class StepProblem:
    """Forward and backward of one graph, with some parameters kept between them."""

    forward: ScheduleProblem
    backward: ScheduleProblem

    def peak_bytes(self, plan: Callable[[ScheduleProblem], Plan] = one_ahead_plan) -> int:
        """Returns the larger peak of the two graphs under a plan, which is by default that with one
        gather and one reduction in flight."""
        return max(
            int(live_bytes(problem, plan(problem)).max(initial=0))
            for problem in (self.forward, self.backward)
        )

    def keeping(self, kept: Collection[KeptParam]) -> StepProblem:
        """Returns the step in which the given parameters stay in memory."""
        ends = np.zeros(len(self.forward.slots) + 1, dtype=np.int64)
        starts = np.zeros(len(self.backward.slots) + 1, dtype=np.int64)
        for each in kept:
            ends[each.forward_slot] += each.nbytes
            starts[0] += each.nbytes
            starts[self.backward.jobs[each.backward_job].latest] -= each.nbytes
        gone = {each.backward_job for each in kept}
        stays = [job.number for job in self.backward.jobs if job.number not in gone]
        return StepProblem(
            replace(self.forward, live_bytes=self.forward.live_bytes + np.cumsum(ends[:-1])),
            replace(
                self.backward,
                live_bytes=self.backward.live_bytes + np.cumsum(starts[:-1]),
                jobs=tuple(
                    replace(self.backward.jobs[old], number=new) for new, old in enumerate(stays)
                ),
                items=tuple(self.backward.items[old] for old in stays),
            ),
        )


def keepable_params(step: StepProblem) -> list[KeptParam]:
    """Returns the parameters that both graphs gather, the most worthwhile first."""
    forward, backward = step.forward, step.backward
    gathered = dict(_gathers(forward))
    work = np.concatenate([[0.0], np.cumsum(forward.work_us)])
    before = np.concatenate([[0.0], np.cumsum(backward.work_us)])
    position = {node: index for index, node in enumerate(forward.nodes)}
    found = []
    for name, job in _gathers(backward):
        if name not in gathered:
            continue
        item = forward.items[gathered[name].number]
        readers = [position.get(node, 0) for node in buffer_readers(memory_base(item.wait))]
        last = max((at for at in readers if at < len(position) - 1), default=0)
        slot = bisect_right(forward.slots, last)
        held = float(work[-1] - work[min(slot, len(work) - 1)] + before[job.latest])
        found.append(
            KeptParam(
                name,
                item.tag.params,
                job.full_bytes,
                job.timing.duration_us,
                held,
                min(slot, forward.end),
                gathered[name].number,
                job.number,
            )
        )
    return sorted(found, key=lambda each: (-each.value, each.name))


def _gathers(problem: ScheduleProblem) -> list[tuple[str, Job]]:
    """Returns the gathers of one parameter each, with the name of the node that is the full
    parameter.
    """
    found = []
    for job in problem.jobs:
        full = _full(problem.items[job.number].wait) if job.is_gather else None
        if full is not None:
            found.append((full.name, job))
    return found


def _full(wait: fx.Node) -> fx.Node | None:
    """Returns the full parameter: the wait itself, or the rows of it without padding."""
    for node in (wait, *wait.users):
        tag = tag_of(node)
        if tag is not None and tag.role == "full":
            return node
    return None


@dataclass(frozen=True)
class KeptChoice:
    """Parameters to keep, and what the step then costs."""

    kept: tuple[KeptParam, ...]
    total_us: float
    peak_bytes: int


def choose_kept(step: StepProblem, candidates: Sequence[KeptParam], limit_bytes: int) -> KeptChoice:
    """Returns the parameters to keep with which the step is fastest within a memory limit.

    Memory is shared between kept parameters and collectives in flight; several shares are compared.

    Args:
        step: the step in which nothing is kept.
        candidates: in the order of preference.
        limit_bytes: the largest allowed peak of either graph.
    """
    lean = step.peak_bytes()
    choices: dict[tuple[KeptParam, ...], KeptChoice] = {}
    for share in _SHARES if limit_bytes > lean else _SHARES[:1]:
        limit = min(lean, limit_bytes) + int(share * max(0, limit_bytes - lean))
        kept = tuple(fitting_params(step, candidates, limit)) if share else ()
        if kept not in choices:
            choices[kept] = _cost(step, kept, limit_bytes)
    return min(
        choices.values(),
        key=lambda each: (
            max(0, each.peak_bytes - limit_bytes),
            each.total_us,
            sum(param.nbytes for param in each.kept),
        ),
    )


_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the memory above that of one gather and one reduction in flight: the part for kept parameters.
"""
_PLANS = 4
"""Schedules to compare for each choice, which is only an estimate of what `schedule` will find."""


def _cost(step: StepProblem, kept: tuple[KeptParam, ...], limit_bytes: int) -> KeptChoice:
    keeping = step.keeping(kept)
    costs = [
        plan_schedule(problem, limit_bytes, most=_PLANS).cost
        for problem in (keeping.forward, keeping.backward)
    ]
    return KeptChoice(
        kept, sum(each.total_us for each in costs), max(each.peak_bytes for each in costs)
    )


def fitting_params(
    step: StepProblem, candidates: Sequence[KeptParam], limit_bytes: int
) -> list[KeptParam]:
    """Returns as many of the candidates as fit, in their order.

    What stays in memory leaves room for one gather and one reduction in flight.

    Args:
        step: the step in which nothing is kept.
        candidates: in the order of preference.
        limit_bytes: the largest allowed peak of either graph.
    """
    kept: list[KeptParam] = []

    def add(chunk: Sequence[KeptParam]) -> None:
        if step.keeping([*kept, *chunk]).peak_bytes() <= limit_bytes:
            kept.extend(chunk)
        elif len(chunk) > 1:
            half = len(chunk) // 2
            add(chunk[:half])
            add(chunk[half:])

    if candidates:
        add(candidates)
    return kept
