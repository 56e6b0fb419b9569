"""Renders report.html: a dump as one page that needs no network, no server and no torch.

The data is JSON in a script element that is never executed. Text from the dump enters the page only
as text nodes and attributes. A content security policy allows only this page's own script, by its
hash, and no connections.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import uuid
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from zpasses.dumps.format import Dump
from zpasses.inspect.json_text import batched, json_pieces
from zpasses.inspect.measured import Measured
from zpasses.inspect.report.payload import payload

__all__ = ["render", "render_pieces"]

_FIRST, _LAST = ("dom", "model"), "app"
"""The scripts that define what the others use when they start, and the one that starts the page."""


def render(dump: Dump, rank: int | None = None, compile_name: str | None = None) -> str:
    """One rank of a dump as a page. See `render_pieces`."""
    return "".join(render_pieces(dump, rank, compile_name))


def render_pieces(
    dump: Dump,
    rank: int | None = None,
    compile_name: str | None = None,
    others: Sequence[tuple[Dump, int | None]] = (),
    measured: Measured | None = None,
) -> Iterator[str]:
    """One rank of a dump as a page, in pieces. All graphs are read before the first.

    Args:
        rank: None for the lowest rank that wrote.
        compile_name: None for all compiles.
        others: further dumps, and ranks of dumps, that the page can compare it with.
        measured: what a trace says about the graphs of this rank.

    Raises:
        NotInDumpError: if there is no such rank or compile.
        DumpError: if a graph of the dump cannot be read.
    """
    from jinja2 import Environment, select_autoescape

    data = payload(dump, rank, compile_name, others, measured)
    script = '"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in _script_names())
    template = Environment(autoescape=select_autoescape(default=True)).from_string(
        _asset("page.html")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    about = {"title": data["title"], "style": _asset("style.css"), "data": _DATA}
    page = template.render(script=script, digest=digest, **about)
    before, _, after = page.partition(_DATA)
    return itertools.chain([before], _inert(data), [after])


def _script_names() -> list[str]:
    found = (each.name for each in files("zpasses.inspect.report").iterdir())
    names = {each.removesuffix(".js") for each in found if each.endswith(".js")}
    return [*_FIRST, *sorted(names - {*_FIRST, _LAST}), _LAST]


def _asset(name: str) -> str:
    return (files("zpasses.inspect.report") / name).read_text(encoding="utf-8")


_DATA = f"data of the page, {uuid.uuid4()}"
"""Marks the place of the data in the page."""
_LEVELS = 4
"""Nesting depth of the rows of nodes in the data."""


def _inert(data: dict[str, Any]) -> Iterator[str]:
    """JSON text without characters that could end its HTML element or start another."""
    for text in batched(json_pieces(data, _LEVELS)):  # it escapes non-ASCII characters
        yield text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
