"""What each rank compiles, for the errors of votes to which ranks come with different graphs."""

from __future__ import annotations

import contextlib
import contextvars
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zpasses.errors import some_of

_current: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "zpasses.compiled_graph", default=None
)
_MOST = 4

ComparedOptions = dict[str, tuple[str, str]]
"""Option of the backend that ranks must give alike -> what was given, as text, and a text that is
equal where it means the same."""


@contextlib.contextmanager
def compiling(
    name: str,
    params: Sequence[str],
    dump: str | None = None,
    options: Mapping[str, Any] | None = None,
    compared: ComparedOptions | None = None,
) -> Iterator[None]:
    """Context manager: votes inside it are about the compile of a graph.

    Args:
        name: of the graph, such as `0/0`.
        params: names of the sharded parameters that it reads.
        dump: folder that this rank writes the graph into; None if it does not.
        options: the options of the backend that this rank gave.
        compared: those of them that ranks must give alike.
    """
    given = {
        "name": name,
        "params": list(params),
        "dump": dump,
        "options": dict(options or {}),
        "compared": compared or {},
    }
    token = _current.set(given)
    try:
        yield
    finally:
        _current.reset(token)


def compiled_graph() -> dict[str, Any] | None:
    """Returns the graph that is compiled here, as plain values; None outside of compiles."""
    return _current.get()


def same_graph_differs(
    rank: int, graph: Mapping[str, Any] | None, other_rank: int, other: Mapping[str, Any] | None
) -> str | None:
    """Returns the error about two ranks that compile one graph with options which must be alike;
    None if these are, or they compile other graphs, or one of them none.
    """
    if graph is None or other is None:
        return None
    if any(graph[each] != other[each] for each in ("name", "params")):
        return None
    return compared_differ(rank, graph["compared"], other_rank, other["compared"])


def compared_differ(
    rank: int, options: ComparedOptions, other_rank: int, others: ComparedOptions
) -> str | None:
    """Returns the error about two ranks and the options that they must give alike; None if they do.

    A rank that compiles nothing has none, which is no difference. Nor is an option that was given
    alike: it means something else because another one does.
    """
    said = [
        f"{name} is {given} on rank {rank} and {others[name][0]} on rank {other_rank}"
        for name, (given, meaning) in options.items()
        if name in others and others[name][1] != meaning and others[name][0] != given
    ]
    if not said:
        return None
    return f"ranks compile with different options: {', '.join(said)}; give all ranks the same."


def graphs_differ(
    rank: int, graph: Mapping[str, Any] | None, other_rank: int, other: Mapping[str, Any] | None
) -> str:
    """Returns how the graphs that two ranks compile differ, and what shows it. Empty if one of them
    compiles none.
    """
    if graph is None or other is None:
        return ""
    own, others = (dict.fromkeys(map(str, each["params"])) for each in (graph, other))
    said = [
        f"Only rank {at} reads {_named(only)} in graph {name}."
        for at, name, only in (
            (rank, graph["name"], [each for each in own if each not in others]),
            (other_rank, other["name"], [each for each in others if each not in own]),
        )
        if only
    ]
    if not said and graph["name"] == other["name"]:
        said = [f"Both compile graph {graph['name']}, and read the same parameters in it."]
    elif not said:
        said = [
            f"Rank {rank} compiles graph {graph['name']}, and rank {other_rank} {other['name']}."
        ]
    options = options_differ(rank, graph.get("options"), other_rank, other.get("options"))
    return f" {' '.join(said)} {options}" + how_to_compare(
        rank, graph.get("dump"), other_rank, other.get("dump")
    )


def options_differ(
    rank: int, options: Mapping[str, Any] | None, other_rank: int, others: Mapping[str, Any] | None
) -> str:
    """Returns a sentence that names the options of the backend which two ranks gave differently.

    Empty if they gave the same. Options of dumps may differ between ranks.
    """
    options, others = options or {}, others or {}
    said = [
        f"{name} is {_value(options, name)} on rank {rank} and {_value(others, name)} on rank "
        f"{other_rank}"
        for name in dict.fromkeys((*options, *others))
        if not name.startswith("dump") and options.get(name) != others.get(name)
    ]
    return f"The options differ: {', '.join(said)}. " if said else ""


def _value(options: Mapping[str, Any], name: str) -> str:
    return repr(options[name]) if name in options else "not given"


def how_to_compare(rank: int, dump: str | None, other_rank: int, other_dump: str | None) -> str:
    """Returns a sentence with the command that shows how the graphs of two ranks differ.

    Args:
        rank: one of the ranks.
        dump: folder that it writes its graphs into; None if it does not.
        other_rank: the other rank.
        other_dump: the folder of the other rank.
    """
    low, high = sorted((rank, other_rank))
    if dump and dump == other_dump:
        return f"To see the graphs: zpasses diff {shlex.quote(dump)} --ranks {low} {high}"
    return (
        "To see the graphs, run with options={'dump': DIR, 'dump_ranks': 'all'}, and then: "
        f"zpasses diff DIR --ranks {low} {high}"
    )


def _named(params: Sequence[str]) -> str:
    """`up.weight (module blocks.1.up) and 3 more`."""
    texts = [
        f"{name} (module {name.rpartition('.')[0]})" if "." in name else name for name in params
    ]
    return some_of(texts, _MOST)
