"""The least duration that any schedule of a graph's collectives can have, by the timing model.

The order of kernels and the bytes of collectives are given. The bound knows three limits:

- Kernels run one after another, and each link moves its bytes one after another. Latency of
  collectives is left out, as if all of a link's collectives shared a launch.
- Collectives and kernels beside each other take longer, as on links within a node.
- A kernel needs the gathers of its parameters and of all kernels before it, and a reduction needs
  the kernels before it. The launch of the first gather and of the last reduction has a latency.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from zpasses.cost.plan.schedule_problem import Job, ScheduleProblem


def schedule_bound_us(problem: ScheduleProblem) -> float:
    """Returns the largest of three bounds of a graph: all kernels without waiting, all bytes of the
    busiest link without latency, and the longest path through kernels and what they wait for.
    """
    moved = sum(job.start_us + job.wait_us for job in problem.jobs)
    compute = float(sum(problem.work_us)) + moved
    fixed = [event.timing for event in problem.fixed if event.timing is not None]
    jobs = [job.fastest for job in problem.jobs]
    moved_us: dict[str, float] = {}
    links = {each.channel.link for each in fixed} | {job.channel.link for job in jobs}
    for link in links:
        moved_us[link] = sum(job.transfer_us for job in jobs if job.channel.link == link)
        moved_us[link] += sum(each.duration_us for each in fixed if each.channel.link == link)
    paths = [
        _path_us(problem, [job for job in jobs if job.channel.link == link], total)
        for link, total in moved_us.items()
    ]
    reloads_us = sum(job.reload_us for job in problem.jobs)
    return max([compute, reloads_us, *moved_us.values(), *paths])


def _path_us(problem: ScheduleProblem, jobs: Sequence[Job], moved: float) -> float:
    """Returns the largest bound over all pairs of cuts of the graph into three parts.

    In the first part, the gathers arrive that its kernels and the first kernel after it need. In
    the last part, the reductions run whose gradients its kernels, or the last before it, make.
    """
    if not jobs:
        return 0.0
    slows, slowed = (
        min(job.timing.compute_slowdown for job in jobs),
        min(job.timing.collective_slowdown for job in jobs),
    )
    work = np.concatenate([[0.0], np.cumsum(problem.work_us)])
    total = float(work[-1])
    gathers = sorted((job for job in jobs if job.is_gather), key=lambda job: job.latest)
    reductions = sorted((job for job in jobs if not job.is_gather), key=lambda job: job.earliest)
    # (kernels before the cut, bytes that must have moved before it)
    heads, arrived, latency = [(0.0, 0.0)], 0.0, math.inf
    for job, after in itertools.pairwise([*gathers, None]):
        assert job is not None
        arrived, latency = arrived + job.transfer_us, min(latency, job.latency_us)
        if after is None or after.latest > job.latest:
            heads.append((float(work[job.latest]), arrived + latency))
    tails, left, latency = [(0.0, 0.0)], 0.0, math.inf
    for job, before in itertools.pairwise([*reversed(reductions), None]):
        assert job is not None
        left, latency = left + job.transfer_us, min(latency, job.latency_us)
        if before is None or before.earliest < job.earliest:
            tails.append((total - float(work[job.earliest]), left + latency))
    heads, tails = _thinned(heads), _thinned(tails)
    # Each cut at the start, as a column, with each cut at the end, as a row.
    first, early = (np.array(each)[:, None] for each in zip(*heads, strict=True))
    last, late = (np.array(each)[None, :] for each in zip(*tails, strict=True))
    middle = total - first - last
    # Bytes that no part forces, where they cost least: beside kernels that have room for them.
    free = np.maximum(0.0, moved - early - late)
    parts = (first, early), (np.maximum(0.0, middle), 0.0), (last, late)
    time, room = np.zeros_like(middle), np.zeros_like(middle)
    for kernels, forced in parts:
        most = kernels * slows / slowed
        hidden = np.minimum(most, forced)
        room += most - hidden
        time += kernels + forced - hidden * slowed * _gain(slows, slowed)
    hidden = np.minimum(room, free)
    time += free - hidden * slowed * _gain(slows, slowed)
    return float(time[middle >= -1e-6].max(initial=0.0))


def _gain(slows: float, slowed: float) -> float:
    """Time saved per time in which kernels and a collective run beside each other."""
    return max(0.0, 1 / slows + 1 / slowed - 1)


def _thinned(cuts: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most `_MOST_CUTS` of the cuts, always with the first and the last."""
    step = max(1, len(cuts) // _MOST_CUTS)
    return [*cuts[::step], cuts[-1]]


_MOST_CUTS = 200
