"""Merge collectives, start all-gathers early and await reductions late, as fast as memory allows.

Before                                      After
  a = wait_tensor(all_gather(shard_a))        started = all_gather(shard_a)
  y = mm(x, a)                                s = all_gather_coalesced([.., ..])
  b = wait_tensor(all_gather(shard_b))        a = wait_tensor(started)
  z = mm(y, b)                                y = mm(x, a)
  c = wait_tensor(all_gather(shard_c))        b = wait_tensor(s[0])
  u = mm(z, c)                                c = wait_tensor(s[1])
  ...                                         z = mm(y, b);  u = mm(z, c)
  da = wait_tensor(reduce_scatter(ga))        ...
  gb = mm(..)                                 started_a = reduce_scatter(ga)
                                              gb = mm(..)
                                              da = wait_tensor(started_a)

Contract: the order of all other nodes stays. Results stay equal bit for bit. The graph's peak
memory stays within the budget, as modelled by `zpasses.cost.memory`. The plan is the fastest that
`zpasses.cost.plan.schedule_planner` finds for the target. By the model, it is never slower than the
graph was, nor than `bucket` and `overlap` in the same memory. All ranks use the plan of the first
rank, so the order of collectives is the same on all of them. With `reduction_group=own`, gradient
reductions move to a second process group of the same ranks.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import fx

from zpasses import compat
from zpasses.cost.memory.collective_moves import MemoryCurve
from zpasses.cost.memory.liveness import NOTABLE_BYTES
from zpasses.cost.plan.bucket_keys import compatibility_key
from zpasses.cost.plan.schedule_evaluation import Action, Evaluation, Plan, one_ahead_plan
from zpasses.cost.plan.schedule_planner import Planned, memory_limit, plan_schedule
from zpasses.cost.plan.schedule_problem import ScheduleProblem, problem_of
from zpasses.cost.time.target import current_target
from zpasses.graph.patterns import tag_foreign_gathers
from zpasses.graph.queries import collective_of, is_dialect, is_wait
from zpasses.graph.reduction_groups import regroup_reductions, replicate_groups
from zpasses.option_values import MemoryBudget, parse_budget
from zpasses.passes.writers.exact_plans import fastest_one_ahead
from zpasses.passes.writers.schedule_writer import copied, exact_cost, write_plan
from zpasses.pipeline.events import note
from zpasses.pipeline.facts import Facts
from zpasses.pipeline.passes import Level, Pass
from zpasses.ranks.agree import adopt
from zpasses.ranks.new_groups import reduction_group

_MIB = float(1 << 20)
_log = logging.getLogger("zpasses")


@dataclass(frozen=True)
class Schedule(Pass):
    """Merge and move collectives by a plan for the target and a memory budget."""

    name: ClassVar[str] = "schedule"
    level: ClassVar[Level] = Level.PARTITIONED

    memory_budget: str = "+16MiB"
    """By how much the graph's peak memory may rise (`10%` or `+16MiB`), or the peak that it may
    reach (`60GiB`). A rise counts from the peak with one gather and one reduction in flight. A peak
    below that of the graph without overlap counts as that of the graph."""
    mode: Literal["auto", "coalesced", "flat"] = "auto"
    """As in `bucket`: `coalesced` starts several tensors in one launch, and `flat` packs them into
    one tensor. `auto` takes the cheapest choice by the cost model of the target."""
    reduction_group: Literal["shared", "own"] = "shared"
    """`own` runs gradient reductions on a second process group of the same ranks, beside
    all-gathers instead of in one queue with them. `shared` leaves them on their group. Graphs with
    at most one gather and one reduction always leave them there."""

    def __post_init__(self) -> None:
        parse_budget(self.memory_budget, f"pass {self.name!r}, option 'memory_budget'")

    @property
    def facts(self) -> Facts:
        return Facts(
            votes=True,
            cacheable=self.reduction_group == "shared",
            plans_within=self.memory_budget,
            fallback_cost=self._fallback_cost,
            without_schedule="bucket{cap_mb=1e6,memory_budget=1000%}",
        )

    def _fallback_cost(self, graph: fx.Graph, limit_bytes: int) -> Evaluation | None:
        found = fastest_one_ahead(self.problem(graph), self.mode, limit_bytes, current_target())
        return None if found is None else found.cost

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of collectives saved, or 1 if nodes only moved."""
        tag_foreign_gathers(graph, origin=self.name)
        problem = self.problem(graph)
        if not problem.jobs:
            return 0
        gathers = sum(job.is_gather for job in problem.jobs)
        if gathers < 2 and len(problem.jobs) - gathers < 2:
            # As little as `overlap` would do is equal on all ranks without a vote. Ranks may
            # compile such graphs without the others, inside windows of gradient accumulation.
            return _apply(graph, problem, _by_node(problem, one_ahead_plan(problem)), self.name)
        planned, plan = self._choose(problem)
        adopted, agreed_groups = _agree_on_plan(problem, plan, str(self))
        if adopted is None:
            _log.warning(
                "%s: the plan of the first rank does not fit this rank's graph, in which the "
                "consumers of collectives have another order. Nothing moves.",
                self.name,
            )
            return self._regroup(graph, problem, agreed_groups)
        note(f"{self.name}: {_summary(problem, planned, adopted)}")
        changes = _apply(graph, problem, adopted, self.name)
        regrouped = self._regroup(graph, problem, agreed_groups)
        self._warn_over_budget(graph, planned.limit_bytes)
        return changes or min(regrouped, 1)

    def problem(self, graph: fx.Graph) -> ScheduleProblem:
        """Returns the graph as the planner sees it."""
        own = self.reduction_group == "own"
        return problem_of(graph, current_target(), self.mode, second_group=own)

    def plan(self, problem: ScheduleProblem, *, never_above_us: float = math.inf) -> Planned:
        """Returns the plan that the planner makes.

        Args:
            problem: the graph.
            never_above_us: as in `plan_schedule`.
        """
        limit = memory_limit(problem, self._budget())
        return plan_schedule(problem, limit, never_above_us=never_above_us)

    def _choose(self, problem: ScheduleProblem) -> tuple[Planned, Plan]:
        """Returns the planner's result, and the plan that this rank would make, with indices of
        kept nodes as slots.

        It is the planner's plan, unless what `bucket` and `overlap` make is faster within the
        budget, or the planner's exceeds a budget in bytes that they fit.
        """
        most = self._budget().most_bytes
        allowed = memory_limit(problem, self._budget()) if most is None else most
        target = current_target()
        simple = fastest_one_ahead(problem, self.mode, allowed, target)
        if simple is None:
            planned = self.plan(problem)
            return planned, _by_node(problem, planned.plan)
        planned = self.plan(problem, never_above_us=simple.cost.total_us)
        plan, cost = _by_node(problem, planned.plan), planned.cost
        if cost.peak_bytes > allowed:
            graph, copy = copied(problem)
            write_plan(graph, copy, plan, self.name)
            cost = exact_cost(graph, copy, target)
        if cost.peak_bytes > allowed or simple.cost.total_us < cost.total_us:
            return replace(planned, cost=simple.cost), simple.plan
        return planned, plan

    def _budget(self) -> MemoryBudget:
        return parse_budget(self.memory_budget, self.name)

    def _regroup(
        self, graph: fx.Graph, problem: ScheduleProblem, agreed_groups: Sequence[str]
    ) -> int:
        """Moves reductions to second groups, and returns how many moved.

        Args:
            graph: the graph to edit.
            problem: what was read of it.
            agreed_groups: groups whose ranks all have the same collectives, so that all of them
                come here.
        """
        regrouped = [group for group in agreed_groups if group in problem.regrouped]
        second = {group: reduction_group(group) for group in regrouped}
        if second:
            note(f"{self.name}: reductions run on {', '.join(map(repr, second.values()))}")
        return regroup_reductions(graph, second)

    def _warn_over_budget(self, graph: fx.Graph, limit_bytes: int) -> None:
        """Warn if the plan that all ranks share, made for other shapes, exceeds this rank's budget.
        Ranks must still follow it.
        """
        peak = MemoryCurve(graph).base.peak_bytes
        if peak > limit_bytes + NOTABLE_BYTES:
            _log.warning(
                "%s: all ranks use the plan that the first rank made when these collectives were "
                "first compiled, for other shapes. For this graph, it raises the peak to %.1f MiB, "
                "%.1f MiB above the budget. Compile shapes with a small peak first, or set "
                "memory_budget in bytes.",
                self.name,
                peak / _MIB,
                (peak - limit_bytes) / _MIB,
            )


