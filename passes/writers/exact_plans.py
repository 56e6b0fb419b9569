"""What the passes `bucket` and `overlap` would make of a graph, as a plan for the pass `schedule`.

The planner of `schedule` counts memory from above, so it may refuse a plan that fits exactly. Here,
duration and memory are those of an edited copy of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from zpasses.cost.memory.collective_moves import MemoryCurve, SchedulableCollective
from zpasses.cost.plan.bucket_keys import bucket_key
from zpasses.cost.plan.bucket_planner import BucketKey, plan_buckets
from zpasses.cost.plan.schedule_evaluation import Action, Evaluation, Plan
from zpasses.cost.plan.schedule_problem import ScheduleProblem
from zpasses.cost.time.target import Target
from zpasses.graph.queries import collective_of, is_wait
from zpasses.graph.tags import is_resident
from zpasses.option_values import MemoryBudget
from zpasses.passes.overlap import overlap_launches
from zpasses.passes.writers.bucket_writer import LaunchNodes
from zpasses.passes.writers.schedule_writer import (
    copied,
    exact_cost,
    merged_launches,
    place_launches,
)

_MIB = 1 << 20
_CAPS_MB = (12, 25)
"""`cap_mb` of `bucket` in the pipelines `zero3-one-ahead` and `zero2-one-ahead`."""
_BUDGET = MemoryBudget(rise=0.05)
"""The default of `bucket`."""
_ORIGIN = "schedule"

_Mode = Literal["auto", "coalesced", "flat"]
_Launches = tuple[tuple[int, ...], ...]
"""The job numbers of each launch."""


@dataclass(frozen=True)
class ExactPlan:
    """A plan with indices of kept nodes as slots, and the cost of the graph that it leads to."""

    plan: Plan
    cost: Evaluation


def fastest_one_ahead(
    problem: ScheduleProblem, mode: _Mode, limit_bytes: int, target: Target
) -> ExactPlan | None:
    """Returns the fastest plan of `bucket` and `overlap` that fits a limit.

    If no plan with buckets fits, `overlap` without buckets is tried, and then the graph in which
    collectives stay where they are.

    Args:
        problem: the graph, which stays as it is.
        mode: how collectives share a launch, as in `bucket`.
        limit_bytes: the largest allowed peak.
        target: hardware that the graph runs on.

    Returns:
        None if the peak of every such plan exceeds the limit.
    """
    bucketed = dict.fromkeys(_launches(problem, mode, cap_mb * _MIB) for cap_mb in _CAPS_MB)
    plans = [_exact(problem, launches, target, overlaps=True) for launches in bucketed]
    single = tuple((job.number,) for job in problem.jobs)
    for overlaps in (True, False):
        fitting = [each for each in plans if each.cost.peak_bytes <= limit_bytes]
        if fitting:
            return min(fitting, key=lambda each: each.cost.total_us)
        plans = [_exact(problem, single, target, overlaps=overlaps)]
    return plans[0] if plans[0].cost.peak_bytes <= limit_bytes else None


def _launches(problem: ScheduleProblem, mode: _Mode, cap_bytes: int) -> _Launches:
    """Returns the launches that `bucket` makes."""
    curve = MemoryCurve(problem.nodes[-1].graph, _BUDGET)
    number = {item: job.number for item, job in zip(problem.items, problem.jobs, strict=True)}

    def key(item: SchedulableCollective) -> BucketKey:
        found = bucket_key(item, mode)
        # Calls that find parameters cached leave out the launches that gather no others.
        return replace(found, compatibility=(found.compatibility, is_resident(item.wait)))

    items = sorted(problem.items, key=lambda item: curve.position[item.started])
    planned = plan_buckets(items, key, curve, cap_bytes, plan_for_overlap=True)
    buckets = [tuple(number[item] for item in bucket.items) for bucket in planned]
    merged = {each for members in buckets for each in members}
    return (*buckets, *((job.number,) for job in problem.jobs if job.number not in merged))


def _exact(
    problem: ScheduleProblem, launches: _Launches, target: Target, *, overlaps: bool
) -> ExactPlan:
    """Writes launches into a copy of the graph, and reads the plan and its cost off the copy."""
    graph, copy = copied(problem)
    nodes = merged_launches(graph, copy, launches, _ORIGIN)
    if overlaps:
        overlap_launches(graph, {_collective(launch) for launch in nodes})
    plan = Plan(launches, tuple(_actions(graph, copy, nodes)))
    place_launches(copy.nodes, nodes, plan.actions)
    return ExactPlan(plan, exact_cost(graph, copy, target))


def _collective(launch: LaunchNodes) -> fx.Node:
    return next(node for node in launch.start if collective_of(node) is not None)


def _actions(
    graph: fx.Graph, problem: ScheduleProblem, launches: Sequence[LaunchNodes]
) -> list[Action]:
    """Returns where the launches start and are awaited in a graph, in order."""
    events: dict[fx.Node, tuple[str, int]] = {}
    for number, launch in enumerate(launches):
        events[_collective(launch)] = "start", number
        events[next(node for node in launch.wait if is_wait(node))] = "wait", number
    kept, first = set(problem.nodes), problem.slots[0]
    actions: list[Action] = []
    at = 0
    for node in graph.nodes:
        if node in kept:
            at += 1
        elif node in events:
            kind, number = events[node]
            actions.append(Action(max(first, at), kind, number))  # type: ignore[arg-type]
    return actions
