"""Estimate the duration of graphs on a target, with collectives that overlap compute.

The nodes of a graph run in order on one stream, and its collectives beside them. Collectives within
a node share its links, and collectives between nodes share the network; the two kinds do not delay
each other. Where a group's ranks are decides this, not its size. Collectives of a channel run one
after another, and channels of one link share it (`zpasses.cost.time.clock`). Process groups of
parameters have one channel per link. Copy engines have another, and so have a second group of the
same ranks (`zpasses.ranks.new_groups`) and groups that only the model uses, as for tensor
parallelism. Copies to the host and back have a link each. A kernel takes its roofline time, and
longer while a collective that needs compute units runs beside it. A collective takes longer while
kernels run beside it. An op of the dialect is a collective that is awaited at once. The model
ignores fusion, the CPU and the optimizer. It compares forms of one step, and does not predict real
durations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.time.clock import Channel, Clock, CollectiveTiming, Queue, in_sequence
from zpasses.cost.time.fused_kernels import FusedKernels
from zpasses.cost.time.roofline import (
    collective_on_route_us,
    copy_engine_launch_us,
    durations_us,
    nodes_of,
    ring_collective_us,
)
from zpasses.cost.time.route_figures import engine_routes, route_figures
from zpasses.cost.time.target import Target
from zpasses.graph.host_copies import HostCopy, host_copy_of, is_host_wait
from zpasses.graph.queries import (
    Collective,
    collective_of,
    is_dialect,
    is_wait,
    named_arguments,
    nbytes,
    started_by,
    value_of,
)
from zpasses.graph.reduction_groups import is_regroupable
from zpasses.graph.row_exchange import ROW_EXCHANGES
from zpasses.graph.tags import tag_of


@dataclass(frozen=True)
class StepTime:
    """Durations in microseconds."""

    total_us: float
    compute_us: float
    """Sum of the kernels' durations with nothing running beside them, and of the time that starting
    collectives takes on the device that computes."""
    collective_us: float
    """Sum of the collectives' durations with nothing running beside them."""
    exposed_us: float
    """Time in which no kernel runs because a collective is awaited."""

    @property
    def slowed_us(self) -> float:
        """Time by which collectives beside them prolong the kernels."""
        return self.total_us - self.compute_us - self.exposed_us


def step_time(graphs: Iterable[fx.Graph], target: Target) -> StepTime:
    """Returns the duration of graphs that run one after another, such as forward and backward."""
    parts = [Timeline(graph, target).run() for graph in graphs]
    return StepTime(
        *(sum(values) for values in zip(*(vars(part).values() for part in parts), strict=True))
    )


@dataclass(frozen=True)
class _Event:
    """What a node does: kernels, the start of a collective, a wait for one, or the latter two."""

    work_us: float = 0.0
    starts: fx.Node | None = None
    awaits: fx.Node | None = None


_AS_WRITTEN: Mapping[fx.Node, str] = MappingProxyType({})


