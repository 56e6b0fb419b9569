"""Who watches a compile: dumps, torch's structured trace, trials. Nothing here costs anything while
nobody watches.

A `Recorder` is told of every graph before and after each pass. The backend, flushes and packs run
their passes through `recorded_passes`, so that all graphs are seen alike, those of a failing
compile too."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import fx

from zpasses.errors import AgreementError, PassError
from zpasses.graph.nodes import collectives_by_group
from zpasses.pipeline.bisect import Trial
from zpasses.pipeline.pipeline import Pass, PassRecord, Pipeline, run_passes
from zpasses.ranks.agreement import digest
from zpasses.ranks.vote import has_other_ranks

__all__ = [
    "Recorder",
    "Recorders",
    "ResultHook",
    "apply_bisect_limits",
    "note",
    "options_of",
    "recorded_passes",
    "runtime_note",
    "watch",
]

log = logging.getLogger("zpasses")


class Recorder:
    """Watches one compile; what it is told is for reading alone."""

    def before(self, graph_name: str, level: str, graph: fx.Graph) -> None:
        """A graph comes to a level; none of the level's passes has run."""

    def after(
        self,
        graph_name: str,
        level: str,
        each: Pass,
        record: PassRecord,
        graph: fx.Graph,
        notes: Sequence[str],
    ) -> None:
        """A pass has run, and the graph was checked."""

    def failed(
        self,
        graph_name: str,
        level: str,
        each: Pass,
        error: BaseException,
        graph: fx.Graph,
        notes: Sequence[str],
    ) -> None:
        """A pass raised, or left a graph that is wrong."""

    def variant(
        self, graph_name: str, of: str, given: Sequence[str], kept: Sequence[str], graph: fx.Graph
    ) -> None:
        """A form of a graph that carries values from call to call was cut."""

    def agreement(
        self, graph_name: str, group: str, digest: str, collectives: int, verdict: str
    ) -> None:
        """The ranks compared what a graph communicates, or did not."""

    def problem(self, where: str, error: BaseException) -> None:
        """The compile failed outside of any pass."""

    def runtime_note(self, concerning: str, text: str) -> None:
        """Something was decided while code ran that concerns what a pass of this name made."""

    def done(self) -> None:
        """The backend has what it was called for; a backward that torch compiles late may
        follow."""

    def restarted(self) -> None:
        """Torch traces the frame once more: nothing came of this compile."""


class Recorders(Recorder):
    """Tells several recorders, or none."""

    def __init__(self, recorders: Sequence[Recorder] = ()) -> None:
        self._recorders = tuple(recorders)

    def __bool__(self) -> bool:
        return bool(self._recorders)

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

    def variant(
        self, graph_name: str, of: str, given: Sequence[str], kept: Sequence[str], graph: fx.Graph
    ) -> None:
        for each in self._recorders:
            each.variant(graph_name, of, given, kept, graph)

    def agreement(
        self, graph_name: str, group: str, digest: str, collectives: int, verdict: str
    ) -> None:
        for each in self._recorders:
            each.agreement(graph_name, group, digest, collectives, verdict)

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
    def watching(self, where: str) -> Iterator[None]:
        """Record what goes wrong inside, and let it go on."""
        try:
            yield
        except Exception as error:
            self.problem(where, error)
            raise

    def agreed(self, graph_name: str, graph: fx.Graph, asked: bool) -> None:
        """Record what the ranks have agreed on.

        Args:
            asked: whether they were asked at all.
        """
        if not self:
            return
        for group, sequence in collectives_by_group(graph).items():
            verdict = "off" if not asked else "agreed" if has_other_ranks(group) else "alone"
            self.agreement(graph_name, group, digest(sequence), len(sequence), verdict)


def recorded_passes(
    recorder: Recorders, graph_name: str, level: str, graph: fx.Graph, passes: Sequence[Pass]
) -> list[PassRecord]:
    """`run_passes`, watched."""
    if not recorder:
        return run_passes(graph, passes)
    recorder.before(graph_name, level, graph)
    ran = 0

    def observe(record: PassRecord, rewritten: fx.Graph) -> None:
        nonlocal ran
        recorder.after(graph_name, level, passes[ran], record, rewritten, _taken())
        ran += 1

    token = _notes.set([])
    try:
        return run_passes(graph, passes, observe=observe)
    except (PassError, AgreementError) as error:
        recorder.failed(graph_name, level, passes[ran], error, graph, _taken())
        raise
    finally:
        _notes.reset(token)


# --- while code runs ------------------------------------------------------------------------------
_watching: weakref.WeakSet[Recorder] = weakref.WeakSet()
"""Recorders of compiles whose code can still run."""


def watch(recorders: Iterable[Recorder]) -> None:
    """Let `runtime_note` reach these recorders, for as long as somebody holds them."""
    _watching.update(recorders)


def runtime_note(concerning: str, text: str) -> None:
    """Tell the recorders of all compiles what was decided while code ran, which a pass of this name
    left open."""
    for each in tuple(_watching):
        each.runtime_note(concerning, text)


# --- notes ----------------------------------------------------------------------------------------
_notes: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "zpasses.notes", default=None
)


def note(text: str) -> None:
    """What a pass has to say about its choice: goes to the log, and into the record of the pass
    that runs."""
    log.info("%s", text)
    notes = _notes.get()
    if notes is not None:
        notes.append(text)


def _taken() -> list[str]:
    notes = _notes.get() or []
    taken = list(notes)
    notes.clear()
    return taken


def options_of(each: Pass) -> dict[str, object]:
    """All options of a pass, defaults too."""
    return {
        field.name: getattr(each, field.name) for field in dataclasses.fields(each) if field.init
    }  # type: ignore[arg-type]


# --- trials ---------------------------------------------------------------------------------------
ResultHook = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""Takes a compiled function and what its results are, and gives one that also writes them down."""


def apply_bisect_limits(pipeline: Pipeline, compile_name: str) -> tuple[Pipeline, ResultHook]:
    """The passes that may run, and what to do with results: all and nothing, unless `zpasses
    bisect` runs this program.

    Raises:
        OptionError: when the environment variable ZPASSES_BISECT does not hold what `zpasses
            bisect` sets.
    """
    if not os.environ.get("ZPASSES_BISECT"):
        return pipeline, lambda fn, _: fn
    trial = Trial.current()
    return trial.prefix(pipeline, compile_name), lambda fn, what: trial.recorded(
        fn, f"{compile_name} {what}"
    )
