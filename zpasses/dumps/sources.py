"""Where in the user's model nodes came from: the innermost line that is neither torch's nor ours,
and the module's path."""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import fx

from zpasses.dumps.format import Source

__all__ = ["SourceTable"]

_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in [^\n]*(?:\n[ \t]+([^\n]*))?')
_PART = re.compile(
    r"\._(?:modules|parameters|buffers)\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]|\.(\w+)"
)
_TORCH, _ZPASSES = str(Path(torch.__file__).parent) + "/", str(Path(__file__).parents[1]) + "/"
_FILE_BYTES, _ALL_BYTES = 512 << 10, 4 << 20
"""Of the user's code that a dump holds."""


class SourceTable:
    """Finds the source of nodes; many have the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Source | None] = {}
        self._files: dict[str, str] = {}
        """Name in the dump -> path."""

    def of(self, node: fx.Node) -> Source | None:
        trace = node.meta.get("stack_trace")
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        path = _last_path(stack)
        if not isinstance(trace, str):
            trace = ""
        key = (trace, path)
        if key not in self._known:
            self._known[key] = self._source(trace, _module(path))
        return self._known[key]

    def _source(self, trace: str, module: str) -> Source | None:
        frames = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_ZPASSES)]
        own = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
        if not own:
            return Source("", 0, "", module) if module else None
        file, line, text = own[-1]
        name = _short(file)
        self._files.setdefault(name, file)
        return Source(name, int(line), text.strip(), module)

    def texts(self) -> dict[str, str]:
        """Text of the files that nodes came from: the user's, as far as they are there and not too
        large."""
        found, left = {}, _ALL_BYTES
        for name, path in sorted(self._files.items()):
            text = "".join(linecache.getlines(path))
            if text and not path.startswith(_TORCH) and len(text) <= min(_FILE_BYTES, left):
                found[name] = text
                left -= len(text)
        return found


def _last_path(stack: Any) -> str:
    if not isinstance(stack, dict) or not stack:
        return ""
    last = next(reversed(stack.values()))
    return str(last[0]) if isinstance(last, (tuple, list)) and last else ""


def _module(path: str) -> str:
    """`L['self']._modules['layers']._modules['0']` -> "layers.0"."""
    start = path.find("]") + 1 if path.startswith(("L[", "G[")) else 0
    parts = ["".join(groups) for groups in _PART.findall(path[start:])]
    return ".".join(parts) or ("" if start else path)


def _short(file: str) -> str:
    """A path below the place that it was imported from, so that a dump names no folders of the
    machine where it can."""
    entries = sorted(
        (entry for entry in sys.path if entry and file.startswith(entry.rstrip("/") + "/")), key=len
    )
    return file[len(entries[-1].rstrip("/")) + 1 :] if entries else file
