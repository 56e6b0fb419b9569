"""Plans that need no search: every collective where it is needed, or one launch ahead of that.

Both can merge neighbours into launches under a cap.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import pairwise

from zpasses.cost.plan.schedule_evaluation import Action, Plan
from zpasses.cost.plan.schedule_problem import Job, ScheduleProblem

Launches = tuple[tuple[int, ...], ...]
"""The job numbers of each launch."""

CAP_BYTES = 25 << 20
"""Usual cap of a launch, as the bucket size of torch's DistributedDataParallel."""


def merged_neighbours(problem: ScheduleProblem, cap_bytes: float) -> Launches:
    """Merges collectives that follow each other and can share a launch.

    Args:
        problem: the graph.
        cap_bytes: largest size of the full tensors of a merged launch.
    """
    launches: list[list[int]] = []
    open_launches: dict[Hashable, tuple[list[int], int]] = {}
    for job in problem.jobs:
        key = job.is_gather, job.resident, job.key.mode, job.key.compatibility
        members, nbytes = open_launches.get(key, ([], 0))
        if not members or job.key.mode == "single" or nbytes + job.full_bytes > cap_bytes:
            members, nbytes = [], 0
            launches.append(members)
        members.append(job.number)
        open_launches[key] = members, nbytes + job.full_bytes
    return tuple(map(tuple, launches))


def single_plan(problem: ScheduleProblem, launches: Launches | None = None) -> Plan:
    """Returns the plan in which every launch is awaited where it starts.

    Args:
        problem: the graph.
        launches: None gives every collective a launch of its own.
    """
    order = sorted(_launches(problem, launches), key=lambda launch: _place(problem, launch))
    actions = []
    for number, launch in enumerate(order):
        slot = _place(problem, launch)
        actions += [Action(slot, "start", number), Action(slot, "wait", number)]
    return Plan(tuple(order), tuple(actions))


def one_ahead_plan(problem: ScheduleProblem, launches: Launches | None = None) -> Plan:
    """Returns the plan with one more gather and reduction in flight than is awaited: each gather
    starts where the previous one was awaited, and each reduction is awaited where the next one has
    started.

    Args:
        problem: the graph.
        launches: None gives every collective a launch of its own.
    """

    def of_kind(gathers: bool) -> list[tuple[int, ...]]:
        found = [each for each in given if problem.jobs[each[0]].is_gather == gathers]
        return sorted(found, key=lambda launch: _place(problem, launch))

    given = _launches(problem, launches)
    gathers, reductions = of_kind(True), of_kind(False)
    events: list[tuple[int, int, Action]] = []
    for number, (before, launch) in enumerate(pairwise([None, *gathers])):
        assert launch is not None
        start = _place(problem, before) if before is not None else 0
        # A gather starts after the wait of the one before it.
        events.append((start, 2 * number, Action(start, "start", number)))
        wait = _place(problem, launch)
        events.append((wait, 2 * number + 1, Action(wait, "wait", number)))
    rank = 2 * len(given)
    for number, (launch, after) in enumerate(pairwise([*reductions, None]), len(gathers)):
        assert launch is not None
        start = _place(problem, launch)
        wait = _place(problem, after) if after is not None else problem.end
        events.append((start, rank + 2 * number, Action(start, "start", number)))
        events.append((wait, rank + 2 * number + 3, Action(wait, "wait", number)))
    events.sort(key=lambda event: event[:2])
    return Plan((*gathers, *reductions), tuple(event[2] for event in events))


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
        cap_bytes = min(cap_bytes, sum(job.full_bytes for job in problem.jobs)) / 2
    if name != "single":
        yield single_plan(problem)


def _launches(problem: ScheduleProblem, launches: Launches | None) -> Launches:
    return launches if launches is not None else tuple((job.number,) for job in problem.jobs)


def _place(problem: ScheduleProblem, launch: tuple[int, ...]) -> int:
    """The slot where the first member of gathers is needed, or the last input of reductions is
    ready.
    """

    def at(job: Job) -> int:
        return job.latest if job.is_gather else job.earliest

    places = [at(problem.jobs[number]) for number in launch]
    return min(places) if problem.jobs[launch[0]].is_gather else max(places)
