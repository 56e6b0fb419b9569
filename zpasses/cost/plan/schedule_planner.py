"""Search the fastest schedule of a graph's collectives within a memory limit."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.plan_improvement import engine_launches, improve_plan, priced
from zpasses.cost.plan.schedule_evaluation import Cost, Plan, duration_us, evaluate
from zpasses.cost.plan.schedule_problem import ScheduleProblem
from zpasses.cost.plan.simple_plans import (
    CAP_BYTES,
    one_ahead_plan,
    simple_plans,
    single_plan,
    varied_plans,
)
from zpasses.option_values import MemoryBudget

_log = logging.getLogger("zpasses")


@dataclass(frozen=True)
class Planned:
    """The chosen plan, and what is known about it."""

    plan: Plan
    cost: Cost
    bound_us: float
    """What no schedule is faster than."""
    limit_bytes: int
    simple: tuple[tuple[Plan, Cost], ...] = ()
    """The plans of `simple_plans` that it was compared with. The planner counts memory from above,
    so one that exceeds the limit here may fit when its graph is judged."""


def memory_limit(problem: ScheduleProblem, budget: MemoryBudget) -> int:
    """Returns the largest allowed peak in bytes.

    Args:
        problem: the graph.
        budget: how far the peak may rise above that with one gather and one reduction in flight
            besides those that are awaited, the least with which collectives overlap with kernels;
            or the peak in bytes, also as a rise from a given peak, which is raised to that of the
            graph in which every collective is awaited where it starts.
    """
    if budget.most_bytes is None and budget.of_bytes is None:
        return budget.limit_bytes(evaluate(problem, one_ahead_plan(problem)).peak_bytes)
    return max(budget.limit_bytes(0), evaluate(problem, single_plan(problem)).peak_bytes)


def plan_schedule(
    problem: ScheduleProblem,
    limit_bytes: int,
    *,
    most: int | None = None,
) -> Planned:
    """Returns the fastest plan found whose peak is at most `limit_bytes`.

    A graph that exceeds the limit without any overlap keeps the plan with the lowest peak.

    Args:
        problem: the graph.
        limit_bytes: the largest allowed peak.
        most: how many changes of one plan to draw, for a quick estimate; None draws as many of
            several plans as the size of the graph allows.
    """
    planned = _Search(problem, limit_bytes, most).run()
    if planned.cost.peak_bytes <= limit_bytes:
        return planned
    # A search for speed may miss what a search for memory alone finds under any limit.
    least = _Search(problem, 0, most).run()
    if least.cost.peak_bytes >= planned.cost.peak_bytes:
        return planned
    return replace(planned, plan=least.plan, cost=least.cost)


PRICE = 0.005
"""Share of its duration by which a plan must be faster to be worth the whole of the memory above
that of one gather and one reduction in flight."""
ROUTE_PRICE_US = 1.0
"""What a launch on copy engines must gain: figures of routes are not exact."""
_STARTS, _NEAR_BOUND = 3, 0.001
"""How many plans to improve, since changes of one may end in a dead end; and the share of the bound
above it from which on none is."""


def _most_changes(jobs: int) -> int:
    """How many changes to draw of each plan, for a graph with so many collectives: about a second
    of them for 40 and more.
    """
    return min(4 * jobs**2, 100 * jobs, 400_000 // max(1, jobs))


class _Search:
    def __init__(self, problem: ScheduleProblem, limit_bytes: int, most: int | None) -> None:
        self._problem, self._limit = problem, limit_bytes
        self._bound_us = schedule_bound_us(problem)
        self._near_bound_us = self._bound_us * (1 + _NEAR_BOUND)
        one_ahead = evaluate(problem, one_ahead_plan(problem))
        self._least = min(limit_bytes, one_ahead.peak_bytes)
        """Peak with one gather and one reduction in flight."""
        self._found: dict[Plan, tuple[_Rank, Cost]] = {}
        self._most = _most_changes(len(problem.jobs))
        self._starts = _STARTS
        if most is not None:
            self._most, self._starts = min(most, self._most), 1

    def run(self) -> Planned:
        problem = self._problem
        simple = list(simple_plans(problem, "one-ahead", CAP_BYTES))
        self._simple = [self._offer(plan) for plan in simple]
        for plan in varied_plans(problem):
            self._offer(plan)
            takes = engine_launches(problem, plan)
            for route in problem.routes:
                on_it = frozenset((each, route) for each, can in takes.items() if route in can)
                self._offer(replace(plan, routes=on_it))
        unchanged = len(self._found)
        for start in self._best_starts():
            if self._ranked()[0][1][1].total_us <= self._near_bound_us:
                break
            for plan in improve_plan(problem, start, self._rank, self._most, self._limit):
                self._offer(plan)
        plan, cost = self._most_tolerant()
        changed = list(self._found).index(plan) >= unchanged
        made_by = "changes of other plans" if changed else "no search"
        _log.debug("schedule: of %d plans, the one by %s", len(self._found), made_by)
        return Planned(
            plan,
            cost,
            self._bound_us,
            self._limit,
            tuple((each, self._found[each][1]) for each in simple),
        )

    def _ranked(self) -> list[tuple[Plan, tuple[_Rank, Cost]]]:
        return sorted(self._found.items(), key=lambda found: found[1][0])

    def _best_starts(self) -> list[Plan]:
        """Returns the best plans so far, of which no two have the same launches. One of them may
        exceed the limit: a fast plan that does so by a little is a good start.
        """
        best: dict[Any, Plan] = {}
        for plan, _ in self._ranked():
            best.setdefault(tuple(sorted(plan.launches)), plan)
        starts = list(best.values())[: self._starts]
        if self._starts > 1:
            near = min(self._found, key=lambda each: priced(self._found[each][0], self._limit))
            starts = list(dict.fromkeys((*starts[:-1], near, *starts[-1:])))[: self._starts]
        return starts

    def _offer(self, plan: Plan) -> _Rank:
        if plan not in self._found:
            cost = evaluate(self._problem, plan)
            self._found[plan] = self._rank_of(plan, cost), cost
        return self._found[plan][0]

    def _rank(self, plan: Plan) -> _Rank:
        return self._rank_of(plan, evaluate(self._problem, plan))

    def _rank_of(self, plan: Plan, cost: Cost) -> _Rank:
        excess = max(0, cost.peak_bytes - self._limit)
        more = max(0, cost.peak_bytes - excess - self._least) / max(1, self._limit - self._least)
        priced = round(cost.total_us * (1 + PRICE * more) + ROUTE_PRICE_US * len(plan.routes), 3)
        return excess, priced, len(plan.launches), cost.peak_bytes

    def _most_tolerant(self) -> tuple[Plan, Cost]:
        """Returns the plan that loses least if collectives take longer than predicted, of those
        that are nearly as fast as the fastest.
        """
        ranked = self._ranked()
        excess, total, *_ = ranked[0][1][0]
        simple = min((rank[1] for rank in self._simple if rank[0] <= excess), default=math.inf)
        most = min(total * (1 + _TOLERANCE), max(total, simple))
        near = [each for each in ranked if each[1][0][0] == excess and each[1][0][1] <= most]

        def late_us(found: tuple[Plan, tuple[_Rank, Cost]]) -> tuple[Any, ...]:
            late = duration_us(self._problem, found[0], _SLOWER)
            return round(late * 200 / max(total, 1e-9)), found[1][0]

        plan, (_, cost) = min(near[:_MOST_NEAR], key=late_us)
        return plan, cost


_Rank = tuple[int, float, int, int]
"""Bytes above the limit, microseconds with what memory and routes must gain, launches, peak; lower
is better."""
_SLOWER, _TOLERANCE, _MOST_NEAR = 1.5, 0.004, 12
