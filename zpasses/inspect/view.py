"""Pages of the inspector, independent of their output: text for terminals, HTML for notebooks, and
plain values for programs.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zpasses.inspect.escape import one_line
from zpasses.inspect.fitted_table import Lines, fitted_table
from zpasses.inspect.units import cut
from zpasses.inspect.wrap import code_lines, wrapped_lines

Cell = str | tuple[str, ...]
"""A cell of a table: one line, or several."""

_CELL_CHARS = 200
_CELL_LINES = 20
_HIGHLIGHTED_CHARS = 1 << 20
"""Characters of a listing beyond which it has no colors: pygments takes a second for each of them.
"""


@dataclass(frozen=True)
class Text:
    """A paragraph of several lines."""

    lines: tuple[str, ...]

    def text(self, color: bool = False, width: int | None = None) -> str:
        return "\n".join(_each_wrapped(self.lines, width))

    def html(self) -> str:
        return f"<p>{'<br>'.join(html.escape(one_line(line)) for line in self.lines)}</p>"


def text_of(message: str) -> Text:
    """A message that may have several lines. All but its first are indented, so that none looks
    like a line of the page.
    """
    first, *others = message.split("\n")
    return Text((first, *(f"    {line}" for line in others)))


@dataclass(frozen=True)
class Table:
    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    right: frozenset[str] = frozenset()
    """Headers of right-aligned columns."""
    title: str = ""
    yields: tuple[str, ...] = ()
    """Headers of columns that a narrow terminal has no room for, least telling first."""
    below: frozenset[str] = frozenset()
    """Those of `yields` whose cells stand below their row then. The others are left out, and are
    named below the table."""
    whole: frozenset[str] = frozenset()
    """Headers of left-aligned columns whose cells are never cut."""

    def text(self, color: bool = False, width: int | None = None) -> str:
        """The table as text. With a width, it is fitted into it."""
        body = "\n".join(line.rstrip() for line in self._render("simple").splitlines())
        if width is not None and self.rows and max(map(len, body.splitlines())) > width:
            how = {"right": self.right, "whole": self.whole, "below": self.below}
            cells = self._cells()
            body, omitted = fitted_table(self.headers, cells, width, yields=self.yields, **how)
            if omitted:
                hint = f"Not shown at this width: {', '.join(omitted)}."
                body += f"\n{_wrapped(f'{hint} A pipe and --json have all columns.', width)}"
        return f"{_bold(one_line(self.title), color)}\n{body}" if self.title else body

    def html(self) -> str:
        title = f"<h4>{html.escape(one_line(self.title))}</h4>" if self.title else ""
        return title + self._render("html")

    def _cells(self) -> list[list[Lines]]:
        """Rows of cells of lines, escaped and cut."""
        return [[_shown(cell) for cell in row] for row in self.rows]

    def _render(self, style: str) -> str:
        from tabulate import tabulate

        align = ["right" if header in self.right else "left" for header in self.headers]
        return tabulate(
            [["\n".join(cell) for cell in row] for row in self._cells()],
            headers=self.headers,
            colalign=align if self.rows else None,
            disable_numparse=True,
            tablefmt=style,
        )


def _shown(cell: Cell) -> Lines:
    given = (cell,) if isinstance(cell, str) else cell
    kept = given if len(given) <= _CELL_LINES else (*given[: _CELL_LINES - 1], "...")
    return tuple(cut(one_line(line[: _CELL_CHARS + 1]), _CELL_CHARS) for line in kept)


@dataclass(frozen=True)
class Code:
    """Lines of a graph's listing."""

    lines: tuple[str, ...]

    def text(self, color: bool = False, width: int | None = None) -> str:
        body = "\n".join(part for line in self.lines for part in code_lines(one_line(line), width))
        if not color or not self._is_short():
            return body
        from pygments import highlight
        from pygments.formatters.terminal import TerminalFormatter
        from pygments.lexers.python import PythonLexer

        # TerminalFormatter uses the terminal's own palette, which its user has chosen.
        return highlight(body, PythonLexer(stripnl=False), TerminalFormatter()).rstrip("\n")

    def _is_short(self) -> bool:
        return sum(map(len, self.lines)) <= _HIGHLIGHTED_CHARS

    def html(self) -> str:
        body = "\n".join(map(one_line, self.lines))
        if not self._is_short():
            return f"<pre>{html.escape(body)}</pre>"
        from pygments import highlight
        from pygments.formatters.html import HtmlFormatter
        from pygments.lexers.python import PythonLexer

        return highlight(
            body, PythonLexer(stripnl=False), HtmlFormatter(noclasses=True, nobackground=True)
        )


