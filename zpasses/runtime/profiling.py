"""Ranges that tie a trace of `torch.profiler` to the nodes of a dump.

A trace has the operators of a run, and a dump has its graphs. While a profiler records, each run of
a graph is a range `zpasses.graph:COMPILE:KIND:DIGEST`. The digest is that of the names of the
graph's collectives, so `zpasses.inspect.measured` finds the graph, and the n-th launch inside is
its n-th collective. Exchanges over gloo (zpasses.runtime.gloo) add the ranges `zpasses.launch:N`
and `zpasses.wait:N`, which tie waits to launches.

Gathers that start before their graph, and reductions that end after it, are ranges of their own:
`zpasses.part:COMPILE:KIND:DIGEST:PLACES` names the places of its launches among the collectives of
the graph. The range of the rest of that graph has such places, too.

The trace shows a message over gloo until something waits for it. While a profiler records, a thread
waits as soon as the messages have started, so that the trace shows when they have arrived.

If a dump was asked for, the runs also go into its file of progress (zpasses.dumps.progress).
Without both, a run costs two more function calls.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.profiler import record_function

from zpasses import compat
from zpasses.dumps import progress
from zpasses.graph.nodes import collective_of
from zpasses.runtime.codegen import boxed
from zpasses.runtime.measuring import start_if_requested

_Code = Callable[[list[Any]], Any]
_numbers = itertools.count()


@dataclass(frozen=True)
class TraceNames:
    """Names of nodes of a graph that traces and files of progress refer to."""

    collectives: tuple[str, ...]
    """Of the graph as a dump shows it."""
    exchanges: tuple[str, ...]
    """Operators of `zpasses.runtime.gloo`, of the graph that runs."""

    @classmethod
    def of(cls, graph: fx.Graph, runnable: fx.Graph) -> TraceNames:
        """Names of a graph, and of the form of it that code is generated from."""
        return cls(
            tuple(node.name for node in graph.nodes if collective_of(node) is not None),
            tuple(node.name for node in runnable.nodes if is_exchange(node)),
        )


def with_profiler_range(
    code: _Code,
    names: TraceNames,
    compile_name: str,
    kind: str,
    *,
    body: TraceNames | None = None,
) -> _Code:
    """Code that marks its runs in traces.

    Args:
        names: of the nodes of its graph.
        body: of the nodes that the code runs, if other parts of the graph run apart.
        compile_name: Dynamo's compile id; empty for a graph outside of any compile.
        kind: "forward", "backward", "inference" or "flush".
    """
    start_if_requested()
    name = f"{compile_name}:{kind}:{collectives_digest(names.collectives)}"
    title = f"zpasses.graph:{name}"
    exchanges = names.exchanges
    if body is not None:
        title, exchanges = f"{title}:{_places(names, body)}", body.exchanges

    def run(args: list[Any]) -> Any:
        profiles, written = compat.is_profiling(), progress.current()
        if written is not None:
            written.enter(name, exchanges)
        if not profiles and written is None:
            return code(args)
        with record_function(title) if profiles else contextlib.nullcontext():
            values = code(args)
        if written is not None:
            written.leave()
        return values

    return boxed(run)


def with_part_range(
    code: _Code, names: TraceNames, part: TraceNames, compile_name: str, kind: str
) -> _Code:
    """Code of a part of a graph, which marks its runs in traces. It may run inside of others.

    Args:
        names: of the nodes of the whole graph.
        part: of the nodes of the part.
    """
    name = f"{compile_name}:{kind}:{collectives_digest(names.collectives)}"
    title = f"zpasses.part:{name}:{_places(names, part)}"

    def run(args: list[Any]) -> Any:
        profiles, written = compat.is_profiling(), progress.current()
        if written is not None:
            written.enter_part(name, part.exchanges)
        with record_function(title) if profiles else contextlib.nullcontext():
            values = code(args)
        if written is not None:
            written.leave_part()
        return values

    return boxed(run)


def _places(names: TraceNames, part: TraceNames) -> str:
    return ",".join(str(names.collectives.index(name)) for name in part.collectives)


def is_exchange(node: fx.Node) -> bool:
    """Whether a node runs one of the operators of `zpasses.runtime.gloo`."""
    return isinstance(node.target, compat.OpOverload) and compat.op_name(node.target).startswith(
        "gloo_"
    )


def collectives_digest(names: Iterable[str]) -> str:
    """Digest of the names of a graph's collectives, in graph order."""
    return f"{zlib.crc32(' '.join(names).encode()):08x}"


def watch_if_profiling(finish: Callable[[], None]) -> Watch | None:
    """Finish started messages in another thread, if a profiler records.

    Args:
        finish: waits for the messages, and raises if one fails.
    """
    return Watch(finish) if compat.is_profiling() else None


class Watch:
    """Waits for messages in a thread of its own, so that a trace shows when they arrive."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._number = next(_numbers)
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._finish = finish
        with record_function(f"zpasses.launch:{self._number}"):
            _queue().put(self)

    def waiting(self) -> record_function:
        """Range of one wait for the messages."""
        return record_function(f"zpasses.wait:{self._number}")

    def join(self) -> None:
        """Wait for the thread. Raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait for the messages."""
        try:
            self._finish()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()


_watches: queue.SimpleQueue[Watch] | None = None


def _queue() -> queue.SimpleQueue[Watch]:
    """What the thread works off. Messages of one pair of ranks arrive in order, so one thread is
    enough for a group.
    """
    global _watches
    if _watches is None:
        _watches = queue.SimpleQueue()
        threading.Thread(
            target=_work_off, args=(_watches,), name="zpasses-trace", daemon=True
        ).start()
    return _watches


def _work_off(watches: queue.SimpleQueue[Watch]) -> None:
    while True:
        watches.get().finish()
