"""Fits a table of texts into the width of a terminal.

Columns that say the least are left out, long texts may stand below their row, and names are
abbreviated so that they still identify: "…layers.34…q_proj.weight".
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

__all__ = ["Layout", "abbreviated", "fitted_table"]

Lines = tuple[str, ...]
"""The lines of one cell."""

_GAP = 2
_LEGIBLE = 18
"""Columns are left out before texts are cut to fewer characters."""
_LEAST = 9
"""Texts are not cut to fewer characters, even if the table is too wide then."""


@dataclass(frozen=True)
class Layout:
    """What a table may do without."""

    right: Collection[str] = ()
    """Headers of right-aligned columns, whose cells are never cut."""
    yields: Sequence[str] = ()
    """Headers of columns that a narrow table has no room for, least telling first."""
    below: Collection[str] = ()
    """Those of `yields` whose cells stand below their row instead of being left out."""
    whole: Collection[str] = ()
    """Headers of left-aligned columns whose cells are never cut."""


@dataclass
class _Column:
    header: str
    cells: list[Lines]
    is_right: bool
    is_whole: bool
    width: int = 0
    texts: list[Lines] = field(default_factory=list)

    @property
    def title(self) -> list[str]:
        """The header as lines."""
        return textwrap.wrap(self.header, max(self.width, 1), break_long_words=False) or [""]

    @functools.cached_property
    def natural(self) -> int:
        lines = (len(line) for cell in self.cells for line in cell)
        return max(0, *self._words, *lines)

    @property
    def _words(self) -> list[int]:
        return [len(word) for word in self.header.split(" ")]

    @property
    def least(self) -> int:
        if self.is_whole:
            return self.natural
        return min(self.natural, max(_LEAST, *self._words))

    @property
    def legible(self) -> int:
        return self.natural if self.is_whole else min(self.natural, max(_LEGIBLE, self.least))


def fitted_table(
    headers: Sequence[str], rows: Sequence[Sequence[Lines]], layout: Layout, width: int
) -> tuple[str, tuple[str, ...]]:
    """A table of at most `width` characters, if its figures allow that, and the headers of the
    columns that it leaves out.
    """
    columns = [
        _Column(
            header,
            [row[at] for row in rows],
            header in layout.right,
            header in layout.right or header in layout.whole,
        )
        for at, header in enumerate(headers)
    ]
    shown, yielded = list(columns), []
    for name in layout.yields:
        if _sum([each.legible for each in shown]) <= width:
            break
        found = next((each for each in shown if each.header == name), None)
        if found is not None:
            shown.remove(found)
            yielded.append(found)
    _set_widths(shown, width)
    below = [each for each in columns if each in yielded and each.header in layout.below]
    omitted = [
        each.header
        for each in columns
        if each in yielded and each not in below and any(map(any, each.cells))
    ]
    return _text(shown, below, len(rows), width), tuple(omitted)


def _sum(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * max(len(widths) - 1, 0)


def _set_widths(columns: Sequence[_Column], width: int) -> None:
    for each in columns:
        each.width = each.natural
    excess = _sum([each.width for each in columns]) - width
    while excess > 0:
        cut = [each for each in columns if each.width > each.least]
        if not cut:
            break
        widest = max(cut, key=lambda each: each.width)
        others = [each.width for each in cut if each is not widest]
        by = max(1, min(excess, widest.width - max(widest.least, *others, 0)))
        widest.width -= by
        excess -= by
    for each in columns:
        each.texts = [
            tuple(abbreviated(line, each.width) for line in cell) or ("",) for cell in each.cells
        ]


def _text(shown: Sequence[_Column], below: Sequence[_Column], count: int, width: int) -> str:
    height = max((len(each.title) for each in shown), default=0)
    lines = [_line(shown, [_at(each.title, at) for each in shown]) for at in range(height)]
    lines.append((" " * _GAP).join("-" * each.width for each in shown))
    for row in range(count):
        tall = max(len(each.texts[row]) for each in shown)
        lines += [_line(shown, [_at(each.texts[row], at) for each in shown]) for at in range(tall)]
        said = [(each.header, " ".join(each.cells[row])) for each in below if any(each.cells[row])]
        text = "; ".join(f"{header}: {cell}" if len(below) > 1 else cell for header, cell in said)
        lines += _indented(text, width)
    return "\n".join(lines)


def _indented(text: str, width: int) -> list[str]:
    """Lines of a text, which may break after commas too."""
    lines = textwrap.wrap(
        re.sub(r",(?=\S)", ",\0 ", text),
        max(width, 30),
        initial_indent="    ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )
    return [line.replace("\0 ", "").rstrip("\0") for line in lines]


def _at(lines: Sequence[str], at: int) -> str:
    return lines[at] if at < len(lines) else ""


def _line(columns: Sequence[_Column], texts: Sequence[str]) -> str:
    cells = [
        text.rjust(each.width) if each.is_right else text.ljust(each.width)
        for each, text in zip(columns, texts, strict=True)
    ]
    return (" " * _GAP).join(cells).rstrip()


# --- names ----------------------------------------------------------------------------------------
_COUNTED = re.compile(r"(.+?)(?: \((\d+) times\))?(?: and (\d+) more)?$")
_PLACE = re.compile(r".*/.*:\d+")
_PATH = re.compile(r"[\w*]+(?:\.[\w*]+){2,}")
_FILLER = re.compile(r"(?:_into|_tensor|_default)+(?:_|$)")


def abbreviated(text: str, limit: int) -> str:
    """A text of at most `limit` characters that still tells what it names.

    A parameter or module keeps the number of its layer and its end, a line of code its file and
    number, and a node its kind and number. "w and 3 more" becomes "w +3". Other texts are cut in
    their middle.
    """
    if len(text) <= limit:
        return text
    found = _COUNTED.fullmatch(text)
    if found is not None and (found[2] or found[3]):
        counts = (f" x{found[2]}" if found[2] else "") + (f" +{found[3]}" if found[3] else "")
        if limit - len(counts) >= _LEAST // 2:
            return abbreviated(found[1], limit - len(counts)) + counts
    if _PLACE.fullmatch(text):
        return f"…{text[len(text) - limit + 1 :]}"
    if _PATH.fullmatch(text):
        return _shorter_path(text, limit)
    return _middle(_FILLER.sub("…", text) if text.isidentifier() else text, limit)


def _shorter_path(path: str, limit: int) -> str:
    """A dotted path that keeps the number of its layer, and its last two parts."""
    parts = path.split(".")
    numbers = [at for at, part in enumerate(parts[:-1]) if part.isdigit() or part == "*"]
    if not numbers:
        return _middle(f"…{'.'.join(parts[-2:])}", limit)
    at = numbers[0]
    heads = [f"{'…' if at > 1 else ''}{'.'.join(parts[max(at - 1, 0) : at + 1])}"]
    heads += [f"…{parts[at]}"] if at else []
    rest = parts[at + 1 :]
    end = ".".join(rest[-2:])
    whole = [f"{head}.{'.'.join(rest)}" for head in heads]
    forms = whole + ([f"{head}…{end}" for head in heads] if len(rest) > 2 else [])
    fitting = next((form for form in forms if len(form) <= limit), None)
    if fitting is not None:
        return fitting
    head = f"{heads[-1]}…"
    return head + _middle(end, limit - len(head)) if limit > len(head) + 4 else _middle(path, limit)


def _middle(text: str, limit: int) -> str:
    """A text cut in its middle, because its ends distinguish names best."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 2
    start, end = text[:head], text[len(text) - (limit - 1 - head) :]
    return f"{start.rstrip('…')}…{end.lstrip('…')}"
