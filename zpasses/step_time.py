"""How long graphs would take on a target: their nodes in order on one stream, their collectives beside it, one after another by route.

A kernel takes what the roofline says, and longer while collectives that need compute units are under way. There is no fusion, no CPU and
no optimizer in it: it compares forms of one step, and is no prediction of what a clock would show.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from zpasses import compat
from zpasses.cost import collective_us, compute_us, engine_us, route_us
from zpasses.graph import Collective, collective_of, is_dialect, is_wait, nbytes, value_of
from zpasses.route_figures import figures_of
from zpasses.target import Target

__all__ = ["StepTime", "step_time"]


@dataclass(frozen=True)
class StepTime:
    """Times in microseconds."""

    total_us: float
    compute_us: float
    """Kernels, with nothing beside them."""
    collective_us: float
    """Collectives, all added up."""
    waited_us: float
    """In which nothing computes, because a collective is not done."""

    @property
    def slowed_us(self) -> float:
        """By which kernels took longer because of collectives beside them."""
        return self.total_us - self.compute_us - self.waited_us


@dataclass(frozen=True)
class _Flight:
    start: float
    end: float
    slowdown: float


def step_time(graphs: Iterable[fx.Graph], target: Target) -> StepTime:
    """Time of graphs that run one after another, such as forward and backward."""
    parts = [_Timeline(graph, target).run() for graph in graphs]
    return StepTime(*(sum(values) for values in zip(*(vars(part).values() for part in parts), strict=True)))


class _Timeline:
    def __init__(self, graph: fx.Graph, target: Target) -> None:
        self._graph, self._target = graph, target
        self._now = self._compute = self._collective = self._waited = 0.0
        self._free = {"c10d": 0.0, "engine": 0.0}
        """When each kind of route has done all that it was given."""
        self._flights: dict[fx.Node, _Flight] = {}
        self._open: list[_Flight] = []

    def run(self) -> StepTime:
        for node in self._graph.nodes:
            collective = collective_of(node)
            if is_wait(node):
                self._wait(node)
            elif collective is not None and not is_dialect(node):
                self._start(node, collective)
            else:
                self._work(compute_us(node, self._target))
        return StepTime(self._now, self._compute, self._collective, self._waited)

    def _start(self, node: fx.Node, collective: Collective) -> None:
        engine = collective.op.startswith("sdma_") and self._target.routes
        route = self._target.routes[0] if engine else "c10d"
        figures, ranks = figures_of(route, self._target), len(compat.group_ranks(collective.group))
        parts = _full_bytes(node, collective, ranks)
        if figures is None or ranks > self._target.ranks_per_node:
            took, slowdown = collective_us(collective.op, sum(parts), ranks, self._target), 1.0
        else:
            if engine:
                took = engine_us(figures, collective.op, parts, ranks, self._target)
            else:
                took = route_us(figures, collective.op, sum(parts), ranks, self._target)
            slowdown = figures.compute_slowdown
        lane = "engine" if engine else "c10d"
        start = max(self._now, self._free[lane])
        self._free[lane] = start + took
        self._flights[node] = _Flight(start, start + took, slowdown)
        self._open.append(self._flights[node])
        self._collective += took

    def _wait(self, node: fx.Node) -> None:
        source = node.all_input_nodes[0]
        started = source.all_input_nodes[0] if source.target is operator.getitem else source
        flight = self._flights.get(started)
        if flight is not None and flight.end > self._now:
            self._waited += flight.end - self._now
            self._now = flight.end

    def _work(self, left: float) -> None:
        self._compute += left
        while left > 1e-9:
            self._open = [each for each in self._open if each.end > self._now]
            slowdown = max((each.slowdown for each in self._open if each.start <= self._now), default=1.0)
            turns = [at for each in self._open for at in (each.start, each.end) if at > self._now]
            until = min(turns, default=float("inf"))
            spent = min(left * slowdown, until - self._now)
            left -= spent / slowdown
            self._now += spent


def _full_bytes(node: fx.Node, collective: Collective, ranks: int) -> list[int]:
    """Bytes of the full tensors that a call gathers or reduces."""
    given = node.args[0]
    inputs = [value_of(item) for item in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(item, fx.Node)]
    times = ranks if "gather" in collective.op else 1
    return [nbytes(value) * times for value in inputs if isinstance(value, Tensor)]
