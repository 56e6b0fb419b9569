"""Marked regions of a Markdown page, and what belongs into them."""

from __future__ import annotations

import re

from zpasses.tools.docs.tables import generate

__all__ = ["fill_regions"]

_START = re.compile(r"^<!-- generated: (?P<name>.+?) -->\n", re.MULTILINE)
_END = "<!-- end -->"


def fill_regions(text: str) -> str:
    """The page with every marked region replaced by what its name generates.

    Raises:
        ValueError: for a region without an end, or with a name that generates nothing.
    """
    parts, position = [], 0
    for start in _START.finditer(text):
        end = text.find(_END, start.end())
        if end < 0 or _START.search(text, start.end(), end):
            raise ValueError(f"region {start['name']!r} has no {_END!r} before the next region.")
        parts += [text[position : start.end()], f"\n{generate(start['name'])}\n\n"]
        position = end
    return "".join([*parts, text[position:]])
