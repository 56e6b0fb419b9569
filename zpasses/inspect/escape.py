"""Escapes characters that would steer a terminal, reverse or hide text, or forge a line. Every page
passes the text of a dump through this file: a dump may come from an untrusted source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_FORMAT = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e"
    "\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f"
)
"""Unicode's control, format and surrogate characters and its separators of lines and paragraphs,
but tabs and line breaks."""
_IN_TEXT = re.compile(f"[{_FORMAT}]")
_IN_LINE = re.compile(f"[{_FORMAT}\t\n]")


def printable(text: str) -> str:
    """Text of several lines, such as a traceback: all but tabs and line breaks is escaped."""
    return text.translate(_TEXT) if _IN_TEXT.search(text) else text


def one_line(text: str) -> str:
    """Text that is one line, or a part of one, such as a name: line breaks are escaped too."""
    return text.translate(_LINE) if _IN_LINE.search(text) else text


def one_line_values(value: Any) -> Any:
    """Plain values with `one_line` applied to all of their texts and keys. JSON has no infinity and
    no NaN, so these become texts.
    """
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {one_line(str(key)): one_line_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [one_line_values(item) for item in value]
    return value


class _Escapes(dict[int, str]):
    """Character -> what to print for it, as `str.translate` takes it."""

    def __init__(self, unprintable: re.Pattern[str]) -> None:
        super().__init__()
        self._unprintable = unprintable

    def __missing__(self, code: int) -> str:
        char = chr(code)
        self[code] = _escaped(char) if self._unprintable.fullmatch(char) else char
        return self[code]


def _escaped(char: str) -> str:
    if char in "\t\n\r":
        return repr(char)[1:-1]
    code = ord(char)
    width, letter = (2, "x") if code < 1 << 8 else (4, "u") if code < 1 << 16 else (8, "U")
    return f"\\{letter}{code:0{width}x}"


_TEXT, _LINE = _Escapes(_IN_TEXT), _Escapes(_IN_LINE)
