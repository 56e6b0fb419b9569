"""Pages of the inspector, independent of their output: text for terminals, HTML for notebooks, and
plain values for programs.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ChangeLines", "Code", "Table", "View", "printable"]

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with control characters and characters that change the writing direction escaped. A
    dump may come from an untrusted source.
    """
    return _UNPRINTABLE.sub(
        lambda found: (
            f"\\x{ord(found[0]):02x}" if ord(found[0]) < 256 else f"\\u{ord(found[0]):04x}"
        ),
        text,
    )


@dataclass(frozen=True)
class Table:
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    """Headers of right-aligned columns."""
    title: str = ""

    def text(self, color: bool = False) -> str:
        from tabulate import tabulate

        align = ["right" if header in self.right else "left" for header in self.headers]
        rows = [[printable(cell) for cell in row] for row in self.rows]
        body = tabulate(
            rows, headers=self.headers, colalign=align if rows else None, disable_numparse=True
        )
        body = "\n".join(line.rstrip() for line in body.splitlines())
        return f"{_bold(printable(self.title), color)}\n{body}" if self.title else body

    def html(self) -> str:
        from tabulate import tabulate

        align = ["right" if header in self.right else "left" for header in self.headers]
        rows = [[printable(cell) for cell in row] for row in self.rows]
        body = tabulate(
            rows,
            headers=self.headers,
            colalign=align if rows else None,
            disable_numparse=True,
            tablefmt="html",
        )
        return (f"<h4>{html.escape(printable(self.title))}</h4>" if self.title else "") + body


@dataclass(frozen=True)
class Code:
    """Lines of a graph's listing."""

    lines: tuple[str, ...]

    def text(self, color: bool = False) -> str:
        body = "\n".join(printable(line) for line in self.lines)
        if not color:
            return body
        from pygments import highlight
        from pygments.formatters.terminal import TerminalFormatter
        from pygments.lexers.python import PythonLexer

        # TerminalFormatter uses the terminal's own palette, which its user has chosen.
        return highlight(body, PythonLexer(stripnl=False), TerminalFormatter()).rstrip("\n")

    def html(self) -> str:
        from pygments import highlight
        from pygments.formatters.html import HtmlFormatter
        from pygments.lexers.python import PythonLexer

        body = "\n".join(printable(line) for line in self.lines)
        return highlight(
            body, PythonLexer(stripnl=False), HtmlFormatter(noclasses=True, nobackground=True)
        )


_COLORS = {
    "inserted": 32,
    "removed": 31,
    "moved": 36,
    "rewired": 33,
    "retagged": 35,
    "recompute-changed": 35,
    "retyped": 34,
    "renamed": 34,
}
_SIGNS = {
    "inserted": "+",
    "removed": "-",
    "moved": ">",
    "rewired": "~",
    "retagged": "#",
    "recompute-changed": "*",
    "retyped": ":",
    "renamed": "=",
}
_CSS = {
    "inserted": "#2e9e4f",
    "removed": "#d1434b",
    "moved": "#1a93a8",
    "rewired": "#b07d12",
    "retagged": "#a557c0",
    "recompute-changed": "#a557c0",
}


@dataclass(frozen=True)
class ChangeLines:
    """Lines of (kind of change, text). A line of kind "" has no sign and no color."""

    lines: tuple[tuple[str, str], ...]

    def text(self, color: bool = False) -> str:
        return "\n".join(self._line(kind, printable(text), color) for kind, text in self.lines)

    def _line(self, kind: str, text: str, color: bool) -> str:
        if not kind:
            return _bold(text, color) if text.endswith(":") else text
        line = f"{_SIGNS.get(kind, '?')} {text}"
        return f"\x1b[{_COLORS.get(kind, 39)}m{line}\x1b[0m" if color else line

    def html(self) -> str:
        return (
            f"<pre>{''.join(self._span(kind, printable(text)) for kind, text in self.lines)}</pre>"
        )

    def _span(self, kind: str, text: str) -> str:
        if not kind:
            return f"<b>{html.escape(text)}</b>\n"
        line = f"{_SIGNS.get(kind, '?')} {html.escape(text)}"
        return f'<span style="color:{_CSS.get(kind, "#3f6fd1")}">{line}</span>\n'


@dataclass(frozen=True)
class View:
    """A page. `str(view)` is its text, notebooks show its HTML, and `view.data` has its values."""

    title: str
    parts: tuple[Table | Code | ChangeLines | str, ...]
    data: Any

    def text(self, color: bool = False) -> str:
        shown: list[str] = [_bold(printable(self.title), color)] if self.title else []
        shown += [
            printable(part) if isinstance(part, str) else part.text(color) for part in self.parts
        ]
        return "\n\n".join(each for each in shown if each)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def _repr_html_(self) -> str:
        parts = [
            f"<p>{html.escape(printable(part))}</p>" if isinstance(part, str) else part.html()
            for part in self.parts
        ]
        return f"<h3>{html.escape(printable(self.title))}</h3>{''.join(parts)}"


def _bold(text: str, color: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if color else text


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Iterable[str] = (),
    title: str = "",
) -> Table:
    """A table of values, which are converted by `str`; None becomes an empty cell."""
    return Table(
        tuple(headers),
        tuple(tuple("" if cell is None else str(cell) for cell in row) for row in rows),
        frozenset(right),
        title,
    )
