"""The schedule of graphs that run one after another, such as those of blocks compiled one by one.

A graph whose collectives are hoisted (zpasses.graph.hoisting) tells the schedule when it runs. The
schedule predicts the graphs that run next from the last ones, starts their gathers, and leaves the
reductions of a backward in flight while the next one computes.

All ranks predict the same, because their graphs run in the same order: `zpasses.ranks.run_order`
compares that. A graph that comes unexpected gathers when it runs. What was gathered for another one
is dropped.

Nothing is started across a border where parameters may change. Gathers of a forward start in the
same call of the model (`begin_model_call`). Gathers of a backward start in the forward before it,
or in the same run of the autograd engine.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.cost.plan.prefetch import GraphRun, StepCost
from zpasses.runtime.early_steps import is_complete, run_early_steps
from zpasses.runtime.edits import memory_of
from zpasses.runtime.layout import rows_of
from zpasses.runtime.param_conversion import accumulate_grads, wrap_shard_grad
from zpasses.runtime.param_value import stamp_of
from zpasses.runtime.windows import EngineRun

log = logging.getLogger("zpasses")

_CONTEXTS = (8, 4, 2, 1)
"""Numbers of graphs by which the next one is predicted. The longest that is known decides."""

_MAX_PREDICTIONS = 1 << 14

_MAX_STEP = 1 << 12
"""Graphs of one step that are planned together."""

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
    """From `BlockSchedule.number_of`."""


@dataclass
class Gathered:
    """Gathers that have started."""

    values: list[Tensor]
    in_flight: Sequence[int]
    """Positions of the values that must be awaited."""
    sources: list[tuple[int, object]]
    """Address and version of each shard that was read."""

    def wait(self) -> list[Tensor]:
        """Returns the gathered tensors."""
        for position in self.in_flight:
            self.values[position] = compat.functional.wait_tensor(self.values[position])
        return self.values


class Starter:
    """Starts the gathers of one graph for certain parameters.

    Args:
        run: takes the shards of the parameters, and starts the gathers.
        in_flight: positions of the results that must be awaited.
        params: the parameters, which are held by weak references.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Any],
        in_flight: Sequence[int],
        params: Sequence[DTensor],
    ) -> None:
        self._run, self._in_flight = run, in_flight
        self._params = [weakref.ref(param) for param in params]

    def start(self) -> Gathered | None:
        """Returns None if a parameter no longer exists."""
        params = [ref() for ref in self._params]
        alive = [param for param in params if param is not None]
        if len(alive) < len(params):
            return None
        with torch.no_grad():
            shards = [rows_of(param).detach() for param in alive]
            sources = list(map(_source, alive, shards))
            for param in alive:
                if (memory := memory_of(param)) is not None:
                    memory.copied = True
            return Gathered(list(self._run(list(shards))), self._in_flight, sources)

    def is_fresh(self, gathered: Gathered) -> bool:
        """Whether the parameters have not changed since their gathers started."""
        params = [ref() for ref in self._params]
        return gathered.sources == [
            _source(param, rows_of(param)) if param is not None else None for param in params
        ]


def _source(param: DTensor, shard: Tensor) -> tuple[int, object]:
    # A shard without a version counter equals nothing.
    return compat.address(shard), stamp_of(param, shard) or object()


@dataclass
class Reducing:
    """Reductions of one backward that have started."""

    finish: Callable[[], list[Tensor]]
    """Awaits them. Returns the gradient of the shard of each parameter."""
    params: list[DTensor]
    limits: Callable[[], AbstractContextManager[None]]
    """Context in which the reductions give up in time."""


