"""Search the fastest schedule of a graph's collectives within a memory limit."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.list_scheduler import Policy, list_schedule
from zpasses.cost.plan.plan_improvement import engine_launches, improve_plan
from zpasses.cost.plan.schedule_evaluation import Cost, Plan, duration_us, evaluate
from zpasses.cost.plan.schedule_problem import ScheduleProblem
from zpasses.cost.plan.simple_plans import CAP_BYTES, one_ahead_plan, simple_plans, single_plan
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
            or the peak in bytes, which is raised to that of the graph in which every collective is
            awaited where it starts.
    """
    if budget.most_bytes is None:
        return budget.limit_bytes(evaluate(problem, one_ahead_plan(problem)).peak_bytes)
    return max(budget.most_bytes, evaluate(problem, single_plan(problem)).peak_bytes)


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
        most: about how many plans to compare, for a quick estimate; None compares as many as the
            size of the graph allows.
    """
    return _Search(problem, limit_bytes, most).run()


_CHOICES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("gather_latencies", (8.0, 32.0)),
    ("reduction_latencies", (8.0, 32.0)),
    ("end_us", (1.0, 1.07)),
    ("horizon", (1.5, math.inf)),
    ("collect_until", (math.inf, 1.0)),
    ("memory_share", (1.0, 0.5)),
)
"""Values of the fields of `Policy`, from which the search by changes goes on. `end_us` is given in
bounds. `memory_share` is no field: it is the share of the memory above that of one gather and one
reduction in flight, since more in flight is not always faster."""
_MOST_WORK = 400_000
"""Segments and collectives that all compared plans have together, for graphs with many."""
_FEWEST_PLANS, _ROUNDS = 12, 2
_CHANGES_PER_PLAN = 10
"""Changes that are drawn in quick estimates, per plan to compare."""
_PRICE = 0.005
"""Share of its duration by which a plan must be faster to be worth the whole of the memory above
that of one gather and one reduction in flight."""


def _most_changes(jobs: int) -> int:
    """How many changes to draw for a graph: about a second of them for 40 collectives and more."""
    return min(4 * jobs**2, 160 * jobs, 600_000 // max(1, jobs))


class _Search:
    def __init__(self, problem: ScheduleProblem, limit_bytes: int, most: int | None) -> None:
        self._problem, self._limit = problem, limit_bytes
        self._bound_us = schedule_bound_us(problem)
        one_ahead = evaluate(problem, one_ahead_plan(problem))
        self._least = min(limit_bytes, one_ahead.peak_bytes)
        """Peak with one gather and one reduction in flight."""
        self._found: list[tuple[_Rank, Plan, Cost]] = []
        self._costs: dict[Plan, Cost] = {}
        """Policies often lead to the same plan."""
        self._made_by: dict[Plan, str] = {}
        size = len(problem.slots) + 8 * len(problem.jobs)
        self._most = max(_FEWEST_PLANS, _MOST_WORK // max(1, size)) if most is None else most
        self._most_changes = _most_changes(len(problem.jobs))
        if most is not None:
            self._most_changes = min(self._most_changes, _CHANGES_PER_PLAN * most)

    def run(self) -> Planned:
        simple = list(simple_plans(self._problem, "one-ahead", CAP_BYTES))
        self._simple = [self._offer(plan, "no search") for plan in simple]
        first = {name: each[0] for name, each in _CHOICES} | {"engines": False}
        values = self._climb(first, self._most)
        if self._problem.has_engines:
            # Second, so that no plan of the first search is missed.
            most = len(self._found) + self._most
            engines = self._climb({**values, "engines": True}, most)
            values = min(values, engines, key=self._try)
        self._found.sort(key=lambda found: found[0])
        best = self._found[0][1]
        for plan in improve_plan(self._problem, best, self._rank, self._most_changes):
            self._offer(plan, "changes of other plans")
        plan, cost = self._most_tolerant()
        _log.debug("schedule: of %d plans, the one by %s", len(self._costs), self._made_by[plan])
        return Planned(
            plan,
            cost,
            self._bound_us,
            self._limit,
            tuple((each, self._costs[each]) for each in simple),
        )

    def _climb(self, values: _Values, most: int) -> _Values:
        """Varies one value after another until there are `most` plans. Returns the best values."""
        best = self._try(values)
        for _ in range(_ROUNDS):
            before = best
            for name, choices in _CHOICES:
                for choice in choices:
                    if choice == values[name] or len(self._found) >= most:
                        continue
                    rank = self._try({**values, name: choice})
                    if rank < best:
                        best, values = rank, {**values, name: choice}
            if best == before:
                break
        return values

    def _try(self, values: _Values) -> _Rank:
        fields = dict(values)
        on_engines = fields.pop("engines")
        share = fields.pop("memory_share")
        limit = self._least + int(share * (self._limit - self._least))
        fields["end_us"] *= self._bound_us
        problem = self._problem.on_engines if on_engines else self._problem
        plan = list_schedule(problem, limit, Policy(**fields))
        if on_engines:
            plan = replace(plan, engines=frozenset(engine_launches(self._problem, plan)))
        made_by = ", ".join(f"{name}={value:g}" for name, value in values.items())
        return self._offer(plan, made_by)

    def _offer(self, plan: Plan, made_by: str) -> _Rank:
        self._made_by.setdefault(plan, made_by)
        cost = self._costs.get(plan)
        if cost is None:
            cost = self._costs[plan] = evaluate(self._problem, plan)
        rank = self._rank_of(plan, cost)
        self._found.append((rank, plan, cost))
        return rank

    def _rank(self, plan: Plan) -> _Rank:
        return self._rank_of(plan, evaluate(self._problem, plan))

    def _rank_of(self, plan: Plan, cost: Cost) -> _Rank:
        excess = max(0, cost.peak_bytes - self._limit)
        more = max(0, cost.peak_bytes - excess - self._least) / max(1, self._limit - self._least)
        priced = round(cost.total_us * (1 + _PRICE * more), 3)
        return excess, priced, len(plan.launches), cost.peak_bytes

    def _most_tolerant(self) -> tuple[Plan, Cost]:
        """Returns the plan that loses least if collectives take longer than predicted, of those
        that are nearly as fast as the fastest.
        """
        self._found.sort(key=lambda found: found[0])
        (excess, total, *_), *_ = (rank for rank, _, _ in self._found)
        simple = min((rank[1] for rank in self._simple if rank[0] <= excess), default=math.inf)
        most = min(total * (1 + _TOLERANCE), max(total, simple))
        near = [found for found in self._found if found[0][0] == excess and found[0][1] <= most]

        def late_us(found: tuple[_Rank, Plan, Cost]) -> tuple[Any, ...]:
            late = duration_us(self._problem, found[1], _SLOWER)
            return round(late * 200 / max(total, 1e-9)), found[0]

        _, plan, cost = min(near[:_MOST_NEAR], key=late_us)
        return plan, cost


_Values = dict[str, Any]
"""Of the fields of `_CHOICES`, and whether copy engines take gathers."""
_Rank = tuple[int, float, int, int]
"""Bytes above the limit, microseconds with the price of memory, launches, peak; lower is better."""
_SLOWER, _TOLERANCE, _MOST_NEAR = 1.5, 0.004, 12
