"""What is alive along a graph, and at its peak; by the model of `zpasses.cost.memory`, whose
figures a dump holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zpasses.dumps.format import Buffer, Compile, Graph, Node, Snapshot

__all__ = ["KINDS", "Alive", "Memory", "StepPeak", "memory", "peaks", "sizes"]

KINDS = ("parameter", "bucket", "gradient", "activation", "saved", "scratch", "other")
"""Kinds of buffers, in the order in which they are shown."""


@dataclass(frozen=True)
class Alive:
    """One buffer."""

    node: str
    """Who allocated it."""
    id: int
    nbytes: int
    kind: str
    params: tuple[str, ...]
    first: str
    last: str
    """The last node that needs it."""


@dataclass(frozen=True)
class Memory:
    """Bytes alive along a graph, and what is alive at one of its nodes."""

    snapshot: Snapshot
    at: Node
    """The node in question: the first at which the peak is reached, if none was asked for."""
    alive: tuple[Alive, ...]
    """While that node runs, largest first."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> bytes of the full one."""

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """One figure a node, in graph order."""
        return self.snapshot.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self.snapshot.peak_bytes

    @property
    def nbytes(self) -> int:
        """Alive while the node in question runs."""
        return sum(each.nbytes for each in self.alive)

    @property
    def by_kind(self) -> dict[str, int]:
        """Kind -> bytes alive, without those that have none."""
        found = _sums((each.kind, each.nbytes) for each in self.alive)
        ordered = (*KINDS, *sorted(found.keys() - set(KINDS)))
        return {kind: found[kind] for kind in ordered if found.get(kind)}

    @property
    def by_parameter(self) -> dict[str, int]:
        """Parameter -> bytes alive that belong to it, most first. What several share counts by
        their sizes."""
        found: dict[str, float] = defaultdict(float)
        for each in self.alive:
            whole = sum(self.sizes.get(name, 1) for name in each.params) or 1
            for name in each.params:
                found[name] += each.nbytes * self.sizes.get(name, 1) / whole
        return {
            name: round(nbytes) for name, nbytes in sorted(found.items(), key=lambda item: -item[1])
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_bytes": self.peak_bytes,
            "at": self.at.name,
            "nbytes": self.nbytes,
            "by_kind": self.by_kind,
            "by_parameter": self.by_parameter,
            "alive": [{**vars(each), "params": list(each.params)} for each in self.alive],
            "live_bytes": list(self.live_bytes),
            "nodes": [node.name for node in self.snapshot.nodes],
        }


@dataclass(frozen=True)
class StepPeak:
    """The peak before the first pass, or after a pass."""

    step: int
    after: str | None
    peak_bytes: int
    at: str
    by_kind: dict[str, int]


def sizes(compiled: Compile) -> dict[str, int]:
    """Parameter -> bytes of the full one."""
    return {name: param.nbytes for name, param in compiled.info.parameters.items()}


def memory(
    snapshot: Snapshot, at: Node | None = None, sizes: Mapping[str, int] | None = None
) -> Memory:
    """What is alive at a node of a graph.

    Args:
        at: None for the first node at which the peak is reached.
        sizes: parameter -> bytes, by which buffers that parameters share are divided among them;
            None for equal parts.
    """
    if at is None:
        at = snapshot.nodes[snapshot.live_bytes.index(snapshot.peak_bytes)]
    names = {node.id: node.name for node in snapshot.nodes}
    return Memory(
        snapshot,
        at,
        tuple(_alive(node, buffer, names) for node, buffer in snapshot.alive_at(at)),
        sizes or {},
    )


def peaks(graph: Graph) -> list[StepPeak]:
    """The peak before the first pass and after each pass that left a graph."""
    found, seen = [], dict[int, Memory]()
    for step in graph.steps:
        if step.snapshot is not None and step.number is not None and step.snapshot.nodes:
            there = seen.get(step.number) or seen.setdefault(step.number, memory(step.snapshot))
            found.append(
                StepPeak(step.index, step.after, there.peak_bytes, there.at.name, there.by_kind)
            )
    return found


def _alive(node: Node, buffer: Buffer, names: dict[int, str]) -> Alive:
    return Alive(
        node.name,
        node.id,
        buffer.nbytes,
        buffer.kind,
        buffer.params,
        names[buffer.first],
        names[buffer.last],
    )


def _sums(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for key, nbytes in items:
        found[key] += nbytes
    return found