class Timeline:
    """The sequence of kernels, collectives and waits of one graph.

    It can be simulated several times, with different routes for the collectives.

    Args:
        graph: a graph with fake values. The process groups that it names must exist.
        target: hardware that the graph runs on.
        regrouped: process groups whose gradient reductions will run on a second group.
        left_out: operators that count as taking no time.
        kernels: those of the graph, if the caller has them.
    """

    def __init__(
        self,
        graph: fx.Graph,
        target: Target,
        *,
        regrouped: Collection[str] = (),
        left_out: Collection[object] = (),
        kernels: FusedKernels | None = None,
    ) -> None:
        self._of_graph = GraphTimings(graph, target, regrouped)
        self._events: dict[fx.Node, _Event] = {}
        self._transfers: dict[fx.Node, Transfer] = {}
        self._timings: dict[tuple[fx.Node, str | None], CollectiveTiming] = {}
        self._nodes = tuple(graph.nodes)
        for node, work in zip(self._nodes, durations_us(self._nodes, target, kernels), strict=True):
            if node.target not in left_out:
                self._add(node, work)

    def run(self, routes: Mapping[fx.Node, str] = _AS_WRITTEN) -> StepTime:
        """Simulates the graph and returns its duration.

        Args:
            routes: of collectives that take another than the graph says.
        """
        clock = Clock()
        numbers: dict[fx.Node, int] = {}
        for event in self._events.values():
            self._advance(clock, event, numbers, routes)
        timings = [self.timing(node, routes.get(node)) for node in numbers]
        work_us = sum(event.work_us for event in self._events.values())
        return StepTime(
            clock.now_us,
            work_us + sum(each.issue_us for each in timings),
            sum(each.duration_us for each in timings),
            clock.exposed_us,
        )

    def transfers(self, route: str | None = None) -> CollectiveTiming:
        """Returns the transfers of the graph as one, all of them by a route if it is given."""
        return in_sequence(self.timing(node, route) for node in self._transfers)

    def spans(self) -> list[tuple[float, float]]:
        """Returns the start and the end of each node in microseconds, in graph order.

        The span of a collective is its transfer, which may end after the graph. The spans of all
        other nodes are on the compute stream, in order: a kernel, a wait, or an empty span.
        """
        clock = Clock()
        numbers: dict[fx.Node, int] = {}
        issued: dict[fx.Node, float] = {}
        spans: dict[fx.Node, tuple[float, float]] = {}
        for node in self._nodes:
            start, exposed = clock.now_us, clock.exposed_us
            if node in self._events:
                self._advance(clock, self._events[node], numbers, _AS_WRITTEN)
            spans[node] = start, clock.now_us
            issued[node] = clock.now_us - (clock.exposed_us - exposed)
        free: dict[Channel, float] = {}
        for node, number in numbers.items():
            clock.wait(number)
            timing = self.timing(node)
            start = max(issued[node], free.get(timing.channel, 0.0))
            spans[node] = start, clock.done_us[number]
            free[timing.channel] = clock.done_us[number]
        return list(spans.values())

    def _advance(
        self,
        clock: Clock,
        event: _Event,
        numbers: dict[fx.Node, int],
        routes: Mapping[fx.Node, str],
    ) -> None:
        if event.starts is not None:
            timing = self.timing(event.starts, routes.get(event.starts))
            numbers[event.starts] = len(numbers)
            clock.work(timing.issue_us)
            clock.enqueue(numbers[event.starts], timing.duration_us, timing)
        if event.awaits is not None:
            clock.wait(numbers[event.awaits])
        clock.work(event.work_us)

    def timing(self, node: fx.Node, route: str | None = None) -> CollectiveTiming:
        """Returns the timing of a collective by a route. None is the one that the graph says."""
        key = node, route
        if key not in self._timings:
            transfer = self._transfers[node]
            self._timings[key] = self._of_graph.of(node, transfer, route=route)
        return self._timings[key]

    def _add(self, node: fx.Node, work: float) -> None:
        transfer = transfer_of(node)
        if is_wait(node) or is_host_wait(node):
            started = started_by(node)
            if started in self._transfers:
                self._events[node] = _Event(awaits=started)
        elif transfer is not None:
            self._transfers[node] = transfer
            self._events[node] = _Event(starts=node, awaits=node if is_dialect(node) else None)
        elif work:
            self._events[node] = _Event(work_us=work)


Transfer = Collective | HostCopy


def transfer_of(node: fx.Node) -> Transfer | None:
    """Describes the transfer that a node starts: a collective, or a copy to the host or back."""
    return collective_of(node) or host_copy_of(node)


def host_copy_timing(copy: HostCopy, target: Target) -> CollectiveTiming:
    """Returns the timing of a copy to the host or back. Kernels beside it lose the bandwidth of
    memory that it takes. On a CPU, it is a kernel itself.
    """
    out = copy.direction == "out"
    speed = target.host_out_gb_s if out else target.host_in_gb_s
    took = copy.nbytes / (speed * 1e3)
    channel = Channel("host-out" if out else "host-in")
    if target.architecture == "cpu":
        return CollectiveTiming(target.kernel_us, channel=channel, issue_us=took)
    slowdown = 1.0 + speed / target.memory_gb_s
    return CollectiveTiming(target.kernel_us + took, slowdown, slowdown, channel)


def latency_of(node: fx.Node, transfer: Transfer, target: Target) -> float:
    """Returns the part of a transfer's duration that does not depend on its bytes."""
    if isinstance(transfer, HostCopy):
        return target.kernel_us
    return collective_timing(node, transfer, target, full_bytes=0).duration_us