def _summary(problem: ScheduleProblem, planned: Planned, adopted: Plan) -> str:
    gathers = sum(problem.jobs[members[0]].is_gather for members in adopted.launches)
    cost = planned.cost
    # The planner knows no chains of collectives, so what completes a reduction takes no time.
    averages = replicate_groups(problem.nodes[-1].graph)
    without = " without the averages over replicas, which are inserted later" if averages else ""
    return (
        f"{len(problem.jobs):,} collectives in launches: {gathers:,} of gathers and "
        f"{len(adopted.launches) - gathers:,} of reductions; predicted "
        f"{cost.total_us / 1e3:,.2f} ms, bound {planned.bound.total_us / 1e3:,.2f} ms{without}; "
        f"peak {cost.peak_bytes / _MIB:,.1f} of {planned.limit_bytes / _MIB:,.1f} MiB"
    )


# --- agreement ------------------------------------------------------------------------------------
def _agree_on_plan(
    problem: ScheduleProblem, plan: Plan, options: str
) -> tuple[Plan | None, list[str]]:
    """Returns the plan that all ranks adopt, with indices of kept nodes as slots, and the groups
    whose ranks all have the same collectives.

    What fits the budget depends on shapes. The same collectives always get the same plan. The plan
    is None if it does not fit this rank's graph.

    Args:
        problem: this rank's graph.
        plan: what this rank would do, with indices of kept nodes as slots.
        options: of the pass.
    """
    keys = [compatibility_key(item) for item in problem.items]
    # Groups by number, because their names differ between the replicas of hybrid sharding.
    numbers = {name: at for at, name in enumerate(dict.fromkeys(str(key[1]) for key in keys))}
    described = [
        (key[0], numbers[str(key[1])], tuple(map(str, key[2:])), *about)
        for key, *about in zip(
            keys,
            [item.tag.params for item in problem.items],
            [item.full_bytes for item in problem.items],
            [job.resident for job in problem.jobs],
            strict=True,
        )
    ]
    fixed = _fixed_starts(problem)
    mine: list[Any] = [
        [list(members) for members in plan.launches],
        [
            # With the number of collectives that stay and start before: all ranks must share it.
            [each.slot, each.kind, each.launch, bisect_left(fixed, each.slot)]
            for each in plan.actions
        ],
    ]
    groups = [compat.parent_group(str(key[1])) for key in keys]
    (launches, actions), agreed_groups = adopt(
        dict.fromkeys([*groups, *replicate_groups(problem.nodes[-1].graph)]),
        "the schedule",
        (options, described),
        mine,
        planned_for=current_target(),
    )
    adopted = Plan(
        tuple(tuple(members) for members in launches),
        tuple(Action(at, kind, launch) for at, kind, launch, _ in actions),
    )
    return _fitted(problem, adopted, [before for *_, before in actions]), agreed_groups


