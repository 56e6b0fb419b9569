"""Plans of steps of graphs that run one after another: for how many graphs ahead gathers start, by
which routes, and which saved values rest on the host.

A step is planned when its last backward ends. What is known of its graphs is kept per graph of this
rank, because other ranks may run graphs for other lengths.

The program may drop a forward without a backward, as after an error that it caught, or in an
evaluation with gradients. What that one saved is freed, so it is no part of the step: when a
backward begins, only forwards count whose backward may still run. Ranks may free it at different
times, so what they agree on does not depend on that.

A forward may also run in one step and its backward in another, as in the pipeline schedule 1F1B.
What it saved is held in all steps until then, and counts in their plans. So it moves what the most
demanding of these plans says. A forward that begins while more forwards are in flight than its
plans count moves everything, as if it had no plan.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zpasses import compat
from zpasses.cost.plan.prefetch import Agreed, GraphRun, StepCost, ran_before
from zpasses.runtime.backward_checks import values_used
from zpasses.runtime.param_conversion import current_backward
from zpasses.runtime.windows import EngineRun

_MAX_STEP = 1 << 12
"""Graphs of one step that are planned together: the last ones."""

_MAX_PLANS = 64


@dataclass(frozen=True)
class RunKey:
    """A graph with its parameters. Equal on all ranks at the same place of the program."""

    graph: str
    params: object
    is_backward: bool
    text: str = field(default="", compare=False)
    """For notes: " with parameters 'layers.0.weight' to 'layers.0.bias'"."""


class Forward(NamedTuple):
    """A forward of this rank. Other ranks may run one for other lengths."""

    params: object
    """As in its `RunKey`."""
    graph: int
    """From `PlannedBlocks.number_of`."""


class _Ran(NamedTuple):
    """One run of a graph."""

    number: int
    """Of its key; negative if the graph is silent."""
    saves: bool
    """Whether what it saves stays in memory. A checkpoint drops it, and runs the graph again in
    backward."""
    moves: bool
    """Whether what it saves may rest on the host."""
    graph: int
    """Number of the graph on this rank. All else is equal on all ranks, except of silent graphs."""
    before: bool = False
    """Whether it is a forward of an earlier step, whose backward has not run when this one begins.
    """
    since_forward: int = 0
    """How many graphs before a backward its forward ran; 0 if that is not known."""


@dataclass(eq=False)
class _InFlight:
    """A forward that saves values, whose backward has not run."""

    params: object
    ran: _Ran
    backward: weakref.ref[object]
    """What is alive as long as its backward may run."""
    at: int | None = None
    """Its position in the step."""


class _Plan(NamedTuple):
    cost: StepCost
    moved: dict[Forward, tuple[int, ...]]
    """Positions of the values that each forward moves to the host."""
    counted: dict[Forward, int]
    """How many forwards with the same parameters are in flight when each of them begins."""


class _Moves:
    """What a forward moves: the most that any plan says of the round that runs and the two before
    it.

    A round ends when no forward is in flight. Its steps differ, as those at the begin and the end
    of a pipeline schedule, and what a forward saves may be held in several of them. Two kinds of
    rounds may take turns, as where a schedule runs its stages once to learn shapes.
    """

    def __init__(self) -> None:
        self._rounds = deque[tuple[int, tuple[int, ...], int]](maxlen=3)
        """Number of a round; positions of values; how many forwards with the same parameters are
        in flight when the forward begins."""

    @property
    def positions(self) -> tuple[int, ...]:
        return max((positions for _, positions, _ in self._rounds), key=len)

    @property
    def counted(self) -> int:
        return max(counted for _, _, counted in self._rounds)

    def add(self, round_: int, positions: tuple[int, ...], counted: int) -> None:
        """A step of a round has ended with a plan."""
        if self._rounds and self._rounds[-1][0] == round_:
            _, before, most = self._rounds.pop()
            positions, counted = max(before, positions, key=len), max(most, counted)
        self._rounds.append((round_, positions, counted))


PlanStep = Callable[[Sequence[GraphRun], Agreed | None], StepCost]
"""Plans a step of graphs, for which ranks have agreed how gathers start. If that is None, it asks
them."""


class InputSeen(NamedTuple):
    """What is known of an input that a forward saves, of all its runs."""

    freed: bool
    """Whether the device frees it when its copy to the host has ended."""
    counted: bool
    """Whether it is part of what another forward saves."""


class PlannedBlocks:
    """The graphs of this rank, their last step, and its plans."""

    def __init__(self) -> None:
        self._keys: dict[int, RunKey] = {}
        """By their numbers."""
        self._forwards: dict[object, Forward] = {}
        """Parameters -> the last forward with them."""
        self._graphs: list[GraphRun] = []
        self._graph_numbers: dict[GraphRun, int] = {}
        self._silent: dict[RunKey, int] = {}
        """Numbers of the keys of silent graphs, which communicate nothing. Other ranks may not run
        them."""
        self._step = deque[_Ran](maxlen=_MAX_STEP)
        """Graphs since the last step's backward, up to the last backward."""
        self._ended = 0
        """Number of graphs that have been added to `_step`."""
        self._awaiting = deque[tuple[_Ran, "weakref.ref[object] | None", _InFlight | None]](
            maxlen=_MAX_STEP
        )
        """Forwards after these, and what is alive as long as their backward may run."""
        self._ran = deque[tuple[int, bool, bool]](maxlen=_MAX_STEP)
        """What all ranks know of all graphs since the last step's backward, also of forwards
        without a backward: `number`, `saves` and `moves` as in `_Ran`."""
        self._in_flight: list[_InFlight] = []
        self._before: list[_InFlight] = []
        """Those of them when the step began. Empty once they are a part of it."""
        self._is_over = False
        """Whether the next forward begins another step."""
        self._agreed: dict[tuple[object, ...], Agreed] = {}
        """Graphs of a step, as all ranks know them -> how gathers start."""
        self._plans: dict[tuple[_Ran, ...], _Plan] = {}
        """Graphs of a step of this rank -> its plan."""
        self._last = Agreed(1, {})
        """How gathers of the last step start."""
        self._round = 0
        """Counts steps that begin without a forward in flight."""
        self._moved: dict[Forward, _Moves] = {}
        """Forward -> what it moves to the host."""
        self._inputs: dict[tuple[Forward, int], InputSeen] = {}
        """A forward, and number of an input that it saves -> what is known of it."""
        self._dropped: dict[tuple[Forward, int], bool] = {}
        """A forward, and position of an output -> whether code between the graphs drops it."""
        self._planning: weakref.ref[EngineRun] | None = None
        self._asks = True
        self._lock = threading.RLock()

    @property
    def ahead(self) -> int:
        """For how many graphs ahead gathers start where that is planned. 1 until the first step has
        ended.
        """
        return self._last.ahead

    def route_of(self, number: int) -> str:
        """Returns the copy-engine route of the gathers of a graph; "" for compute units.

        Args:
            number: of its key.
        """
        return self._last.routes.get(number, "")

    def forward_of(self, params: object) -> Forward | None:
        """Returns the last forward with these parameters; None if none takes part in the schedule.

        Args:
            params: as in its `RunKey`.
        """
        return self._forwards.get(params)

    def moved_by(self, forward: Forward | None) -> tuple[int, ...] | None:
        """Which of the values that a forward saves rest on the host until its backward: positions
        among its outputs. None if no plan says so, as until its first step has ended, or if more
        forwards with these parameters are in flight than the plan counts.
        """
        with self._lock:
            moved = self._moved.get(forward) if forward is not None else None
            if forward is None or moved is None:
                return None
            others = sum(each.params == forward.params for each in self._alive()) - 1
            return moved.positions if others <= moved.counted else None

    def is_planned(self, forward: Forward | None) -> bool:
        """Whether a plan says what a forward moves, for any number of forwards in flight."""
        return forward in self._moved

    def _alive(self, of: Sequence[_InFlight] | None = None) -> list[_InFlight]:
        """The forwards in flight, or some of them, whose backward may still run."""
        found = self._in_flight if of is None else of
        return [each for each in found if each.backward() is not None]

    def number_of(self, graph: GraphRun) -> int:
        """Returns the number of a graph of this rank. Graphs that take the same have the same."""
        with self._lock:
            number = self._graph_numbers.setdefault(graph, len(self._graphs))
            if number == len(self._graphs):
                self._graphs.append(graph)
            return number

    def note_input(self, forward: Forward, number: int, freed: bool, *, counted: bool) -> None:
        """An input that a forward saves has moved to the host.

        Args:
            number: of the input, among those that may move.
            freed: whether its memory on the device was freed. Else something else holds it.
            counted: whether it is part of what another forward saves.
        """
        with self._lock:
            before = self._inputs.get((forward, number), InputSeen(True, True))
            self._inputs[forward, number] = InputSeen(
                before.freed and freed, before.counted and counted
            )

    def note_returned(self, forward: Forward, at: int, dropped: bool) -> None:
        """Two forwards after it, what a forward returned may have been freed.

        Args:
            at: position among its outputs.
            dropped: whether it was freed, and not because it moved to the host.
        """
        with self._lock:
            before = self._dropped.get((forward, at), True)
            self._dropped[forward, at] = before and dropped

    def add_silent(self, key: RunKey, graph: int) -> None:
        """A graph of the step runs that communicates nothing.

        Args:
            graph: from `number_of`.
        """
        with self._lock:
            self.add_run(key, -1 - self._silent.setdefault(key, len(self._silent)), graph)

    def add_run(self, key: RunKey, number: int, graph: int) -> None:
        """A graph of the step runs. The first forward after a backward begins another step.

        Args:
            number: of its key.
            graph: from `number_of`.
        """
        with self._lock:
            self._keys[number] = key
            if self._graphs[graph].returned:
                self._forwards[key.params] = Forward(key.params, graph)
            in_backward, moves = compat.in_backward(), values_may_move()
            if self._is_over and not in_backward:
                self._step.clear()
                self._ran.clear()
                self._in_flight = self._alive()[-_MAX_STEP:]
                self._before = list(self._in_flight)
                self._round += not self._before
                self._is_over = False
            self._is_over |= key.is_backward
            ran = _Ran(number, moves or in_backward, moves, graph)
            if number >= 0:
                self._ran.append((number, ran.saves, ran.moves))
            if in_backward:
                self._end_forwards()
                if key.is_backward:
                    ran = ran._replace(since_forward=self._end_flight(key.params))
                self._add(ran)
            else:
                saves = bool(self._graphs[graph].returned)
                backward = current_backward() if saves else None
                flight = None
                if backward is not None and ran.saves:
                    flight = _InFlight(key.params, ran, backward)
                    self._in_flight.append(flight)
                self._awaiting.append((ran, backward, flight))

    def _end_forwards(self) -> None:
        """A backward has begun. Forwards whose backward cannot run any more are no part of the
        step.
        """
        before, self._before = self._before, []
        for flight in self._alive(before):
            flight.at = self._add(flight.ran._replace(before=True))
        for ran, backward, its_flight in self._awaiting:
            if backward is None or backward() is not None:
                at = self._add(ran)
                if its_flight is not None:
                    its_flight.at = at
        self._awaiting.clear()

    def _add(self, ran: _Ran) -> int:
        """Adds a graph to the step. Returns its position."""
        self._step.append(ran)
        self._ended += 1
        return self._ended - 1

    def _end_flight(self, params: object) -> int:
        """A backward with these parameters runs. If its forward is not known, it is taken to be the
        first one in flight, as in the schedules of pipelines.

        Returns:
            How many graphs before it its forward ran; 0 if that is not known.
        """
        used, alive = values_used(), [each for each in self._alive() if each.params == params]
        known = next((each for each in alive if each.backward() is used), None)
        found = known or next(iter(alive), None)
        self._in_flight = [each for each in self._in_flight if each is not found]
        return 0 if known is None or known.at is None else self._ended - known.at

    def plan_at_end(self, plan: PlanStep, *, asks: bool = True) -> None:
        """Called in a backward: plan the step when its backward ends, if its graphs are new.

        Args:
            asks: whether to ask other ranks for how many graphs ahead gathers start, if they have
                not agreed on that for this step. A step of which all backwards are silent keeps the
                last number.
        """
        run = EngineRun.current()
        if self._planning is None or self._planning() is not run:
            self._planning, self._asks = weakref.ref(run), False
            run.at_end(lambda: self._plan(plan))
        self._asks |= asks

    def _plan(self, plan: PlanStep) -> None:
        if compat.in_backward():  # the end of a run inside of another one, as of a checkpoint
            return
        step = tuple(self._step)
        # Whether other ranks are asked depends only on what all of them know.
        agreed = tuple(self._ran)
        known = self._agreed.get(agreed) if self._asks else self._last
        found = self._plans.get(step)
        if found is None or known != found.cost.agreed:
            found = self._new_plan(step, plan, known)
            if known is None and len(self._agreed) >= _MAX_PLANS:
                self._agreed.clear()
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[step] = found
            if self._asks:
                self._agreed[agreed] = found.cost.agreed
        self._last = found.cost.agreed
        for forward, positions in found.moved.items():
            moves = self._moved.setdefault(forward, _Moves())
            moves.add(self._round, positions, found.counted.get(forward, 0))

    def _new_plan(self, step: Sequence[_Ran], plan: PlanStep, agreed: Agreed | None) -> _Plan:
        keys = self._keys
        ran = [each._replace(before=False) for each in step]
        kinds = {each: self._described(each, keys[each.number]) for each in {*ran}}
        # A graph that runs again is one object.
        kinds |= {each: self._held(each, kinds, step) for each in {*step} if each.before}
        runs = [kinds[each] for each in step]
        chosen = plan(runs, agreed)
        moved = {
            Forward(keys[each.number].params, each.graph): tuple(
                value.at for value in run.movable[:count]
            )
            for each, run, count in zip(step, runs, chosen.moved or [0] * len(step), strict=True)
            if each.moves and not each.before and self._graphs[each.graph].movable
        }
        return _Plan(chosen, moved, self._most_before(step))

    def _held(self, ran: _Ran, kinds: Mapping[_Ran, GraphRun], step: Collection[_Ran]) -> GraphRun:
        """Returns a forward that ran before a step begins.

        Args:
            kinds: what is known of the graphs.
        """
        again = ran._replace(before=False)
        run = ran_before(kinds[again])
        if again in step:
            return run
        # What it moves is not planned with this step.
        moved = self._moved.get(Forward(self._keys[ran.number].params, ran.graph))
        out = [each.nbytes for each in run.movable if moved is None or each.at in moved.positions]
        return replace(run, movable=(), saved_bytes=run.saved_bytes - sum(out))

    def _most_before(self, step: Sequence[_Ran]) -> dict[Forward, int]:
        """Returns how many forwards with the same parameters are in flight, at most, when each
        forward of a step begins.
        """
        now: dict[object, int] = {}
        most: dict[Forward, int] = {}
        for each in step:
            key = self._keys[each.number]
            if key.is_backward:
                now[key.params] = max(0, now.get(key.params, 0) - 1)
            elif each.saves and self._graphs[each.graph].returned:
                forward, before = Forward(key.params, each.graph), now.get(key.params, 0)
                most[forward] = max(most.get(forward, 0), before)
                now[key.params] = before + 1
        return most

    def _described(self, ran: _Ran, key: RunKey) -> GraphRun:
        run = self._graphs[ran.graph]
        name = f"{run.name}{key.text}"
        run = replace(run, name=name, params=key.params, number=ran.number)
        if run.is_backward:
            return replace(run, since_forward=ran.since_forward)
        if not ran.moves:
            return replace(run, movable=(), saved_bytes=run.saved_bytes if ran.saves else 0)
        forward = Forward(key.params, ran.graph)
        dropped = [size for at, size in run.returned if self._dropped.get((forward, at))]
        run = replace(run, dropped_bytes=sum(dropped)) if dropped else run
        inputs = [each for each in run.movable if each.is_input]
        if not inputs:
            return run
        seen = {each: self._seen(forward, number) for number, each in enumerate(inputs)}
        freed = [each for each, known in seen.items() if known is not None and known.freed]
        uncounted = [each.nbytes for each in freed if (known := seen[each]) and not known.counted]
        return replace(
            run,
            movable=tuple(each for each in run.movable if not each.is_input or each in freed),
            saved_bytes=run.saved_bytes + sum(uncounted),
            held_bytes=sum(each.nbytes for each in inputs if seen[each] and each not in freed),
        )

    def _seen(self, forward: Forward, number: int) -> InputSeen | None:
        """What is known of an input. If it did not move, for lack of memory on the host, it is as
        that of the last equal graph.
        """
        found = self._inputs.get((forward, number))
        for (params, graph), its_number in reversed(self._inputs) if found is None else ():
            if (graph, its_number) == (forward.graph, number):
                return self._inputs[Forward(params, graph), number]
        return found


def values_may_move() -> bool:
    """Whether what a forward saves now may rest on the host until its backward. What a checkpoint
    saves does not rest, and what it computes again is needed at once.
    """
    return not compat.in_backward() and not compat.has_saved_tensor_hooks()
