"""Code of a graph whose gathers start before it, and whose reductions end after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.plan.prefetch import GraphRun
from zpasses.graph.hoisting import HoistedGraph
from zpasses.graph.host_copies import size_places, sizes_of
from zpasses.runtime.block_schedule import block_schedule
from zpasses.runtime.late_reductions import Reducing
from zpasses.runtime.param_conversion import (
    bound_call,
    current_call,
    current_params,
    local_shards_node,
    whose_call,
)
from zpasses.runtime.planned_blocks import PlanStep, RunKey
from zpasses.runtime.started_gathers import Gathered, Starter

_Code = Callable[[list[Any]], Any]

_MOST_SIZES = 16
"""Sizes of one graph that are planned apart."""


@dataclass(frozen=True)
class Surroundings:
    """What the code of a graph needs to know of its compile."""

    order: Mapping[str, int]
    """Name of a sharded input -> its position among the sharded inputs of the call."""
    ahead: int | None
    """For how many graphs after this one gathers start; None plans it."""
    plan: PlanStep
    limits: Callable[[], AbstractContextManager[None]]
    """Context in which collectives give up in time."""
    part: Callable[[fx.GraphModule, str], _Code]
    """Returns code of a part of the graph, with gathers by a copy-engine route; "" for compute
    units."""
    described: Callable[[Mapping[Any, int]], GraphRun]
    """Returns what the graph takes with certain dynamic sizes."""
    is_silent: bool = False
    """Whether the graph communicates nothing, while others do. Other ranks may not run it."""


class HoistedCode:
    """Code of a whole graph. It takes and returns what the graph does.

    Gradients whose reductions are still in flight are returned as None, and are added to
    `param.grad` when the run of the autograd engine ends. Autograd would call the hooks of such a
    parameter with None, so the gradients of parameters with hooks are awaited.

    Args:
        graph: the parts of the graph.
        body: code of `graph.body`.
        name: equal for graphs, of any rank, that communicate the same.
        cost: what the graph takes.
    """

    def __init__(
        self,
        graph: HoistedGraph,
        body: _Code,
        name: str,
        cost: GraphRun,
        surroundings: Surroundings,
    ) -> None:
        self._graph, self._body, self._name = graph, body, name
        self._is_backward = cost.is_backward
        self._ahead, self._plan = surroundings.ahead, surroundings.plan
        self._is_silent = surroundings.is_silent
        self._limits, self._schedule = surroundings.limits, block_schedule()
        self._described, self._places = surroundings.described, size_places(graph.body.graph)
        self._costs: list[tuple[Mapping[Any, int], GraphRun, int]] = []
        """What the graph takes with certain sizes, and its number for the schedule."""
        if not self._places:
            self._costs.append(({}, cost, self._schedule.plans.number_of(cost)))
        order, part = surroundings.order, surroundings.part
        gathers, reductions = graph.gathers, graph.reductions
        if gathers is not None:
            self._gathered = [order[param] for param in gathers.params]
            self._gathers_by: dict[str, _Code] = {}
            """Route -> code of the gathers."""
            self._part = part
            self._shards = graph.shard_positions()
        if reductions is not None:
            self._reduced = [order[param] for param in reductions.gradients.values()]
            self._start_reductions, self._end = part(reductions.start, ""), part(reductions.end, "")

    def __call__(self, args: list[Any]) -> Any:
        params = self._params()
        distance = self._schedule.plans.ahead if self._ahead is None else self._ahead
        if self._ahead is None and self._is_backward:
            self._schedule.plans.plan_at_end(self._plan, asks=not self._is_silent)
        self._add_gathered(args, params, distance, *self._cost_of(args))
        values = self._body(args)
        return values if self._graph.reductions is None else self._reduce(values, params, distance)

    def _start_gathers(self, shards: list[Any], route: str = "") -> Any:
        if route not in self._gathers_by:
            assert self._graph.gathers is not None
            self._gathers_by[route] = self._part(self._graph.gathers.graph, route)
        return self._gathers_by[route](shards)

    def _cost_of(self, args: Sequence[Any]) -> tuple[GraphRun, int]:
        """Returns what a run takes, or a larger one before, and the number of that."""
        sizes = sizes_of(args, self._places)
        for known, cost, number in self._costs:
            if all(size <= known[symbol] for symbol, size in sizes.items()):
                return cost, number
        if len(self._costs) >= _MOST_SIZES:
            for known, *_ in self._costs:
                sizes = {symbol: max(size, known[symbol]) for symbol, size in sizes.items()}
        cost = self._described(sizes)
        self._costs.append((sizes, cost, self._schedule.plans.number_of(cost)))
        return self._costs[-1][1:]

    def _params(self) -> Sequence[Any]:
        """The sharded parameters of the call."""
        if not self._is_backward:
            return current_params()
        source = local_shards_node()
        return source.zpasses_params if source is not None else ()

    def _add_gathered(
        self, args: list[Any], params: Sequence[Any], distance: int, cost: GraphRun, number: int
    ) -> None:
        """Add the gathered tensors to the inputs, and start the gathers of the next graphs."""
        call, starter, gathers = current_call(), None, self._graph.gathers
        if gathers is not None and params:
            own = [params[position] for position in self._gathered]
            starter = Starter(self._start_gathers, gathers.in_flight, own)
        of = f" with {call.text}" if call is not None else ""
        key = RunKey(self._name, whose_call(params), self._is_backward, of)
        if self._is_silent:
            self._schedule.plans.add_silent(key, number)
            return
        gathered = self._schedule.begin(
            key, starter, distance, number, at_turn=cost.gathers_at_turn
        )
        if gathers is not None and not params:
            # No parameter of the call is trained, so no autograd node knows them.
            values = list(self._start_gathers([args[position] for position in self._shards]))
            gathered = Gathered(values, gathers.in_flight, [])
        if gathered is not None:
            args.extend(gathered.wait())

    def _reduce(self, returned: Any, params: Sequence[Any], distance: int) -> list[Any]:
        """Start the reductions. Returns the outputs of the graph."""
        reductions, values = self._graph.reductions, list(returned)
        assert reductions is not None
        extra = values[self._graph.outputs :]
        del values[self._graph.outputs :]
        started = [*self._start_reductions(extra[: reductions.inputs]), *extra[reductions.inputs :]]
        del extra

        call = current_call()

        def finish() -> list[Tensor]:
            with bound_call(call, params):  # another backward may run by now
                return list(self._end(started))

        trained = [params[position] for position in self._reduced]
        if _are_accumulated(self._reduced, trained):
            self._schedule.reductions.add(Reducing(finish, trained, self._limits), distance)
        else:
            for position, grad in zip(reductions.gradients, finish(), strict=True):
                values[position] = grad
        return values


def _are_accumulated(positions: Sequence[int], params: Sequence[Any]) -> bool:
    """Whether the running backward adds the gradients of all these parameters to `param.grad`, and
    no hook sees them.
    """
    source = local_shards_node()
    if source is None:
        return False
    consumers = compat.grad_consumers(source)
    return all(
        compat.only_accumulates(consumers, position, param)
        for position, param in zip(positions, params, strict=True)
    )
