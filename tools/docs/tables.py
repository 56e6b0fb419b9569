"""Tables of a page as GitHub-flavoured Markdown, and the regions that they fill."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import distribution

from tabulate import tabulate

from zpasses.cost.time.target import TARGETS, Target
from zpasses.errors import suggestion
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Pipeline, catalogue
from zpasses.tools.docs.fields import FieldDoc, describe_fields, first_sentence

_START = re.compile(r"^<!-- generated: (?P<name>.+?) -->\n", re.MULTILINE)
_END = "<!-- end -->"

_OPTIONS_SHOWN = 4
"""Options of a pass in the table of all passes; the others are in the table of that pass."""


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


def generate(name: str) -> str:
    """The table of this name.

    Raises:
        ValueError: for a name that is not known; the message names the nearest one.
    """
    tables = _tables()
    if name not in tables:
        raise ValueError(f"nothing generates {name!r}.{suggestion(name, tables)}")
    return tables[name]()


def _tables() -> Mapping[str, Callable[[], str]]:
    tables = {"options": _options, "passes": _pass_table, "pipelines": _pipelines}
    tables |= {"targets": _targets, "target figures": _target_figures}
    for name, entry in _passes().items():
        tables[f"pass {name}"] = functools.partial(_pass_section, entry)
    return tables


# --- options --------------------------------------------------------------------------------------
def _options() -> str:
    """Of `torch.compile(..., options=...)`: values as Python writes them."""
    rows = []
    for each in describe_fields(Options):
        kind, default = _choices(each.type, '`"{}"`'), _code(repr(each.default).replace("'", '"'))
        rows.append((_code(each.name), kind, default, first_sentence(each.doc)))
    return _table(("option", "type", "default", "meaning"), rows)


def _pass_options(entry: type[Pass]) -> str:
    """Of one pass: values as pipelines write them, and the docstrings as a whole."""
    rows = [
        (_code(each.name), _choices(each.type, "`{}`"), _default_text(each), each.doc)
        for each in describe_fields(entry)
    ]
    if not rows:
        return "This pass has no options."
    return _table(("option", "type", "default", "meaning"), rows)


# --- passes ---------------------------------------------------------------------------------------
def _catalogue() -> dict[str, type[Pass] | Pipeline]:
    """The part of the catalogue that is from zpasses itself; other packages may add to it."""
    own = {point.name for point in distribution("zpasses").entry_points}
    return {name: entry for name, entry in catalogue().items() if name in own}


def _passes() -> dict[str, type[Pass]]:
    """Passes of the joint graph first; then in the order in which pipelines run them."""
    known = _catalogue()
    run = [each.name for entry in known.values() if isinstance(entry, Pipeline) for each in entry]
    order = {name: at for at, name in enumerate(dict.fromkeys(run))}
    passes = [(name, entry) for name, entry in known.items() if isinstance(entry, type)]
    joint = (Level.CAPTURED, Level.JOINT)

    def place(item: tuple[str, type[Pass]]) -> tuple[bool, int]:
        return item[1].level not in joint, order.get(item[0], len(order))

    return dict(sorted(passes, key=place))


def _pass_table() -> str:
    rows = []
    for name, entry in _passes().items():
        link, does = f"[{_code(_text_with_defaults(entry))}](#{name})", inspect.getdoc(entry) or ""
        rows.append((link, entry.level.value, first_sentence(does)))
    return _table(("pass", "level", "what it does"), rows)


def _pass_section(entry: type[Pass]) -> str:
    """One pass: the graphs and the contract from its module's docstring, and its options."""
    paragraphs = (inspect.getdoc(inspect.getmodule(entry)) or "").split("\n\n")
    shown = [text for text in paragraphs if text.startswith(("Before", "After"))]
    graphs = [f"```text\n{text}\n```" for text in shown]
    contracts = [
        textwrap.fill(text.replace("Contract:", "**Contract:**", 1), 100)
        for text in paragraphs
        if text.startswith("Contract:")
    ]
    return "\n\n".join([*graphs, *contracts, _pass_options(entry)])


def _text_with_defaults(entry: type[Pass]) -> str:
    fields = describe_fields(entry)
    options = [f"{each.name}={each.default_text}" for each in fields[:_OPTIONS_SHOWN]]
    if len(fields) > _OPTIONS_SHOWN:
        options.append("...")
    return entry.name + (f"{{{','.join(options)}}}" if options else "")


def _pipelines() -> str:
    found = {name: entry for name, entry in _catalogue().items() if isinstance(entry, Pipeline)}
    rows = [(_code(name), _code(str(entry))) for name, entry in found.items()]
    return _table(("pipeline", "passes"), rows)


# --- targets --------------------------------------------------------------------------------------
def _targets() -> str:
    rows = []
    for name, each in TARGETS.items():
        routes = ", ".join(map(_code, each.routes)) or "none"
        rows.append((_code(name), _code(each.architecture), routes, each.source))
    return _table(("target", "architecture", "copy-engine routes", "source of the figures"), rows)


def _target_figures() -> str:
    fields = [each for each in describe_fields(Target) if each.type in ("int", "float")]
    rows = [(_code(each.name), each.type, each.doc) for each in fields]
    return _table(("figure", "type", "meaning"), rows)


# --- Markdown -------------------------------------------------------------------------------------
def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(escaped, headers=headers, tablefmt="github", disable_numparse=True)


def _code(text: str) -> str:
    return f"`{text}`"


def _choices(type_: str, code: str) -> str:
    """`'a' or 'b'`, which `describe_type` says of a Literal, with each choice as code."""
    return re.sub(r"'([^']*)'", lambda choice: code.format(choice[1]), type_)


def _default_text(field: FieldDoc) -> str:
    return _code(field.default_text) if field.default_text else "empty"
