"""Finds the collective in which the ranks of a run wait, and the ranks that have not come to it.

Each rank's file of torch's flight recorder says which collectives it started and awaits, numbered
per process group. The lowest number that any rank waits for is where the group stands. A rank that
has not started it is missing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zpasses.dumps.format import Dump
from zpasses.dumps.nodes import Node, Snapshot
from zpasses.inspect.find import SelectedGraph, is_executed, select_graphs
from zpasses.inspect.flight_recorder import GroupState, LastCollective, RankState
from zpasses.inspect.launches import kind_of

_COMPARED = 64
"""Collectives of the flight recorder that are compared with a graph, from the last on backwards."""


@dataclass(frozen=True)
class Place:
    """Where a collective is in a dump."""

    graph: SelectedGraph
    node: Node
    inserted_by: str
    """Name of the pass that inserted the node; empty if it is unknown."""


@dataclass(frozen=True)
class RankHang:
    """One rank of a group in which ranks wait."""

    rank: int
    state: str
    """ "waits", "missing" (it has not started the collective), "passed" (it has), "waits for a
    later one" or "unknown" (no file says what it did)."""
    collective: LastCollective | None
    """What it waits for, else the last that it started."""
    places: tuple[Place, ...] = ()
    """The nodes that this collective may be; one, if it is certain."""


@dataclass(frozen=True)
class GroupHang:
    """A process group in which at least one rank waits."""

    group: str
    number: int
    """The collective in which the group stands: the n-th of the group."""
    ranks: tuple[RankHang, ...]
    mismatch: str = ""
    """How the ranks' collectives of this number differ; empty if they do not."""
    label: str = ""
    """Mesh dimension of the group; see `zpasses.dumps.Collective.label`."""

    def of_state(self, state: str) -> list[int]:
        return [each.rank for each in self.ranks if each.state == state]


def find_hangs(dump: Dump, states: Mapping[int, RankState], finder: NodeFinder) -> list[GroupHang]:
    """The groups in which ranks wait, in the order of their names.

    Args:
        dump: the dump of the run.
        states: rank -> what it did last.
        finder: of the nodes of this dump.
    """
    names = sorted({name for state in states.values() for name in state.groups})
    found = (_group(name, dump, states, finder) for name in names)
    return [each for each in found if each is not None]


def _group(
    name: str, dump: Dump, states: Mapping[int, RankState], finder: NodeFinder
) -> GroupHang | None:
    waits = {
        rank: last
        for rank, state in states.items()
        if name in state.groups and (last := state.groups[name].waits) is not None
    }
    if not waits:
        return None
    number = min(last.number for last in waits.values())
    ranks = []
    for rank in _members(name, dump, states):
        state = states.get(rank)
        if state is None:
            ranks.append(RankHang(rank, "unknown", None))
            continue
        of_group = state.groups.get(name, GroupState())
        last = of_group.waits or of_group.started
        places = finder.places(rank, name, last, of_group.history) if last is not None else ()
        what = _what(of_group, number)
        ranks.append(RankHang(rank, what, last, places))
    compiles = [each for rank in dump.ranks.values() for each in rank.compiles]
    labels = (each.info.group_labels.get(name) for each in compiles)
    label = next(filter(None, labels), "")
    return GroupHang(name, number, tuple(ranks), _mismatch(name, number, states), label)


def _what(state: GroupState, number: int) -> str:
    if state.waits is not None:
        return "waits" if state.waits.number == number else "waits for a later one"
    return "missing" if state.started is None or state.started.number < number else "passed"


def _members(name: str, dump: Dump, states: Mapping[int, RankState]) -> list[int]:
    for state in states.values():
        if name in state.members:
            return sorted(state.members[name])
    for rank in dump.ranks.values():
        for each in rank.compiles:
            if name in each.info.groups:
                return sorted(each.info.groups[name])
    return sorted(rank for rank, state in states.items() if name in state.groups)


def _mismatch(name: str, number: int, states: Mapping[int, RankState]) -> str:
    seen: dict[tuple[str, int | None], list[int]] = {}
    for rank, state in states.items():
        of_group = state.groups.get(name, GroupState())
        last = next((each for each in of_group.history if each.number == number), None)
        if last is not None:
            seen.setdefault((last.kind, last.elements), []).append(rank)
    if len(seen) < 2:
        return ""
    return "; ".join(
        f"rank {', '.join(map(str, ranks[:8]))} runs {kind}"
        + (f" of {elements:,} elements" if elements is not None else "")
        for (kind, elements), ranks in seen.items()
    )


# --- nodes ----------------------------------------------------------------------------------------
@dataclass
class _Collectives:
    """The collectives of one graph in one process group."""

    graph: SelectedGraph
    snapshot: Snapshot
    nodes: list[Node]
    keys: list[tuple[str, int | None]] = field(default_factory=list)
    """(kind, elements of all inputs) of each."""


