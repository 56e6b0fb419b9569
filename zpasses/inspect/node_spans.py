"""When each node of a graph runs: the compute stream, and one stream for each process group.

The times are those that the cost model of the passes computed when the graph was dumped
(`zpasses.cost.time.step_time.Timeline`). A wait blocks compute until its collective has ended.
That time is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from zpasses.dumps.nodes import Node, Snapshot
from zpasses.inspect.units import count


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
    """Start of the transfer, after the earlier collectives of its queue."""
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
        """Time for which compute waits for it while it queues behind earlier collectives."""
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
    """Time until compute has ended."""

    @property
    def launches(self) -> int:
        """Number of the collectives, without the copies to and from the host."""
        return sum(
            each is not None and not each.is_host_copy
            for each in (span.node.collective for span in self.collectives)
        )

    @property
    def groups(self) -> tuple[str, ...]:
        """Process groups with collectives, in the order of their first collective."""
        return tuple(dict.fromkeys(span.group for span in self.collectives))

    @property
    def group_titles(self) -> dict[str, str]:
        """Process group -> its mesh dimension, or its name, and its size: "dp (4 ranks)"."""
        return {
            span.group: f"{of.title} ({count(of.ranks, 'rank')})"
            for span in reversed(self.collectives)
            if (of := span.node.collective) is not None
        }

    @property
    def has_labels(self) -> bool:
        """Whether a group belongs to a mesh dimension with a name."""
        return any(span.node.collective and span.node.collective.label for span in self.collectives)

    @property
    def compute_us(self) -> float:
        """Time of the kernels, as far as collectives slow them."""
        return sum(span.end_us - span.start_us for span in self.compute)

    @property
    def communication_us(self) -> float:
        return sum(span.time_us for span in self.collectives)

    @property
    def exposed_us(self) -> float:
        """Time in which compute waits for communication."""
        return sum(span.exposed_us for span in self.collectives)

    @property
    def hidden(self) -> float:
        """The share of communication time, 0 to 1, that overlaps with compute; 1 if there is no
        communication.
        """
        whole = self.communication_us
        return 1.0 if whole == 0 else max(0.0, 1 - self.exposed_us / whole)


def schedule(snapshot: Snapshot) -> Schedule:
    """The schedule of a graph, as its dump has it."""
    nodes, position, spans = snapshot.nodes, snapshot.position, snapshot.spans
    compute: list[ComputeSpan] = []
    computed = [0.0]
    """Compute time before each node."""
    for node, (start, end) in zip(nodes, spans, strict=True):
        kernel = node.collective is None and node.cost_us > 0
        if kernel:
            compute.append(ComputeSpan(node, start, end))
        computed.append(computed[-1] + (node.cost_us if kernel else 0.0))
    total = max((spans[at][1] for at, each in enumerate(nodes) if not each.collective), default=0.0)
    collectives: list[CollectiveSpan] = []
    following = total
    """Start of the next node on the compute stream."""
    for at in reversed(range(len(nodes))):
        node, (start, end) = nodes[at], spans[at]
        if node.collective is None:
            following = start
            continue
        waits = sorted(node.collective.waits, key=position.__getitem__)
        stalls = [Stall(nodes[position[key]], *spans[position[key]]) for key in waits]
        if not waits and following > start:  # an op of the dialect, which includes its wait
            stalls = [Stall(node, start, end)]
        place = position[waits[0]] if waits else at
        between = max(place - at - 1, 0), computed[place] - computed[at]
        stalled = tuple(stall for stall in stalls if stall.end_us > stall.start_us)
        collectives.append(CollectiveSpan(node, start, end, nodes[place], *between, stalled))
    return Schedule(tuple(compute), tuple(reversed(collectives)), total)
