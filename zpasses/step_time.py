"""How long graphs would take on a target: their nodes in order on one stream, their collectives beside it, one after another.

A kernel takes what the roofline says, and longer while collectives that need compute units are under way; collectives take longer too,
while kernels run beside them. There is no fusion, no CPU and no optimizer in it: it compares forms of one step, and is no prediction of
what a clock would show.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from zpasses import compat
from zpasses.cost import collective_us, compute_us, engine_us, route_us
from zpasses.graph import Collective, collective_of, is_dialect, is_wait, nbytes, value_of
from zpasses.route_figures import figures_of
from zpasses.target import Target

__all__ = ["StepTime", "Timeline", "step_time"]


@dataclass(frozen=True)
class StepTime:
    """Times in microseconds."""

    total_us: float
    compute_us: float
    """Kernels, with nothing beside them."""
    collective_us: float
    """Collectives with nothing beside them, all added up."""
    waited_us: float
    """In which nothing computes, because a collective is not done."""

    @property
    def slowed_us(self) -> float:
        """By which kernels took longer because of collectives beside them."""
        return self.total_us - self.compute_us - self.waited_us


def step_time(graphs: Iterable[fx.Graph], target: Target) -> StepTime:
    """Time of graphs that run one after another, such as forward and backward."""
    parts = [Timeline(graph, target).run() for graph in graphs]
    return StepTime(*(sum(values) for values in zip(*(vars(part).values() for part in parts), strict=True)))


@dataclass(frozen=True)
class _Event:
    """What happens next on the compute stream: kernels, the start of a collective, or a wait for one."""

    work_us: float = 0.0
    starts: fx.Node | None = None
    awaits: fx.Node | None = None


@dataclass(frozen=True)
class _Ride:
    """A collective by one route."""

    took_us: float
    """With nothing beside it."""
    slows: float = 1.0
    """How many times longer kernels beside it take."""
    slowed: float = 1.0
    """How many times longer it takes beside kernels."""


class Timeline:
    """One graph as what happens in order, to be run with different routes for its collectives.

    Args:
        graph: a graph with fake values; the groups that it names must exist.
        target: what it runs on. Copy engines are those of the target's preferred route.
    """

    def __init__(self, graph: fx.Graph, target: Target) -> None:
        self._target = target
        self._events: list[_Event] = []
        self._by_engine: set[fx.Node] = set()
        self._collectives: dict[fx.Node, Collective] = {}
        self._rides: dict[tuple[fx.Node, bool], _Ride] = {}
        for node in graph.nodes:
            self._add(node)

    def run(self, engines: Collection[fx.Node] = ()) -> StepTime:
        """Time of the graph.

        Args:
            engines: collectives that copy engines carry out, besides those that call `zpasses::sdma` ops already.
        """
        return _Run().through(self._events, {node: self.ride(node, node in engines) for node in self._collectives})

    def ride(self, node: fx.Node, by_engine: bool) -> _Ride:
        """A collective of the graph by copy engines, or as it stands there."""
        key = node, by_engine or node in self._by_engine
        if key not in self._rides:
            self._rides[key] = self._measure(*key)
        return self._rides[key]

    def compute_until_wait(self, started: fx.Node) -> float:
        """Microseconds of kernels between a collective and the first wait for it."""
        events = iter(self._events)
        for event in events:
            if event.starts is started:
                break
        total = 0.0
        for event in events:
            if event.awaits is started:
                return total
            total += event.work_us
        return 0.0

    def _add(self, node: fx.Node) -> None:
        collective = collective_of(node)
        if is_wait(node):
            source = node.all_input_nodes[0]
            started = source.all_input_nodes[0] if source.target is operator.getitem else source
            if started in self._collectives:
                self._events.append(_Event(awaits=started))
        elif collective is not None and not is_dialect(node):
            self._collectives[node] = collective
            if collective.op.startswith("sdma_"):
                self._by_engine.add(node)
            self._events.append(_Event(starts=node))
        elif work := compute_us(node, self._target):
            self._events.append(_Event(work_us=work))

    def _measure(self, node: fx.Node, by_engine: bool) -> _Ride:
        target, collective = self._target, self._collectives[node]
        ranks = len(compat.group_ranks(collective.group))
        parts = _full_bytes(node, collective, ranks)
        figures = figures_of(target.routes[0] if by_engine and target.routes else "c10d", target)
        if figures is None or ranks > target.ranks_per_node:
            return _Ride(collective_us(collective.op, sum(parts), ranks, target))
        if by_engine and target.routes:
            took = engine_us(figures, collective.op, parts, ranks, target)
        else:
            took = route_us(figures, collective.op, sum(parts), ranks, target)
        return _Ride(took, figures.compute_slowdown, figures.collective_slowdown)


@dataclass
class _Flight:
    node: fx.Node
    ride: _Ride
    left_us: float
    """What it would still take by itself."""


class _Run:
    def __init__(self) -> None:
        self._now = self._compute = self._collective = self._waited = 0.0
        self._flights: deque[_Flight] = deque()
        """The first moves: routes share the links, so that collectives take turns."""

    def through(self, events: Iterable[_Event], rides: dict[fx.Node, _Ride]) -> StepTime:
        for event in events:
            if event.starts is not None:
                ride = rides[event.starts]
                self._flights.append(_Flight(event.starts, ride, ride.took_us))
                self._collective += ride.took_us
            elif event.awaits is not None:
                self._await(event.awaits)
            else:
                self._work(event.work_us)
        return StepTime(self._now, self._compute, self._collective, self._waited)

    def _await(self, node: fx.Node) -> None:
        while any(flight.node is node for flight in self._flights):
            late = self._flights.popleft().left_us
            self._waited += late
            self._now += late

    def _work(self, left: float) -> None:
        self._compute += left
        while left > 1e-9 and self._flights:
            flight = self._flights[0]
            spent = min(left * flight.ride.slows, flight.left_us * flight.ride.slowed)
            left -= spent / flight.ride.slows
            flight.left_us -= spent / flight.ride.slowed
            self._now += spent
            if flight.left_us <= 1e-9:
                self._flights.popleft()
        self._now += left


def _full_bytes(node: fx.Node, collective: Collective, ranks: int) -> list[int]:
    """Bytes of the full tensors that a call gathers or reduces."""
    given = node.args[0] if node.args else node.kwargs["input"]
    inputs = [value_of(item) for item in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(item, fx.Node)]
    times = ranks if "gather" in collective.op else 1
    return [nbytes(value) * times for value in inputs if isinstance(value, Tensor)]
