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

Copies of shards from the host move last: each starts ahead of its gather, which waits for it. So
do copies of gradients to the host: each starts when its gradient is reduced.

Contract: the order of all other nodes stays. Results stay equal bit for bit. The graph's peak
memory stays within the budget, as modelled by `zpasses.cost.memory`. The plan is the fastest that
`zpasses.cost.plan.schedule_planner` finds for the target, or, with `plan=one-ahead` and
`plan=single`, one that needs no figures of the target. By the model, the planned one is never
slower than these in the same memory. All ranks use the plan of the first rank, so the order of
collectives is the same on all of them. With `reduction_group=own`, gradient reductions move to a
second process group of the same ranks. On targets with copy engines, the plan chooses the route of
every launch of gathers; whether a group can take it is decided at run time by a vote
(`zpasses.sdma`), with its other routes and then the functional collective as fallbacks. The tag of
every gather holds the reason.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch import fx

from zpasses import compat
from zpasses.cost.memory.collective_moves import equal_liveness, movable_collectives
from zpasses.cost.memory.liveness import NOTABLE_BYTES
from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.bucket_keys import compatibility_key
from zpasses.cost.plan.plan_improvement import choose_routes, engine_launches, on_route
from zpasses.cost.plan.schedule_evaluation import Action, Cost, Plan, evaluate, launch_cost
from zpasses.cost.plan.schedule_planner import Planned, memory_limit, plan_schedule
from zpasses.cost.plan.schedule_problem import ScheduleProblem, problem_of
from zpasses.cost.plan.simple_plans import CAP_BYTES, SIMPLE_PLANS, simple_plans
from zpasses.cost.time.fused_kernels import fuses
from zpasses.cost.time.route_figures import engine_routes, planned_routes, route_figures
from zpasses.cost.time.target import current_target
from zpasses.errors import OptionError
from zpasses.graph.host_copies import FROM_HOST, split_shard_copies
from zpasses.graph.patterns import tag_foreign_gathers
from zpasses.graph.queries import collective_of, is_dialect, is_wait
from zpasses.graph.reduction_groups import regroup_reductions, replicate_groups
from zpasses.option_values import MemoryBudget, format_size, parse_budget
from zpasses.passes.writers.schedule_writer import copied, exact_cost, write_plan
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.events import note
from zpasses.pipeline.facts import Facts
from zpasses.ranks.agree import adopt
from zpasses.ranks.new_groups import reduction_group
from zpasses.sdma.engine_gathers import note_route

_MIB = float(1 << 20)
_MOST_ROUTES = 400
"""Most changes of the route of a launch that are tried for a simple plan."""
_MARGIN = 500
"""Part of a budget by which a graph may exceed its plan unsaid: kernels may differ in it."""
_NEAR = 20
"""Part of a limit above which a peak is counted exactly."""
_log = logging.getLogger("zpasses")


