"""Code of graphs of blocks: gathers start before their graph, and reductions end after it
(`zpasses.graph.hoisting`), by the schedule of `zpasses.runtime.block_schedule`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.backend.block_steps import (
    BlockStep,
    add_turning_point,
    agreed_prefetch,
    graph_cost,
    turn_order,
    turn_text,
)
from zpasses.backend.cache.entry import Variant
from zpasses.backend.compile_job import Compiled, CompileJob
from zpasses.backend.graph_facts import VariantFacts
from zpasses.cost.plan.prefetch import Agreed, GraphRun, StepCost
from zpasses.cost.time.route_figures import planned_routes
from zpasses.graph.hoisting import HoistedGraph, hoist_collectives
from zpasses.graph.host_copies import HostNeed, host_need
from zpasses.graph.queries import collectives, returned_values
from zpasses.host.saved_arenas import SavedArenas, gradients, with_arenas
from zpasses.ranks.run_order import RunEvent
from zpasses.ranks.vote import has_other_ranks
from zpasses.runtime.codegen import boxed, eager_codegen
from zpasses.runtime.free_memory import note_planned_peak
from zpasses.runtime.gloo import replace_gloo_collectives
from zpasses.runtime.grad_slots import returned_gradients
from zpasses.runtime.hoisted import HoistedCode, Surroundings
from zpasses.runtime.overflows import EncodedGrad
from zpasses.runtime.profiling import collective_names, with_part_range
from zpasses.runtime.run_checks import limited_collectives
from zpasses.sdma.engine_gathers import can_take_engine, gather_by_engine


def hoisted_graph(
    job: CompileJob,
    gm: fx.GraphModule,
    kind: str,
    variant: Variant | None,
) -> HoistedGraph | None:
    """Returns the parts of a graph whose collectives may leave it. One rank has none, and its
    graphs are parts of the schedule if it says what rests on the host. A variant of a step that has
    none is silent: it takes all parameters from the cache, or leaves all gradients pending.
    """
    if not job.options.prefetch:
        return None
    is_backward = kind == "backward"
    hoisted = hoist_collectives(gm, returned_gradients(gm.graph) if is_backward else None)
    if any(map(has_other_ranks, job.captured.groups)):
        is_part = variant is not None and kind != "inference" and not any(collectives(gm.graph))
    else:
        is_part = bool(job.host_bytes)
    if hoisted is None and is_part:
        return HoistedGraph(gm, [], len(returned_values(gm.graph)), None, None)
    if hoisted is None or not all(param in job.order for param in hoisted.params()):
        return None
    add_turning_point(hoisted, job.target)
    return hoisted


def hoisted_code(
    job: CompileJob,
    kind: str,
    body: Compiled,
    hoisted: HoistedGraph,
    facts: VariantFacts,
    outputs: int,
) -> tuple[Compiled, Mapping[str, RunEvent]]:
    """Returns code of a whole graph, and the events of its runs, which say what leaves the graph:
    ranks that start gathers elsewhere start collectives in another order.

    Args:
        body: code of `hoisted.body`.
        facts: of the whole graph.
        outputs: values that the graph returns without variants.
    """
    options = job.options
    movable = job.state.movable if kind == "forward" else ()

    def described(sizes: Mapping[Any, int]) -> GraphRun:
        with job.planning(), compat.planned_for(sizes):
            return graph_cost(
                hoisted, kind, job.target, movable, outputs, copy_engines=_uses_engines(job)
            )

    cost = described({})
    leaves = f"{hoisted.summary()}, {options.prefetch} ahead"
    ordered, shown = turn_order(hoisted), turn_text(hoisted, cost)
    events = {
        group: dataclasses.replace(
            event,
            digest=f"{event.digest} {leaves}{ordered}",
            text=f"{event.text} ({leaves}{shown})",
        )
        for group, event in facts.events.items()
    }
    surroundings = Surroundings(
        job.order,
        None if options.prefetch == "auto" else options.prefetch,
        lambda runs, agreed: _plan_prefetch(job, runs, agreed, sorted(events)),
        functools.partial(
            limited_collectives,
            events if options.agreement else (),
            f"graph {job.name} {kind}",
            options.agreement_timeout_s,
        ),
        lambda gm, route: _part(
            job, by_engine(gm, route), kind, facts.collectives, _ended(hoisted, gm, facts)
        ),
        described,
        is_silent=not facts.collectives and any(map(has_other_ranks, job.captured.groups)),
    )
    communicated = [event.digest for event in events.values()] or [job.name]
    digests = " ".join([kind, *communicated])
    return boxed(HoistedCode(hoisted, body, digests, cost, surroundings)), events


def _uses_engines(job: CompileJob) -> bool:
    """Whether the plan of the step may use copy engines: as the stages do, if no pipeline says."""
    if job.options.pipeline is None:
        return bool(planned_routes(job.target))
    return job.state.pipeline.uses_engines


def by_engine(gm: fx.GraphModule, route: str) -> fx.GraphModule:
    """Returns a graph whose gathers take a copy-engine route; the graph itself without one."""
    if not route:
        return gm
    swapped = compat.clone_graph_module(gm)
    for node in filter(can_take_engine, swapped.graph.nodes):
        gather_by_engine(node, route)
    swapped.recompile()
    return swapped


def _ended(hoisted: HoistedGraph, part: fx.GraphModule, facts: VariantFacts) -> list[EncodedGrad]:
    """Returns the gradients of encoded reductions that a part of a graph returns."""
    if hoisted.reductions is None or part is not hoisted.reductions.end:
        return []
    at = {position: place for place, position in enumerate(hoisted.reductions.gradients)}
    return [
        dataclasses.replace(each, position=at[each.position])
        for each in facts.encoded_grads
        if each.position in at
    ]


def _part(
    job: CompileJob,
    gm: fx.GraphModule,
    kind: str,
    names: Sequence[str],
    encoded: Sequence[EncodedGrad],
) -> Compiled:
    """Returns code of gathers before a graph, or of reductions after it."""
    code = eager_codegen(replace_gloo_collectives(gm), ())
    code = job.overflows.watching(code, encoded, f"graph {job.name} {kind}")
    code = with_grad_arenas(job, code, host_need(gm.graph))
    return with_part_range(code, names, collective_names(gm.graph), job.name, kind)


def _plan_prefetch(
    job: CompileJob, runs: Sequence[GraphRun], agreed: Agreed | None, groups: Sequence[str]
) -> StepCost:
    options, step = job.options, BlockStep(runs, job.options.zero_stage, job.host_bytes)
    job.listeners.send(step)
    with job.listeners.report_errors("prefetch"):
        chosen = agreed_prefetch(
            step, options.memory_budget, job.free_bytes, groups, options.agreement_timeout_s, agreed
        )
    note_planned_peak(job.captured.gm, chosen.peak_bytes - chosen.residual_bytes)
    return chosen


def with_grad_arenas(job: CompileJob, code: Compiled, need: HostNeed | None) -> Compiled:
    arenas = SavedArenas(pool=gradients)
    return code if need is None else boxed(with_arenas(code, need, arenas, job.report))
