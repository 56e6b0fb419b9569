"""Duration and peak memory of a planned schedule, without building its graph.

Durations are those of `zpasses.cost.time.step_time.Timeline` on the graph that the plan leads to.
Shards on the host come one after another from the start of the graph, in the order of their
gathers. A gather starts when its shard has come. These copies slow no kernels.
Memory is at least that of `zpasses.cost.memory` there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from zpasses.cost.plan.schedule_problem import Average, Job, ScheduleProblem
from zpasses.cost.time.clock import Clock, CollectiveTiming


class Action(NamedTuple):
    """The start or the wait of a launch."""

    slot: int
    kind: Literal["start", "wait"]
    launch: int
    """Index in `Plan.launches`."""


@dataclass(frozen=True)
class Plan:
    """Which collectives share a launch, and where launches start and are awaited."""

    launches: tuple[tuple[int, ...], ...]
    """The job numbers of each launch."""
    actions: tuple[Action, ...]
    """In the order of the graph. Slots never decrease."""
    routes: frozenset[tuple[int, str]] = frozenset()
    """The launches that copy engines run, as indices in `launches`, with their routes."""


@dataclass(frozen=True)
class Cost:
    """What a plan costs."""

    total_us: float
    exposed_us: float
    """Time in which no kernel runs because a collective is awaited."""
    peak_bytes: int
    averages: int = 0
    """How many launches of averages over replicas are counted."""


def evaluate(
    problem: ScheduleProblem, plan: Plan, *, averages: bool = False, copies: bool = False
) -> Cost:
    """Returns what a plan costs.

    Args:
        averages: count averages over replicas, too (`Job.average`), without their results, which
            the caller holds.
        copies: count copies of gradients to the host, too (`Job.to_host`).
    """
    return Evaluation(problem, plan, averages, copies).cost


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A plan, and what it costs. Its peak is found in less time than its duration."""

    problem: ScheduleProblem
    plan: Plan
    averages: bool = False
    """As for `evaluate`."""
    copies: bool = False
    """As for `evaluate`."""

    @cached_property
    def _costs(self) -> list[LaunchCost]:
        return _costs(self.problem, self.plan)

    @cached_property
    def least_us(self) -> float:
        """What its duration is not below: that of all kernels."""
        moved = sum([cost.start_work_us + cost.wait_work_us for cost in self._costs])
        return self.problem.work_before_us[-1] + moved

    @cached_property
    def peak_bytes(self) -> int:
        return int(_live_bytes(self.problem, self.plan, self._costs).max(initial=0))

    @cached_property
    def cost(self) -> Cost:
        later = None
        if self.problem.has_followers and (self.averages or self.copies):
            later = _Followers(self.problem, self.averages, self.copies)
        clock = _run(self.problem, self.plan, self._costs, later=later)
        launches = later.launches if later is not None else 0
        return Cost(clock.now_us, clock.exposed_us, self.peak_bytes, launches)


def duration_us(problem: ScheduleProblem, plan: Plan, factor: float) -> float:
    """Returns the duration of a plan if collectives take `factor` times as long as predicted."""
    return _run(problem, plan, _costs(problem, plan), factor).now_us


@dataclass(frozen=True)
class LaunchCost:
    """What one launch costs wherever it starts and is awaited."""

    members: tuple[Job, ...]
    start_work_us: float
    """Duration of the kernels at its start."""
    duration_us: float
    """Duration with nothing running beside it."""
    wait_work_us: float
    """Duration of the kernels at its wait."""
    held_bytes: int
    """From its start until its wait, besides the full tensors."""
    full_bytes: int
    """Of the full tensors: of gathers, those that are not there anyway."""
    full_from: int
    """For reductions: the first segment in which nothing else needs any of the full tensors."""
    result_bytes: int
    """For reductions: of the results that live from its start to the end of the graph."""
    ready: int
    """For reductions: the first segment in which all of them may run."""
    unpacked_bytes: int
    """Bytes of the packed tensors that exist beside the copies out of them at the wait."""
    reload_us: float
    """Duration of the copies of shards from the host that end before its start."""


