"""Source locations of nodes: the innermost line of the user's code, and the module's path."""

from __future__ import annotations

import linecache

from torch import fx

from zpasses.dumps.nodes import Source
from zpasses.graph.source_lines import is_torch_file, module_path, short_file, user_frame

_FILE_BYTES, _ALL_BYTES = 512 << 10, 4 << 20
"""Limits of the user's code in a dump: of one file, and of all files together."""


class SourceTable:
    """Finds the source of nodes. Nodes from one line share one `Source`."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Source | None] = {}
        self._files: dict[str, str] = {}
        """Name in the dump -> path."""

    def of(self, node: fx.Node) -> Source | None:
        key = (str(node.meta.get("stack_trace") or ""), module_path(node))
        if key not in self._known:
            self._known[key] = self._source(user_frame(node), key[1])
        return self._known[key]

    def _source(self, frame: tuple[str, int, str] | None, module: str) -> Source | None:
        if frame is None:
            return Source("", 0, "", module) if module else None
        file, line, text = frame
        name = short_file(file)
        self._files.setdefault(name, file)
        return Source(name, line, text, module)

    def texts(self) -> dict[str, str]:
        """Text of the user's files that nodes come from. Files that are not available or too large
        are left out.
        """
        found, left = {}, _ALL_BYTES
        for name, path in sorted(self._files.items()):
            text = "".join(linecache.getlines(path))
            if text and not is_torch_file(path) and len(text) <= min(_FILE_BYTES, left):
                found[name] = text
                left -= len(text)
        return found
