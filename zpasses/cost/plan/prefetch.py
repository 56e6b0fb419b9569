"""How far ahead gathers start in a step of several graphs, such as blocks compiled one by one.

The step is simulated by the clock of `zpasses.cost.time.clock`, with gathers that start 0, 1, 2,
... graphs ahead. The fewest graphs ahead that are as fast as any within the memory limit win. For
each number, equal graphs change to the copy-engine route with which the step is fastest.

Values that forwards save may rest on the host until their backward. Each call moves its own: the
copy out runs beside the next forward, and the copy back beside the backward before its own. For
each number of graphs ahead, as few values move as make the step fit.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from zpasses.cost.plan.schedule_planner import ROUTE_PRICE_US
from zpasses.cost.time.clock import Channel, Clock, CollectiveTiming
from zpasses.graph.host_copies import aligned

MOST_AHEAD = 4

MOST_RISE = 0.3
"""By how much of the peak copy engines may raise it without a budget, as collectives in flight may
in `schedule`."""

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


class EngineGather(NamedTuple):
    """The gathers of a graph by a copy-engine route."""

    route: str
    timing: CollectiveTiming
    packed_bytes: int
    """Most that they allocate besides the full tensors."""


@dataclass(frozen=True)
class GraphRun:
    """One run of a graph whose gathers start before it, and whose reductions end after it."""

    name: str
    """For notes: "forward of layers.3.attention.weight to layers.3.mlp.bias"."""
    is_backward: bool
    compute_us: float
    """Duration of its kernels, and of the collectives that stay in it."""
    gather: CollectiveTiming
    """Its gathers, as one transfer."""
    reduce: CollectiveTiming
    """Its reductions."""
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
    engines: tuple[EngineGather, ...] = ()
    """How copy engines can run its gathers."""
    number: int = -1
    """Equal on all ranks for one graph with its parameters; negative if others may not run it."""
    ran_before: GraphRun | None = None
    """The graph itself, if this is a forward that ran before the step, and whose backward did not.
    What it saved is in memory, and it takes no time."""
    since_forward: int = 0
    """How many graphs before a backward its forward ran; 0: it is the last one whose values are
    left."""

    @property
    def kind(self) -> Hashable:
        """Equal for graphs whose gathers take the same route."""
        return self.is_backward, self.compute_us, self.gather, self.engines

    def gather_on(self, route: str) -> EngineGather:
        """Returns its gathers by a route; "" for compute units."""
        on_units = EngineGather("", self.gather, 0)
        return next((each for each in self.engines if each.route == route), on_units)


def ran_before(run: GraphRun) -> GraphRun:
    """Returns a forward that ran before the step begins, and whose backward runs in it or later."""
    movable = tuple(replace(each, out_us=0.0) for each in run.movable)
    return replace(
        run,
        movable=movable,
        ran_before=run,
        compute_us=0.0,
        gather=CollectiveTiming(0.0),
        exposed_us=0.0,
        collectives=0,
        engines=(),
    )


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
    routes: Routes = field(default_factory=dict)
    """The routes of gathers that copy engines run."""

    @property
    def agreed(self) -> Agreed:
        """What all ranks must share of it."""
        return Agreed(self.ahead, self.routes)


Routes = Mapping[int, str]
"""`GraphRun.number` -> the copy-engine route of its gathers."""
ON_UNITS: Routes = MappingProxyType({})


class Agreed(NamedTuple):
    """How gathers start, which is the same on all ranks."""

    ahead: int
    """For how many graphs ahead."""
    routes: Routes


def plan_prefetch(
    runs: Sequence[GraphRun], limit_bytes: int | None, host_bytes: int = 0
) -> StepCost:
    """Choose for how many graphs ahead gathers start, which routes they take, and which values rest
    on the host.

    Args:
        runs: the graphs of one step, in their order. Those that are one object are one graph with
            the same parameters.
        limit_bytes: largest peak; None has no limit, but routes may raise the peak that the step
            has without them by 30 % at most, for what they pack and for graphs farther ahead.
        host_bytes: the most that values may take of the host.

    Returns:
        The choice. If nothing fits, that with the least peak.
    """
    moves = moves_in_order(runs, host_bytes)
    if limit_bytes is None and any(run.engines for run in runs):
        on_units = plan_prefetch([replace(run, engines=()) for run in runs], None)
        limit_bytes, moves = int(on_units.peak_bytes * (1 + MOST_RISE)), []
    costs = [plan_routes(runs, ahead, limit_bytes, moves) for ahead in range(MOST_AHEAD + 1)]
    fitting = [each for each in costs if limit_bytes is None or each.peak_bytes <= limit_bytes]
    if not fitting:
        return min(costs, key=lambda each: each.peak_bytes)
    fastest = min(each.total_us for each in fitting)
    return next(each for each in fitting if each.total_us <= fastest * _TOLERANCE)


def plan_routes(
    runs: Sequence[GraphRun], ahead: int, limit_bytes: int | None, moves: Sequence[Sequence[int]]
) -> StepCost:
    """Choose routes for the gathers of graphs, and values to move, as `plan_moves`. One kind of
    equal graphs after another takes the route with which the step is fastest, given those before.
    """

    def rank(cost: StepCost) -> tuple[float, float]:
        excess = 0 if limit_bytes is None else max(0, cost.peak_bytes - limit_bytes)
        return excess, cost.total_us + ROUTE_PRICE_US * len(cost.routes)

    best = plan_moves(runs, ahead, limit_bytes, moves)
    kinds: dict[Hashable, list[GraphRun]] = {}
    for run in runs:
        if run.engines and run.number >= 0:
            kinds.setdefault(run.kind, []).append(run)
    for alike in kinds.values():
        for each in alike[0].engines:
            routes = {**best.routes, **dict.fromkeys((run.number for run in alike), each.route)}
            cost = plan_moves(runs, ahead, limit_bytes, moves, routes)
            best = min(best, cost, key=rank)
    return best


def plan_moves(
    runs: Sequence[GraphRun],
    ahead: int,
    limit_bytes: int | None,
    moves: Sequence[Sequence[int]],
    routes: Routes = ON_UNITS,
) -> StepCost:
    """Choose as few values to move to the host as make a step fit, with gathers that start `ahead`
    graphs ahead. All of them move if it never fits.

    Args:
        moves: from `moves_in_order`.
        routes: as `StepCost.routes`.
    """

    def with_first(count: int) -> StepCost:
        moved = [0] * len(runs)
        for positions in moves[:count]:
            for each in positions:
                moved[each] += 1
        return step_cost(runs, ahead, moved if count else (), routes)

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
    before the step. Copies with no compute beside them come last.

    Args:
        host_bytes: the most that the values of all moves may take.
    """
    forward_of = _forward_of(runs)
    backwards = {forward: at for at, forward in forward_of.items()}
    positions: dict[int, list[int]] = {}
    for at, run in enumerate(runs):
        if run.movable:
            positions.setdefault(id(run.ran_before or run), []).append(at)
    found: list[tuple[float, list[int], int]] = []
    for each in positions.values():
        runs_now = any(runs[at].ran_before is None for at in each)
        if runs_now and all(_rests(runs, forward_of, at, backwards.get(at)) for at in each):
            out_us = back_us = 0.0
            for value in runs[each[-1]].movable:
                out_us, back_us = out_us + value.out_us, back_us + value.in_us
                now = [at for at in each if runs[at].ran_before is None]
                beside = [out_us / _out_beside_us(runs, at) for at in now]
                ends = [backwards[at] for at in each if at in backwards]
                beside += [back_us / _back_beside_us(runs, forward_of, at) for at in ends]
                found.append((max(beside), each, aligned(value.nbytes) * len(each)))
    found.sort(key=lambda move: (move[0], move[1]))
    moves, left = [], host_bytes
    for _, each, nbytes in found:
        left -= nbytes
        if left < 0:
            break
        moves.append(each)
    return moves


