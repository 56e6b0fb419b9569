"""Plans that need no search: every collective where it is needed, or some launches ahead of that.

All can merge neighbours into launches up to a size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter

from zpasses.cost.plan.schedule_evaluation import Action, Plan
from zpasses.cost.plan.schedule_problem import Job, ScheduleProblem

Launches = tuple[tuple[int, ...], ...]
"""The job numbers of each launch."""

CAP_BYTES = 25 << 20
"""Usual cap of a launch, as the bucket size of torch's DistributedDataParallel."""


def merged_neighbours(
    problem: ScheduleProblem, most: float, size: Callable[[Job], float] = attrgetter("full_bytes")
) -> Launches:
    """Merges collectives that follow each other and can share a launch.

    Args:
        problem: the graph.
        most: largest size of a merged launch.
        size: the size of a member: by default the bytes of the full tensor.
    """
    launches: list[list[int]] = []
    open_launches: dict[Hashable, tuple[list[int], float]] = {}
    for job in problem.jobs:
        key, more = job.launch_key, size(job)
        members, total = open_launches.get(key, ([], 0.0))
        if not members or total + more > most:
            members, total = [], 0.0
            launches.append(members)
        members.append(job.number)
        open_launches[key] = members, total + more
    return tuple(map(tuple, launches))


def single_plan(problem: ScheduleProblem, launches: Launches | None = None) -> Plan:
    """Returns the plan in which every launch is awaited where it starts. Where a gradient is ready
    and a parameter is needed, the reduction comes first: it frees the full gradient.

    Args:
        problem: the graph.
        launches: None gives every collective a launch of its own.
    """
    return _Placed(problem, _launches(problem, launches)).ahead(0)


def one_ahead_plan(problem: ScheduleProblem, launches: Launches | None = None) -> Plan:
    """Returns `ahead_plan` with one more gather and reduction in flight than is awaited."""
    return ahead_plan(problem, _launches(problem, launches), 1)


def ahead_plan(problem: ScheduleProblem, launches: Launches, ahead: int) -> Plan:
    """Returns the plan with so many more gathers and reductions in flight than are awaited: each
    gather starts where the one before these was awaited, and each reduction is awaited where the
    one after these has started.

    Args:
        problem: the graph.
        launches: the collectives that start together.
        ahead: with 0, it is `single_plan`.
    """
    return _Placed(problem, launches).ahead(ahead)


class _Placed:
    """Launches in the order of the places where they are needed or ready."""

    def __init__(self, problem: ScheduleProblem, launches: Launches) -> None:
        self._end = problem.end
        gathers: list[tuple[int, tuple[int, ...]]] = []
        reductions: list[tuple[int, tuple[int, ...]]] = []
        for launch in launches:
            kind = gathers if problem.jobs[launch[0]].is_gather else reductions
            kind.append((_place(problem, launch), launch))
        self._gathers, self._reductions = sorted(gathers), sorted(reductions)

    def ahead(self, ahead: int) -> Plan:
        """Returns the plan that `ahead_plan` or `single_plan` describes."""
        return self._ahead(ahead) if ahead else self._single()

    def _single(self) -> Plan:
        order = [(slot, False, launch) for slot, launch in self._reductions]
        order += [(slot, True, launch) for slot, launch in self._gathers]
        order.sort()
        actions = []
        for number, (slot, _, _) in enumerate(order):
            actions += [Action(slot, "start", number), Action(slot, "wait", number)]
        return Plan(tuple([launch for _, _, launch in order]), tuple(actions))

    def _ahead(self, ahead: int) -> Plan:
        gathers, reductions = self._gathers, self._reductions
        events: list[tuple[int, int, Action]] = []
        for number, (wait, _) in enumerate(gathers):
            start = gathers[number - ahead][0] if number >= ahead else 0
            # A gather starts after the wait of the other one.
            events.append((start, 2 * (number - ahead) + 2, Action(start, "start", number)))
            events.append((wait, 2 * number + 1, Action(wait, "wait", number)))
        rank = 2 * (len(gathers) + len(reductions))
        for at, (start, _) in enumerate(reductions):
            number = len(gathers) + at
            wait = reductions[at + ahead][0] if at + ahead < len(reductions) else self._end
            events.append((start, rank + 2 * at, Action(start, "start", number)))
            events.append((wait, rank + 2 * (at + ahead) + 1, Action(wait, "wait", number)))
        events.sort()  # no two are equal but for their actions
        return Plan(
            tuple([launch for _, launch in (*gathers, *reductions)]),
            tuple([action for _, _, action in events]),
        )


SIMPLE_PLANS: dict[str, Callable[[ScheduleProblem, Launches | None], Plan]] = {
    "one-ahead": one_ahead_plan,
    "single": single_plan,
}
"""By the name that the option `plan` of the pass `schedule` gives them."""


def simple_plans(problem: ScheduleProblem, name: str, cap_bytes: float) -> Iterator[Plan]:
    """Yields plans from many to few bytes in flight: launches under the cap, under halves of it,
    and unmerged; then the plan that holds least, in which nothing moves.

    Args:
        problem: the graph.
        name: "one-ahead" or "single".
        cap_bytes: as in `merged_neighbours`.
    """
    seen = set[Launches]()
    single = tuple((job.number,) for job in problem.jobs)
    while True:
        launches = merged_neighbours(problem, cap_bytes)
        if launches not in seen:
            seen.add(launches)
            yield SIMPLE_PLANS[name](problem, launches)
        if launches == single:
            break
        # Collectives of no bytes stay merged under any other cap.
        total = sum(job.full_bytes for job in problem.jobs)
        cap_bytes = min(cap_bytes, total) / 2 if cap_bytes >= 1 else -1.0
    if name != "single":
        yield single_plan(problem)


def varied_plans(problem: ScheduleProblem, *, few: bool = False) -> Iterator[Plan]:
    """Yields plans with launches of many sizes, or of a few, awaited where they start or some
    launches later. The first has a launch for every collective.

    Sizes are in latencies: a launch that takes many of them hardly loses time by its own.
    """
    seen = set[Launches]()
    for most in _LATENCIES[::6] if few else _LATENCIES:
        launches = merged_neighbours(problem, most, attrgetter("latencies"))
        if launches not in seen:
            seen.add(launches)
            placed = _Placed(problem, launches)
            yield from map(placed.ahead, _FEW_AHEAD if few else _AHEAD)


_LATENCIES = (-1.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
_AHEAD, _FEW_AHEAD = (0, 1, 2, 4, 8, 16), (0, 1, 4, 16)


def _launches(problem: ScheduleProblem, launches: Launches | None) -> Launches:
    return launches if launches is not None else tuple((job.number,) for job in problem.jobs)


def _place(problem: ScheduleProblem, launch: tuple[int, ...]) -> int:
    """The slot where the first member of gathers is needed, or the last input of reductions is
    ready.
    """
    jobs = problem.jobs
    if jobs[launch[0]].is_gather:
        return min([jobs[number].latest for number in launch])
    return max([jobs[number].earliest for number in launch])
