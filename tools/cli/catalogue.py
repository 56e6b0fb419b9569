"""Pages about the installed passes. This module imports torch, because passes depend on it."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import torch
from torch import nn

from zpasses.errors import OptionError
from zpasses.inspect.view import Code, Table, Text, View, table
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.pipeline import Pipeline, catalogue, unknown_pass
from zpasses.testing import capture_graphs, listing
from zpasses.tools.docs.fields import describe_fields

_EXAMPLES = {"cache-params": "cache-params", "merge-reads": "merge-reads"}
"""Passes for which the example uses other options than the named pipelines, so that the pass
changes something in a small model.
"""


def all_passes_view() -> View:
    """All installed passes, and the named pipelines."""
    known = catalogue()
    rows, data = [], []
    for name, entry in known.items():
        if isinstance(entry, type):
            options, about = _options(entry), (name, entry.level.value, _first_sentence(entry))
            shown = ", ".join(f"{option['name']}={option['default']}" for option in options)
            rows.append((*about, tuple(textwrap.wrap(shown, 60))))
            named = dict(zip(("name", "level", "summary"), about, strict=True))
            data.append({**named, "options": options})
    pipelines = [(name, str(entry)) for name, entry in known.items() if isinstance(entry, Pipeline)]
    headers = ("pass", "level", "what it does", "options")
    long, passes = ("options", "what it does"), ("passes",)
    parts = (
        table(headers, rows, yields=long, below=long, whole=long[1:]),
        table(("pipeline", *passes), pipelines, yields=passes, below=passes, whole=passes),
        "zpasses passes NAME shows one pass and the graph before and after it.",
    )
    return View("", parts, {"passes": data, "pipelines": dict(pipelines)})


def pass_view(name: str) -> View:
    """One pass: its documentation, its options, and a small graph before and after it.

    Raises:
        OptionError: if there is no pass of this name.
    """
    entry = catalogue().get(name)
    if entry is None:
        raise OptionError(unknown_pass(name))
    if isinstance(entry, Pipeline):
        passes = [str(each) for each in entry]
        return View(name, (f"This is a named pipeline: {entry}",), {"name": name, "passes": passes})
    options = _options(entry)
    document = inspect.getdoc(inspect.getmodule(entry)) or inspect.getdoc(entry) or ""
    parts: list[Table | Code | Text] = [Text(tuple(document.splitlines()))]
    if options:
        rows = []
        for option in options:
            meaning = tuple(textwrap.wrap(option["doc"], 80))
            rows.append((option["name"], option["type"], option["default"], meaning))
        headers = ("option", "type", "default", "meaning")
        last = headers[3:]
        parts.append(table(headers, rows, yields=last, below=last, whole=headers[1:]))
    shown = []
    for title, before, after in _example(name, entry):
        parts.append(Code((f"# {title}, before", *before.splitlines())))
        parts.append(Code((f"# {title}, after", *after.splitlines())))
        shown.append({"graph": title, "before": before, "after": after})
    data = {"name": name, "level": entry.level.value, "document": document, "options": options}
    return View(f"{name} ({entry.level.value})", tuple(parts), {**data, "example": shown})


def _first_sentence(entry: type[Pass]) -> str:
    return (inspect.getdoc(entry) or "").partition("\n")[0].rstrip(".")


def _options(entry: type[Pass]) -> list[dict[str, Any]]:
    """Name, type, default and documentation of each option of a pass."""
    return [
        {"name": each.name, "type": each.type, "default": each.default_text, "doc": each.doc}
        for each in describe_fields(entry)
    ]


# --- the example ----------------------------------------------------------------------------------
def _example(name: str, entry: type[Pass]) -> list[tuple[str, str, str]]:
    """(title, listing before, listing after) of each graph that the pass changes in a small model
    on two ranks.
    """
    pipeline = _pipeline_to(name)
    if pipeline is None:
        return []
    before, after = (
        {kind: listing(graph) for kind, graph in _captured(passes).items()}
        for passes in (pipeline[:-1], pipeline)
    )
    return [
        (f"{kind} graph of the example", before[kind], after[kind])
        for kind in _kinds(entry.level)
        if kind in after and after[kind] != before[kind]
    ]


def _kinds(level: Level) -> tuple[str, ...]:
    both = ("forward", "backward")
    return both if level is Level.PARTITIONED else (level.value,)


def _pipeline_to(name: str) -> list[Pass] | None:
    """The passes of the first named pipeline that contains the pass, up to the pass; None if there
    is none.
    """
    for pipeline in ("zero3", "zero2"):
        passes = list(Pipeline.parse(pipeline))
        at = next((at for at, each in enumerate(passes) if each.name == name), None)
        if at is not None:
            return [*passes[:at], *Pipeline.parse(_EXAMPLES.get(name, str(passes[at])))]
    return None


def _captured(passes: list[Pass]) -> dict[str, Any]:
    """The graphs of a small model on two ranks after passes."""

    class Example(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):  # so that merge-reads has something to merge
                x = self.down(self.up(x).relu())
            return x

    inputs, pipeline = (torch.ones(2, 4),), Pipeline(tuple(passes))
    after = capture_graphs(Example(), inputs, world_size=2, pipeline=pipeline).after
    kinds = ("captured", "joint", "forward", "backward")
    return {kind: graph for kind in kinds if (graph := getattr(after, kind)) is not None}