_NO_COMPUTE_US = 1e-3


def _out_beside_us(runs: Sequence[GraphRun], forward: int) -> float:
    """How long a graph computes beside the copies out of a forward: the next one, if it is another
    forward. A backward awaits them first.
    """
    after = runs[forward + 1]
    return _NO_COMPUTE_US if after.is_backward else max(_NO_COMPUTE_US, after.compute_us)


def _back_beside_us(
    runs: Sequence[GraphRun], forward_of: Mapping[int, int], backward: int
) -> float:
    """How long a graph computes beside the copies back for a backward."""
    before = _back_from(runs, forward_of, backward)
    return max(_NO_COMPUTE_US, runs[before].compute_us) if before < backward else _NO_COMPUTE_US


def _back_from(runs: Sequence[GraphRun], forward_of: Mapping[int, int], backward: int) -> int:
    """Position of the backward with which the copies back for a backward start: the one before it,
    if that one's forward ran later, as in the backward of one call of the model; else its own.
    """
    before = backward - 1
    follows = runs[before].is_backward and (
        before not in forward_of or forward_of[before] > forward_of.get(backward, -1)
    )
    return before if follows else backward


def _rests(
    runs: Sequence[GraphRun], forward_of: Mapping[int, int], forward: int, backward: int | None
) -> bool:
    """Whether some graph runs between the ends of the copies out and the starts of those back."""
    if forward + 1 == len(runs):
        return False
    if backward is None:  # it comes after the step
        return True
    # The copies out end after the next forward, or before the next backward.
    end = forward if runs[forward + 1].is_backward else forward + 1
    return _back_from(runs, forward_of, backward) - end > 1


