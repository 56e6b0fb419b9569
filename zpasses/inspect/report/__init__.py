"""Renders report.html: a dump as one page that needs no network, no server and no torch.

The data is JSON in a script element that is never executed. Text from the dump enters the page only
as text nodes and attributes. A content security policy allows only this page's own script, by its
hash, and no connections.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from zpasses.dumps.format import Dump
from zpasses.inspect.measured import Measured
from zpasses.inspect.report.payload import payload

_FIRST, _LAST = ("dom", "model"), "app"
"""The scripts that define what the others use when they start, and the one that starts the page."""


def render(
    dump: Dump,
    rank: int | None = None,
    compile_name: str | None = None,
    others: Sequence[tuple[Dump, int | None]] = (),
    measured: Measured | None = None,
) -> str:
    """One rank of a dump as a page.

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
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = Environment(autoescape=select_autoescape(default=True)).from_string(
        _asset("page.html")
    )
    about = {"title": data["title"], "style": _asset("style.css"), "data": _inert(data)}
    return template.render(script=script, digest=digest, **about)


def _script_names() -> list[str]:
    found = (each.name for each in files("zpasses.inspect.report").iterdir())
    names = {each.removesuffix(".js") for each in found if each.endswith(".js")}
    return [*_FIRST, *sorted(names - {*_FIRST, _LAST}), _LAST]


def _asset(name: str) -> str:
    return (files("zpasses.inspect.report") / name).read_text(encoding="utf-8")


def _inert(data: dict[str, Any]) -> str:
    """JSON without characters that could end its HTML element or start another."""
    text = json.dumps(data, separators=(",", ":"))  # it escapes non-ASCII characters
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
