"""Improve a plan by merging launches that follow each other, and by choosing their routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from zpasses.cost.plan.list_scheduler import can_share
from zpasses.cost.plan.schedule_evaluation import Action, Plan
from zpasses.cost.plan.schedule_problem import ScheduleProblem

Rank = tuple[Any, ...]


def merge_launches(
    problem: ScheduleProblem, plan: Plan, rank: Callable[[Plan], Rank], most: int
) -> Plan:
    """Merges neighbouring launches as long as the plan gets better.

    Gathers start where the first of them started and are awaited where the first was. Reductions
    start where the last of them started and are awaited where the last was.

    Args:
        problem: the graph.
        plan: the plan to improve.
        rank: how good a plan is; lower is better.
        most: how many plans to try at most.

    Returns:
        The best plan that was found.
    """
    best, tried, changed = rank(plan), 0, True
    while changed:
        changed = False
        at = 0
        while at < len(plan.launches):
            after = _next_launch(problem, plan, at)
            if after is None:
                at += 1
                continue
            if tried >= most:
                return plan
            tried += 1
            merged = _merged(problem, plan, at, after)
            found = rank(merged)
            if found < best:
                plan, best, changed = merged, found, True
            else:
                at += 1
    return plan


def choose_routes(
    problem: ScheduleProblem, plan: Plan, rank: Callable[[Plan], Rank], most: int
) -> Plan:
    """Moves launches of gathers to copy engines, or back, as long as the plan gets better.

    Args and result are those of `merge_launches`.
    """
    best, tried, changed = rank(plan), 0, problem.has_engines
    while changed:
        changed = False
        for number in engine_launches(problem, plan):
            if tried >= most:
                return plan
            tried += 1
            other = replace(plan, engines=plan.engines ^ {number})
            found = rank(other)
            if found < best:
                plan, best, changed = other, found, True
    return plan


def engine_launches(problem: ScheduleProblem, plan: Plan) -> list[int]:
    """Returns the launches that copy engines can run."""
    return [
        number
        for number, launch in enumerate(plan.launches)
        if problem.jobs[launch[0]].by_engine is not None
    ]


def _next_launch(problem: ScheduleProblem, plan: Plan, at: int) -> int | None:
    """Returns the next launch that can share one with launch `at`."""
    first = problem.jobs[plan.launches[at][0]]
    if first.key.mode == "single":
        return None
    for number in range(at + 1, len(plan.launches)):
        if can_share(first, problem.jobs[plan.launches[number][0]]):
            return number
    return None


def _merged(problem: ScheduleProblem, plan: Plan, at: int, after: int) -> Plan:
    gathers = problem.jobs[plan.launches[at][0]].is_gather
    launches = list(plan.launches)
    launches[at] = tuple(sorted((*launches[at], *launches[after])))
    del launches[after]
    engines = frozenset(each - int(each > after) for each in plan.engines if each != after)
    return Plan(tuple(launches), tuple(_actions(plan, at, after, keep_first=gathers)), engines)


def _actions(plan: Plan, at: int, after: int, *, keep_first: bool) -> Iterator[Action]:
    """Yields the actions, with one of each kind for the two launches."""
    places: dict[str, list[int]] = {"start": [], "wait": []}
    for place, action in enumerate(plan.actions):
        if action.launch in (at, after):
            places[action.kind].append(place)
    kept = {kind: min(each) if keep_first else max(each) for kind, each in places.items()}
    for place, action in enumerate(plan.actions):
        if action.launch in (at, after):
            if place == kept[action.kind]:
                yield Action(action.slot, action.kind, at)
        else:
            yield Action(action.slot, action.kind, action.launch - int(action.launch > after))
