"""When a graph's nodes would run: computation on one stream, communication on one a process group,
by the cost model of the dump's target.

Nodes are issued in order and without delay. Computation runs one node after the other; the
collectives of a group as well, each from its start on, or from the end of the one before. Groups do
not hold each other up, as on devices; that they may share links is left out. A wait holds
computation until its collective has ended: that is exposed time."""

from __future__ import annotations

from dataclasses import dataclass

from zpasses.dumps.format import Node, Snapshot

__all__ = ["Flight", "Schedule", "Span", "Stall", "schedule"]


@dataclass(frozen=True, slots=True)
class Span:
    """One computing node at work."""

    node: Node
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Stall:
    """Computation stands still until a collective has ended."""

    at: Node
    """The node that waits."""
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Flight:
    """One collective."""

    node: Node
    start_us: float
    """When its bytes start to move: once computation has reached it, and the group's collective
    before has ended."""
    end_us: float
    wait: Node
    """The first node that awaits it; its own for a collective that waits by itself."""
    distance: int
    """Nodes between its start and its first wait."""
    compute_us: float
    """Of the nodes between its start and its first wait."""
    stalls: tuple[Stall, ...]
    """At its waits."""

    @property
    def group(self) -> str:
        """The process group, on whose stream it runs."""
        return self.node.collective.group if self.node.collective is not None else ""

    @property
    def time_us(self) -> float:
        return self.end_us - self.start_us

    @property
    def exposed_us(self) -> float:
        """How long computation stands still for it."""
        return sum(stall.end_us - stall.start_us for stall in self.stalls)


@dataclass(frozen=True)
class Schedule:
    """All streams of a graph, from its first node on."""

    compute: tuple[Span, ...]
    flights: tuple[Flight, ...]
    total_us: float
    """Until all streams have ended."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Process groups that communicate, each on its stream, in the order in which they start
        to."""
        return tuple(dict.fromkeys(flight.group for flight in self.flights))

    @property
    def compute_us(self) -> float:
        return sum(span.end_us - span.start_us for span in self.compute)

    @property
    def communication_us(self) -> float:
        return sum(flight.time_us for flight in self.flights)

    @property
    def exposed_us(self) -> float:
        """How long computation stands still, or is over, while communication goes on: `total_us -
        compute_us`."""
        return self.total_us - self.compute_us

    @property
    def hidden(self) -> float:
        """The share of communication, 0 to 1, that runs beside computation; 1 where there is
        none."""
        whole = self.communication_us
        return 1.0 if whole == 0 else max(0.0, 1 - self.exposed_us / whole)


def schedule(snapshot: Snapshot) -> Schedule:
    """When each node of a graph would run."""
    now = 0.0
    free: dict[str, float] = {}
    """When the stream of a group has done what it was given."""
    spans: list[Span] = []
    flying: dict[
        int, tuple[Node, float, float, int, float]
    ] = {}  # id -> node, start, end, index, compute time before it
    awaited: dict[int, list[int]] = {}  # id of a wait -> ids of what it awaits
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
            spans.append(Span(node, now, now + node.cost_us))
            now += node.cost_us
            computed += node.cost_us
    flights = []
    for key, (node, start, end, at, before) in flying.items():
        awaiting, place, after = first_wait.get(key, (node, at, before))
        flights.append(
            Flight(
                node,
                start,
                end,
                awaiting,
                max(place - at - 1, 0),
                after - before,
                tuple(stalls[key]),
            )
        )
    return Schedule(tuple(spans), tuple(flights), max((now, *free.values())))
