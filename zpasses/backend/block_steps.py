"""The plan of a step of several graphs: what it needs to know of each, and what ranks agree on."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from zpasses import compat
from zpasses.backend.host_advice import LeanestPlan, host_advice
from zpasses.cost.memory.collective_memory import engine_packing_bytes
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.plan.prefetch import (
    Agreed,
    EngineGather,
    GraphRun,
    MovableValue,
    StepCost,
    moves_in_order,
    plan_moves,
    plan_prefetch,
    step_cost,
)
from zpasses.cost.time.clock import CollectiveTiming, in_sequence
from zpasses.cost.time.roofline import durations_us
from zpasses.cost.time.route_figures import engine_obstacle, engine_routes
from zpasses.cost.time.step_time import Timeline, host_copy_timing, step_time
from zpasses.cost.time.target import Target
from zpasses.errors import MemoryBudgetError
from zpasses.graph.aliases import CLONES, view_base
from zpasses.graph.cached_params import cached_params, is_cached_param
from zpasses.graph.error_feedback import residual_inputs
from zpasses.graph.hoisting import HoistedGraph, ReductionPart
from zpasses.graph.host_copies import HostCopy
from zpasses.graph.queries import collective_of, is_wait, nbytes, returned_values, value_of
from zpasses.option_values import format_size, parse_budget
from zpasses.pipeline.events import runtime_note
from zpasses.ranks.agree import exchange
from zpasses.runtime.block_schedule import TURNING_POINT
from zpasses.sdma.engine_gathers import can_take_engine

log = logging.getLogger("zpasses")

_GIB = float(1 << 30)

_TURN_AFTER = 0.25
"""Share of a backward's compute that comes before its turning point, at least."""

_MARGIN = 1.25
"""Collectives have this many times their predicted duration."""


def add_turning_point(hoisted: HoistedGraph, target: Target) -> None:
    """Give the body of a backward a turning point: it awaits the reductions of the backward before
    there, and gathers for the next one may start.

    The full gradients that are reduced stay in memory until then, so the next gathers should not
    join them. The turning point is behind a matrix product: its result is in memory anyway,
    whatever the kernels fuse. If the reductions are predicted to take nearly as long as the body,
    it has none.

    Durations depend on shapes, in which ranks may differ. If the place of the turning point decides
    about the order in which collectives start, it depends only on the number of products.
    """
    if hoisted.reductions is None:
        return
    graph = hoisted.body.graph
    nodes = list(graph.nodes)
    if _orders_collectives(hoisted):
        durations = [float(_is_product(node)) for node in nodes]
        wanted = _TURN_AFTER * sum(durations)
    else:
        durations = durations_us(nodes, target)
        wanted = max(_TURN_AFTER * sum(durations), _MARGIN * _reduce_us(hoisted.reductions, target))
    total, passed = sum(durations), 0.0
    for node, duration in zip(nodes, durations, strict=True):
        passed += duration
        if wanted <= passed < total and _is_product(node):
            with graph.inserting_after(node):
                graph.call_function(TURNING_POINT, (node,))
            hoisted.body.recompile()
            return


def _orders_collectives(hoisted: HoistedGraph) -> bool:
    """Whether the place of the turning point decides about the order of collectives: the body has
    some, or those that end reductions start others, as averages over replicas do.
    """
    ends = [hoisted.reductions.end] if hoisted.reductions is not None else []
    return any(_starts(node) for part in (hoisted.body, *ends) for node in part.graph.nodes)


def _starts(node: fx.Node) -> bool:
    return collective_of(node) is not None and not is_wait(node)


def _is_product(node: fx.Node) -> bool:
    """Whether a node is a matrix product."""
    return (
        node.op == "call_function"
        and compat.flop_formula(node.target) is not None
        and isinstance(value_of(node), Tensor)
        and bool(node.users)
    )


def _reduce_us(reductions: ReductionPart, target: Target) -> float:
    return _reduce(reductions, target).duration_us


def _reduce(reductions: ReductionPart, target: Target) -> CollectiveTiming:
    parts = reductions.start.graph, reductions.end.graph
    return in_sequence(Timeline(part, target).transfers() for part in parts)


def _engine_gathers(
    graph: fx.Graph, timeline: Timeline, target: Target
) -> tuple[EngineGather, ...]:
    """Returns the gathers before a graph by each copy-engine route that can run all of them."""
    nodes = [node for node in graph.nodes if _starts(node)]
    if not nodes or not all(map(can_take_engine, nodes)):
        return ()
    found = [collective_of(node) for node in nodes]
    if any(each and engine_obstacle(compat.group_ranks(each.group), target) for each in found):
        return ()
    packed = sum(
        engine_packing_bytes(node, each) for node, each in zip(nodes, found, strict=True) if each
    )
    return tuple(
        EngineGather(route, timeline.transfers(route), packed) for route in engine_routes(target)
    )


