"""The lines of the model that read its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zpasses.dumps.format import Compile
from zpasses.dumps.nodes import Node, Source
from zpasses.errors import some_of


def parameter_sources(compiled: Compile) -> dict[str, Source]:
    """Parameter -> the first line that reads it, from the graphs before their first pass."""
    found: dict[str, Source] = {}
    seen: set[int] = set()
    for graph in compiled.graphs.values():
        if graph.first.number is None or graph.first.number in seen or graph.first.snapshot is None:
            continue
        seen.add(graph.first.number)
        for node in graph.first.snapshot.nodes:
            if len(node.params) == 1 and node.source is not None and node.source.file:
                found.setdefault(node.params[0], node.source)
    return found


def sources_of(node: Node, of_params: Mapping[str, Source]) -> tuple[Source, ...]:
    """The lines that a node comes from: its own, or those that read its parameters."""
    if node.source is not None and node.source.file:
        return (node.source,)
    found = (of_params.get(name) for name in node.params)
    return tuple(dict.fromkeys(each for each in found if each is not None))


def source_text(sources: Sequence[Source]) -> str:
    """ "model.py:31 and 4 more"."""
    return some_of([f"{each.file}:{each.line}" for each in sources])