class NodeFinder:
    """Finds the nodes of collectives."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self._graphs: dict[int, list[SelectedGraph]] = {}
        self._by_group: dict[int, dict[str, list[_Collectives]]] = {}

    def places(
        self, rank: int, group: str, last: LastCollective, history: Sequence[LastCollective]
    ) -> tuple[Place, ...]:
        """The nodes that a collective may be.

        Args:
            rank: if it wrote no graphs, those of the lowest rank that did are taken.
            group: its process group.
            last: the collective.
            history: the rank's last collectives of the group, with this one among them.
        """
        if not self._dump.ranks:
            return ()
        rank = rank if rank in self._dump.ranks else min(self._dump.ranks)
        if rank not in self._graphs:
            self._graphs[rank] = [
                each
                for each in select_graphs(self._dump, rank=rank)
                if is_executed(each.graph.name) and each.graph.last.snapshot is not None
            ]
        until = [each for each in history if each.number <= last.number][-_COMPARED:]
        found = self._matching(self._collectives(rank, group), until)
        return tuple(Place(graph, node, self._inserted_by(graph, node)) for graph, node in found)

    def _collectives(self, rank: int, group: str) -> list[_Collectives]:
        if rank not in self._by_group:
            self._by_group[rank] = defaultdict(list)
            for each in self._graphs[rank]:
                snapshot = each.graph.last.snapshot
                assert snapshot is not None
                nodes = defaultdict(list)
                for node in snapshot.nodes:
                    if node.collective is not None:
                        nodes[node.collective.group].append(node)
                for name, of_group in nodes.items():
                    keys = [(_kind(node), _elements(node, snapshot)) for node in of_group]
                    self._by_group[rank][name].append(_Collectives(each, snapshot, of_group, keys))
        return self._by_group[rank].get(group, [])

    def _matching(
        self, graphs: Sequence[_Collectives], history: Sequence[LastCollective]
    ) -> list[tuple[SelectedGraph, Node]]:
        """The nodes whose graphs explain the most of the history.

        The history is then the start of a graph up to the node, before it whole graphs in any
        order, between them collectives of the program itself, and first the end of a graph.
        """
        if not history:
            return []
        explained = _explained(graphs, history)
        best, found = 0, list[tuple[SelectedGraph, Node]]()
        for each in graphs:
            for place in range(len(each.nodes)):
                matched = _matched(each.keys[: place + 1], history)
                if matched <= min(place, len(history) - 1):
                    continue  # an earlier collective differs
                matched += explained[len(history) - matched]
                if matched > best:
                    best, found = matched, []
                if matched == best:
                    found.append((each.graph, each.nodes[place]))
        names = {node.name for _, node in found}
        return found[:1] if len(names) == 1 else found

    def _inserted_by(self, graph: SelectedGraph, node: Node) -> str:
        """Name of the pass after which the node is there, in its graph or in the joint graph."""
        graphs = [graph.compile.graphs.get("joint"), graph.compile.graphs.get(graph.graph.of)]
        for each in (*graphs, graph.graph):
            for step in each.steps if each is not None else ():
                if step.snapshot is not None and node.id in step.snapshot.by_id:
                    if step.after is None:
                        break
                    return step.after.partition("{")[0]
        return ""


def _explained(graphs: Sequence[_Collectives], history: Sequence[LastCollective]) -> list[int]:
    """For each length, how many of so many first collectives are those of graphs, if a graph ends
    there.
    """
    best = [0]
    for end in range(1, len(history) + 1):
        found = best[end - 1]  # the last one is of the program itself
        for each in graphs:
            matched = _matched(each.keys, history[:end])
            if matched == end or matched == len(each.keys):
                found = max(found, matched + best[end - matched])
        best.append(found)
    return best


def _matched(keys: Sequence[tuple[str, int | None]], history: Sequence[LastCollective]) -> int:
    """How many of the last collectives are equal."""
    count = 0
    for (kind, elements), last in zip(reversed(keys), reversed(history), strict=False):
        if kind != last.kind or (
            None not in (elements, last.elements) and elements != last.elements
        ):
            break
        count += 1
    return count


def _kind(node: Node) -> str:
    return kind_of(node.collective.kind) if node.collective is not None else ""


def _elements(node: Node, snapshot: Snapshot) -> int | None:
    """Elements of all inputs of a collective; None if a size is dynamic."""
    sources = (snapshot.by_id.get(key) for key in node.inputs)
    shapes = [value.shape for each in sources if each is not None for value in each.vals[:1]]
    if any(isinstance(size, str) for shape in shapes for size in shape):
        return None
    return sum(math.prod(map(int, shape)) for shape in shapes)