def groups_of_model(graph: fx.Graph) -> frozenset[str]:
    """Returns the process groups over which a graph communicates, but not for its parameters.

    Their collectives, such as those of tensor parallelism, have a stream of their own. The result
    is empty for a graph without collectives of parameters.
    """
    own: set[str] = set()
    others: set[str] = set()
    for node in graph.nodes:
        collective = collective_of(node)
        if collective is not None:
            of_params = tag_of(node) is not None or is_dialect(node)
            (own if of_params else others).add(compat.parent_group(collective.group))
    return frozenset(others - own) if own else frozenset()


def collective_timing(
    node: fx.Node,
    collective: Collective,
    target: Target,
    full_bytes: int | None = None,
    *,
    route: str | None = None,
) -> CollectiveTiming:
    """Returns the timing of a collective. It uses the same figures as the pass `sdma`.

    Args:
        node: the collective's node.
        collective: `collective_of(node)`.
        target: hardware that the graph runs on.
        full_bytes: bytes of the full tensors, instead of those of the node.
        route: how it runs within a node: "c10d" or a copy-engine route. None is the one that the
            graph says.
    """
    group = compat.group_ranks(collective.group)
    parts = _full_bytes(node, collective, len(group)) if full_bytes is None else [full_bytes]
    route = route_named(node, collective, target) if route is None else route
    figures = route_figures(target).get(route)
    queue: Queue = (
        "groups" if compat.parent_group(collective.group) == collective.group else "beside"
    )
    ranks, nodes = len(group), nodes_of(group, target)
    if figures is None or nodes > 1:
        return CollectiveTiming(
            ring_collective_us(collective.op, sum(parts), ranks, target, nodes),
            channel=Channel("network" if nodes > 1 else "node", queue),
            issue_us=target.issue_us,
        )
    if route != "c10d":
        took = copy_engine_launch_us(figures, collective.op, parts, ranks, target)
        queue = "engines"
    else:
        took = collective_on_route_us(figures, collective.op, sum(parts), ranks, target)
    return CollectiveTiming(
        took,
        figures.compute_slowdown,
        figures.collective_slowdown,
        channel=Channel("node", queue),
        issue_us=target.issue_us,
    )


def is_copy_engine_collective(collective: Collective) -> bool:
    """Whether a collective is a copy-engine op. It runs on copy engines if the target has any."""
    return collective.op.startswith("sdma_")


def route_named(node: fx.Node, collective: Collective, target: Target) -> str:
    """Returns the route by which a collective runs within a node: "c10d" or a copy-engine route.

    A copy-engine op names its route. One that names none, or that the target does not have, takes
    the target's preferred one, as it does at run time.
    """
    if not is_copy_engine_collective(collective):
        return "c10d"
    named = node.kwargs.get("route")
    known = [*engine_routes(target), "c10d"]
    return str(named) if named in target.routes else known[0]


class GraphTimings:
    """Timings of the collectives of one graph, as `collective_timing` returns them. Reductions that
    will run on a second group, and collectives of the model, run beside the others.

    Args:
        graph: the graph.
        target: hardware that it runs on.
        regrouped: process groups whose gradient reductions will run on a second group.
    """

    def __init__(self, graph: fx.Graph, target: Target, regrouped: Collection[str] = ()) -> None:
        self._target, self._regrouped = target, regrouped
        self._of_model = groups_of_model(graph)

    def of(
        self, node: fx.Node, collective: Transfer, *, route: str | None = None
    ) -> CollectiveTiming:
        if isinstance(collective, HostCopy):
            return host_copy_timing(collective, self._target)
        timing = collective_timing(node, collective, self._target, route=route)
        second = collective.group in self._regrouped and is_regroupable(node)
        second = second or collective.group in self._of_model
        return (
            replace(timing, channel=timing.channel._replace(queue="beside")) if second else timing
        )


def _full_bytes(node: fx.Node, collective: Collective, ranks: int) -> list[int]:
    """Returns the bytes of the full tensors that a call gathers or reduces."""
    if is_dialect(node) or node.target in ROW_EXCHANGES:
        return [collective.nbytes]
    assert isinstance(node.target, compat.OpOverload)
    given = named_arguments(node, node.target)[node.target._schema.arguments[0].name]
    inputs = [
        value_of(item)
        for item in (given if isinstance(given, (list, tuple)) else [given])
        if isinstance(item, fx.Node)
    ]
    times = ranks if "gather" in collective.op else 1
    return [nbytes(value) * times for value in inputs if isinstance(value, Tensor)]
