"""Bounds for a reader of an untrusted dump: on sizes, and on the work that the dump causes.

A small file can cost much: a list of empty lists, a record of nothing, a snapshot that repeats its
base. `Work` therefore counts what a reader does, over all files that one `read` opens, and refuses
to go on beyond `Limits.work`. One unit is about 0.4 microseconds of the most expensive command.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from zpasses.dumps.errors import DumpTooLargeError

__all__ = ["Limits", "Work"]

_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Limits:
    """Upper bounds for a reader. With the defaults, every command ends within 5 s and 500 MB."""

    work: int = 12_000_000
    """Work of all files together, in units of about 0.4 microseconds. A graph of 1,000 nodes
    costs some 200,000 units, and its state after one more pass some 60,000."""
    file_bytes: int = 64 << 20
    """Size of one file."""
    line_bytes: int = 4 << 20
    """Size of one line."""
    nodes: int = 200_000
    """Nodes of one graph."""
    depth: int = 64
    """Nesting depth of lists and objects."""
    entries: int = 20_000
    """Entries of a folder, and records of events.jsonl."""
    name_chars: int = 256
    """Characters of the name of a node, graph or compile. Pages repeat these names."""

    @classmethod
    def trusted(cls) -> Limits:
        """No bounds but that on `depth`, for a dump of one's own."""
        return cls(
            work=_UNLIMITED,
            file_bytes=_UNLIMITED,
            line_bytes=_UNLIMITED,
            nodes=_UNLIMITED,
            entries=_UNLIMITED,
            name_chars=_UNLIMITED,
        )

    def exceeded(self, where: str | Path, found: str, name: str) -> DumpTooLargeError:
        """The error about the limit `name`. `found` ends with a comparative."""
        return DumpTooLargeError(
            f"{where}: {found} than the limit of {getattr(self, name):,} (Limits({name}=...)). "
            "To read a dump of your own without limits, add --trusted to the command, or "
            "limits=Limits.trusted() in Python."
        )


# Units, found by measuring hostile dumps with every command (tests/zpasses/inspect/test_work.py).
_FILE = 250
_ENTRY = 4
_RECORD = 80
_TRACE_EVENT = 40
"""An event of a trace, in addition to its values."""
_PICKLE_BYTE = 4
_OBJECT = 3
"""An object, in addition to its values: an empty one needs 64 bytes, and one with a field 184."""
_CHARACTERS_PER_UNIT = 8
_LINE = 4
"""A line of a source file."""
_NODE = 30
"""A node that is written in a snapshot, in addition to its values."""
_PLACE = 6
"""A node's place in a snapshot, written or inherited from the base."""
_STEP = 500
"""A step whose graph a page shows, with some tables of its own."""
_USE = 40
"""A node of that graph."""
_COLLECTIVE = 60
"""A collective of that graph, in addition to its node."""
_NAME_CHARACTERS_PER_UNIT = 16
"""Characters of names in the arguments of shown nodes."""


class Work:
    """Counts the work of one `read`, and of the snapshots that are read later.

    Methods raise DumpTooLargeError if the sum exceeds the limit.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._units = 0
        self._found: Counter[str] = Counter()

    def file(self, path: Path) -> None:
        """A file is opened."""
        self._add(path, "files", 1, _FILE)

    def entries(self, folder: Path, count: int) -> None:
        """A folder is listed."""
        self._add(folder, "entries of folders", count, _FILE + _ENTRY * count)

    def record(self, where: str) -> None:
        """A record of events.jsonl becomes an event, and perhaps a step and a row."""
        self._add(where, "events", 1, _RECORD)

    def trace_event(self, where: str, count: int) -> None:
        """Events of a trace are put in order and assigned to nodes."""
        self._add(where, "events of a trace", count, count * _TRACE_EVENT)

    def pickle(self, where: str, size: int) -> None:
        """A pickle of plain values is read. Each of its bytes may be an instruction."""
        self._add(where, "bytes of a pickle", size, size * _PICKLE_BYTE)

    def text(self, where: str, text: str) -> int:
        """Text is parsed as JSON. Returns an upper bound of the number of its values, which
        counting characters gives without parsing it.
        """
        objects = text.count("{")
        values = text.count(",") + text.count("[") + text.count(":") + objects
        # The width of the widest character is that of all, so an emoji makes a text four times as
        # large.
        size = text.__sizeof__()
        self._add(where, "bytes", size, size // _CHARACTERS_PER_UNIT)
        self._add(where, "JSON values", values, values + _OBJECT * objects)
        return values

    def source_lines(self, where: str, count: int) -> None:
        """A page shows the lines of source files."""
        self._add(where, "lines of source files", count, count * _LINE)

    def node(self, where: str) -> None:
        """A node is read from a line of a snapshot."""
        self._add(where, "written nodes", 1, _NODE)

    def place(self, where: str, nodes: int, values: int) -> None:
        """A snapshot is put together of so many nodes, whose lines have so many values."""
        self._add(where, "nodes of snapshots", nodes, nodes * _PLACE + values // 8)

    def use(self, where: str, nodes: int, values: int, collectives: int, name_chars: int) -> None:
        """A page shows a snapshot as the graph of a step.

        Args:
            values: of the lines of all nodes.
            collectives: of all nodes.
            name_chars: upper bound of the characters of all names that arguments refer to.
        """
        units = _STEP + nodes * _USE + values // 2 + collectives * _COLLECTIVE
        units += name_chars // _NAME_CHARACTERS_PER_UNIT
        self._add(where, "nodes of steps", nodes, units)

    def _add(self, where: str | Path, what: str, count: int, units: int) -> None:
        self._found[what] += count
        self._units += units
        if self._units > self.limits.work:
            found = ", ".join(f"{each:,} {what}" for what, each in self._found.most_common())
            raise self.limits.exceeded(
                where,
                f"reading up to here takes {self._units:,} units of work ({found}), more",
                "work",
            )
