"""Wraps lines of the inspector's pages to the width of a terminal. A pipe gets whole lines."""

from __future__ import annotations

import re

_WORDS = re.compile(r"[^ ,]+[ ,]*|[ ,]+")
"""A line may end after a space or a comma. Pipelines have commas only."""
_COMMAND = ": zpasses "
"""A line with a command stays whole, so that it can be copied."""
_NOTE = re.compile(r" {2,}# ")
"""Between the code and the note of a line of a listing."""
_INDENT = "    "


def wrapped_lines(line: str, width: int | None, indent: str = _INDENT) -> list[str]:
    """A line as lines of at most `width` characters, all but the first with a further indent. A
    word that is longer is a line of its own.
    """
    if width is None or len(line) <= width or _COMMAND in line:
        return [line]
    start = line[: len(line) - len(line.lstrip())] + indent
    lines, held = [], ""
    for word in _WORDS.findall(line):
        if held.strip() and len(held) + len(word.rstrip()) > width:
            lines.append(held.rstrip())
            held = start
        held += word
    return [*lines, held.rstrip()]


def code_lines(line: str, width: int | None) -> list[str]:
    """A line of a listing as lines: the code, and its note below it if both need more room."""
    if width is None or len(line) <= width:
        return [line]
    code, *notes = _NOTE.split(line, maxsplit=1)
    short = f"{code}  # {notes[0]}" if notes else code
    if len(short) <= width:
        return [short]
    lines = wrapped_lines(code, width)
    for note in notes:
        first, *others = wrapped_lines(f"{_INDENT}# {note}", width)
        lines += [first, *(f"{_INDENT}#   {each.strip()}" for each in others)]
    return lines
