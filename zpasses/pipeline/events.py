"""Events of compiles: what the backend and window flushes tell their listeners.

A listener is a function that takes every event and picks those that it knows. A dump and torch's
structured trace listen to one compile. `listen` adds a listener for all compiles of this process,
and `observe_graphs` is its form for compiled graphs. A listener must not change what it gets.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from zpasses.errors import AgreementError, PassError
from zpasses.graph.queries import collectives_by_group
from zpasses.pipeline.base_pass import Pass
from zpasses.pipeline.runner import PassRecord, Verify, run_passes
from zpasses.ranks.compared_collectives import digest
from zpasses.ranks.vote import has_other_ranks

log = logging.getLogger("zpasses")

Listener = Callable[[object], None]
E = TypeVar("E")


# --- events ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LevelStarted:
    """A graph reaches a level. None of the level's passes has run."""

    graph_name: str
    """Name of the graph in records, such as "forward"."""
    level: str
    graph: fx.Graph
    passes: Sequence[Pass]
    """The passes that will run, in order."""


@dataclass(frozen=True)
class PassRan:
    """A pass has run, and the verifier has accepted the graph."""

    graph_name: str
    level: str
    each: Pass
    record: PassRecord
    graph: fx.Graph
    notes: Sequence[str]
    """What the pass reported through `note`."""


@dataclass(frozen=True)
class PassFailed:
    """A pass raised, or the verifier has rejected its graph."""

    graph_name: str
    level: str
    each: Pass
    error: BaseException
    graph: fx.Graph
    notes: Sequence[str]


@dataclass(frozen=True)
class ObservedGraph:
    """All passes of a level have run on a graph, which is compiled next."""

    name: str
    """Dynamo's compile id and the kind of graph: "0/0 joint", "0/0 forward", "0/0 backward"."""
    kind: str
    """"captured", "joint", "forward", "backward" or "inference"."""
    graph: fx.Graph
    records: list[PassRecord] = field(default_factory=list)


@dataclass(frozen=True)
class VariantBuilt:
    """A variant of a graph was built, which passes values from call to call."""

    of: str
    """Name of the graph."""
    given: Sequence[str]
    """Parameters whose values are extra inputs."""
    kept: Sequence[str]
    """Parameters whose values are extra outputs."""
    stepped: Sequence[str]
    """Parameters that step in the graph."""
    graph: fx.Graph


@dataclass(frozen=True)
class CollectivesCompared:
    """The ranks have compared the collectives of a graph, or skipped the comparison."""

    graph_name: str
    group: str
    digest: str
    collectives: int
    result: str
    """"agreed", "off" or "single-rank"; zpasses.dumps.format describes them."""


@dataclass(frozen=True)
class Problem:
    """The compile failed. Passes that failed have been reported before."""

    where: str
    error: BaseException


@dataclass(frozen=True)
class RuntimeNote:
    """A decision was taken that passes or options had left open."""

    concerning: str
    """Name of the pass, or of the option."""
    text: str


@dataclass(frozen=True)
class CompileEnded:
    """The backend returns its result. A backward graph that torch compiles later may follow."""

    restarted: bool = False
    """Dynamo restarts the analysis of the frame instead, and discards this compile."""


# --- sending --------------------------------------------------------------------------------------
_listeners: list[Listener] = []
"""Listeners to all compiles of this process."""


class Events:
    """Sends the events of one compile.

    Args:
        own: listeners to this compile only.
    """

    def __init__(self, own: Sequence[Listener] = ()) -> None:
        self._own = tuple(own)
        if own:
            _recorded.add(self)

    def __bool__(self) -> bool:
        """Whether the compile has listeners of its own."""
        return bool(self._own)

    def send(self, event: object) -> None:
        """Call every listener with an event."""
        for each in (*self._own, *_listeners):
            each(event)

    @contextlib.contextmanager
    def report_errors(self, where: str) -> Iterator[None]:
        """Send exceptions that leave the block as a `Problem`, and re-raise them."""
        try:
            yield
        except Exception as error:
            self.send(Problem(where, error))
            raise

    def collectives_compared(self, graph_name: str, graph: fx.Graph, compared: bool) -> None:
        """Send that ranks run the same collectives, per process group, if the compile has listeners
        of its own.

        Args:
            compared: whether the ranks compared the collectives of this graph.
        """
        for group, sequence in collectives_by_group(graph).items() if self else ():
            result = (
                "off" if not compared else "agreed" if has_other_ranks(group) else "single-rank"
            )
            found = digest(sequence), len(sequence), result
            self.send(CollectivesCompared(graph_name, group, *found))


def run_reported_passes(
    events: Events,
    graph_name: str,
    level: str,
    graph: fx.Graph,
    passes: Sequence[Pass],
    *,
    verify: Verify = "static",
) -> list[PassRecord]:
    """Run passes on a graph as `run_passes` does, and send an event after each.

    Args:
        graph_name: name of the graph in records, such as "forward".
        level: value of the `Level` of the passes.
        verify: as for `run_passes`.
    """
    events.send(LevelStarted(graph_name, level, graph, passes))
    ran = 0

    def observe(record: PassRecord, rewritten: fx.Graph) -> None:
        nonlocal ran
        each, ran = passes[ran], ran + 1
        events.send(PassRan(graph_name, level, each, record, rewritten, _take_notes()))

    token = _notes.set([])
    try:
        return run_passes(graph, passes, observe=observe, verify=verify)
    except (PassError, AgreementError) as error:
        events.send(PassFailed(graph_name, level, passes[ran], error, graph, _take_notes()))
        raise
    finally:
        _notes.reset(token)


# --- listening ------------------------------------------------------------------------------------
@contextlib.contextmanager
def listen(kind: type[E], listener: Callable[[E], None]) -> Iterator[None]:
    """Context manager that calls a function with the events of one class, of all compiles."""

    def filtered(event: object) -> None:
        if isinstance(event, kind):
            listener(event)

    _listeners.append(filtered)
    try:
        yield
    finally:
        _listeners.remove(filtered)


def observe_graphs(
    observer: Callable[[ObservedGraph], None],
) -> contextlib.AbstractContextManager[None]:
    """Context manager that calls `observer` with every graph that the backend compiles, after the
    passes of its level.
    """
    return listen(ObservedGraph, observer)


def has_listeners() -> bool:
    """Whether code of this process listens to all compiles."""
    return bool(_listeners)


# --- notes ----------------------------------------------------------------------------------------
_recorded: weakref.WeakSet[Events] = weakref.WeakSet()
"""Compiles with listeners of their own. Weak, so that a listener lives as long as the code of its
compile."""


def runtime_note(concerning: str, text: str) -> None:
    """Report a decision that was taken at run time to all compiles that have listeners of their
    own.

    Args:
        concerning: name of the pass, or of the option, that left the decision open.
    """
    for each in tuple(_recorded):
        each.send(RuntimeNote(concerning, text))


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
