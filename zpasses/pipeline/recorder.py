"""Recorders: callbacks that record a compile, such as a dump or torch's structured trace.

The backend, window flushes and `pack_parameters` run their passes through `run_recorded_passes`. It
calls each `Recorder` with every graph before and after each pass, also if the compile fails.
Without recorders it only runs the passes.

This module also holds the hook for `zpasses bisect`, `apply_bisect_limits`.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from torch import fx

from zpasses.cost.prediction import Prediction
from zpasses.errors import AgreementError, PassError
from zpasses.graph.nodes import collectives_by_group
from zpasses.pipeline.bisect import Trial
from zpasses.pipeline.passes import Pass
from zpasses.pipeline.pipeline import Pipeline
from zpasses.pipeline.runner import PassRecord, Verify, run_passes
from zpasses.ranks.agreement import digest
from zpasses.ranks.vote import has_other_ranks

__all__ = [
    "Recorder",
    "Recorders",
    "ResultHook",
    "apply_bisect_limits",
    "enable_runtime_notes",
    "note",
    "run_recorded_passes",
    "runtime_note",
]

log = logging.getLogger("zpasses")


class Recorder:
    """Callbacks for the events of one compile. Implementations must not change their arguments."""

    takes_predictions: ClassVar[bool] = False
    """Whether `prediction` does anything. Predictions are made only for recorders that take them,
    because they take time."""

    def before(self, graph_name: str, level: str, graph: fx.Graph) -> None:
        """A graph reaches a level. None of the level's passes has run."""

    def after(
        self,
        graph_name: str,
        level: str,
        each: Pass,
        record: PassRecord,
        graph: fx.Graph,
        notes: Sequence[str],
    ) -> None:
        """A pass has run, and the verifier has accepted the graph.

        Args:
            notes: what the pass reported through `note`.
        """

    def failed(
        self,
        graph_name: str,
        level: str,
        each: Pass,
        error: BaseException,
        graph: fx.Graph,
        notes: Sequence[str],
    ) -> None:
        """A pass raised, or the verifier has rejected its graph."""

    def prediction(self, graph_name: str, prediction: Prediction) -> None:
        """All passes have run on a graph, and the cost model has compared it with what is
        possible.
        """

    def variant(
        self, graph_name: str, of: str, given: Sequence[str], kept: Sequence[str], graph: fx.Graph
    ) -> None:
        """A variant of a graph was built, which passes values from call to call.

        Args:
            of: name of the graph.
            given: parameters whose values are extra inputs.
            kept: parameters whose values are extra outputs.
        """

    def agreement(
        self, graph_name: str, group: str, digest: str, collectives: int, result: str
    ) -> None:
        """The ranks have compared the collectives of a graph, or skipped the comparison.

        Args:
            result: "agreed", "off" or "single-rank"; zpasses.dumps.format describes them.
        """

    def problem(self, where: str, error: BaseException) -> None:
        """The compile failed outside of passes."""

    def runtime_note(self, concerning: str, text: str) -> None:
        """A decision was taken at run time.

        Args:
            concerning: name of the pass, or of the option, that left the decision open.
        """

    def done(self) -> None:
        """The backend returns its result. A backward graph that torch compiles later may follow."""

    def restarted(self) -> None:
        """Dynamo restarts the analysis of the frame and discards this compile."""


