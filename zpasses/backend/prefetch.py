"""The plan of a step of several graphs: what it needs to know of each, and what ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from zpasses.cost.memory import liveness
from zpasses.cost.prefetch import GraphRun, StepCost, plan_prefetch, step_cost
from zpasses.cost.step_time import step_time
from zpasses.cost.target import Target
from zpasses.errors import MemoryBudgetError
from zpasses.graph.hoisting import HoistedGraph
from zpasses.graph.nodes import nbytes, value_of
from zpasses.option_values import parse_budget
from zpasses.pipeline.recorder import runtime_note
from zpasses.ranks.vote import exchange

__all__ = ["agreed_prefetch", "graph_cost"]

_MIB = float(1 << 20)
_GIB = float(1 << 30)


def graph_cost(hoisted: HoistedGraph, kind: str, target: Target) -> GraphRun:
    """Describes one run of a graph."""
    body = hoisted.body.graph
    parts = [body]
    gather_us = reduce_us = 0.0
    reduced_bytes = 0
    if hoisted.gathers is not None:
        gather_us = step_time([hoisted.gathers.graph.graph], target).ring_collective_us
    if hoisted.reductions is not None:
        ends = [hoisted.reductions.start.graph, hoisted.reductions.end.graph]
        reduce_us = step_time(ends, target).ring_collective_us
        sent = hoisted.reductions.start.graph.find_nodes(op="placeholder")
        reduced_bytes = nbytes([value_of(node) for node in sent])
    returned: Sequence[Any] = body.output_node().args[0]  # type: ignore[assignment]
    saved = {
        node: None for node in returned if isinstance(node, fx.Node) and node.op != "placeholder"
    }
    return GraphRun(
        name=kind,
        is_backward=kind == "backward",
        compute_us=step_time(parts, target).total_us,
        gather_us=gather_us,
        reduce_us=reduce_us,
        gathered_bytes=nbytes(hoisted.extra_inputs),
        reduced_bytes=reduced_bytes,
        peak_bytes=liveness(body).peak_bytes,
        saved_bytes=0 if kind == "backward" else nbytes([value_of(node) for node in saved]),
    )


def agreed_prefetch(
    runs: Sequence[GraphRun],
    budget: str | None,
    free_bytes: int | None,
    groups: Sequence[str],
    timeout_s: float,
) -> int:
    """Plans for how many graphs ahead gathers start. All ranks take the smallest answer.

    Args:
        runs: the graphs of a step.
        budget: the option `memory_budget`.
        free_bytes: what the budget "auto" stands for.
        groups: process groups of the ranks.
        timeout_s: seconds to wait for other ranks.

    Raises:
        MemoryBudgetError: on all ranks, if the step of one of them does not fit the budget.
    """
    least = step_cost(runs, 0)
    limit = None
    if budget == "auto":
        limit = free_bytes
    elif budget is not None:
        limit = parse_budget(budget, "option 'memory_budget'").limit_bytes(least.peak_bytes)
    chosen = plan_prefetch(runs, limit)
    fits = limit is None or chosen.peak_bytes <= limit
    ahead = chosen.ahead if fits else -1
    for group in groups:
        question = "for how many graphs ahead gathers start"
        ahead = min(exchange(group, question, ahead, timeout_s))
    if ahead < 0:
        raise MemoryBudgetError(
            f"memory_budget={budget!r}: the graphs of this step hold at least "
            f"{least.peak_bytes / _MIB:,.1f} MiB on this rank, even if nothing is gathered ahead, "
            f"and {(limit or 0) / _MIB:,.1f} MiB are allowed. Checkpoint the blocks, use more "
            "ranks, smaller batches or a larger budget."
        )
    runtime_note("prefetch", _note(runs, least, step_cost(runs, ahead), limit))
    return ahead


def _note(runs: Sequence[GraphRun], least: StepCost, chosen: StepCost, limit: int | None) -> str:
    within = "" if limit is None else f" of {limit / _GIB:,.3f} allowed"
    backwards = sum(run.is_backward for run in runs)
    first, last = (run.name.partition(", sharded in")[0] for run in (runs[0], runs[-1]))
    return (
        f"a step runs {len(runs)} graphs, {backwards} of them backward, from {first} to {last}; "
        f"gathers start {chosen.ahead} graph(s) ahead: predicted {chosen.total_us / 1e3:,.2f} ms "
        f"({least.total_us / 1e3:,.2f} ms with 0 ahead, "
        f"{sum(run.compute_us for run in runs) / 1e3:,.2f} ms without communication), peak "
        f"{chosen.peak_bytes / _GIB:,.3f} GiB{within}"
    )
