"""Writes values as JSON piece by piece, so that the text of a large page is never held at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_SHORT = 100
"""Characters of an object or list that stays on one line."""


def json_pieces(value: Any, levels: int, indent: int | None = None) -> Iterator[str]:
    """JSON text in pieces. All non-ASCII characters are escaped.

    Args:
        levels: nesting depth down to which each item is a piece. Deeper values are one piece.
        indent: spaces per level, where each piece is a line; None for compact text.
    """
    yield from _pieces(value, levels, indent, "\n")


def _pieces(value: Any, levels: int, indent: int | None, line: str) -> Iterator[str]:
    separators = (",", ":") if indent is None else (", ", ": ")
    if not isinstance(value, (dict, list, tuple)) or not value or levels == 0:
        yield json.dumps(value, separators=separators)
        return
    if indent is not None and len(value) < _SHORT and _is_flat(value):
        text = json.dumps(value, separators=separators)
        if len(text) <= _SHORT:
            yield text
            return
    inner = line if indent is None else line + " " * indent
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    between = opening
    for key, item in items:
        head = "" if key is None else json.dumps(str(key)) + separators[1]
        yield between + ("" if indent is None else inner) + head
        yield from _pieces(item, levels - 1, indent, inner)
        between = ","
    yield closing if indent is None else line + closing


def _is_flat(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return not any(isinstance(item, (dict, list, tuple)) for item in items)


def batched(pieces: Iterator[str], size: int = 1 << 16) -> Iterator[str]:
    """The same text in pieces of about `size` characters."""
    held: list[str] = []
    length = 0
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        if length >= size:
            yield "".join(held)
            held, length = [], 0
    yield "".join(held)