def graph_cost(
    hoisted: HoistedGraph,
    kind: str,
    target: Target,
    movable: Sequence[int] = (),
    outputs: int | None = None,
    *,
    copy_engines: bool = False,
) -> GraphRun:
    """Describes one run of a graph.

    Args:
        movable: positions of the outputs that may rest on the host until backward.
        outputs: number of outputs before those that go to the cache; None if none do.
        copy_engines: whether its gathers may take the target's copy-engine routes.
    """
    body = hoisted.body.graph
    gather = reduce = in_sequence(())
    engines: tuple[EngineGather, ...] = ()
    reduced_bytes = 0
    if hoisted.gathers is not None:
        timeline = Timeline(hoisted.gathers.graph.graph, target)
        gather = timeline.transfers()
        if copy_engines:
            engines = _engine_gathers(hoisted.gathers.graph.graph, timeline, target)
    if hoisted.reductions is not None:
        reduce = _reduce(hoisted.reductions, target)
        sent = hoisted.reductions.start.graph.find_nodes(op="placeholder")
        reduced_bytes = nbytes([value_of(node) for node in sent])
    returned: Sequence[Any] = returned_values(body)
    cached, read = _cached(hoisted, outputs)
    is_cached = is_cached_param(body)
    saved = {
        node: None
        for node in returned
        if isinstance(node, fx.Node) and node.op != "placeholder" and not is_cached(node)
    }
    places = {node: at for at, node in enumerate(returned) if node in saved}
    sizes = [(at, nbytes(value_of(node))) for node, at in places.items()]
    gathers = [hoisted.gathers.graph] if hoisted.gathers is not None else []
    reductions = hoisted.reductions
    ends = [reductions.start, reductions.end] if reductions is not None else []
    live, time, gather_us = liveness(body), step_time([body], target), gather.duration_us
    turn_us, turn_peak, peak = None, 0, live.peak_bytes
    for node in body.find_nodes(op="call_function", target=TURNING_POINT):
        at = live.nodes.index(node)
        turn_us = sum(durations_us(live.nodes[:at], target))
        turn_peak, peak = max(live.live_bytes[:at]), max(live.live_bytes[at:])
    return GraphRun(
        name=kind,
        is_backward=kind == "backward",
        compute_us=time.total_us,
        gather=gather,
        reduce=reduce,
        engines=engines,
        gathered_bytes=nbytes(hoisted.extra_inputs),
        reduced_bytes=reduced_bytes,
        peak_bytes=peak,
        saved_bytes=nbytes([value_of(node) for node in saved]) if kind == "forward" else 0,
        turn_us=turn_us,
        turn_peak_bytes=turn_peak,
        gathers_at_turn=turn_us is not None
        and (_orders_collectives(hoisted) or turn_us + _MARGIN * gather_us <= time.total_us),
        exposed_us=time.exposed_us,
        collectives=sum(
            _starts(node) for part in (hoisted.body, *gathers, *ends) for node in part.graph.nodes
        ),
        returned=tuple(sizes) if kind == "forward" else (),
        movable=tuple(_movable(at, returned[at], target) for at in movable),
        copies_compute=target.architecture == "cpu",
        residual_bytes=nbytes([value_of(node) for node in residual_inputs(body)]),
        cached_bytes=nbytes(list(map(value_of, cached))),
        cached_read_bytes=nbytes(list(map(value_of, read))),
    )


def _cached(hoisted: HoistedGraph, outputs: int | None) -> tuple[list[fx.Node], list[fx.Node]]:
    """Returns the full parameters that the body of a forward takes from the cache or leaves there,
    and those of them that it saves for backward.
    """
    graph = hoisted.body.graph
    given = graph.find_nodes(op="placeholder")
    gathered = {*given[len(given) - len(hoisted.extra_inputs) :]}
    bases = [
        view_base(node, CLONES) if isinstance(node, fx.Node) else None
        for node in returned_values(graph)
    ]
    cached = [
        node
        for node in cached_params(graph)
        if node in bases or (node.op == "placeholder" and node not in gathered)
    ]
    return cached, [node for node in cached if node in bases[:outputs]]