def _forward_of(runs: Sequence[GraphRun]) -> dict[int, int]:
    """Position of each backward -> that of its forward."""
    found = {
        at: at - run.since_forward
        for at, run in enumerate(runs)
        if run.is_backward and 0 < run.since_forward <= at
    }
    known, left = {*found.values()}, list[int]()
    for at, run in enumerate(runs):
        if run.is_backward and left and not run.since_forward:
            found[at] = left.pop()
        elif not run.is_backward and run.saved_bytes and at not in known:
            left.append(at)
    return found


def step_cost(
    runs: Sequence[GraphRun], ahead: int, moved: Sequence[int] = (), routes: Routes = ON_UNITS
) -> StepCost:
    """Simulate a step whose gathers start `ahead` graphs ahead.

    A forward does not start the gathers of graphs after its last backward. Reductions of at least
    one backward stay in flight until the turning point of the next one, as at run time.

    Args:
        moved: how many values each graph moves to the host; () moves none.
        routes: as `StepCost.routes`.
    """
    return _Step(runs, ahead, moved, routes).cost()


def step_bound_us(runs: Sequence[GraphRun]) -> float:
    """Duration that no start of these collectives, and no route, can beat.

    Before a graph computes, its gathers and those of all graphs before it must have ended. After
    it, its reductions and those of all graphs after it must still run. The bound is the largest
    value over all pairs of a first and a last graph, between which only kernels count, and over all
    channels, each of which runs one transfer after another.
    """
    channels = {each.channel for run in runs for each in (run.gather, run.reduce)}
    return max(_bound_us(runs, channel) for channel in channels)


def _bound_us(runs: Sequence[GraphRun], channel: Channel) -> float:
    def took(timing: CollectiveTiming) -> float:
        return timing.duration_us if timing.channel == channel else 0.0

    # Engines share the links of the channel, so gathers by them count as if they were on it.
    gathers = [
        min([took(run.gather), *(each.timing.duration_us for each in run.engines)]) for run in runs
    ]
    reductions = [took(run.reduce) for run in runs]
    gathered, computed, reduced = 0.0, 0.0, sum(reductions)
    start, bound = 0.0, reduced + sum(gathers)
    for run, gather, reduction in zip(runs, gathers, reductions, strict=True):
        gathered += gather
        start = max(start, gathered - computed)
        computed += run.compute_us - run.exposed_us
        bound = max(bound, start + computed + reduced)
        reduced -= reduction
    return bound


_OUT, _IN = Channel("host-out"), Channel("host-in")