@dataclass(frozen=True)
class Schedule(Pass):
    """Merge and move collectives by a plan within a memory budget."""

    name: ClassVar[str] = "schedule"
    level: ClassVar[Level] = Level.PARTITIONED

    plan: Literal["auto", "one-ahead", "single"] = "auto"
    """`auto` searches the fastest plan for the target. `one-ahead` starts each gather where the one
    before it has arrived, and awaits each reduction where the next one has started. `single` awaits
    every collective where it starts."""
    cap_mb: float | None = None
    """Largest size of the full tensors in one launch of `one-ahead` and `single`, in MiB; 0 merges
    nothing, and `none` allows 25. It is halved until the peak is within the budget. `auto` refuses
    it, because it searches sizes itself."""
    memory_budget: str = "30%"
    """By how much the graph's peak memory may rise (`10%`, `+16MiB`, or `25% up to 4GiB`, which
    has both limits), or the peak that it may reach (`60GiB`). A rise counts from the peak with one
    gather and one reduction in flight, or from a given one (`10% of 50GiB`). A peak below that of
    the graph without overlap counts as that of the graph."""
    mode: Literal["auto", "coalesced", "flat"] = "auto"
    """`coalesced` starts several tensors in one launch, and `flat` packs them into one tensor.
    `auto` takes the cheapest choice by the cost model of the target, which may be not to merge."""
    copy_engines: Literal["auto", "on", "off"] = "auto"
    """Whether the plan may have copy engines run gathers of a group on one node. `auto` chooses
    among mori, where the target has it, and routes with measured figures; `on` uses the target's
    other routes where these are missing."""
    reduction_group: Literal["shared", "own"] = "shared"
    """`own` runs gradient reductions on a second process group of the same ranks, beside
    all-gathers instead of in one queue with them. `shared` leaves them on their group. Graphs with
    at most one gather and one reduction always leave them there."""

    def __post_init__(self) -> None:
        parse_budget(self.memory_budget, f"pass {self.name!r}, option 'memory_budget'")
        where = f"pass {self.name!r}, option 'cap_mb': got {self.cap_mb}"
        if self.cap_mb is not None and not self.cap_mb >= 0:
            raise OptionError(
                f"{where}; expected MiB >= 0 (0: every collective has a launch of its own)."
            )
        if self.cap_mb is not None and self.plan == "auto":
            raise OptionError(
                f"{where} with plan=auto, which chooses the size of each launch itself. Leave it "
                "out, or set plan=one-ahead or plan=single."
            )

    @property
    def facts(self) -> Facts:
        searches = self.plan == "auto"
        return Facts(
            votes=True,
            uses_engines=self._uses_engines(),
            cacheable=self.reduction_group == "shared",
            plans_within=self.memory_budget if searches else None,
            # The plan of the blocks chooses routes.
            without_schedule=(
                "schedule{plan=single,cap_mb=1e6,memory_budget=1000%,copy_engines=off}"
            ),
        )

    def _uses_engines(self) -> bool:
        if self.copy_engines == "auto":
            return bool(planned_routes(current_target()))
        return self.copy_engines == "on"

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of collectives saved, or 1 if nodes only moved."""
        if self.copy_engines == "on" and not engine_routes(current_target()):
            note(
                f"{self.name}: copy_engines=on does nothing, because {current_target().name} has "
                "no route for copy engines"
            )
        tag_foreign_gathers(graph, origin=self.name)
        changes, limit_bytes = self._move_collectives(graph)
        copies, copies_limit = self._move_shard_copies(graph, limit_bytes)
        self._warn_over_budget(graph, copies_limit)
        return changes + copies

    def _move_shard_copies(
        self, graph: fx.Graph, limit_bytes: int | None
    ) -> tuple[int, int | None]:
        """Starts the copies of shards from the host ahead of their gathers, and awaits those of
        gradients to the host after their reductions, which stay. Returns how many there are, and
        the largest allowed peak if it had to be known. They are no collectives, so ranks need not
        agree.

        Args:
            limit_bytes: the largest allowed peak; None takes that of the memory budget.
        """
        copies = split_shard_copies(graph, self.name)
        if copies:
            found = movable_collectives(graph)
            moved = [item for item in found if item.tag.role == "reload" or item.started in copies]
            reloads = sum(item.is_gather for item in moved)
            problem = problem_of(graph, current_target(), items=moved)
            planned = self.choose(problem, limit_bytes)
            limit_bytes = planned.limit_bytes
            _apply(graph, problem, _by_node(problem, planned.plan), self.name)
            cost = planned.cost
            note(
                f"{self.name}: {_named_copies(reloads, len(moved) - reloads)}; predicted "
                f"{cost.total_us / 1e3:,.2f} ms; peak {_peak(planned)}"
            )
        return len(copies), limit_bytes

    def _move_collectives(self, graph: fx.Graph) -> tuple[int, int | None]:
        """Returns the number of changes, and the largest allowed peak if it had to be known."""
        problem = self.problem(graph)
        if not problem.jobs:
            return 0, None
        collectives = [item for item in problem.items if not item.is_host_copy]
        gathers = sum(item.is_gather for item in collectives)
        few = gathers < 2 and len(collectives) - gathers < 2
        if few and (collectives or len(problem.jobs) < 2):
            # Such a plan is equal on all ranks without a vote. Ranks may compile such graphs
            # without the others, inside windows of gradient accumulation.
            simple = SIMPLE_PLANS["one-ahead" if self.plan == "auto" else self.plan]
            plan = _by_node(problem, simple(problem, None))
            return _apply(graph, problem, plan, self.name), None
        planned = self.choose(problem)
        plan = _by_node(problem, planned.plan)
        adopted, agreed_groups = _agree_on_plan(problem, plan, str(self))
        if adopted is None:
            _log.warning(
                "%s: the plan of the first rank does not fit this rank's graph, in which the "
                "consumers of collectives have another order. Nothing moves.",
                self.name,
            )
            return self._regroup(graph, problem, agreed_groups), planned.limit_bytes
        reasons = _routes(problem, planned.plan, adopted)
        changes = _apply(graph, problem, adopted, self.name, reasons)
        # The planner counts the copies of flat launches from above.
        planned = replace(planned, cost=exact_cost(graph, problem, current_target()))
        note(f"{self.name}: {_summary(problem, planned, adopted)}")
        regrouped = self._regroup(graph, problem, agreed_groups)
        return changes or min(regrouped, 1), planned.limit_bytes

    def problem(self, graph: fx.Graph) -> ScheduleProblem:
        """Returns the graph as the planner sees it."""
        return problem_of(
            graph,
            current_target(),
            self.mode,
            second_group=self.reduction_group == "own",
            copy_engines=self._uses_engines(),
        )

    def choose(self, problem: ScheduleProblem, limit_bytes: int | None = None) -> Planned:
        """Returns the plan that this rank would make.

        Args:
            limit_bytes: the largest allowed peak; None takes that of the memory budget.
        """
        most = self._budget().most_bytes
        limit = memory_limit(problem, self._budget()) if limit_bytes is None else limit_bytes
        plans: Iterable[tuple[Plan, Cost]]
        if self.plan == "auto":
            planned = plan_schedule(problem, limit if most is None else min(limit, most))
            ours = [(planned.plan, planned.cost)]
            if planned.cost.peak_bytes > planned.limit_bytes < limit:
                planned = plan_schedule(problem, limit)
                ours.append((planned.plan, planned.cost))
            plans = sorted((*ours, *planned.simple), key=lambda each: each[1].total_us)
        else:
            cap_bytes = CAP_BYTES if self.cap_mb is None else self.cap_mb * _MIB
            simple = list(simple_plans(problem, self.plan, cap_bytes))
            plans = (self._with_routes(problem, each, limit) for each in simple)
            last = simple[-1], evaluate(problem, simple[-1])
            planned = Planned(*last, schedule_bound_us(problem), limit)
        found = self._first_fitting(problem, plans, limit if most is None else most)
        return planned if found is None else replace(planned, plan=found[0], cost=found[1])

    def _with_routes(
        self, problem: ScheduleProblem, plan: Plan, limit_bytes: int
    ) -> tuple[Plan, Cost]:
        """Returns a simple plan whose launches take the routes that gain, and its cost."""

        def rank(each: Plan) -> tuple[float, ...]:
            cost = evaluate(problem, each)
            return max(0, cost.peak_bytes - limit_bytes), cost.total_us

        chosen = choose_routes(problem, plan, rank, _MOST_ROUTES)
        return chosen, evaluate(problem, chosen)

    def _first_fitting(
        self, problem: ScheduleProblem, plans: Iterable[tuple[Plan, Cost]], limit_bytes: int
    ) -> tuple[Plan, Cost] | None:
        """Returns the first plan within a limit, and its cost. A peak near the limit is judged on a
        copy of the graph: the planner counts flat gathers from above, and other kernels may be
        fused once launches and waits stand between them. So are flat gathers: where kernels compute
        their copies, all that was gathered stays until the last of them.
        """
        near = limit_bytes - limit_bytes // _NEAR
        for plan, cost in plans:
            if cost.peak_bytes > near or (fuses() and _has_flat_gathers(problem, plan)):
                graph, copy = copied(problem)
                write_plan(graph, copy, _by_node(problem, plan), self.name)
                cost = exact_cost(graph, copy, current_target())
            if cost.peak_bytes <= limit_bytes:
                return plan, cost
        return None

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

    def _warn_over_budget(self, graph: fx.Graph, limit_bytes: int | None) -> None:
        """Warn if the plan that all ranks share, made for another graph with these collectives,
        exceeds this rank's budget. Ranks must still follow it. Without a budget of the program's,
        that is only noted, because programs that train and evaluate have such graphs. Warn also if
        no plan fits a budget in bytes, by however little.

        Args:
            graph: what was written.
            limit_bytes: the largest peak that a plan was allowed; None if none was made.
        """
        given = self._budget().most_bytes
        if given is None and limit_bytes is None:
            return
        peak, allowed = equal_liveness(graph).peak_bytes, max(given or 0, limit_bytes or 0)
        margin = NOTABLE_BYTES if given is None else allowed // _MARGIN
        if given is not None and given < peak and (limit_bytes is None or peak <= allowed):
            _log.warning(
                "%s: the peak of this graph is %s, %s above the memory budget of %s, because it "
                "holds as much even if every collective is awaited where it starts. Raise "
                "memory_budget, or take a smaller batch.",
                self.name,
                format_size(peak),
                format_size(peak - given),
                format_size(given),
            )
        elif limit_bytes is not None and peak > allowed + margin:
            default = parse_budget(Schedule.memory_budget, self.name)
            is_default = replace(self._budget(), of_bytes=None) == default
            _log.log(
                logging.INFO if is_default else logging.WARNING,
                "%s: all ranks use the plan that the first rank made when these collectives were "
                "first compiled: in another graph, such as that of training, or for other shapes. "
                "In this graph, such as that of an evaluation, it raises the peak to %s, "
                "%s above the budget. Where that is too much, set memory_budget to a size, "
                "or compile the graph with the smaller peak first.",
                self.name,
                format_size(peak),
                format_size(peak - allowed),
            )


def _has_flat_gathers(problem: ScheduleProblem, plan: Plan) -> bool:
    firsts = [problem.jobs[members[0]] for members in plan.launches if len(members) > 1]
    return any(job.is_gather and job.key.mode == "flat" for job in firsts)


def _named_copies(inward: int, outward: int) -> str:
    to_host = f"{outward:,} copies to the host"
    from_host = f"{inward:,} copies from the host"
    return ", ".join([*[from_host] * bool(inward), *[to_host] * bool(outward)])


def _summary(problem: ScheduleProblem, planned: Planned, adopted: Plan) -> str:
    first = [members[0] for members in adopted.launches]
    copies = sum(problem.items[job].is_host_copy for job in first)
    gathers = sum(
        problem.jobs[job].is_gather for job in first if not problem.items[job].is_host_copy
    )
    with_copies = f", {copies:,} copies to or from the host" if copies else ""
    cost = planned.cost
    # The planner knows no chains of collectives, so what completes a reduction takes no time.
    averages = replicate_groups(problem.nodes[-1].graph)
    later = "without the averages over replicas or nodes, which are inserted later"
    without = f" {later}" if averages else ""
    by_engine = f"{_by_engines(problem, adopted)}; " if problem.routes else ""
    return (
        f"{len(problem.jobs) - copies:,} collectives in launches: {gathers:,} of gathers and "
        f"{len(first) - gathers - copies:,} of reductions{with_copies}; {by_engine}predicted "
        f"{cost.total_us / 1e3:,.2f} ms, bound {planned.bound_us / 1e3:,.2f} ms{without}; "
        f"peak {_peak(planned)}"
    )


def _by_engines(problem: ScheduleProblem, plan: Plan) -> str:
    count = Counter(route for _, route in plan.routes)
    each = ", ".join(f"{count[route]:,} {route}" for route in problem.routes)
    return f"{count.total():,} by copy engines" + (f" ({each})" if len(problem.routes) > 1 else "")


def _peak(planned: Planned) -> str:
    return f"{format_size(planned.cost.peak_bytes)} of {format_size(planned.limit_bytes)}"


def _routes(problem: ScheduleProblem, ours: Plan, adopted: Plan) -> dict[tuple[int, ...], str]:
    """Returns the reason for the route of each launch that a copy engine could run.

    Args:
        problem: this rank's graph.
        ours: what this rank would do.
        adopted: what all ranks do. If its launches are others, this rank cannot tell what they
            gain.
    """
    if ours.launches != adopted.launches:
        by_first = "as the first rank plans"
        return {adopted.launches[at]: f"by {route}: {by_first}" for at, route in adopted.routes}
    plan, found = replace(ours, routes=adopted.routes), dict[tuple[int, ...], str]()
    for number, routes in engine_launches(problem, plan).items():
        launch = plan.launches[number]
        without = evaluate(problem, on_route(plan, number, "")).total_us
        size = format_size(sum(problem.items[job].tag.nbytes for job in launch))
        texts = []
        for route in routes:
            gain = without - evaluate(problem, on_route(plan, number, route)).total_us
            took = launch_cost(problem, launch, route).duration_us
            taken = (number, route) in plan.routes
            effect = f"{'gain' if gain >= 0 else 'lose'}{'s' if taken else ''} {abs(gain):.0f} us"
            texts.append(
                f"{'by' if taken else 'not by'} {route}: {size} per rank in {took:.0f} us, "
                f"{'' if taken else 'would '}{effect}"
            )
        found[launch] = "; ".join(sorted(texts))  # "by" comes before "not by"
    return found


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
    order, described, groups = _described(problem)
    number = {at: place for place, at in enumerate(order)}
    fixed = _fixed_starts(problem)
    mine: list[Any] = [
        [[number[at] for at in members] for members in plan.launches],
        [
            # With the number of collectives that stay and start before: all ranks must share it.
            [each.slot, each.kind, each.launch, bisect_left(fixed, each.slot)]
            for each in plan.actions
        ],
        sorted(plan.routes),
    ]
    target = current_target()
    (launches, actions, routes), agreed_groups = adopt(
        dict.fromkeys([*groups, *replicate_groups(problem.nodes[-1].graph)]),
        "the schedule",
        (options, described),
        mine,
        planned_for=(target, route_figures(target)) if problem.routes else target,
    )
    adopted = Plan(
        tuple(tuple(order[each] for each in members) for members in launches),
        tuple(Action(at, kind, launch) for at, kind, launch, _ in actions),
        frozenset((number, route) for number, route in routes),
    )
    return _fitted(problem, adopted, [before for *_, before in actions]), agreed_groups


def _described(problem: ScheduleProblem) -> tuple[list[int], list[tuple[Any, ...]], list[str]]:
    """Returns the order in which a plan numbers the collectives of a graph, their descriptions in
    this order, and their groups.

    The order is not that of the graph. Ranks whose shapes differ may have reductions in another
    order: a product of a batch of one row has its bias added by another operator, so that backward
    reaches bias and weight the other way round.
    """
    texts, groups = [], []
    for item, job in zip(problem.items, problem.jobs, strict=True):
        how: tuple[Any, ...] = (item.tag.role,)
        group = None
        if not item.is_host_copy:  # every rank of a group copies the same values to the host
            key = compatibility_key(item)
            group = str(key[1])
            how = (key[0], len(compat.group_ranks(key[1])), tuple(map(str, key[2:])))
        on_host = any(node.target is FROM_HOST for node in item.inputs)
        texts.append((*how, item.tag.params, item.full_bytes, job.resident, on_host))
        groups.append(group)
    order = sorted(range(len(texts)), key=lambda at: repr(texts[at]))
    # Groups by number, because their names differ between the replicas of hybrid sharding.
    names = list(dict.fromkeys(groups[at] for at in order))
    described = [(*texts[at], groups[at] and names.index(groups[at])) for at in order]
    return order, described, [compat.parent_group(name) for name in names if name is not None]


def _by_node(problem: ScheduleProblem, plan: Plan) -> Plan:
    """Returns the plan with indices of kept nodes as slots."""
    actions = tuple(each._replace(slot=problem.slots[each.slot]) for each in plan.actions)
    return replace(plan, actions=actions)


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
    actions = zip(plan.actions, places, strict=True)
    return replace(plan, actions=tuple(each._replace(slot=at) for each, at in actions))


# --- rewriting ------------------------------------------------------------------------------------
def _apply(
    graph: fx.Graph,
    problem: ScheduleProblem,
    plan: Plan,
    origin: str,
    reasons: Mapping[tuple[int, ...], str] = MappingProxyType({}),
) -> int:
    """Rewrites the graph.

    Args:
        graph: the graph to edit.
        problem: what was read of it.
        plan: its slots are indices of kept nodes.
        origin: name of the pass, for tags.
        reasons: of the routes of launches, for tags.

    Returns:
        The number of collectives saved, or 1 if nodes only moved or changed their route.
    """
    before = list(graph.nodes)
    launches = write_plan(graph, problem, plan, origin)
    for members, launch in zip(plan.launches, launches, strict=True):
        if members in reasons:
            note_route(launch.collective, reasons[members], origin)
    saved = len(problem.jobs) - len(plan.launches)
    return saved or int(bool(plan.routes) or before != list(graph.nodes))
