"""Two graphs side by side: time, exposed communication, peak and collectives of both, and what is
alive at one peak and not at the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from zpasses.dumps.format import Buffer, Node, Snapshot
from zpasses.inspect.difference import Difference
from zpasses.inspect.memory import memory
from zpasses.inspect.schedule import schedule

__all__ = ["Comparison", "Figures", "HeldBuffer", "figures_of"]


@dataclass(frozen=True)
class Figures:
    """What one graph costs, by the models."""

    nodes: int
    collectives: int
    time_us: float
    exposed_us: float
    peak_bytes: int


def figures_of(snapshot: Snapshot) -> Figures:
    """The figures of a graph."""
    plan = schedule(snapshot)
    return Figures(
        len(snapshot.nodes),
        len(plan.collectives),
        plan.total_us,
        plan.exposed_us,
        snapshot.peak_bytes,
    )


@dataclass(frozen=True)
class HeldBuffer:
    """A buffer that is alive at the peak of one graph and not at that of the other."""

    node: str
    """Name of the node that allocates it, in its own graph."""
    nbytes: int
    kind: str
    params: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Figures of two graphs, and what explains the difference of their peaks."""

    difference: Difference

    @cached_property
    def before(self) -> Figures:
        return figures_of(self.difference.before)

    @cached_property
    def after(self) -> Figures:
        return figures_of(self.difference.after)

    @cached_property
    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Kind of buffer -> bytes at the peak of the first graph, and at that of the second. Kinds
        with equal bytes are left out.
        """
        one, other = (
            memory(each).by_kind if each.nodes else {}
            for each in (self.difference.before, self.difference.after)
        )
        kinds = dict.fromkeys((*one, *other))
        found = {kind: (one.get(kind, 0), other.get(kind, 0)) for kind in kinds}
        return {kind: sizes for kind, sizes in found.items() if sizes[0] != sizes[1]}

    @cached_property
    def new(self) -> tuple[HeldBuffer, ...]:
        """Buffers at the peak of the second graph that are not at that of the first, largest
        first.
        """
        return self._only(first=False)

    @cached_property
    def gone(self) -> tuple[HeldBuffer, ...]:
        """Buffers at the peak of the first graph that are not at that of the second, largest
        first.
        """
        return self._only(first=True)

    def _only(self, *, first: bool) -> tuple[HeldBuffer, ...]:
        """What only one graph holds at its peak, and by how much its other buffers are larger."""
        old = _held(self.difference.before, self.difference.pairs)
        new = _held(self.difference.after, None)
        own, others = (old, new) if first else (new, old)
        found = [
            HeldBuffer(node.name, more, buffer.kind, buffer.params)
            for (node, buffer), same in zip(own.values(), _counterparts(own, others), strict=True)
            if (more := buffer.nbytes - (same.nbytes if same is not None else 0)) > 0
        ]
        return tuple(sorted(found, key=lambda each: -each.nbytes))

    def to_json(self) -> dict[str, Any]:
        """All figures as plain values."""
        return {
            "before": asdict(self.before),
            "after": asdict(self.after),
            "peak_by_kind": {kind: list(sizes) for kind, sizes in self.by_kind.items()},
            "new_at_peak": [asdict(each) for each in self.new],
            "gone_at_peak": [asdict(each) for each in self.gone],
        }


_Held = dict[tuple[int, str, int], tuple[Node, Buffer]]
"""(Number of a node in the second graph, kind, number of its buffer of this kind) -> the buffer."""


def _held(snapshot: Snapshot, pairs: Mapping[int, int] | None) -> _Held:
    """The buffers at the peak of a graph.

    Args:
        pairs: number of a node of the first graph -> its number in the second; None for the second.
    """
    found: _Held = {}
    if not snapshot.nodes:
        return found
    at = snapshot.nodes[snapshot.live_bytes.index(snapshot.peak_bytes)]
    counts = Counter[tuple[int, str]]()
    for node, buffer in snapshot.buffers_at(at):
        # Nodes of only one graph have numbers of their own.
        number = node.id if pairs is None else pairs.get(node.id, -1 - node.id)
        found[number, buffer.kind, counts[number, buffer.kind]] = node, buffer
        counts[number, buffer.kind] += 1
    return found


def _counterparts(own: _Held, others: _Held) -> list[Buffer | None]:
    """For each buffer, the same one of the other graph: what the same node allocates of its kind,
    else a buffer of its kind for the same parameter.
    """
    left: dict[tuple[str, tuple[str, ...]], list[Buffer]] = {}
    for key, (_, buffer) in others.items():
        if key not in own and len(buffer.params) == 1:
            left.setdefault((buffer.kind, buffer.params), []).append(buffer)
    found: list[Buffer | None] = []
    for key, (_, buffer) in own.items():
        alike = left.get((buffer.kind, buffer.params), [])
        if key in others:
            found.append(others[key][1])
        else:
            found.append(alike.pop(0) if alike else None)
    return found
