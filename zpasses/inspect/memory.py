"""Bytes alive along a graph, and the buffers at its peak. A dump contains these figures of the
model `zpasses.cost.memory`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zpasses.dumps.format import Compile, Graph
from zpasses.dumps.nodes import Buffer, Node, Snapshot
from zpasses.inspect.modules import module_of

KINDS = ("parameter", "bucket", "gradient", "activation", "scratch", "other")
"""Kinds of buffers, in display order."""


@dataclass(frozen=True)
class LiveBuffer:
    """One buffer."""

    node: str
    """Name of the node that allocates it."""
    id: int
    """Id of that node."""
    nbytes: int
    kind: str
    params: tuple[str, ...]
    """Names of the parameters that it holds data of."""
    first: str
    """Name of the first node at which it is alive."""
    last: str
    """Name of the last node that needs it."""


@dataclass(frozen=True)
class Memory:
    """Bytes alive along a graph, and the buffers that are alive at one node."""

    snapshot: Snapshot
    at: Node
    """The requested node, or else the first node at which the peak is reached."""
    alive: tuple[LiveBuffer, ...]
    """Buffers that are alive while that node runs, largest first."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> bytes of the full parameter."""

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes alive while each node runs, in graph order."""
        return self.snapshot.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self.snapshot.peak_bytes

    @property
    def nbytes(self) -> int:
        """Bytes alive while the node `at` runs."""
        return sum(each.nbytes for each in self.alive)

    @property
    def by_kind(self) -> dict[str, int]:
        """Kind -> bytes alive, without kinds of 0 bytes."""
        return _by_kind((each.kind, each.nbytes) for each in self.alive)

    @property
    def by_parameter(self) -> dict[str, int]:
        """Parameter -> its bytes alive, largest first. A shared buffer is divided by the
        parameters' sizes.
        """
        return _rounded((name, nbytes) for name, _, nbytes in self._shares() if name)

    @property
    def by_module(self) -> dict[str, int]:
        """Module -> its bytes alive, largest first. A buffer belongs to the modules of its
        parameters, or else to the module whose line allocates it. "" is a buffer of neither.
        """
        found = _rounded((module, nbytes) for _, module, nbytes in self._shares())
        return {module: nbytes for module, nbytes in found.items() if nbytes}

    def _shares(self) -> Iterator[tuple[str, str, float]]:
        """Parameter, its module, and its bytes of each buffer. What belongs to no parameter has ""
        and the module whose line allocates it, or "".
        """
        for each in self.alive:
            whole = sum(self.sizes.get(name, 1) for name in each.params) or 1
            for name in each.params:
                yield name, module_of(name), each.nbytes * self.sizes.get(name, 1) / whole
            if not each.params:
                source = self.snapshot.by_id[each.id].source
                yield "", source.module if source is not None else "", each.nbytes

    def to_json(self) -> dict[str, Any]:
        """All figures as plain values."""
        return {
            "peak_bytes": self.peak_bytes,
            "at": self.at.name,
            "nbytes": self.nbytes,
            "by_kind": self.by_kind,
            "by_parameter": self.by_parameter,
            "by_module": self.by_module,
            "alive": [{**vars(each), "params": list(each.params)} for each in self.alive],
            "live_bytes": list(self.live_bytes),
            "nodes": [node.name for node in self.snapshot.nodes],
        }


@dataclass(frozen=True)
class StepPeak:
    """The peak of one step."""

    step: int
    after: str | None
    peak_bytes: int
    at: str
    """Name of the first node at which the peak is reached."""
    by_kind: dict[str, int]
    failed: bool = False
    """Whether the pass failed. The graph is then what it left, and may be wrong."""


def parameter_sizes(compiled: Compile) -> dict[str, int]:
    """Parameter -> bytes of the full parameter."""
    return {name: param.nbytes for name, param in compiled.info.parameters.items()}


def memory(
    snapshot: Snapshot, at: Node | None = None, sizes: Mapping[str, int] | None = None
) -> Memory:
    """The buffers that are alive at one node of a graph.

    Args:
        at: None is the first node at which the peak is reached.
        sizes: parameter -> bytes. Buffers that parameters share are divided in this proportion;
            None divides them equally.
    """
    if at is None:
        at = _peak_node(snapshot)
    names = {node.id: node.name for node in snapshot.nodes}
    alive = tuple(_alive(node, buffer, names) for node, buffer in snapshot.alive_at(at))
    return Memory(snapshot, at, alive, sizes or {})


def peaks(graph: Graph) -> list[StepPeak]:
    """The peak of every step that has a graph."""
    found: list[StepPeak] = []
    seen: dict[int, StepPeak] = {}
    for step in graph.steps:
        if step.snapshot is not None and step.number is not None and step.snapshot.nodes:
            if step.number not in seen:
                seen[step.number] = _step_peak(step.snapshot)
            of, failed = seen[step.number], step.error is not None
            found.append(replace(of, step=step.index, after=step.after, failed=failed))
    return found


def _step_peak(snapshot: Snapshot) -> StepPeak:
    at = _peak_node(snapshot)
    kinds = _by_kind((buffer.kind, buffer.nbytes) for _, buffer in snapshot.buffers_at(at))
    return StepPeak(0, None, snapshot.peak_bytes, at.name, kinds)


def _peak_node(snapshot: Snapshot) -> Node:
    """The first node at which the peak is reached."""
    return snapshot.nodes[snapshot.live_bytes.index(snapshot.peak_bytes)]


def _by_kind(buffers: Iterable[tuple[str, int]]) -> dict[str, int]:
    """(kind, bytes) of buffers -> kind -> bytes, in display order, without kinds of 0 bytes."""
    found = _sums(buffers)
    ordered = (*KINDS, *sorted(found.keys() - set(KINDS)))
    return {kind: int(found[kind]) for kind in ordered if found.get(kind)}


def _alive(node: Node, buffer: Buffer, names: dict[int, str]) -> LiveBuffer:
    about = (buffer.nbytes, buffer.kind, buffer.params)
    return LiveBuffer(node.name, node.id, *about, names[buffer.first], names[buffer.last])


def _sums(items: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(int)
    for key, nbytes in items:
        found[key] += nbytes
    return found


def _rounded(items: Iterable[tuple[str, float]]) -> dict[str, int]:
    """Sums by key, largest first."""
    ordered = sorted(_sums(items).items(), key=lambda item: -item[1])
    return {key: round(nbytes) for key, nbytes in ordered}
