"""How long graphs would take on a target: their nodes in order on one stream, their collectives
beside it.

Collectives take turns on the links that they share, whatever their group and route: those within a
node on its links, those between nodes on the network. Groups of the one kind do not hold up groups
of the other. A kernel takes what the roofline says, and longer while collectives that need compute
units are under way; collectives take longer too, while kernels run beside them. There is no fusion,
no CPU
and no optimizer in it: it compares forms of one step, and is no prediction of what a clock would
show."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.roofline import collective_us, compute_us, engine_us, route_us
from zpasses.cost.routes import figures_of
from zpasses.cost.target import Target
from zpasses.graph.nodes import (
    Collective,
    collective_of,
    is_dialect,
    is_wait,
    named_arguments,
    nbytes,
    value_of,
)

__all__ = ["StepTime", "Timeline", "collective_time_us", "is_by_engine", "step_time"]


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
    return StepTime(
        *(sum(values) for values in zip(*(vars(part).values() for part in parts), strict=True))
    )


@dataclass(frozen=True)
class _Event:
    """What happens next on the compute stream: kernels, the start of a collective, or a wait for
    one."""

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
    between_nodes: bool = False
    """Over the network, or over the links of one node."""


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
            engines: collectives that copy engines carry out, besides those that call
                `zpasses::sdma` ops already.
        """
        return _Run().through(
            self._events, {node: self.ride(node, node in engines) for node in self._collectives}
        )

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
            if is_by_engine(collective):
                self._by_engine.add(node)
            self._events.append(_Event(starts=node))
        elif work := compute_us(node, self._target):
            self._events.append(_Event(work_us=work))

    def _measure(self, node: fx.Node, by_engine: bool) -> _Ride:
        collective = self._collectives[node]
        return _ride(
            node, collective, len(compat.group_ranks(collective.group)), self._target, by_engine
        )


def is_by_engine(collective: Collective) -> bool:
    """Whether a copy engine carries it out, where there is one."""
    return collective.op.startswith("sdma_")


def collective_time_us(node: fx.Node, collective: Collective, ranks: int, target: Target) -> float:
    """Time of a collective as it stands in a graph, with nothing beside it, by the figures that the
    pass `sdma` compares.

    Args:
        collective: `collective_of(node)`; none of the dialect.
        ranks: size of its group.
    """
    return _ride(node, collective, ranks, target, is_by_engine(collective)).took_us


def _ride(
    node: fx.Node, collective: Collective, ranks: int, target: Target, by_engine: bool
) -> _Ride:
    parts = _full_bytes(node, collective, ranks)
    figures = figures_of(target.routes[0] if by_engine and target.routes else "c10d", target)
    if figures is None or ranks > target.ranks_per_node:
        return _Ride(
            collective_us(collective.op, sum(parts), ranks, target),
            between_nodes=ranks > target.ranks_per_node,
        )
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
        self._queues: dict[bool, deque[_Flight]] = {False: deque(), True: deque()}
        """On the links within the node, and on the network between nodes (True). The first of each
        moves."""

    def through(self, events: Iterable[_Event], rides: dict[fx.Node, _Ride]) -> StepTime:
        for event in events:
            if event.starts is not None:
                ride = rides[event.starts]
                self._queues[ride.between_nodes].append(_Flight(event.starts, ride, ride.took_us))
                self._collective += ride.took_us
            elif event.awaits is not None:
                self._await(event.awaits)
            else:
                self._work(event.work_us)
        return StepTime(self._now, self._compute, self._collective, self._waited)

    def _await(self, node: fx.Node) -> None:
        for queue in self._queues.values():
            while any(flight.node is node for flight in queue):
                late = queue[0].left_us
                self._waited += late
                self._pass(late, beside_compute=False)

    def _pass(self, spent: float, *, beside_compute: bool) -> None:
        """Let time pass, in which what is under way moves on."""
        self._now += spent
        for queue in self._queues.values():
            left = spent
            while queue and left >= 0:
                first = queue[0]
                slowed = first.ride.slowed if beside_compute else 1.0
                moved = min(left, first.left_us * slowed)
                first.left_us -= moved / slowed
                if first.left_us > _LEAST_US:
                    break
                left -= moved
                queue.popleft()

    def _work(self, left: float) -> None:
        self._compute += left
        while left > _LEAST_US:
            moving = [queue[0] for queue in self._queues.values() if queue]
            slows = max((flight.ride.slows for flight in moving), default=1.0)
            spent = min([left * slows, *(flight.left_us * flight.ride.slowed for flight in moving)])
            left -= spent / slows
            self._pass(spent, beside_compute=True)


_LEAST_US = 1e-9
"""Less is rounding."""


def _full_bytes(node: fx.Node, collective: Collective, ranks: int) -> list[int]:
    """Bytes of the full tensors that a call gathers or reduces."""
    assert isinstance(node.target, compat.OpOverload)
    given = named_arguments(node, node.target)[node.target._schema.arguments[0].name]
    inputs = [
        value_of(item)
        for item in (given if isinstance(given, (list, tuple)) else [given])
        if isinstance(item, fx.Node)
    ]
    times = ranks if "gather" in collective.op else 1
    return [nbytes(value) * times for value in inputs if isinstance(value, Tensor)]
