"""How far ahead gathers start in a step of several graphs, such as blocks compiled one by one.

The step is simulated with gathers that start 0, 1, 2, ... graphs ahead. A channel runs collectives
one after another, in the order in which they start. The fewest graphs ahead that are as fast as any
within the memory limit win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Most that it allocates itself; after its turning point, if it has one."""
    saved_bytes: int
    """What a forward leaves in memory until its backward."""
    turn_us: float | None = None
    """How long it computes until its turning point, where it awaits the reductions of graphs before
    it; None: it has none."""
    turn_peak_bytes: int = 0
    """Most that it allocates itself until then."""
    gathers_at_turn: bool = False
    """Whether gathers of the next graphs start there, and not where the graph begins."""
    waited_us: float = 0.0
    """Part of `compute_us` in which only collectives that stay in it run."""
    collectives: int = 0
    """Number of its launches, of all kinds."""
    residual_bytes: int = 0
    """What error feedback holds for its gradients, all the time."""


@dataclass(frozen=True)
class StepCost:
    """What a step takes with a number of graphs ahead."""

    ahead: int
    total_us: float
    waited_us: float
    """Time in which no kernel runs because a collective is awaited."""
    peak_bytes: int
    """Most that the graphs hold, residuals included, without parameters, gradients and what runs
    between graphs."""
    residual_bytes: int = 0
    """What error feedback holds of them, between steps as well."""


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

    A forward does not start the gathers of graphs after its last backward. Reductions of at least
    one backward stay in flight until the turning point of the next one, as at run time.
    """
    return _Step(runs, ahead).cost()


def step_bound_us(runs: Sequence[GraphRun]) -> float:
    """Duration that no start of these collectives can beat, with a channel that runs one after
    another.

    Before a graph computes, its gathers and those of all graphs before it must have ended. After
    it, its reductions and those of all graphs after it must still run. The bound is the largest
    value over all pairs of a first and a last graph, between which only kernels count.
    """
    gathered, computed, reduced = 0.0, 0.0, sum(run.reduce_us for run in runs)
    start, bound = 0.0, reduced + sum(run.gather_us for run in runs)
    for run in runs:
        gathered += run.gather_us
        start = max(start, gathered - computed)
        computed += run.compute_us - run.waited_us
        bound = max(bound, start + computed + reduced)
        reduced -= run.reduce_us
    return bound


class _Step:
    def __init__(self, runs: Sequence[GraphRun], ahead: int) -> None:
        self._runs, self._ahead = runs, ahead
        self._now = self._waited = 0.0
        self._channel = 0.0
        """When the collectives that have started will have ended."""
        self._arrived: dict[int, float] = {}
        self._reducing: list[tuple[float, int]] = []
        """When each reduction in flight ends, and its bytes."""
        self._saved = self._peak = 0
        self._left: list[int] = []
        """Bytes that each forward has left, for its backward."""

    def cost(self) -> StepCost:
        for number, run in enumerate(self._runs):
            self._run(number, run)
        self._reduce(0)
        # A graph that runs again has the same residuals.
        held = sum({run.name: run.residual_bytes for run in self._runs}.values())
        return StepCost(self._ahead, self._now, self._waited, self._peak + held, held)

    def _run(self, number: int, run: GraphRun) -> None:
        turn_us = 0.0
        if number not in self._arrived:
            self._start(number)
        if not run.gathers_at_turn:
            self._start_next(number)
        if run.gather_us:
            self._wait(self._arrived[number])
        if run.is_backward and self._left:
            self._saved -= self._left.pop()  # its own peak counts it
        if run.turn_us is not None:
            turn_us = run.turn_us
            self._hold(number, run.turn_peak_bytes)
            self._now += turn_us
            self._reduce(self._ahead - 1)
            self._start_next(number)
        self._hold(number, run.peak_bytes)
        self._now += run.compute_us - turn_us
        self._waited += run.waited_us
        if not run.is_backward:
            self._left.append(run.saved_bytes)
            self._saved += run.saved_bytes
        if run.reduce_us:
            self._channel = max(self._channel, self._now) + run.reduce_us
            self._reducing.append((self._channel, run.reduced_bytes))
            self._reduce(max(1, self._ahead))

    def _start_next(self, number: int) -> None:
        for later in range(number + 1, min(number + 1 + self._ahead, len(self._runs))):
            if later not in self._arrived and _may_start(self._runs[number], self._runs[later]):
                self._start(later)

    def _start(self, number: int) -> None:
        self._channel = max(self._channel, self._now) + self._runs[number].gather_us
        self._arrived[number] = self._channel

    def _hold(self, number: int, peak_bytes: int) -> None:
        gathered = sum(self._runs[each].gathered_bytes for each in self._arrived if each >= number)
        reduced = sum(nbytes for _, nbytes in self._reducing)
        self._peak = max(self._peak, self._saved + gathered + reduced + peak_bytes)

    def _wait(self, until: float) -> None:
        self._waited += max(0.0, until - self._now)
        self._now = max(self._now, until)

    def _reduce(self, left: int) -> None:
        """Await all but the last `left` reductions."""
        while len(self._reducing) > max(0, left):
            self._wait(self._reducing.pop(0)[0])


def _may_start(run: GraphRun, later: GraphRun) -> bool:
    """Whether parameters stay the same between two graphs of one step."""
    return later.is_backward or not run.is_backward