def _movable(at: int, node: fx.Node, target: Target) -> MovableValue:
    size = nbytes(value_of(node))
    out, back = (host_copy_timing(HostCopy(direction, size), target) for direction in ("out", "in"))
    out_us, in_us = (each.duration_us + each.issue_us for each in (out, back))
    return MovableValue(size, out_us, in_us, at, is_input=node.op == "placeholder")


def turn_text(hoisted: HoistedGraph, cost: GraphRun) -> str:
    """Says what starts and ends at the turning point of a graph."""
    for node in hoisted.body.graph.find_nodes(op="call_function", target=TURNING_POINT):
        what = "gathers and reductions" if cost.gathers_at_turn else "reductions"
        return f", {what} at {node.args[0]}"
    return ""


def turn_order(hoisted: HoistedGraph) -> str:
    """Says where the turning point is among the collectives of a graph; "" if that does not decide
    about their order. Ranks must agree on it.
    """
    if not _orders_collectives(hoisted):
        return ""
    nodes = list(hoisted.body.graph.nodes)
    for at, node in enumerate(nodes):
        if node.target is TURNING_POINT:
            return f", turns after {sum(map(_starts, nodes[:at]))}"
    return ""


@dataclass(frozen=True)
class BlockStep:
    """A step of several graphs, for which the runtime plans how far ahead gathers start.

    `zpasses.pipeline.events.listen(BlockStep, ...)` calls a function with each of them before it
    is planned. A step of the same graphs as an earlier one is not planned again.
    """

    runs: Sequence[GraphRun]
    """The graphs of the step, in their order."""
    zero_stage: int | None = None
    """The option of this name."""
    host_bytes: int = 0
    """The most that values which forwards save may take of the host."""

    def limit_bytes(self, budget: str) -> int:
        """Returns the peak that a budget other than "auto" allows. A percentage counts from the
        peak without gathers ahead.

        Raises:
            OptionError: for text that is no budget.
        """
        parsed = parse_budget(budget, "option 'memory_budget'")
        return parsed.limit_bytes(step_cost(self.runs, 0).peak_bytes)

    def planned(self, limit_bytes: int | None, agreed: Agreed | None = None) -> StepCost:
        """Returns the fastest plan within a peak, or that which exceeds it least.

        Args:
            agreed: how gathers start; None chooses it.
        """
        if agreed is None:
            return plan_prefetch(self.runs, limit_bytes, self.host_bytes)
        moves = moves_in_order(self.runs, self.host_bytes)
        return plan_moves(self.runs, agreed.ahead, limit_bytes, moves, agreed.routes)

    def too_little_memory(self, budget: str, limit_bytes: int) -> str:
        """Returns why no number of graphs ahead fits a budget."""
        cost = self.planned(limit_bytes)
        least, missing = cost.peak_bytes, cost.peak_bytes - limit_bytes
        moved = f" and {format_size(cost.host_bytes)} rest on the host" if cost.moved else ""
        held = _held_text(self.runs)
        held = f" {held[0].upper()}{held[1:]}." if held else ""
        forwards = itertools.takewhile(lambda run: not run.is_backward, self.runs)
        advice = self._host_advice(cost, limit_bytes) if missing > 0 else ""
        ways = "checkpoint the blocks, use" if any(map(_may_recompute, forwards)) else "use"
        ways = f"{advice}Or {ways}" if advice else ways.capitalize()
        what = f"{format_size(missing)} are missing" if missing > 0 else "another rank needs more"
        return (
            f"memory_budget={budget!r}: the graphs of this step{_beside(self.runs)} hold at least "
            f"{format_size(least, up=True)} on this rank, even if nothing is gathered "
            f"ahead{moved}, and {format_size(limit_bytes)} are allowed: {what}.{held} {ways} "
            "more ranks, smaller batches or a larger budget."
        )

    def _host_advice(self, needed: StepCost, limit_bytes: int) -> str:
        """Returns which `host_memory` helps a step that does not fit."""

        def plan(host_bytes: int) -> LeanestPlan:
            cost = replace(self, host_bytes=host_bytes).planned(limit_bytes)
            return LeanestPlan(cost.peak_bytes, cost.host_bytes)

        least = LeanestPlan(needed.peak_bytes, needed.host_bytes)
        return host_advice(least, self.host_bytes, limit_bytes, plan)


def _may_recompute(forward: GraphRun) -> bool:
    """Whether a forward saves more than what it returns first, which the next one takes."""
    saved = sum(size for at, size in forward.returned if at)
    return saved > _NOTABLE * forward.saved_bytes > 0


