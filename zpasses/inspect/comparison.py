"""Two graphs side by side: time, exposed communication, peak and collectives of both, and what is
alive at one peak and not at the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from zpasses.dumps.nodes import Snapshot
from zpasses.inspect.difference import Difference
from zpasses.inspect.memory import LiveBuffer, memory
from zpasses.inspect.node_spans import schedule


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
    counts, times = (len(snapshot.nodes), plan.launches), (plan.total_us, plan.exposed_us)
    return Figures(*counts, *times, snapshot.peak_bytes)


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
    def new(self) -> tuple[LiveBuffer, ...]:
        """Buffers at the peak of the second graph that are not at that of the first, largest
        first.
        """
        return self._only(first=False)

    @cached_property
    def gone(self) -> tuple[LiveBuffer, ...]:
        """Buffers at the peak of the first graph that are not at that of the second, largest
        first.
        """
        return self._only(first=True)

    def _only(self, *, first: bool) -> tuple[LiveBuffer, ...]:
        """What only one graph holds at its peak, with the bytes by which its other buffers are
        larger.
        """
        old = _held(self.difference.before, self.difference.pairs)
        new = _held(self.difference.after, None)
        same = _counterparts(old, new)
        if not first:
            old, new, same = new, old, {new_key: key for key, new_key in same.items()}
        found = [
            replace(buffer, nbytes=more)
            for key, buffer in old.items()
            if (more := buffer.nbytes - (new[same[key]].nbytes if key in same else 0)) > 0
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


_Key = tuple[int, str, tuple[str, ...], int]
"""Number of a node in the second graph, kind, the parameter if there is one, and number of its
buffer of these. Buckets of two graphs may have the same node, and other parameters."""
_Held = dict[_Key, LiveBuffer]


def _held(snapshot: Snapshot, pairs: Mapping[int, int] | None) -> _Held:
    """The buffers at the peak of a graph.

    Args:
        pairs: number of a node of the first graph -> its number in the second; None for the second.
    """
    found: _Held = {}
    counts = Counter[tuple[int, str, tuple[str, ...]]]()
    for buffer in memory(snapshot).alive if snapshot.nodes else ():
        # Nodes of only one graph have numbers of their own.
        number = buffer.id if pairs is None else pairs.get(buffer.id, -1 - buffer.id)
        key = number, buffer.kind, buffer.params if len(buffer.params) == 1 else ()
        found[(*key, counts[key])] = buffer
        counts[key] += 1
    return found


def _counterparts(old: _Held, new: _Held) -> dict[_Key, _Key]:
    """The buffers that both graphs hold: of the same node, kind and parameter; else of the same
    kind for the same parameter; else of the same node and kind, if one of them has no parameter.
    """
    found = {key: key for key in old if key in new}

    def pair(group: Callable[[_Key], object], alike: Callable[[_Key, _Key], bool]) -> None:
        taken, left = set(found.values()), dict[object, list[_Key]]()
        for key in new:
            if key not in taken:
                left.setdefault(group(key), []).append(key)
        for key in old:
            others = left.get(group(key), []) if key not in found and group(key) else []
            other = next((each for each in others if alike(key, each)), None)
            if other is not None:
                found[key] = other
                others.remove(other)

    pair(lambda key: key[1:3] if key[2] else None, lambda own, other: True)
    pair(lambda key: key[:2], lambda own, other: not (own[2] and other[2]))
    return found