def launch_cost(problem: ScheduleProblem, launch: tuple[int, ...], route: str = "") -> LaunchCost:
    """Returns what a launch of these job numbers costs, by a copy-engine route or, without one, on
    compute units.
    """
    key = launch, route
    found: LaunchCost | None = problem.launch_costs.get(key)
    if found is None:
        members = tuple(problem.jobs[number] for number in launch)
        if route:
            members = tuple(job.on_routes.get(route, job) for job in members)
        first, packed = members[0], members if len(members) > 1 else ()
        flat = first.key.mode == "flat" and first.is_gather
        duration = first.latency_us + sum(job.transfer_us for job in members)
        if route:
            assert problem.engine_us is not None
            parts = [job.full_bytes for job in members]
            duration = problem.engine_us(route, [sum(parts)] if flat else parts, first.ranks)
        found = problem.launch_costs[key] = LaunchCost(
            members,
            first.timing.issue_us
            + sum(job.packing_us[0] for job in packed)
            + sum(job.start_us for job in members),
            duration,
            sum(job.packing_us[1] for job in packed) + sum(job.wait_us for job in members),
            sum(job.packed_bytes for job in packed) + sum(job.launch_bytes for job in members),
            sum(job.ahead_bytes if job.is_gather else job.full_bytes for job in members),
            max(job.held_from for job in members),
            sum(job.result_bytes for job in members),
            max(job.earliest for job in members),
            sum(job.full_bytes for job in packed) if flat else 0,
            sum(job.reload_us for job in members),
        )
    return found


def _costs(problem: ScheduleProblem, plan: Plan) -> list[LaunchCost]:
    """Returns what each launch of a plan costs."""
    if not plan.routes:
        known = problem.launch_costs.get
        return [known((each, "")) or launch_cost(problem, each) for each in plan.launches]
    routes = dict(plan.routes)
    return [
        launch_cost(problem, launch, routes.get(number, ""))
        for number, launch in enumerate(plan.launches)
    ]


def _run(
    problem: ScheduleProblem,
    plan: Plan,
    costs: Sequence[LaunchCost],
    factor: float = 1.0,
    later: _Followers | None = None,
) -> Clock:
    clock, before = Clock(), problem.work_before_us
    here, fixed, reloaded_us = 0, 0, 0.0
    next_fixed = problem.fixed[0].slot if problem.fixed else len(before)

    def run_until(slot: int) -> None:
        """Runs what does not move until a later slot: kernels, and events of `problem.fixed`."""
        nonlocal here, fixed, next_fixed
        if later is not None and later.ready:
            later.start(clock)
        while next_fixed < slot:
            there = next_fixed
            clock.work(before[there] - before[here])
            here, fixed = there, run_fixed_events(clock, problem, there, fixed)
            more = fixed < len(problem.fixed)
            next_fixed = problem.fixed[fixed].slot if more else len(before)
        clock.work(before[slot] - before[here])
        here = slot

    for action in plan.actions:
        if action.slot > here:
            run_until(action.slot)
        cost = costs[action.launch]
        if action.kind == "start":
            if later is not None and later.ready:
                later.start(clock)
            if cost.reload_us:
                reloaded_us += factor * cost.reload_us
                clock.idle_until(reloaded_us)
            clock.work(cost.start_work_us)
            clock.enqueue(action.launch, factor * cost.duration_us, cost.members[0].timing)
        else:
            clock.wait(action.launch)
            clock.work(cost.wait_work_us)
            if later is not None:
                later.add(clock, cost.members)
    run_until(len(problem.work_us))
    if later is not None:
        later.wait(clock)
    return clock