def _by_node(problem: ScheduleProblem, plan: Plan) -> Plan:
    """Returns the plan with indices of kept nodes as slots."""
    return Plan(
        plan.launches,
        tuple(replace(each, slot=problem.slots[each.slot]) for each in plan.actions),
    )


def _fixed_starts(problem: ScheduleProblem) -> list[int]:
    """Returns the indices of the kept nodes that start a collective: they stay where they are."""
    return [
        index
        for index, node in enumerate(problem.nodes)
        if collective_of(node) is not None and not is_wait(node) and not is_dialect(node)
    ]


def _fitted(problem: ScheduleProblem, plan: Plan, fixed_before: Sequence[int]) -> Plan | None:
    """Returns the plan with places that are possible in this rank's graph, in the same order.

    Another rank may have other nodes between the collectives, for example to add zeros for a
    gradient that it does not have. Returns None if no places are possible in this order.

    Args:
        problem: this rank's graph.
        plan: the plan of another rank, with indices of kept nodes as slots.
        fixed_before: for each action, how many collectives that stay start before it.
    """
    nodes, slots = len(problem.nodes), problem.slots
    fixed = [-1, *_fixed_starts(problem), nodes - 1]
    lower, upper = [], []
    for action, before in zip(plan.actions, fixed_before, strict=True):
        jobs = [problem.jobs[number] for number in plan.launches[action.launch]]
        ready = [slots[job.earliest] for job in jobs if not job.is_gather]
        used = [slots[job.latest] for job in jobs if job.is_gather]
        if before > len(fixed) - 2:
            return None
        lower.append(max([slots[0], fixed[before] + 1, *ready]))
        upper.append(min([fixed[before + 1], *used]))
    places = [action.slot for action in plan.actions]
    latest = nodes - 1
    for at in reversed(range(len(places))):
        latest = min(latest, upper[at])
        places[at] = min(places[at], latest)
    earliest = 0
    for at, (least, most) in enumerate(zip(lower, upper, strict=True)):
        earliest = max(earliest, least, places[at])
        if earliest > most:
            return None
        places[at] = earliest
    return Plan(
        plan.launches,
        tuple(replace(each, slot=at) for each, at in zip(plan.actions, places, strict=True)),
    )


# --- rewriting ------------------------------------------------------------------------------------
def _apply(graph: fx.Graph, problem: ScheduleProblem, plan: Plan, origin: str) -> int:
    """Rewrites the graph. The slots of `plan` are indices of kept nodes.

    Returns the number of collectives saved, or 1 if nodes only moved.
    """
    before = list(graph.nodes)
    write_plan(graph, problem, plan, origin)
    saved = len(problem.jobs) - len(plan.launches)
    return saved or int(before != list(graph.nodes))
