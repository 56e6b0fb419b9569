"""Which ranks of a dump run the same collectives, and where the first difference is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from zpasses.dumps.dump_errors import DumpError
from zpasses.dumps.format import Dump, Graph
from zpasses.dumps.nodes import Node, Snapshot
from zpasses.inspect.find import is_executed
from zpasses.inspect.listing import op_text, value_text
from zpasses.inspect.modules import modules_of, modules_text
from zpasses.ranks.sequence_difference import first_difference, tensor_texts

_READ_NODES = 200_000
"""Nodes of all ranks' graphs up to which they are read if the ranks recorded no digest."""


@dataclass(frozen=True)
class RankAgreement:
    """One graph on all ranks that wrote it."""

    compile: str
    graph: str
    alike: tuple[tuple[int, ...], ...]
    """Ranks that run the same collectives, the largest set first. One set if all agree."""
    missing: tuple[int, ...]
    """Ranks of the dump that have no such graph."""
    difference: str = ""
    """The first difference between the first two sets; empty if all agree."""

    @property
    def agree(self) -> bool:
        return len(self.alike) == 1 and not self.missing

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "compile": self.compile,
            "graph": self.graph,
            "agree": self.agree,
            "alike": [list(ranks) for ranks in self.alike],
            "missing": list(self.missing),
            "difference": self.difference,
        }


def rank_agreements(dump: Dump) -> list[RankAgreement]:
    """The graphs that run, on all ranks. Empty for a dump of one rank.

    Compiles are matched by order. Ranks are compared by the digests that they exchanged, or else by
    the collectives of their graphs, or, for very large graphs, by the number and the bytes of the
    collectives after each pass.
    """
    if len(dump.ranks) < 2:
        return []
    found: dict[tuple[int, str], dict[int, Graph]] = defaultdict(dict)
    names: dict[int, str] = {}
    for rank in dump.ranks.values():
        for order, each in enumerate(rank.compiles):
            names.setdefault(order, each.name)
            for graph in each.graphs.values():
                if is_executed(graph.name):
                    found[order, graph.name][rank.rank] = graph
    _add_common_graphs(dump, found)
    return [
        _agreement(dump, names[order], name, graphs)
        for (order, name), graphs in sorted(
            found.items(), key=lambda item: (item[0][0], is_executed(item[0][1]))
        )
    ]


def ranks_that_differ(dump: Dump) -> tuple[int, int] | None:
    """Returns the lowest rank, and the lowest that runs other collectives than it in some graph;
    None if no graph is known to differ.
    """
    first = min(dump.ranks, default=0)
    found = [
        ranks[0]
        for each in rank_agreements(dump)
        for ranks in each.alike
        if first not in ranks and any(first in others for others in each.alike)
    ]
    return (first, min(found)) if found else None


def _add_common_graphs(dump: Dump, found: dict[tuple[int, str], dict[int, Graph]]) -> None:
    """Adds the last graph before partitioning of each compile in which a rank has not all graphs.

    A compile that failed leaves out the graphs after the failure, on some ranks or on all. The
    graph before shows where ranks part.
    """
    for order in range(max(len(rank.compiles) for rank in dump.ranks.values())):
        compiled = {
            rank.rank: rank.compiles[order].graphs
            for rank in dump.ranks.values()
            if order < len(rank.compiles)
        }
        late = [graphs for (at, _), graphs in found.items() if at == order]
        if late and all(len(graphs) == len(dump.ranks) for graphs in late):
            continue
        # The first of them that all ranks have; else the first that any has.
        for name in sorted(
            ("joint", "captured"),
            key=lambda each: -sum(each in graphs for graphs in compiled.values()),
        ):
            graphs = {rank: each[name] for rank, each in compiled.items() if name in each}
            if graphs:
                found[order, name] = graphs
                break


def _agreement(dump: Dump, compiled: str, name: str, graphs: dict[int, Graph]) -> RankAgreement:
    sets: dict[Hashable, list[int]] = defaultdict(list)
    small = sum(_nodes(graph) for graph in graphs.values()) <= _READ_NODES
    exchanged = all(_digests(graph) for graph in graphs.values())
    for rank, graph in graphs.items():
        sets[_signature(graph, exchanged=exchanged, small=small)].append(rank)
    alike = sorted((tuple(ranks) for ranks in sets.values()), key=lambda each: (-len(each), each))
    missing = tuple(rank for rank in dump.ranks if rank not in graphs)
    difference = ""
    if len(alike) > 1:
        one, other = alike[0][0], alike[1][0]
        difference = _difference(name, one, graphs[one], other, graphs[other])
        low, high = sorted((one, other))
        difference += f"Shown by: zpasses diff {dump.path} {name} --ranks {low} {high}"
    return RankAgreement(compiled, name, tuple(alike), missing, difference)


def _nodes(graph: Graph) -> int:
    counts = graph.last.counts
    return counts.nodes if counts is not None else 0


def _digests(graph: Graph) -> tuple[tuple[str, str], ...]:
    """What the ranks exchanged. Group names differ between subgroups, and labels do not."""
    return tuple(
        (each.label or each.group, each.digest)
        for each in graph.agreements
        if each.result == "agreed"
    )


def _signature(graph: Graph, *, exchanged: bool, small: bool) -> Hashable:
    if exchanged:
        return _digests(graph)
    if small:
        try:
            if graph.last.snapshot is not None:
                return tuple(map(_line, _collectives(graph.last.snapshot)))
        except DumpError:
            pass
    return tuple((step.after, step.counts) for step in graph.steps)


def _collectives(snapshot: Snapshot) -> list[Node]:
    return [node for node in snapshot.nodes if node.collective is not None]


def _calls(name: str, snapshot: Snapshot) -> dict[str, Any]:
    """The collectives of a graph, as `first_difference` takes them."""
    nodes = _collectives(snapshot)
    places = [
        f"{node.source.file}:{node.source.line}" if node.source and node.source.file else ""
        for node in nodes
    ]
    return {
        "graph": name,
        "lines": [_line(node) for node in nodes],
        "places": places,
        "modules": [modules_text(modules_of(node)) for node in nodes],
        "tensors": [
            tensor_texts(
                [value_text([each]) for each in node.vals], node.params, [place] * len(node.vals)
            )
            for node, place in zip(nodes, places, strict=True)
        ],
    }


def _line(node: Node) -> str:
    """`all_gather_into_tensor -> f32[8, 2] of layers.0.weight over dp`."""
    call = node.collective
    assert call is not None
    of = f" of {', '.join(node.params)}" if node.params else ""
    over = f" over {call.label}" if call.label else f" on group {call.group!r}"
    return f"{op_text(node.target)} -> {value_text(node.vals, None)}{of}{over}"


def _difference(name: str, one: int, first: Graph, other: int, second: Graph) -> str:
    try:
        a, b = first.last.snapshot, second.last.snapshot
    except DumpError as error:
        return f"The graphs cannot be read: {error} "
    if a is None or b is None:
        return "One of the graphs is not in the dump. "
    return first_difference(one, _calls(name, a), other, _calls(name, b))


def ranks_text(ranks: Sequence[int], most: int = 6) -> str:
    """ "0 to 3, 5 and 8 more"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = []
    for first, last in runs:
        between = " to " if last > first + 1 else ", "
        texts.append(str(first) if first == last else f"{first}{between}{last}")
    left = sum(last - first + 1 for first, last in runs[most:])
    return ", ".join(texts[:most]) + (f" and {left} more" if left else "")
