"""How far ahead gathers start in a step of several graphs, such as blocks compiled one by one.

The step is simulated with gathers that start 0, 1, 2, ... graphs ahead. A channel runs collectives
one after another, in the order in which they start. The fewest graphs ahead that are as fast as any
within the memory limit win.

Values that forwards save may rest on the host until their backward. Each call moves its own: the
copy out runs beside the next forward, and the copy back beside the backward before its own. For
each number of graphs ahead, as few values move as make the step fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zpasses.graph.host_copies import aligned

MOST_AHEAD = 4

_TOLERANCE = 1.004
"""Steps whose durations differ by less are equally fast."""


@dataclass(frozen=True)
class MovableValue:
    """A value that a forward saves, and that may rest on the host until backward."""

    nbytes: int
    out_us: float
    """Duration of the copy to the host."""
    in_us: float
    """Duration of the copy back."""
    at: int = 0
    """Its position among the outputs of the forward."""
    is_input: bool = False
    """Whether the forward got it. Its memory is then that of whoever made it, and moving it frees
    that only if nothing else holds it."""


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
    """What a forward leaves in memory until its backward, without `cached_bytes`."""
    turn_us: float | None = None
    """How long it computes until its turning point, where it awaits the reductions of graphs before
    it; None: it has none."""
    turn_peak_bytes: int = 0
    """Most that it allocates itself until then."""
    gathers_at_turn: bool = False
    """Whether gathers of the next graphs start there, and not where the graph begins."""
    exposed_us: float = 0.0
    """Part of `compute_us` in which only collectives that stay in it run."""
    collectives: int = 0
    """Number of its launches, of all kinds."""
    movable: tuple[MovableValue, ...] = ()
    """What may rest on the host, in the order in which values are chosen."""
    returned: tuple[tuple[int, int], ...] = ()
    """Position and bytes of each tensor in `saved_bytes`."""
    dropped_bytes: int = 0
    """What code between the graphs drops of `saved_bytes`: it is freed when the next forward but
    one has run."""
    held_bytes: int = 0
    """Inputs that would rest there if nothing else held them."""
    copies_compute: bool = False
    """Whether no kernel runs beside a copy to or from the host, as on CPUs."""
    residual_bytes: int = 0
    """What error feedback holds for its gradients, all the time."""
    cached_bytes: int = 0
    """Full parameters that it takes from the cache, or leaves there until their gradients are
    reduced."""
    cached_read_bytes: int = 0
    """Part of `cached_bytes` that the backward of a forward reads, whose own peak counts it."""
    params: object = None
    """Equal for graphs with the same parameters."""
    ran_before: GraphRun | None = None
    """The graph itself, if this is a forward that ran before the step, and whose backward did not.
    What it saved is in memory, and it takes no time."""


def ran_before(run: GraphRun) -> GraphRun:
    """Returns a forward that ran before the step begins, and whose backward runs in it or later."""
    movable = tuple(replace(each, out_us=0.0) for each in run.movable)
    none = {"compute_us": 0.0, "gather_us": 0.0, "exposed_us": 0.0, "collectives": 0}
    return replace(run, movable=movable, ran_before=run, **none)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StepCost:
    """What a step takes with a number of graphs ahead."""

    ahead: int
    total_us: float
    exposed_us: float
    """Time in which no kernel runs because a collective or a copy is awaited."""
    peak_bytes: int
    """Most that the graphs hold, residuals included, without parameters, gradients and what runs
    between graphs."""
    moved: tuple[int, ...] = ()
    """How many values each graph moves to the host; () if none does."""
    host_bytes: int = 0
    """Bytes of these."""
    residual_bytes: int = 0
    """What error feedback holds of the peak, between steps as well."""


def plan_prefetch(
    runs: Sequence[GraphRun], limit_bytes: int | None, host_bytes: int = 0
) -> StepCost:
    """Choose for how many graphs ahead gathers start, and which values rest on the host.

    Args:
        runs: the graphs of one step, in their order. Those that are one object are one graph with
            the same parameters.
        limit_bytes: largest peak; None has no limit.
        host_bytes: the most that values may take of the host.

    Returns:
        The choice. If nothing fits, that with the least peak.
    """
    moves = moves_in_order(runs, host_bytes)
    costs = [plan_moves(runs, ahead, limit_bytes, moves) for ahead in range(MOST_AHEAD + 1)]
    fitting = [each for each in costs if limit_bytes is None or each.peak_bytes <= limit_bytes]
    if not fitting:
        return min(costs, key=lambda each: each.peak_bytes)
    fastest = min(each.total_us for each in fitting)
    return next(each for each in fitting if each.total_us <= fastest * _TOLERANCE)


def plan_moves(
    runs: Sequence[GraphRun],
    ahead: int,
    limit_bytes: int | None,
    moves: Sequence[Sequence[int]],
) -> StepCost:
    """Choose as few values to move to the host as make a step fit, with gathers that start `ahead`
    graphs ahead. All of them move if it never fits.

    Args:
        moves: from `moves_in_order`.
    """

    def with_first(count: int) -> StepCost:
        moved = [0] * len(runs)
        for positions in moves[:count]:
            for each in positions:
                moved[each] += 1
        return step_cost(runs, ahead, moved if count else ())

    cost = with_first(0)
    if limit_bytes is None or cost.peak_bytes <= limit_bytes:
        return cost
    few, many, cost = 0, len(moves), with_first(len(moves))
    while many - few > 1 and cost.peak_bytes <= limit_bytes:
        middle = (few + many) // 2
        between = with_first(middle)
        if between.peak_bytes <= limit_bytes:
            many, cost = middle, between
        else:
            few = middle
    return cost


def moves_in_order(runs: Sequence[GraphRun], host_bytes: int) -> list[list[int]]:
    """Returns the moves of values to the host, the best first: those that the compute beside them
    covers most, and of equal ones the earliest, which rest longest.

    A move is the next value of one graph, in all its runs: the position of each. Graphs move
    nothing if one of their runs has its backward so soon that the copies would meet, or if all ran
    before the step.

    Args:
        host_bytes: the most that the values of all moves may take.
    """
    backwards = {forward: at for at, forward in _forward_of(runs).items()}
    positions: dict[int, list[int]] = {}
    for at, run in enumerate(runs):
        if run.movable:
            positions.setdefault(id(run.ran_before or run), []).append(at)
    found: list[tuple[float, list[int], int]] = []
    for each in positions.values():
        runs_now = any(runs[at].ran_before is None for at in each)
        if runs_now and all(_rests(runs, at, backwards.get(at)) for at in each):
            out_us = back_us = 0.0
            for value in runs[each[-1]].movable:
                out_us, back_us = out_us + value.out_us, back_us + value.in_us
                now = [at for at in each if runs[at].ran_before is None]
                beside = [out_us / max(1e-3, runs[at + 1].compute_us) for at in now]
                ends = [backwards[at] for at in each if at in backwards]
                beside += [back_us / max(1e-3, runs[at - 1].compute_us) for at in ends]
                found.append((max(beside), each, aligned(value.nbytes) * len(each)))
    found.sort(key=lambda move: (move[0], move[1]))
    moves, left = [], host_bytes
    for _, each, nbytes in found:
        left -= nbytes
        if left < 0:
            break
        moves.append(each)
    return moves


def _rests(runs: Sequence[GraphRun], forward: int, backward: int | None) -> bool:
    """Whether some graph runs between the ends of the copies out and the starts of those back."""
    if forward + 1 == len(runs) or runs[forward + 1].is_backward:
        return False
    # A backward that is not in the step comes later.
    return backward is None or (backward - forward >= _NEAREST and runs[backward - 1].is_backward)


_NEAREST = 4
"""The copies out end after the next graph, and those back start before the last one before their
backward."""


def _forward_of(runs: Sequence[GraphRun]) -> dict[int, int]:
    """Position of each backward -> that of its forward: the last one whose values are left."""
    found, left = {}, list[int]()
    for at, run in enumerate(runs):
        if run.is_backward and left:
            found[at] = left.pop()
        elif not run.is_backward and run.saved_bytes:
            left.append(at)
    return found


def step_cost(runs: Sequence[GraphRun], ahead: int, moved: Sequence[int] = ()) -> StepCost:
    """Simulate a step whose gathers start `ahead` graphs ahead.

    A forward does not start the gathers of graphs after its last backward. Reductions of at least
    one backward stay in flight until the turning point of the next one, as at run time.

    Args:
        moved: how many values each graph moves to the host; () moves none.
    """
    return _Step(runs, ahead, moved).cost()


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
        computed += run.compute_us - run.exposed_us
        bound = max(bound, start + computed + reduced)
        reduced -= run.reduce_us
    return bound


class _Step:
    def __init__(self, runs: Sequence[GraphRun], ahead: int, moved: Sequence[int]) -> None:
        self._runs, self._ahead, self._moved = runs, ahead, tuple(moved)
        self._forward_of = _forward_of(runs)
        pairs = zip(runs, self._moved, strict=False)
        self._values = [run.movable[:count] for run, count in pairs] or [()] * len(runs)
        self._now = self._exposed = 0.0
        self._channel = 0.0
        """When the collectives that have started will have ended."""
        self._arrived: dict[int, float] = {}
        self._reducing: list[tuple[float, GraphRun]] = []
        """When the reductions in flight of each graph end."""
        self._cached: dict[object, int] = {}
        """Parameters -> bytes of them in the cache."""
        for run in runs:
            self._cached.setdefault(run.params, max(0, run.cached_bytes - run.gathered_bytes))
        self._saved = self._peak = 0
        self._freed: dict[int, int] = {}
        """Forward -> bytes of what it saved that code between the graphs has dropped."""
        self._out = self._in = 0.0
        """When the copies to and from the host that have started will have ended."""
        self._leaving: list[tuple[float, int]] = []
        """When the copies out of each forward end, and their bytes, which the device holds."""
        self._back: dict[int, float] = {}
        """Forward -> when its values are back. The device holds them."""

    def cost(self) -> StepCost:
        for number, run in enumerate(self._runs):
            self._run(number, run)
        self._reduce(0)
        moved = sum(value.nbytes for values in self._values for value in values)
        # A graph that runs again has the same residuals.
        held = sum({run.name: run.residual_bytes for run in self._runs}.values())
        return StepCost(
            self._ahead, self._now, self._exposed, self._peak + held, self._moved, moved, held
        )

    def _run(self, number: int, run: GraphRun) -> None:
        turn_us = 0.0
        if run.is_backward:
            self._free_left()
            self._bring_back(number)
            self._bring_back(number + 1)
            self._wait(self._back.get(self._forward_of.get(number, -1), 0.0))
        if number not in self._arrived:
            self._start(number)
        if not run.gathers_at_turn:
            self._start_next(number)
        if run.gather_us:
            self._wait(self._arrived[number])
        counted = 0  # by its own peak, too
        if run.is_backward and number in self._forward_of:
            forward = self._forward_of[number]
            self._saved -= self._runs[forward].saved_bytes - self._freed.get(forward, 0)
            counted = self._runs[forward].cached_read_bytes
        if run.turn_us is not None:
            turn_us = run.turn_us
            self._hold(number, run.turn_peak_bytes - counted)
            self._now += turn_us
            self._reduce(self._ahead - 1)
            self._start_next(number)
        self._hold(number, run.peak_bytes - counted)
        self._now += run.compute_us - turn_us
        self._exposed += run.exposed_us
        if not run.is_backward:
            self._saved += run.saved_bytes
            if run.cached_bytes:
                self._cached[run.params] = run.cached_bytes
            self._drop_before(number)
            self._free_left()
            self._move_out(number)
        if run.reduce_us:
            self._channel = max(self._channel, self._now) + run.reduce_us
            self._reducing.append((self._channel, run))
            self._reduce(max(1, self._ahead))

    def _drop_before(self, number: int) -> None:
        """Free what code after the forward but one before has dropped."""
        before = self._runs[max(0, number - 2) : number]
        if len(before) > 1 and not any(run.is_backward for run in before):
            self._freed[number - 2] = before[0].dropped_bytes
            self._saved -= before[0].dropped_bytes

    def _move_out(self, number: int) -> None:
        values, run = self._values[number], self._runs[number]
        if values:
            self._out = self._copy(self._out, run, sum(each.out_us for each in values))
            self._leaving.append((self._out, sum(each.nbytes for each in values)))

    def _free_left(self) -> None:
        """Await the copies out of the forwards before."""
        for end, nbytes in self._leaving:
            self._wait(end)
            self._saved -= nbytes
        self._leaving.clear()

    def _bring_back(self, number: int) -> None:
        """Start the copies back for a backward, if they have not started."""
        forward = self._forward_of.get(number, -1)
        values = self._values[forward] if forward >= 0 else ()
        if values and forward not in self._back:
            run = self._runs[forward]
            self._in = self._copy(self._in, run, sum(each.in_us for each in values))
            self._back[forward] = self._in
            self._saved += sum(each.nbytes for each in values)

    def _copy(self, busy: float, run: GraphRun, duration_us: float) -> float:
        """Returns when a copy ends that starts now."""
        if run.copies_compute:
            self._now += duration_us
            return self._now
        return max(busy, self._now) + duration_us

    def _start_next(self, number: int) -> None:
        for later in range(number + 1, min(number + 1 + self._ahead, len(self._runs))):
            if later not in self._arrived and _may_start(self._runs[number], self._runs[later]):
                self._start(later)

    def _start(self, number: int) -> None:
        self._channel = max(self._channel, self._now) + self._runs[number].gather_us
        self._arrived[number] = self._channel

    def _hold(self, number: int, peak_bytes: int) -> None:
        gathered = sum(self._runs[each].gathered_bytes for each in self._arrived if each >= number)
        reduced = sum(run.reduced_bytes for _, run in self._reducing)
        held = self._saved + sum(self._cached.values()) + gathered + reduced
        self._peak = max(self._peak, held + peak_bytes)

    def _wait(self, until: float) -> None:
        self._exposed += max(0.0, until - self._now)
        self._now = max(self._now, until)

    def _reduce(self, left: int) -> None:
        """Await all but the last `left` reductions."""
        while len(self._reducing) > max(0, left):
            end, run = self._reducing.pop(0)
            self._wait(end)
            cached = self._cached.get(run.params, 0)  # what is frozen stays there
            self._cached[run.params] = max(0, cached - run.reduced_bytes)


def _may_start(run: GraphRun, later: GraphRun) -> bool:
    """Whether parameters stay the same between two graphs of one step."""
    return later.is_backward or not run.is_backward