@dataclass
class _Pending:
    """What one run of the autograd engine has not yet added to gradients."""

    reducing: list[Reducing] = field(default_factory=list)
    params: list[DTensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    ahead: int = 1
    """For how many graphs ahead the last backward started gathers."""

    def finish(self, left: int) -> None:
        """Await all but the last `left` reductions."""
        while len(self.reducing) > max(0, left):
            first = self.reducing.pop(0)
            with first.limits():
                grads = first.finish()
            self._add(first.params, grads)

    def _add(self, params: Sequence[DTensor], grads: Sequence[Tensor]) -> None:
        parts = set(map(id, self.params))  # of which another part of the gradient has come
        now: list[tuple[DTensor, Tensor]] = []
        for param, grad in zip(params, grads, strict=True):
            if is_complete(param, grad) and id(param) not in parts:
                now.append((param, grad))
            else:
                self.params.append(param)
                self.grads.append(grad)
        wrapped = [wrap_shard_grad(grad, param, stored=False) for param, grad in now]
        run_early_steps([param for param, _ in now], wrapped)

    def drop(self) -> None:
        """Await the reductions of a run that failed. Until then torch holds them, and they write to
        their memory.
        """
        reducing, self.reducing, self.params, self.grads = self.reducing, [], [], []
        for each in reducing:
            try:
                with each.limits():
                    each.finish()
            except Exception as error:  # nobody misses the gradients
                log.warning("reductions of a backward that failed did not end: %s", error)

    def close(self) -> None:
        self.finish(0)
        params, grads = self.params, self.grads
        self.params, self.grads = [], []
        if params:
            accumulate_grads(params, grads)


class _Ran(NamedTuple):
    """One run of a graph."""

    number: int
    """Of its key."""
    saves: bool
    """Whether what it saves stays in memory. A checkpoint drops it, and runs the graph again in
    backward."""
    moves: bool
    """Whether what it saves may rest on the host."""
    graph: int
    """Number of the graph on this rank. All else is equal on all ranks."""


class _Plan(NamedTuple):
    cost: StepCost
    moved: dict[Forward, tuple[int, ...]]
    """Positions of the values that each forward moves to the host."""


PlanStep = Callable[[Sequence[GraphRun], int | None], StepCost]
"""Plans a step of graphs, for which ranks have agreed for how many graphs ahead gathers start. If
that is None, it asks them."""


class InputSeen(NamedTuple):
    """What is known of an input that a forward saves, of all its runs."""

    freed: bool
    """Whether the device frees it when its copy to the host has ended."""
    counted: bool
    """Whether it is part of what another forward saves."""


class BlockSchedule:
    """What runs next, and what has started for it."""

    def __init__(self) -> None:
        self._numbers: dict[RunKey, int] = {}
        self._forwards: dict[object, Forward] = {}
        """Parameters -> the last forward with them."""
        self._starters: dict[int, Starter] = {}
        self._is_backward: dict[int, bool] = {}
        self._history: tuple[int, ...] = ()
        self._token: object = None
        """Where the last graph ran: in which call of the model, or run of the engine."""
        self._successors: dict[tuple[int, ...], tuple[int, bool]] = {}
        """The last graphs -> the next one, and whether parameters stay the same until then."""
        self._in_flight: dict[int, Gathered] = {}
        self._graphs: list[GraphRun] = []
        self._graph_numbers: dict[GraphRun, int] = {}
        self._step: list[_Ran] = []
        """Graphs since the last step's backward."""
        self._agreed: dict[tuple[object, ...], int] = {}
        """Graphs of a step, as all ranks know them -> for how many graphs ahead gathers start."""
        self._plans: dict[tuple[_Ran, ...], _Plan] = {}
        """Graphs of a step of this rank -> its plan."""
        self._planned = 1
        """For how many graphs ahead gathers of the last step start."""
        self._moved: dict[Forward, tuple[int, ...]] = {}
        """Positions of the values that each forward moves to the host, by the last plan with it."""
        self._inputs: dict[tuple[Forward, int], InputSeen] = {}
        """A forward, and number of an input that it saves -> what is known of it."""
        self._dropped: dict[tuple[Forward, int], bool] = {}
        """A forward, and position of an output -> whether code between the graphs drops it."""
        self._planning: weakref.ref[EngineRun] | None = None
        self._put_off = 0
        """For how many graphs gathers start at the turning point of the backward that runs."""
        self._pending: weakref.WeakKeyDictionary[EngineRun, _Pending] = weakref.WeakKeyDictionary()
        self._ended: list[_Pending] = []
        """What runs of the engine left that have ended, some of them by an exception."""
        self._lock = threading.RLock()
        self.started_ahead = 0
        """Number of graphs whose gathers started before them. For tests."""
        self.dropped = 0
        """Number of these that did not run next. For tests."""

    @property
    def planned(self) -> int:
        """For how many graphs ahead gathers start where that is planned. 1 until the first step has
        ended.
        """
        return self._planned

    def forward_of(self, params: object) -> Forward | None:
        """Returns the last forward with these parameters; None if none takes part in the schedule.

        Args:
            params: as in its `RunKey`.
        """
        return self._forwards.get(params)

    def moved_by(self, forward: Forward | None) -> tuple[int, ...] | None:
        """Which of the values that a forward saves rest on the host until its backward: positions
        among its outputs. None if no plan says so, as until its first step has ended.
        """
        return self._moved.get(forward) if forward is not None else None

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

    # --- gathers ----------------------------------------------------------------------------------
    def begin(
        self,
        key: RunKey,
        starter: Starter | None,
        ahead: int,
        graph: int,
        *,
        at_turn: bool = False,
    ) -> Gathered | None:
        """A graph begins to run.

        Args:
            starter: starts its gathers; None if it has none.
            ahead: for how many graphs after it gathers start.
            graph: from `number_of`, for the plan of the step.
            at_turn: start them at its turning point, and not now.

        Returns:
            Its gathers, which may still be in flight.
        """
        with self._lock:
            self._drop_failed()
            number = self._numbers.setdefault(key, len(self._numbers))
            self._is_backward[number] = key.is_backward
            if self._graphs[graph].returned:
                self._forwards[key.params] = Forward(key.params, graph)
            self._record(number, graph)
            gathered = self._in_flight.pop(number, None)
            if gathered is not None and (starter is None or not starter.is_fresh(gathered)):
                self._drop(gathered)
                gathered = None
            if starter is not None:
                self._starters[number] = starter
                gathered = gathered or starter.start()
            self._put_off = ahead if at_turn else 0
            if not at_turn:
                self._start_next(ahead)
            return gathered

    def drop_forwards(self) -> None:
        """Drop gathers that have started for forwards that have not run."""
        with self._lock:
            for number in list(self._in_flight):
                if not self._is_backward[number]:
                    self._drop(self._in_flight.pop(number))

    def _record(self, number: int, graph: int) -> None:
        token = _place()
        history, before = self._history, self._token
        if not compat.in_backward() and history and self._is_backward[history[-1]]:
            self._step.clear()
        if len(self._step) < _MAX_STEP:
            moves = values_may_move()
            self._step.append(_Ran(number, moves or compat.in_backward(), moves, graph))
        if history:
            was_backward = self._is_backward[history[-1]]
            if self._is_backward[number] and not was_backward:
                reachable = True
            else:
                reachable = token is not None and token == before
            if len(self._successors) >= _MAX_PREDICTIONS:
                self._successors.clear()
            for length in _CONTEXTS:
                if length <= len(history):
                    self._successors[history[-length:]] = number, reachable
        self._history, self._token = (*history, number)[-_CONTEXTS[0] :], token

    def _start_next(self, ahead: int) -> None:
        expected, history = [], self._history
        for _ in range(ahead):
            found = self._expected(history)
            if found is None:
                break
            expected.append(found)
            history = (*history, found)[-_CONTEXTS[0] :]
        for number in list(self._in_flight):
            if number not in expected:
                self._drop(self._in_flight.pop(number))
        for number in expected:
            starter = self._starters.get(number)
            if starter is not None and number not in self._in_flight:
                gathered = starter.start()
                if gathered is not None:
                    self._in_flight[number] = gathered
                    self.started_ahead += 1

    def _expected(self, history: tuple[int, ...]) -> int | None:
        for length in _CONTEXTS:
            found = self._successors.get(history[-length:]) if length <= len(history) else None
            if found is not None:
                return found[0] if found[1] else None
        return None

    def _drop(self, gathered: Gathered) -> None:
        # Memory that a collective still writes must not be freed.
        gathered.wait()
        self.dropped += 1

    # --- plans ------------------------------------------------------------------------------------
    def plan_at_end(self, plan: PlanStep) -> None:
        """Called in a backward: plan the step when its backward ends, if its graphs are new."""
        run = EngineRun.current()
        if self._planning is None or self._planning() is not run:
            self._planning = weakref.ref(run)
            run.at_end(lambda: self._plan(plan))

    def _plan(self, plan: PlanStep) -> None:
        if compat.in_backward():  # the end of a run inside of another one, as of a checkpoint
            return
        step = tuple(self._step)
        # Whether other ranks are asked depends only on what all of them know.
        agreed = tuple((each.number, each.saves, each.moves) for each in step)
        ahead = self._agreed.get(agreed)
        if ahead is None or step not in self._plans:
            found = self._new_plan(step, plan, ahead)
            if ahead is None and len(self._agreed) >= _MAX_PLANS:
                self._agreed.clear()
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._agreed[agreed], self._plans[step] = found.cost.ahead, found
        self._planned = self._plans[step].cost.ahead
        self._moved.update(self._plans[step].moved)

    def _new_plan(self, step: Sequence[_Ran], plan: PlanStep, ahead: int | None) -> _Plan:
        keys = list(self._numbers)
        kinds = {each: self._described(each, keys[each.number]) for each in {*step}}
        runs = [kinds[each] for each in step]  # a graph that runs again is one object
        chosen = plan(runs, ahead)
        moved = {
            Forward(keys[each.number].params, each.graph): tuple(
                value.at for value in run.movable[:count]
            )
            for each, run, count in zip(step, runs, chosen.moved or [0] * len(step), strict=True)
            if each.moves and self._graphs[each.graph].movable
        }
        return _Plan(chosen, moved)

    def _described(self, ran: _Ran, key: RunKey) -> GraphRun:
        run = self._graphs[ran.graph]
        run = replace(run, name=f"{run.name}{key.text}")
        if run.is_backward:
            return run
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

    # --- reductions -------------------------------------------------------------------------------
    def reduce_later(self, reducing: Reducing, ahead: int) -> None:
        """Await reductions when `ahead` more backwards have started theirs, or when the last of
        these comes to its turning point. Add the gradients when the run of the autograd engine
        ends.
        """
        run = EngineRun.current()
        pending = self._pending.get(run)
        if pending is None:
            pending = self._pending[run] = _Pending()
            run.at_end(pending.close)
            # A run that fails calls nothing at its end. Nobody may wait for other ranks where it is
            # freed, so the next graph does.
            weakref.finalize(run, self._ended.append, pending).atexit = False
        pending.reducing.append(reducing)
        pending.ahead = ahead
        pending.finish(max(1, ahead))

    def _drop_failed(self) -> None:
        while self._ended:
            self._ended.pop().drop()

    def turn(self) -> None:
        """A backward has come to its turning point: await the reductions whose gradients need not
        stay in memory until it ends, and start the gathers that were put off.
        """
        pending = self._pending.get(EngineRun.current())
        if pending is not None:
            pending.finish(pending.ahead - 1)
        with self._lock:
            ahead, self._put_off = self._put_off, 0
            if ahead:
                self._start_next(ahead)


_schedule = BlockSchedule()


def block_schedule() -> BlockSchedule:
    """The schedule of this process."""
    return _schedule


@contextlib.contextmanager
def own_block_schedule() -> Iterator[None]:
    """Context whose graphs, which are compiled and run in it, have a schedule of their own. It
    knows nothing of graphs before, whose parameters may have had the same addresses.
    """
    global _schedule
    before, _schedule = _schedule, BlockSchedule()
    try:
        yield
    finally:
        _schedule = before


# --- inside of a graph ----------------------------------------------------------------------------
_library = torch.library.Library("zpasses", "FRAGMENT")
# The op writes nothing. That it may write a tensor keeps its place in generated code: after the
# kernel that makes the tensor, and before the kernels that read it.
_library.define("turning_point(Tensor(a!) after) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
TURNING_POINT = torch.ops.zpasses.turning_point.default
"""Tells the schedule that a backward has come to its turning point."""


def _turning_point(after: Tensor) -> None:
    if compat.in_backward():
        _schedule.turn()


_library.impl("turning_point", _turning_point, "CompositeExplicitAutograd")
torch.library.register_fake("zpasses::turning_point", lambda after: None, lib=_library)


# --- calls of the model ---------------------------------------------------------------------------
class _ModelCalls(threading.local):
    def __init__(self) -> None:
        self.open: list[int] = []


_model_calls = _ModelCalls()
_call_numbers = itertools.count(1)


def begin_model_call() -> None:
    """A call of the model begins. Until it ends, no parameter changes, so gathers of a forward may
    start ahead of it.
    """
    _model_calls.open.append(next(_call_numbers))


def end_model_call() -> None:
    """The call has ended. Forwards that did not run are no longer expected."""
    if _model_calls.open:
        _model_calls.open.pop()
    if not _model_calls.open and not compat.in_backward():
        _schedule.drop_forwards()


def _place() -> object:
    return ("run", compat.current_graph_task_id()) if compat.in_backward() else place_of_call()


def place_of_call() -> object:
    """Returns what identifies the call of the model that is open; None outside of any."""
    return ("call", _model_calls.open[0]) if _model_calls.open else None


def values_may_move() -> bool:
    """Whether what a forward saves now may rest on the host until its backward. What a checkpoint
    saves does not rest, and what it computes again is needed at once.
    """
    return not compat.in_backward() and not compat.has_saved_tensor_hooks()