class Recorders(Recorder):
    """Forwards every event to several recorders, or to none."""

    def __init__(self, recorders: Sequence[Recorder] = ()) -> None:
        self._recorders = tuple(recorders)

    def __bool__(self) -> bool:
        return bool(self._recorders)

    def take_predictions(self) -> bool:
        """Whether one of the recorders takes predictions."""
        return any(each.takes_predictions for each in self._recorders)

    def with_recorder(self, other: Recorder | None) -> Recorders:
        """Returns these recorders and another one."""
        return self if other is None else Recorders((*self._recorders, other))

    def before(self, graph_name: str, level: str, graph: fx.Graph) -> None:
        for each in self._recorders:
            each.before(graph_name, level, graph)

    def after(
        self,
        graph_name: str,
        level: str,
        each: Pass,
        record: PassRecord,
        graph: fx.Graph,
        notes: Sequence[str],
    ) -> None:
        for recorder in self._recorders:
            recorder.after(graph_name, level, each, record, graph, notes)

    def failed(
        self,
        graph_name: str,
        level: str,
        each: Pass,
        error: BaseException,
        graph: fx.Graph,
        notes: Sequence[str],
    ) -> None:
        for recorder in self._recorders:
            recorder.failed(graph_name, level, each, error, graph, notes)

    def prediction(self, graph_name: str, prediction: Prediction) -> None:
        for each in self._recorders:
            each.prediction(graph_name, prediction)

    def variant(
        self, graph_name: str, of: str, given: Sequence[str], kept: Sequence[str], graph: fx.Graph
    ) -> None:
        for each in self._recorders:
            each.variant(graph_name, of, given, kept, graph)

    def agreement(
        self, graph_name: str, group: str, digest: str, collectives: int, result: str
    ) -> None:
        for each in self._recorders:
            each.agreement(graph_name, group, digest, collectives, result)

    def runtime_note(self, concerning: str, text: str) -> None:
        for each in self._recorders:
            each.runtime_note(concerning, text)

    def problem(self, where: str, error: BaseException) -> None:
        for each in self._recorders:
            each.problem(where, error)

    def done(self) -> None:
        for each in self._recorders:
            each.done()

    def restarted(self) -> None:
        for each in self._recorders:
            each.restarted()

    @contextlib.contextmanager
    def record_errors(self, where: str) -> Iterator[None]:
        """Record exceptions that leave the block, and re-raise them."""
        try:
            yield
        except Exception as error:
            self.problem(where, error)
            raise

    def record_agreement(self, graph_name: str, graph: fx.Graph, compared: bool) -> None:
        """Record that ranks run the same collectives, per process group.

        Args:
            compared: whether the ranks compared the collectives of this graph.
        """
        if not self:
            return
        for group, sequence in collectives_by_group(graph).items():
            result = (
                "off" if not compared else "agreed" if has_other_ranks(group) else "single-rank"
            )
            self.agreement(graph_name, group, digest(sequence), len(sequence), result)


def run_recorded_passes(
    recorder: Recorders,
    graph_name: str,
    level: str,
    graph: fx.Graph,
    passes: Sequence[Pass],
    *,
    verify: Verify = "static",
) -> list[PassRecord]:
    """Run passes on a graph as `run_passes` does, and report each to the recorder.

    Args:
        graph_name: name of the graph in records, such as "forward".
        level: value of the `Level` of the passes.
        verify: as for `run_passes`.
    """
    if not recorder:
        return run_passes(graph, passes, verify=verify)
    recorder.before(graph_name, level, graph)
    ran = 0

    def observe(record: PassRecord, rewritten: fx.Graph) -> None:
        nonlocal ran
        recorder.after(graph_name, level, passes[ran], record, rewritten, _take_notes())
        ran += 1

    token = _notes.set([])
    try:
        return run_passes(graph, passes, observe=observe, verify=verify)
    except (PassError, AgreementError) as error:
        recorder.failed(graph_name, level, passes[ran], error, graph, _take_notes())
        raise
    finally:
        _notes.reset(token)


# --- run time -------------------------------------------------------------------------------------
_runtime_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
"""Recorders that receive `runtime_note`. Weak, so that a recorder lives as long as the code of its
compile."""


def enable_runtime_notes(recorders: Iterable[Recorder]) -> None:
    """Send later runtime notes to these recorders too, as long as they are alive."""
    _runtime_recorders.update(recorders)


def runtime_note(concerning: str, text: str) -> None:
    """Report a decision that was taken at run time to the recorders of all compiles.

    Args:
        concerning: name of the pass, or of the option, that left the decision open.
    """
    for each in tuple(_runtime_recorders):
        each.runtime_note(concerning, text)


# --- notes ----------------------------------------------------------------------------------------
_notes: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "zpasses.notes", default=None
)


def note(text: str) -> None:
    """Report why a pass decides as it does.

    The text goes to the log and into the record of the running pass.
    """
    log.info("%s", text)
    notes = _notes.get()
    if notes is not None:
        notes.append(text)


def _take_notes() -> list[str]:
    notes = _notes.get() or []
    taken = list(notes)
    notes.clear()
    return taken


# --- bisection ------------------------------------------------------------------------------------
ResultHook = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""Wraps a compiled function so that its results are recorded. The second argument says what the
results are, such as "outputs"."""


def apply_bisect_limits(pipeline: Pipeline, compile_name: str) -> tuple[Pipeline, ResultHook]:
    """Return the passes that may run and the hook for results.

    Outside of `zpasses bisect`, these are the whole pipeline and a hook that does nothing.

    Raises:
        OptionError: if the environment variable ZPASSES_BISECT does not hold what `zpasses bisect`
            sets.
    """
    if not os.environ.get("ZPASSES_BISECT"):
        return pipeline, lambda fn, _: fn
    trial = Trial.current()
    return trial.limit_passes(pipeline, compile_name), lambda fn, what: trial.record_results(
        fn, f"{compile_name} {what}"
    )