_STYLES = {
    "inserted": ("+", 32, "#2e9e4f"),
    "removed": ("-", 31, "#d1434b"),
    "moved": (">", 36, "#1a93a8"),
    "rewired": ("~", 33, "#b07d12"),
    "retagged": ("#", 35, "#a557c0"),
    "recompute-changed": ("*", 35, "#a557c0"),
    "retyped": (":", 34, "#3f6fd1"),
    "renamed": ("=", 34, "#3f6fd1"),
}
"""Kind of change -> its sign, its color of terminals, and its color of HTML."""


@dataclass(frozen=True)
class ChangeLines:
    """Lines of (kind of change, text). A line of kind "" has no sign and no color."""

    lines: tuple[tuple[str, str], ...]

    def text(self, color: bool = False, width: int | None = None) -> str:
        return "\n".join(
            self._line(kind, one_line(text), color, width) for kind, text in self.lines
        )

    def _line(self, kind: str, text: str, color: bool, width: int | None) -> str:
        if not kind:
            text = "\n".join(wrapped_lines(text, width))
            return _bold(text, color) if text.endswith(":") else text
        sign, number, _ = _STYLES[kind]
        line = "\n".join(wrapped_lines(f"{sign} {text}", width))
        return f"\x1b[{number}m{line}\x1b[0m" if color else line

    def html(self) -> str:
        return (
            f"<pre>{''.join(self._span(kind, one_line(text)) for kind, text in self.lines)}</pre>"
        )

    def _span(self, kind: str, text: str) -> str:
        if not kind:
            return f"<b>{html.escape(text)}</b>\n"
        sign, _, color = _STYLES[kind]
        return f'<span style="color:{color}">{sign} {html.escape(text)}</span>\n'


@dataclass(frozen=True)
class View:
    """A page. `str(view)` is its text, notebooks show its HTML, and `view.data` has its values."""

    title: str
    parts: tuple[Table | Code | ChangeLines | Text | str, ...]
    """A part that is a str is one sentence or more, which a terminal's width may wrap."""
    data: Any

    def text(self, color: bool = False, width: int | None = None) -> str:
        """The page as text. Empty parts are left out. Tables and lines fit `width` characters."""
        texts = [_bold(one_line(self.title), color)] if self.title else []
        for part in self.parts:
            if isinstance(part, str):
                texts.append(_wrapped(one_line(part), width))
            else:
                texts.append(part.text(color, width))
        return "\n\n".join(filter(None, texts))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def _repr_html_(self) -> str:
        parts = [
            f"<p>{html.escape(one_line(part))}</p>" if isinstance(part, str) else part.html()
            for part in self.parts
        ]
        return f"<h3>{html.escape(one_line(self.title))}</h3>{''.join(parts)}"


def _wrapped(text: str, width: int | None) -> str:
    """A sentence as lines of at most `width` characters, or of 30 if that is less."""
    return "\n".join(wrapped_lines(text, width and max(width, 30), ""))


def _each_wrapped(lines: Iterable[str], width: int | None) -> Iterator[str]:
    for line in lines:
        yield from wrapped_lines(one_line(line), width)


def _bold(text: str, color: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if color else text


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Iterable[str] = (),
    title: str = "",
    yields: Iterable[str] = (),
    below: Iterable[str] = (),
    whole: Iterable[str] = (),
) -> Table:
    """A table of values, which are converted by `str`; None becomes an empty cell. The digits of an
    int are grouped, so a number that is a name, such as a rank, is given as a str. A tuple of texts
    is a cell of several lines. The other arguments are the fields of `Table`.
    """
    cells = tuple(tuple(_cell(cell) for cell in row) for row in rows)
    about = (frozenset(right), title, tuple(yields), frozenset(below), frozenset(whole))
    return Table(tuple(headers), cells, *about)


def table_of(rows: Sequence[Mapping[str, object]], **about: Any) -> Table:
    """A table of rows, column -> value, that all have the columns of the first one. See `table`."""
    return table(tuple(rows[0]), [tuple(row.values()) for row in rows], **about)


def _cell(value: object) -> Cell:
    if isinstance(value, tuple):
        return tuple(map(str, value))
    if type(value) is int:
        return f"{value:,}"
    return "" if value is None else str(value)
