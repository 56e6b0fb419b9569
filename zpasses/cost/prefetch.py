"""How far ahead gathers start in a step of several graphs, such as blocks compiled one by one.

The step is simulated with gathers that start 0, 1, 2, ... graphs ahead. A channel runs collectives
one after another, in the order in which they start. The fewest graphs ahead that are as fast as any
within the memory limit win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["GraphRun", "StepCost", "plan_prefetch", "step_cost"]

MOST_AHEAD = 4

_TOLERANCE = 1.004
"""Steps whose durations differ by less are equally fast."""


@dataclass(frozen=True)
class GraphRun:
    """One run of a graph whose gathers start before it, and whose reductions end after it."""

    name: str
    """For notes: "forward of layers.3.attention.weight to layers.3.mlp.bias"."""
    is_backward: bool
    compute_us: float
    """Duration of its kernels, and of the collectives that stay in it."""
    gather_us: float
    reduce_us: float
    gathered_bytes: int
    """Full parameters that it reads, in memory from the start of their gather to its end."""
    reduced_bytes: int
    """Gradients that it returns to reductions, in memory until these have ended."""
    peak_bytes: int
    """Most that it allocates itself."""
    saved_bytes: int
    """What a forward leaves in memory until its backward."""


@dataclass(frozen=True)
class StepCost:
    """What a step takes with a number of graphs ahead."""

    ahead: int
    total_us: float
    waited_us: float
    """Time in which no kernel runs because a collective is awaited."""
    peak_bytes: int
    """Most that the graphs hold, without parameters, gradients and what runs between graphs."""


def plan_prefetch(runs: Sequence[GraphRun], limit_bytes: int | None) -> StepCost:
    """Choose for how many graphs ahead gathers start.

    Args:
        runs: the graphs of one step, in their order.
        limit_bytes: largest peak; None has no limit.

    Returns:
        The choice. If nothing fits, that with the least peak.
    """
    costs = [step_cost(runs, ahead) for ahead in range(MOST_AHEAD + 1)]
    fitting = [each for each in costs if limit_bytes is None or each.peak_bytes <= limit_bytes]
    if not fitting:
        return min(costs, key=lambda each: each.peak_bytes)
    fastest = min(each.total_us for each in fitting)
    return next(each for each in fitting if each.total_us <= fastest * _TOLERANCE)


def step_cost(runs: Sequence[GraphRun], ahead: int) -> StepCost:
    """Simulate a step whose gathers start `ahead` graphs ahead.

    A forward does not start the gathers of graphs after its last backward, and reductions of at
    least one backward stay in flight, as at run time.
    """
    now = channel = waited = 0.0
    arrived: dict[int, float] = {}
    reducing: list[tuple[float, int]] = []
    saved = peak = 0
    left: list[int] = []
    """Bytes that each forward has left, for its backward."""
    for i, run in enumerate(runs):
        for j in range(i, min(i + ahead + 1, len(runs))):
            if j not in arrived and (j == i or _may_start(run, runs[j])):
                channel = max(channel, now) + runs[j].gather_us
                arrived[j] = channel
        if run.gather_us and arrived[i] > now:
            waited += arrived[i] - now
            now = arrived[i]
        if run.is_backward and left:
            saved -= left.pop()  # its own peak counts it
        gathered = sum(runs[j].gathered_bytes for j in arrived if j >= i)
        held = saved + gathered + sum(nbytes for _, nbytes in reducing)
        peak = max(peak, held + run.peak_bytes)
        now += run.compute_us
        if not run.is_backward:
            left.append(run.saved_bytes)
            saved += run.saved_bytes
        if run.reduce_us:
            channel = max(channel, now) + run.reduce_us
            reducing.append((channel, run.reduced_bytes))
            while len(reducing) > max(1, ahead):
                ended, _ = reducing.pop(0)
                waited += max(0.0, ended - now)
                now = max(now, ended)
    if reducing:
        waited += max(0.0, reducing[-1][0] - now)
        now = max(now, reducing[-1][0])
    return StepCost(ahead, now, waited, peak)


def _may_start(run: GraphRun, later: GraphRun) -> bool:
    """Whether parameters stay the same between two graphs of one step."""
    return later.is_backward or not run.is_backward
