"""Estimates when each node of a graph runs: one stream for compute, and one for each process group,
by the cost model of the dump's target.

Nodes are issued in graph order and without delay. Compute nodes run one after another. The
collectives of a group run one after another too: each starts when compute has issued it and the
group's previous collective has ended. Groups do not delay each other, and the links that they may
share are not modelled. A wait blocks compute until its collective has ended. That time is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from zpasses.dumps.format import Node, Snapshot

__all__ = ["CollectiveSpan", "ComputeSpan", "Schedule", "Stall", "schedule"]


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """One compute node on the compute stream."""

    node: Node
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait that blocks compute until a collective has ended."""

    at: Node
    """The node that waits."""
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class CollectiveSpan:
    """One collective on its group's stream."""

    node: Node
    start_us: float
    """Start of the transfer: when compute has issued it, and the group's previous collective has
    ended.
    """
    end_us: float
    wait: Node
    """The first node that waits for it, or the collective's node if it includes its wait."""
    distance: int
    """Number of nodes between its start and its first wait."""
    compute_us: float
    """Compute time between its start and its first wait."""
    stalls: tuple[Stall, ...]
    """Stalls at its waits."""

    @property
    def group(self) -> str:
        """The process group. Each group has its own stream."""
        return self.node.collective.group if self.node.collective is not None else ""

    @property
    def time_us(self) -> float:
        return self.end_us - self.start_us

    @property
    def exposed_us(self) -> float:
        """Time for which compute waits for it, of which `queued_us` before its transfer starts."""
        return sum(stall.end_us - stall.start_us for stall in self.stalls)

    @property
    def queued_us(self) -> float:
        """Time for which compute waits for it while it queues behind earlier collectives of its
        group.
        """
        return sum(
            max(min(stall.end_us, self.start_us) - stall.start_us, 0.0) for stall in self.stalls
        )


@dataclass(frozen=True)
class Schedule:
    """The streams of a graph, from its first node on."""

    compute: tuple[ComputeSpan, ...]
    """Spans of the compute stream, in order."""
    collectives: tuple[CollectiveSpan, ...]
    """Spans of all groups' streams, in the order in which they are issued."""
    total_us: float
    """Time until all streams have ended."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Process groups with collectives, in the order of their first collective."""
        return tuple(dict.fromkeys(span.group for span in self.collectives))

    @property
    def group_titles(self) -> dict[str, str]:
        """Process group -> its mesh dimension, or its name, and its size: "dp (4 ranks)"."""
        return {
            span.group: f"{of.title} ({of.ranks} rank{'' if of.ranks == 1 else 's'})"
            for span in reversed(self.collectives)
            if (of := span.node.collective) is not None
        }

    @property
    def has_labels(self) -> bool:
        """Whether a group belongs to a mesh dimension with a name."""
        return any(span.node.collective and span.node.collective.label for span in self.collectives)

    @property
    def compute_us(self) -> float:
        return sum(span.end_us - span.start_us for span in self.compute)

    @property
    def communication_us(self) -> float:
        return sum(span.time_us for span in self.collectives)

    @property
    def exposed_us(self) -> float:
        """Time in which only communication runs: `total_us - compute_us`."""
        return self.total_us - self.compute_us

    @property
    def hidden(self) -> float:
        """The share of communication time, 0 to 1, that overlaps with compute; 1 if there is no
        communication.
        """
        whole = self.communication_us
        return 1.0 if whole == 0 else max(0.0, 1 - self.exposed_us / whole)


def schedule(snapshot: Snapshot) -> Schedule:
    """The estimated schedule of a graph."""
    now = 0.0
    free: dict[str, float] = {}
    """Group -> when its stream becomes idle."""
    spans: list[ComputeSpan] = []
    flying: dict[
        int, tuple[Node, float, float, int, float]
    ] = {}  # id -> node, start, end, index, compute time before its start
    awaited: dict[int, list[int]] = {}  # id of a wait -> ids of its collectives
    stalls: dict[int, list[Stall]] = {}
    first_wait: dict[int, tuple[Node, int, float]] = {}
    computed = 0.0
    for at, node in enumerate(snapshot.nodes):
        for key in awaited.get(node.id, ()):
            first_wait.setdefault(key, (node, at, computed))
            if flying[key][2] > now:
                stalls[key].append(Stall(node, now, flying[key][2]))
                now = flying[key][2]
        collective = node.collective
        if collective is not None:
            start = max(now, free.get(collective.group, 0.0))
            end = free[collective.group] = start + node.cost_us
            flying[node.id], stalls[node.id] = (node, start, end, at, computed), []
            for wait in collective.waits:
                awaited.setdefault(wait, []).append(node.id)
            if not collective.waits:
                first_wait[node.id] = (node, at, computed)
                if end > now:
                    stalls[node.id].append(Stall(node, now, end))
                    now = end
        elif node.cost_us > 0 and node.stream != "communication":
            spans.append(ComputeSpan(node, now, now + node.cost_us))
            now += node.cost_us
            computed += node.cost_us
    collectives = []
    for key, (node, start, end, at, before) in flying.items():
        awaiting, place, after = first_wait.get(key, (node, at, before))
        collectives.append(
            CollectiveSpan(
                node,
                start,
                end,
                awaiting,
                max(place - at - 1, 0),
                after - before,
                tuple(stalls[key]),
            )
        )
    return Schedule(tuple(spans), tuple(collectives), max((now, *free.values())))
