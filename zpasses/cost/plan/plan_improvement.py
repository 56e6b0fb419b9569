"""Improve a plan by small changes of its launches, and by their routes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from random import Random
from typing import Any, NamedTuple

from zpasses.cost.plan.schedule_evaluation import Action, Plan
from zpasses.cost.plan.schedule_problem import Job, ScheduleProblem

Rank = tuple[Any, ...]


def improve_plan(
    problem: ScheduleProblem,
    plan: Plan,
    rank: Callable[[Plan], Rank],
    most: int,
    limit_bytes: int,
) -> list[Plan]:
    """Changes a plan at one place after another, by simulated annealing.

    A start or a wait moves to another slot, a launch takes members of a neighbour or all of it,
    some members get a launch of their own, or a gather takes another route. On the way to better
    plans, some may be slower, or exceed the limit, which counts more and more the longer it takes.
    The changes are drawn with a fixed seed, so the result depends on nothing but the arguments.

    Args:
        problem: the graph.
        plan: the plan to improve.
        rank: how good a plan is; lower is better. First come the bytes above the limit, then the
            duration, or what counts as it.
        most: how many changes to draw. Those that are not possible cost little. A plan without
            launches takes none.
        limit_bytes: the limit that `rank` knows.

    Returns:
        Plans of which each is better than those before it; none if the given one is best.
    """
    return _LocalSearch(problem, plan).run(rank, most, limit_bytes)


def priced(rank: Rank, limit_bytes: int, weight: float = 1.0) -> float:
    """Returns the duration of a plan, and more for each byte above the limit."""
    excess, duration_us, *_ = rank
    return float(duration_us * (1 + weight * _EXCESS * excess / max(1, limit_bytes)))


def choose_routes(
    problem: ScheduleProblem, plan: Plan, rank: Callable[[Plan], Rank], most: int
) -> Plan:
    """Changes the routes of launches of gathers as long as the plan gets better.

    Args:
        problem: the graph.
        plan: the plan to improve.
        rank: as for `improve_plan`.
        most: how many plans to try at most.
    """
    best, tried, changed = rank(plan), 0, bool(problem.routes)
    while changed:
        changed = False
        for number, routes in engine_launches(problem, plan).items():
            for route in ("", *routes):
                if dict(plan.routes).get(number, "") == route:
                    continue
                if tried >= most:
                    return plan
                tried += 1
                other = on_route(plan, number, route)
                found = rank(other)
                if found < best:
                    plan, best, changed = other, found, True
    return plan


def engine_launches(problem: ScheduleProblem, plan: Plan) -> dict[int, tuple[str, ...]]:
    """Returns the launches that copy engines can run, with the routes that each can take."""
    return {
        number: tuple(routes)
        for number, launch in enumerate(plan.launches)
        if (routes := problem.jobs[launch[0]].on_routes)
    }


def on_route(plan: Plan, number: int, route: str) -> Plan:
    """Returns the plan with another route for a launch; "" for compute units."""
    others = {each for each in plan.routes if each[0] != number}
    return replace(plan, routes=frozenset(others | ({(number, route)} if route else set())))


class _Place(NamedTuple):
    slot: int
    order: float
    """Among the starts and waits of the slot: from 0 to 1."""


@dataclass(frozen=True)
class _Launch:
    members: tuple[int, ...]
    """Job numbers, in order."""
    start: _Place
    wait: _Place
    route: str
    """"" for compute units."""


_members = attrgetter("members")


class _LocalSearch:
    def __init__(self, problem: ScheduleProblem, plan: Plan) -> None:
        self._problem, self._random = problem, Random(0)
        self._keys = [job.launch_key for job in problem.jobs]
        self._launches = sorted(_launches_of(plan), key=_members)
        slots = {action.slot for action in plan.actions}
        slots.update(slot for job in problem.jobs for slot in (job.earliest, job.latest))
        self._slots = sorted(slots)
        """Where something can become possible or impossible."""

    def run(self, rank: Callable[[Plan], Rank], most: int, limit_bytes: int) -> list[Plan]:
        best = current = rank(_plan_of(self._launches))
        launches_of_best, better = self._launches, []
        for drawn in range(most if self._launches else 0):
            done = drawn * _CYCLES % most / most
            if done < _CYCLES / most:
                current, self._launches = best, launches_of_best
            launches = self._changed()
            if launches is None:
                continue
            plan = _plan_of(launches)
            found = rank(plan)
            weight = _EXCESS_GROWS**done
            slower = priced(found, limit_bytes, weight) - priced(current, limit_bytes, weight)
            if found < best or self._accepts(slower, _TOLERATED * (1 - done) * best[1]):
                current, self._launches = found, launches
            if found < best:
                best, launches_of_best = found, launches
                better.append(plan)
        return better

    def _accepts(self, slower_us: float, tolerated_us: float) -> bool:
        """Whether to go on with a plan that takes so much longer than the one before it."""
        if slower_us < 0:
            return True
        return self._random.random() < math.exp(-slower_us / max(tolerated_us, 1e-9))

    def _changed(self) -> list[_Launch] | None:
        """Returns the launches with one change; None if what was drawn is impossible."""
        number = self._random.randrange(len(self._launches))
        move = self._random.choice(_MOVES[bool(self._problem.routes)])
        changed = move(self, number)
        if changed is None or not all(map(self._is_possible, changed.values())):
            return None
        launches = dict(enumerate(self._launches)) | changed
        return sorted((each for each in launches.values() if each.members), key=_members)

    def _is_possible(self, launch: _Launch) -> bool:
        jobs = self._jobs(launch)
        return not jobs or (
            _first_start(jobs) <= launch.start.slot
            and not (jobs[0].is_gather and launch.start.slot in self._problem.inside_kernels)
            and launch.start < launch.wait
            and launch.wait.slot <= _last_wait(jobs)
        )

    def _jobs(self, launch: _Launch) -> list[Job]:
        return [self._problem.jobs[number] for number in launch.members]

    # --- changes: each returns the launches that change, by their number ------------------------
    def _move_start(self, number: int) -> dict[int, _Launch] | None:
        launch = self._launches[number]
        start = self._near(launch.start)
        return None if start is None else {number: replace(launch, start=start)}

    def _move_wait(self, number: int) -> dict[int, _Launch] | None:
        launch = self._launches[number]
        wait = self._near(launch.wait)
        return None if wait is None else {number: replace(launch, wait=wait)}

    def _near(self, place: _Place) -> _Place | None:
        """Returns a place in the same slot or, less often the farther it is, in another."""
        distance = int(self._random.expovariate(_NEAR)) * self._random.choice((-1, 1))
        at = bisect_left(self._slots, place.slot) + distance
        return self._at(self._slots[at]) if 0 <= at < len(self._slots) else None

    def _at(self, slot: int) -> _Place:
        return _Place(slot, self._random.random())

    def _move_members(self, number: int) -> dict[int, _Launch] | None:
        """Moves the first or the last members of a launch, or all of them, to a neighbour among
        those that can share a launch with it.
        """
        keys = [self._keys[launch.members[0]] for launch in self._launches]
        alike = [each for each, key in enumerate(keys) if key == keys[number]]
        distance = int(1 + self._random.expovariate(_NEAR_LAUNCHES))
        at = alike.index(number) + distance * self._random.choice((-1, 1))
        if not 0 <= at < len(alike):
            return None
        to = alike[at]
        giver, taker = self._launches[number], self._launches[to]
        count = len(giver.members)
        if self._random.random() >= _WHOLE:
            count = self._random.randint(1, count)
        kept, moved = self._cut(giver, count)
        taker = replace(taker, members=tuple(sorted((*taker.members, *moved))))
        return {number: replace(giver, members=kept), to: self._settled(taker)}

    def _split(self, number: int) -> dict[int, _Launch] | None:
        """Gives the first or the last members of a launch one of their own."""
        launch = self._launches[number]
        if len(launch.members) < 2:
            return None
        kept, moved = self._cut(launch, self._random.randrange(1, len(launch.members)))
        first, second = (replace(launch, members=each) for each in (kept, moved))
        jobs = self._jobs(second)
        if jobs[0].is_gather:
            second = replace(second, wait=self._at(_last_wait(jobs)))
        else:
            second = replace(second, start=self._at(_first_start(jobs)))
        return {number: first, len(self._launches): second}

    def _change_route(self, number: int) -> dict[int, _Launch] | None:
        launch = self._launches[number]
        routes = ("", *self._problem.jobs[launch.members[0]].on_routes)
        others = [route for route in routes if route != launch.route]
        if not others:
            return None
        route = others[0] if len(others) == 1 else self._random.choice(others)
        return {number: replace(launch, route=route)}

    def _cut(self, launch: _Launch, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the members without the first or the last `count` of them, and these."""
        if self._random.random() < 0.5:
            return launch.members[count:], launch.members[:count]
        return launch.members[:-count], launch.members[-count:]

    def _settled(self, launch: _Launch) -> _Launch:
        """Returns a launch with new members, which starts and is awaited where these allow it."""
        jobs = self._jobs(launch)
        start, wait = launch.start, launch.wait
        if start.slot < _first_start(jobs):
            start = self._at(_first_start(jobs))
        if wait.slot > _last_wait(jobs):
            wait = self._at(_last_wait(jobs))
        if start >= wait and jobs[0].is_gather:
            start = _Place(wait.slot, wait.order * self._random.random())
        elif start >= wait:
            wait = _Place(start.slot, 1 - (1 - start.order) * self._random.random())
        return replace(launch, start=start, wait=wait)