class _Followers:
    """What follows reductions: averages over replicas and copies to the host. Averages of
    reductions that are awaited together share a launch.
    """

    def __init__(self, problem: ScheduleProblem, averages: bool, copies: bool) -> None:
        self._averages, self._copies = averages, copies
        self._first = min((event.number for event in problem.fixed), default=0) - 1
        self._started = 0
        self.launches = 0
        """Of averages."""
        self.ready: dict[str, list[Average]] = {}
        """Averages that have not started, by group."""
        self._copied: list[CollectiveTiming] = []
        """Copies of averages, which start when all averages are awaited."""

    def add(self, clock: Clock, reductions: Iterable[Job]) -> None:
        for job in reductions:
            average = job.average if self._averages else None
            if average is not None:
                self.ready.setdefault(average.group, []).append(average)
            if job.to_host is None or not self._copies:
                continue
            if average is not None:
                self._copied.append(job.to_host)
            else:
                self._enqueue(clock, job.to_host.duration_us, job.to_host)

    def start(self, clock: Clock) -> None:
        for members in self.ready.values():
            timing, latency = members[0].timing, members[0].latency_us
            moved = sum(max(0.0, each.timing.duration_us - latency) for each in members)
            self._enqueue(clock, latency + moved, timing)
            self.launches += 1
        self.ready.clear()

    def _enqueue(self, clock: Clock, duration_us: float, timing: CollectiveTiming) -> None:
        clock.work(timing.issue_us)
        clock.enqueue(self._first - self._started, duration_us, timing)
        self._started += 1

    def wait(self, clock: Clock) -> None:
        self.start(clock)
        self._wait_for_all(clock)
        for timing in self._copied:
            self._enqueue(clock, timing.duration_us, timing)
        self._wait_for_all(clock)

    def _wait_for_all(self, clock: Clock) -> None:
        for number in range(self._started):
            clock.wait(self._first - number)


def run_fixed_events(clock: Clock, problem: ScheduleProblem, slot: int, at: int) -> int:
    """Runs the events of a slot that do not move, the first of which is `problem.fixed[at]`.

    Returns the index of the first event of a later slot.
    """
    while at < len(problem.fixed) and problem.fixed[at].slot == slot:
        event, at = problem.fixed[at], at + 1
        if event.timing is None:
            clock.wait(event.number)
        else:
            timing = event.timing
            clock.work(timing.issue_us)
            clock.enqueue(event.number, timing.duration_us, timing)
    return at


def live_bytes(problem: ScheduleProblem, plan: Plan) -> np.ndarray:
    """Returns the largest live memory in each segment."""
    return _live_bytes(problem, plan, _costs(problem, plan))


def _live_bytes(problem: ScheduleProblem, plan: Plan, costs: Sequence[LaunchCost]) -> np.ndarray:
    """As `live_bytes`: what is alive without any launch, and what each holds. A plan has all jobs
    of the problem, and its gathers start where they are needed at the latest.
    """
    changes = [0] * (len(problem.slots) + 1)
    starts: dict[int, int] = {}
    here, started_here = -1, 0
    for slot, kind, launch in plan.actions:
        if slot != here:
            here, started_here = slot, 0
        if kind == "start":
            starts[launch] = here
            started_here += 1
            continue
        start, cost = starts[launch], costs[launch]
        changes[start] += cost.held_bytes
        changes[slot] += cost.unpacked_bytes
        changes[slot + 1] -= cost.held_bytes + cost.unpacked_bytes
        if cost.members[0].is_gather:
            changes[start] += cost.full_bytes
            continue
        # What starts in the same slot before the wait exists beside what the wait frees, and so do
        # gradients beside the packed copy of them.
        packs = start == slot and len(cost.members) > 1 and bool(cost.members[0].packed_bytes)
        end = slot + int(packs or started_here > int(start == slot))
        # A result exists beside the input that its wait frees.
        made = start - int(start == slot)
        if cost.ready <= made:
            changes[made] += cost.result_bytes
        else:
            for job in cost.members:
                changes[max(job.earliest, made)] += job.result_bytes
        if cost.full_from <= end:
            changes[end] -= cost.full_bytes
            continue
        for job in cost.members:
            changes[max(job.held_from, end)] -= job.full_bytes
    return np.asarray(problem.held_bytes + np.cumsum(np.array(changes[:-1], dtype=np.int64)))
