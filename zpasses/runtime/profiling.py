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

Without a profiler, a run costs two more function calls.
"""

from __future__ import annotations

import itertools
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx
from torch.profiler import record_function

from zpasses import compat
from zpasses.graph.host_copies import host_copy_of
from zpasses.graph.queries import collective_of
from zpasses.runtime.codegen import boxed
from zpasses.runtime.measuring import start_if_requested

_Code = Callable[[list[Any]], Any]
_numbers = itertools.count()


def collective_names(graph: fx.Graph) -> tuple[str, ...]:
    """Names of the collectives of a graph and of its copies to the host and back, in graph order,
    as a dump of the graph has them.
    """
    return tuple(node.name for node in graph.nodes if collective_of(node) or host_copy_of(node))


def with_profiler_range(
    code: _Code,
    names: Sequence[str],
    compile_name: str,
    kind: str,
    *,
    body: Sequence[str] | None = None,
) -> _Code:
    """Code that marks its runs in traces.

    Args:
        names: of the collectives of its graph.
        compile_name: Dynamo's compile id; empty for a graph outside of any compile.
        kind: "forward", "backward", "inference" or "flush".
        body: of the collectives that the code runs, if other parts of the graph run apart.
    """
    start_if_requested()
    places = "" if body is None else f":{_places(names, body)}"
    return _marked(code, f"zpasses.graph:{_graph_name(names, compile_name, kind)}{places}")


def with_part_range(
    code: _Code, names: Sequence[str], part: Sequence[str], compile_name: str, kind: str
) -> _Code:
    """Code of a part of a graph, which marks its runs in traces. It may run inside of others.

    Args:
        names: of the collectives of the whole graph.
        part: of the collectives of the part.
    """
    graph = _graph_name(names, compile_name, kind)
    return _marked(code, f"zpasses.part:{graph}:{_places(names, part)}")


def _marked(code: _Code, title: str) -> _Code:
    def run(args: list[Any]) -> Any:
        if not compat.is_profiling():
            return code(args)
        with record_function(title):
            return code(args)

    return boxed(run)


def _graph_name(names: Sequence[str], compile_name: str, kind: str) -> str:
    return f"{compile_name}:{kind}:{collectives_digest(names)}"


def _places(names: Sequence[str], part: Sequence[str]) -> str:
    return ",".join(str(names.index(name)) for name in part)


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
