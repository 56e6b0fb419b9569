"""What each rank did last, for `zpasses hang`: the last collective that it started and awaited.

A dump has a file `progress/rankN.jsonl` per rank, also of ranks that write no graphs. Its lines
have a fixed length, and each is overwritten in place, in shared memory. A line survives the process
in whatever way it ends, and a write costs some microseconds.

Torch's flight recorder has the collectives of NCCL. It does not see the exchanges over gloo of
`zpasses.runtime.gloo`, and those are the collectives of this file.

This module does not import torch.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "LINE_BYTES", "Progress", "current", "start"]

FOLDER = "progress"
LINE_BYTES = 512
"""Length of each line, with its line break."""
_LINES = 64
"""Two per group, after that of the process and that of its activity."""


class Progress:
    """Writes the file of one rank.

    Args:
        path: the file, which is replaced.
        rank: this rank.
        world: number of ranks.

    Raises:
        OSError: if it cannot be written.
    """

    def __init__(self, path: Path, rank: int, world: int) -> None:
        self.path = path
        temporary = path.with_name(f".zpasses-{os.getpid()}-{path.name}")
        temporary.write_bytes((b" " * (LINE_BYTES - 1) + b"\n") * _LINES)
        with temporary.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), LINE_BYTES * _LINES)
        temporary.replace(path)
        self._places: dict[str, int] = {}
        """Group -> number of its first line."""
        self._counts: dict[str, int] = {}
        self._graph = ""
        self._nodes: Sequence[str] = ()
        self._next = 0
        self._outer: list[tuple[str, Sequence[str], int]] = []
        """What was entered before the part that runs."""
        self._write(0, {"rank": rank, "world": world, "pid": os.getpid(), "at": time.time()})

    def activity(self, text: str) -> None:
        """Say what the rank does from now on."""
        self._write(1, {"activity": text[:300], "at": time.time()})

    def enter(self, graph: str, nodes: Sequence[str]) -> None:
        """A graph runs now.

        Args:
            graph: "COMPILE:KIND:DIGEST", as in traces.
            nodes: the names of its nodes that exchange over gloo, in order.
        """
        self._outer.clear()
        self._graph, self._nodes, self._next = graph, nodes, 0

    def leave(self) -> None:
        """The graph has run."""
        self.enter("", ())

    def enter_part(self, graph: str, nodes: Sequence[str]) -> None:
        """A part of a graph runs now, maybe inside of another graph."""
        self._outer.append((self._graph, self._nodes, self._next))
        self._graph, self._nodes, self._next = graph, nodes, 0

    def leave_part(self) -> None:
        """The part has run, and what was entered before goes on."""
        if self._outer:
            self._graph, self._nodes, self._next = self._outer.pop()

    def started(self, group: str, kind: str, nbytes: int) -> Mapping[str, Any]:
        """A collective has started. Returns what `awaited` takes."""
        number = self._counts[group] = self._counts.get(group, 0) + 1
        node = self._nodes[self._next][:200] if self._next < len(self._nodes) else ""
        self._next += 1
        about = {
            "group": group,
            "number": number,
            "kind": kind,
            "bytes": nbytes,
            "graph": self._graph,
            "node": node,
        }
        self._write(self._place(group), {"event": "started", **about, "at": time.time()})
        return about

    def awaited(self, about: Mapping[str, Any], *, done: bool) -> None:
        """A wait for a collective begins, or is done."""
        event = "done" if done else "waits"
        place = self._place(str(about["group"]))
        self._write(place + 1 if place else 0, {"event": event, **about, "at": time.time()})

    def _place(self, group: str) -> int:
        """Number of the first line of a group; 0 if there are too many groups."""
        place = self._places.get(group)
        if place is None:
            place = 2 + 2 * len(self._places)
            self._places[group] = place = place if place + 1 < _LINES else 0
        return place

    def _write(self, line: int, values: Mapping[str, Any]) -> None:
        if line == 0 and "pid" not in values:
            return
        data = json.dumps(values).encode()
        if len(data) < LINE_BYTES:
            start = line * LINE_BYTES
            self._memory[start : start + LINE_BYTES - 1] = data.ljust(LINE_BYTES - 1)


_current: Progress | None = None


def current() -> Progress | None:
    """The file of this process, or None if no dump was asked for."""
    return _current


def start(root: Path, rank: int, world: int) -> Progress:
    """Write the file of this process into a dump from now on.

    Raises:
        OSError: if it cannot be written.
    """
    global _current
    path = root / FOLDER / f"rank{rank}.jsonl"
    if _current is None or _current.path != path:
        path.parent.mkdir(exist_ok=True)
        _current = Progress(path, rank, world)
    return _current