_MEMBERS = _LocalSearch._move_members, _LocalSearch._move_members, _LocalSearch._split
_PLACES = _LocalSearch._move_start, _LocalSearch._move_start, _LocalSearch._move_wait
_MOVES = {
    False: (*_MEMBERS, *_PLACES),
    True: (*_MEMBERS, *_PLACES, _LocalSearch._change_route),
}
"""What is drawn, by whether copy engines can run gathers. A wait gains less often than a start."""
_NEAR, _NEAR_LAUNCHES = 0.3, 1.0
"""Parameters of the exponential distributions of distances, in slots and in launches."""
_WHOLE = 0.3
"""How often all members of a launch move, besides when the number that is drawn says so."""
_TOLERATED = 0.001
"""Share of the duration that a change may cost at first and is still accepted by one in e."""
_EXCESS, _EXCESS_GROWS = 3.0, 100.0
"""By how many times its duration a plan counts as slower that takes twice the limit; at the end of
a search it is so many times more."""
_CYCLES = 3
"""How often the search begins anew from the best plan."""


def _first_start(jobs: Iterable[Job]) -> int:
    return max(job.earliest for job in jobs)


def _last_wait(jobs: Iterable[Job]) -> int:
    return min(job.latest for job in jobs)


def _launches_of(plan: Plan) -> list[_Launch]:
    places = {
        (action.kind, action.launch): _Place(action.slot, at / len(plan.actions))
        for at, action in enumerate(plan.actions)
    }
    routes = dict(plan.routes)
    return [
        _Launch(
            members,
            places["start", number],
            places["wait", number],
            routes.get(number, ""),
        )
        for number, members in enumerate(plan.launches)
    ]


def _plan_of(launches: list[_Launch]) -> Plan:
    places: list[tuple[_Place, Action]] = []
    for number, launch in enumerate(launches):
        places.append((launch.start, Action(launch.start.slot, "start", number)))
        places.append((launch.wait, Action(launch.wait.slot, "wait", number)))
    places.sort(key=lambda each: each[0])
    return Plan(
        tuple(launch.members for launch in launches),
        tuple(action for _, action in places),
        frozenset((number, each.route) for number, each in enumerate(launches) if each.route),
    )
