"""Upper bounds on the sizes in an untrusted dump."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zpasses.dumps.dump_errors import DumpTooLargeError

_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Limits:
    """Upper bounds for a reader."""

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
            file_bytes=_UNLIMITED,
            line_bytes=_UNLIMITED,
            nodes=_UNLIMITED,
            entries=_UNLIMITED,
            name_chars=_UNLIMITED,
        )

    def check_name(self, name: str, field: str, where: str | Path) -> None:
        """Raise if a name is too long."""
        if len(name) > self.name_chars:
            found = f"{field!r} has {len(name):,} characters, more"
            raise self.exceeded(where, found, "name_chars")

    def exceeded(self, where: str | Path, found: str, name: str) -> DumpTooLargeError:
        """The error about the limit `name`. `found` ends with a comparative."""
        return DumpTooLargeError(
            f"{where}: {found} than the limit of {getattr(self, name):,} (Limits({name}=...)). "
            "To read a dump of your own without limits, add --trusted to the command, or "
            "limits=Limits.trusted() in Python."
        )
