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
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from zpasses import compat
from zpasses.runtime.late_reductions import LateReductions
from zpasses.runtime.planned_blocks import PlannedBlocks, RunKey
from zpasses.runtime.started_gathers import Gathered, Starter

_CONTEXTS = (8, 4, 2, 1)
"""Numbers of graphs by which the next one is predicted. The longest that is known decides."""

_MAX_PREDICTIONS = 1 << 14


class BlockSchedule:
    """What runs next, and what has started for it."""

    def __init__(self) -> None:
        self.plans = PlannedBlocks()
        self.reductions = LateReductions()
        self._numbers: dict[RunKey, int] = {}
        self._starters: dict[int, Starter] = {}
        self._is_backward: dict[int, bool] = {}
        self._history: tuple[int, ...] = ()
        self._token: object = None
        """Where the last graph ran: in which call of the model, or run of the engine."""
        self._successors: dict[tuple[int, ...], tuple[int, bool]] = {}
        """The last graphs -> the next one, and whether parameters stay the same until then."""
        self._in_flight: dict[int, Gathered] = {}
        self._put_off = 0
        """For how many graphs gathers start at the turning point of the backward that runs."""
        self._lock = threading.RLock()
        self.started_ahead = 0
        """Number of graphs whose gathers started before them. For tests."""
        self.dropped = 0
        """Number of these that did not run next. For tests."""

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
            graph: from `PlannedBlocks.number_of`, for the plan of the step.
            at_turn: start them at its turning point, and not now.

        Returns:
            Its gathers, which may still be in flight.
        """
        with self._lock:
            self.reductions.drop_failed()
            number = self._numbers.setdefault(key, len(self._numbers))
            self._is_backward[number] = key.is_backward
            self._record(key, number, graph)
            gathered = self._in_flight.pop(number, None)
            if gathered is not None and (starter is None or not starter.is_fresh(gathered)):
                self._drop(gathered)
                gathered = None
            if starter is not None:
                self._starters[number] = starter
                gathered = gathered or starter.start(self.plans.route_of(number))
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

    def _record(self, key: RunKey, number: int, graph: int) -> None:
        token = _place()
        history, before = self._history, self._token
        self.plans.add_run(key, number, graph)
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
                gathered = starter.start(self.plans.route_of(number))
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

    def turn(self) -> None:
        """A backward has come to its turning point: await the reductions whose gradients need not
        stay in memory until it ends, and start the gathers that were put off.
        """
        self.reductions.turn()
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