class _Step:
    def __init__(
        self, runs: Sequence[GraphRun], ahead: int, moved: Sequence[int], routes: Routes
    ) -> None:
        self._runs, self._ahead, self._moved = runs, ahead, tuple(moved)
        self._routes, self._gathers = (
            routes,
            [run.gather_on(routes.get(run.number, "")) for run in runs],
        )
        self._forward_of = _forward_of(runs)
        pairs = zip(runs, self._moved, strict=False)
        self._values = [run.movable[:count] for run, count in pairs] or [()] * len(runs)
        self._clock, self._exposed, self._transfers = Clock(), 0.0, 0
        self._gathering: dict[int, int | None] = {}
        """Graph -> the transfer of its gathers; None if it has none."""
        self._reducing: list[tuple[int, GraphRun]] = []
        """The transfers of the reductions in flight."""
        self._cached: dict[object, int] = {}
        """Parameters -> bytes of them in the cache."""
        for run in runs:
            self._cached.setdefault(run.params, max(0, run.cached_bytes - run.gathered_bytes))
        self._saved = self._peak = 0
        self._freed: dict[int, int] = {}
        """Forward -> bytes of what it saved that code between the graphs has dropped."""
        self._leaving: list[tuple[int | None, int]] = []
        """The copies out of each forward, and their bytes, which the device holds."""
        self._back: dict[int, int | None] = {}
        """Forward -> the copies back of its values. The device holds them."""

    def cost(self) -> StepCost:
        for number, run in enumerate(self._runs):
            self._run(number, run)
        self._reduce(0)
        moved = sum(value.nbytes for values in self._values for value in values)
        # A graph that runs again has the same residuals.
        held = sum({run.name: run.residual_bytes for run in self._runs}.values())
        return StepCost(
            self._ahead,
            self._clock.now_us,
            self._clock.exposed_us + self._exposed,
            self._peak + held,
            self._moved,
            moved,
            held,
            dict(self._routes),
        )

    def _run(self, number: int, run: GraphRun) -> None:
        turn_us = 0.0
        if run.is_backward:
            self._free_left()
            self._bring_back(number)
            if (
                number + 1 < len(self._runs)
                and _back_from(self._runs, self._forward_of, number + 1) == number
            ):
                self._bring_back(number + 1)
            self._wait(self._back.get(self._forward_of.get(number, -1)))
        if number not in self._gathering:
            self._start(number)
        if not run.gathers_at_turn:
            self._start_next(number)
        self._wait(self._gathering[number])
        counted = 0  # by its own peak, too
        if run.is_backward and number in self._forward_of:
            forward = self._forward_of[number]
            self._saved -= self._runs[forward].saved_bytes - self._freed.get(forward, 0)
            counted = self._runs[forward].cached_read_bytes
        if run.turn_us is not None:
            turn_us = run.turn_us
            self._hold(number, run.turn_peak_bytes - counted)
            self._clock.work(turn_us)
            self._reduce(self._ahead - 1)
            self._start_next(number)
        self._hold(number, run.peak_bytes - counted)
        self._clock.work(run.compute_us - turn_us)
        self._exposed += run.exposed_us
        if not run.is_backward:
            self._saved += run.saved_bytes
            if run.cached_bytes:
                self._cached[run.params] = run.cached_bytes
            self._drop_before(number)
            self._free_left()
            self._move_out(number)
        reduction = self._transfer(run.reduce)
        if reduction is not None:
            self._reducing.append((reduction, run))
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
            copies = self._copy(_OUT, run, sum(each.out_us for each in values))
            self._leaving.append((copies, sum(each.nbytes for each in values)))

    def _free_left(self) -> None:
        """Await the copies out of the forwards before."""
        for copies, nbytes in self._leaving:
            self._wait(copies)
            self._saved -= nbytes
        self._leaving.clear()

    def _bring_back(self, number: int) -> None:
        """Start the copies back for a backward, if they have not started."""
        forward = self._forward_of.get(number, -1)
        values = self._values[forward] if forward >= 0 else ()
        if values and forward not in self._back:
            run = self._runs[forward]
            self._back[forward] = self._copy(_IN, run, sum(each.in_us for each in values))
            self._saved += sum(each.nbytes for each in values)

    def _copy(self, channel: Channel, run: GraphRun, duration_us: float) -> int | None:
        """Starts a copy that takes so long."""
        if run.copies_compute:
            self._clock.work(duration_us)
            return None
        return self._transfer(CollectiveTiming(duration_us, channel=channel))

    def _start_next(self, number: int) -> None:
        for later in range(number + 1, min(number + 1 + self._ahead, len(self._runs))):
            if later not in self._gathering and _may_start(self._runs[number], self._runs[later]):
                self._start(later)

    def _start(self, number: int) -> None:
        self._gathering[number] = self._transfer(self._gathers[number].timing)

    def _transfer(self, timing: CollectiveTiming) -> int | None:
        """Starts a transfer. Returns its number; None if there is nothing to transfer."""
        if not timing.duration_us:
            return None
        self._transfers += 1
        self._clock.work(timing.issue_us)
        self._clock.enqueue(self._transfers, timing.duration_us, timing)
        return self._transfers

    def _hold(self, number: int, peak_bytes: int) -> None:
        gathered = sum(
            self._runs[each].gathered_bytes + self._gathers[each].packed_bytes
            for each in self._gathering
            if each >= number
        )
        reduced = sum(run.reduced_bytes for _, run in self._reducing)
        held = self._saved + sum(self._cached.values()) + gathered + reduced
        self._peak = max(self._peak, held + peak_bytes)

    def _wait(self, transfer: int | None) -> None:
        if transfer is not None:
            self._clock.wait(transfer)

    def _reduce(self, left: int) -> None:
        """Await all but the last `left` reductions."""
        while len(self._reducing) > max(0, left):
            reduction, run = self._reducing.pop(0)
            self._wait(reduction)
            cached = self._cached.get(run.params, 0)  # what is frozen stays there
            self._cached[run.params] = max(0, cached - run.reduced_bytes)


def _may_start(run: GraphRun, later: GraphRun) -> bool:
    """Whether parameters stay the same between two graphs of one step."""
    return later.is_backward or not run.is_backward