_NOTABLE = 0.01
"""Part of what a forward saves that is worth naming. Random states are less."""


def agreed_prefetch(
    step: BlockStep,
    budget: str | None,
    free_bytes: int | None,
    groups: Sequence[str],
    timeout_s: float,
    agreed: Agreed | None = None,
) -> StepCost:
    """Plans for how many graphs ahead gathers start, by which routes, and which values rest on the
    host.

    All ranks take the smallest number of graphs, because it orders collectives, and the routes that
    all have chosen. Copies to the host order none, so each rank moves what it needs with that.

    Args:
        step: the graphs of the step.
        budget: the option `memory_budget`.
        free_bytes: what the budget "auto" stands for.
        groups: process groups of the ranks.
        timeout_s: seconds to wait for other ranks.
        agreed: what ranks took for these graphs before, if the graphs of this rank are for other
            sizes now. No rank is asked, and a step that does not fit is only warned of.

    Raises:
        MemoryBudgetError: on all ranks, if the step of one of them does not fit the budget.
    """
    limit = None
    if budget == "auto":
        limit = free_bytes
    elif budget is not None:
        limit = step.limit_bytes(budget)
    chosen = step.planned(limit, agreed)
    fits = limit is None or chosen.peak_bytes <= limit
    if agreed is None:
        answer: list[Any] = [chosen.ahead if fits else -1, [*map(list, chosen.routes.items())]]
        for group in groups:
            question = "for how many graphs ahead gathers start"
            answer = exchange(group, question, answer, timeout_s, merge=_in_common)
        common = Agreed(answer[0], dict(answer[1]))
        if common.ahead < 0:
            raise MemoryBudgetError(step.too_little_memory(str(budget), limit or 0))
        if common != chosen.agreed:
            chosen = step.planned(limit, common)
    elif not fits:
        log.warning(
            "memory_budget=%r: with the sizes of this step, its graphs%s hold %s on this rank, and "
            "%s are allowed. Begin with a step of these sizes, which all ranks plan for, or take "
            "shorter or smaller batches or a larger budget.",
            budget,
            _beside(step.runs),
            format_size(chosen.peak_bytes),
            format_size(limit or 0),
        )
    runtime_note("prefetch", _note(step.runs, chosen, limit))
    return chosen


def _in_common(answers: Sequence[Any]) -> list[Any]:
    """Returns the smallest number of graphs ahead, and the routes that all ranks have chosen."""
    aheads, routes = zip(*answers, strict=True)
    return [min(aheads), [each for each in routes[0] if all(each in other for other in routes)]]


def _beside(runs: Sequence[GraphRun]) -> str:
    """Names what forwards before a step hold; "" if there are none."""
    before = any(run.ran_before is not None for run in runs)
    return " and forwards in flight before it" if before else ""


def _held_text(runs: Sequence[GraphRun]) -> str:
    """Says which inputs stay although their memory is wanted; "" if none do."""
    size = sum(run.held_bytes for run in runs if run.ran_before is None)
    if not size:
        return ""
    return (
        f"{format_size(size)} of what graphs get from code before them stay on the device, because "
        "something else holds them, such as a variable of the model's forward"
    )


def _note(runs: Sequence[GraphRun], chosen: StepCost, limit: int | None) -> str:
    within = "" if limit is None else f" of {limit / _GIB:,.3f} allowed"
    moved = f"; {chosen.host_bytes / _GIB:,.3f} GiB on the host" if chosen.moved else ""
    held = _held_text(runs)
    moved += f"; {held}" if held else ""
    own = [run for run in runs if run.ran_before is None]
    before = sum(run.saved_bytes for run in runs if run.ran_before is not None)
    moved += f"; forwards before it saved {before / _GIB:,.3f} GiB" if before else ""
    by_route = Counter(chosen.routes.values())
    by_engine = "".join(f", those of {count} by {each}" for each, count in by_route.items())
    backwards = sum(run.is_backward for run in own)
    first, last = (run.name.partition(", sharded in")[0] for run in (own[0], own[-1]))
    return (
        f"a step runs {len(own)} graphs, {backwards} of them backward, from {first} to {last}; "
        f"gathers start {chosen.ahead} graph(s) ahead{by_engine}: predicted "
        f"{chosen.total_us / 1e3:,.2f} ms ({step_cost(runs, 0).total_us / 1e3:,.2f} ms with 0 "
        f"ahead, {sum(run.compute_us for run in runs) / 1e3:,.2f} ms without communication), peak "
        f"{chosen.peak_bytes / _GIB:,.3f} GiB{within}{moved}"
    )
