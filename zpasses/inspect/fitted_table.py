"""Fits a table of texts into the width of a terminal.

Columns that say the least are left out, long texts may stand below their row, and names are
abbreviated so that they still identify: "…layers.34…q_proj.weight".
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence

from zpasses.inspect.wrap import wrapped_lines

Lines = tuple[str, ...]
"""The lines of one cell."""

_GAP = "  "
_LEGIBLE = 18
"""Columns are left out before texts are cut to fewer characters."""
_LEAST = 9
"""Texts are not cut to fewer characters, even if the table is too wide then."""


def fitted_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[Lines]],
    width: int,
    *,
    right: Collection[str],
    whole: Collection[str],
    yields: Sequence[str],
    below: Collection[str],
) -> tuple[str, tuple[str, ...]]:
    """A table of at most `width` characters, if its figures allow that.

    Args:
        right: headers of right-aligned columns, whose cells are never cut.
        whole: headers of left-aligned columns whose cells are never cut.
        yields: headers of columns that a narrow table has no room for, least telling first.
        below: those of `yields` whose cells stand below their row instead of being left out.

    Returns:
        The table, and the headers of the columns that it leaves out.
    """
    cells = dict(zip(headers, zip(*rows, strict=True), strict=True))
    words = {each: max(map(len, each.split(" "))) for each in headers}
    widths = {
        each: max(words[each], *(len(line) for cell in cells[each] for line in cell))
        for each in headers
    }

    def least(header: str, limit: int) -> int:
        is_fixed = header in right or header in whole
        return widths[header] if is_fixed else min(widths[header], max(limit, words[header]))

    def excess(found: Sequence[int]) -> int:
        return sum(found) + len(_GAP) * (len(found) - 1) - width

    shown = list(headers)
    for name in yields:
        if excess([least(each, _LEGIBLE) for each in shown]) <= 0:
            break
        if name in shown:
            shown.remove(name)
    bounds = {each: least(each, _LEAST) for each in shown}
    while excess([widths[each] for each in shown]) > 0:
        wide = [each for each in shown if widths[each] > bounds[each]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1

    def lines(of_row: Sequence[Sequence[str]]) -> list[str]:
        """The lines of one row, of the lines of its shown cells."""
        found = []
        for at in range(max(map(len, of_row), default=0)):
            texts = [each[at] if at < len(each) else "" for each in of_row]
            padded = (
                text.rjust(widths[each]) if each in right else text.ljust(widths[each])
                for each, text in zip(shown, texts, strict=True)
            )
            found.append(_GAP.join(padded).rstrip())
        return found

    titles = [textwrap.wrap(each, max(widths[each], 1), break_long_words=False) for each in shown]
    found = [*lines(titles), _GAP.join("-" * widths[each] for each in shown)]
    under = [each for each in headers if each in below and each not in shown]
    for at in range(len(rows)):
        found += lines(
            [[abbreviated(line, widths[each]) for line in cells[each][at]] for each in shown]
        )
        said = [(each, " ".join(cells[each][at])) for each in under if any(cells[each][at])]
        text = "; ".join(f"{each}: {cell}" if len(under) > 1 else cell for each, cell in said)
        found += wrapped_lines(f"    {text}", max(width, 30), "") if text else []
    omitted = (each for each in headers if each not in shown and each not in under)
    return "\n".join(found), tuple(each for each in omitted if any(map(any, cells[each])))


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
