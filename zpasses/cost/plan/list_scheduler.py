"""Schedule collectives beside kernels whose order is fixed: one pass over a graph, given a policy.

The scheduler simulates the graph while it decides, so it knows when each link would be idle. At
every slot it starts what a link needs to stay busy until the next slot. Gathers come in the
order of their first consumers, and go before reductions if they would otherwise arrive late. What
does not fit the memory limit starts later. A reduction whose input no longer fits is awaited at
once, so a plan within the limit always exists if the graph itself is within it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zpasses.cost.plan.held_inputs import HeldInputs
from zpasses.cost.plan.schedule_evaluation import (
    Action,
    LaunchCost,
    Plan,
    launch_cost,
    run_fixed_events,
)
from zpasses.cost.plan.schedule_problem import Job, ScheduleProblem
from zpasses.cost.time.clock import Channel, Clock, Link


@dataclass(frozen=True)
class Policy:
    """How `list_schedule` decides where the limits leave it a choice."""

    end_us: float
    """A launch grows as long as kernels that wait for it can still end at this time."""
    gather_latencies: float = 8.0
    """A launch of gathers grows until its bytes take this many latencies."""
    reduction_latencies: float = 8.0
    """As `gather_latencies`, for reductions."""
    horizon: float = 1.5
    """Start a gather when the compute left before its consumer is at most this times the time that
    gathers and reductions until there need."""
    collect_until: float = math.inf
    """Ready gradients wait until a launch of full size is together, as long as the kernels left
    take more than this many times as long as their reduction; infinity never waits."""


def list_schedule(problem: ScheduleProblem, limit_bytes: int, policy: Policy) -> Plan:
    """Returns a plan whose peak is at most `limit_bytes`, or as low as the graph allows."""
    return _ListScheduler(problem, limit_bytes, policy).run()


class _ListScheduler:
    def __init__(self, problem: ScheduleProblem, limit_bytes: int, policy: Policy) -> None:
        self._problem, self._limit, self._policy = problem, limit_bytes, policy
        self._live = problem.live_bytes.copy()
        self._work_before = np.concatenate([[0.0], np.cumsum(problem.work_us)])
        self._clock = Clock()
        self._reloaded_us = 0.0
        """When the shards on the host have come whose gathers have started."""
        self._launches: list[tuple[int, ...]] = []
        self._actions: list[Action] = []
        self._gathers = [job for job in problem.jobs if job.is_gather]
        links = dict.fromkeys(job.channel.link for job in problem.jobs)
        self._left = {
            link: deque(job for job in self._gathers if job.channel.link == link) for link in links
        }
        """Per link the gathers that have not started, in order, besides a few that have."""
        self._launch_of: dict[int, int] = {}
        """Job number of a gather that has started -> its launch."""
        self._awaited: set[int] = set()
        self._pending: list[Job] = []
        """Reductions that are ready and have not started."""
        self._pending_on: dict[Link, list[Job]] = {link: [] for link in links}
        """The same by link."""
        self._pending_us: float | None = None
        """Their durations one after another; None if they have changed since it was computed."""
        self._held = HeldInputs()
        self._flying: dict[int, LaunchCost] = {}
        """Launches of reductions that are not awaited yet."""
        self._flying_bytes = 0
        """What these hold besides their inputs."""
        self._slot = 0
        self._lead_us = _leads(problem, self._work_before)

    def run(self) -> Plan:
        problem = self._problem
        reductions = [job for job in problem.jobs if not job.is_gather]
        ready = uses = fixed = 0
        for slot, work in enumerate(problem.work_us):
            self._slot = slot
            while ready < len(reductions) and reductions[ready].earliest == slot:
                self._add_pending(reductions[ready])
                ready += 1
            self._await_arrived()
            used = uses
            while used < len(self._gathers) and self._gathers[used].latest == slot:
                used += 1
            waits = self._gathers[uses:used]
            self._free_for(slot)
            for job in waits:
                if job.number not in self._launch_of:
                    self._start_gathers(self._bucket_of(job, forced=True))
            if slot == problem.end:
                self._finish()
            else:
                self._fill(work, [self._launch_of[job.number] for job in waits])
            for job in waits:
                self._await(self._launch_of[job.number])
            uses = used
            if waits and slot != problem.end:
                self._await_arrived()
                self._fill(work, [])
            self._free_for(slot)
            fixed = run_fixed_events(self._clock, problem, slot, fixed)
            self._clock.work(work)
            self._live[slot] += self._held_bytes(slot)
        return Plan(tuple(self._launches), tuple(self._actions))

    # --- what to start ----------------------------------------------------------------------------
    def _fill(self, work: float, before: Sequence[int]) -> None:
        """Starts what links need to be busy during the segment.

        Args:
            work: duration of its kernels.
            before: launches that are awaited before the segment.
        """
        for link, left in self._left.items():
            while left or self._pending_on[link]:
                busy = (
                    self._left_after(link, before) >= _COVER * work
                    if work
                    else self._clock.on_link(link)
                )
                if busy or not self._start_next(link):
                    break

    def _left_after(self, link: Link, before: Sequence[int]) -> float:
        """Duration of what a link still has to do when these launches have been awaited."""
        total = awaited = 0.0
        beside = []
        for channel, queue in self._clock.busy.items():
            if channel.link != link:
                continue
            until = rest = 0.0
            for entry in queue:
                rest += entry[0]
                if entry[3] in before:
                    until, rest = until + rest, 0.0
            if until:
                awaited += until
                total += rest
            else:
                beside.append(rest)
        # While channels share the link, each moves as much as the one that is awaited.
        return total + sum(max(0.0, rest - awaited) for rest in beside)

    def _start_next(self, link: Link) -> bool:
        job = self._gather_on(link)
        ready = self._pending_on[link]
        bucket = self._reduction_bucket(ready) if ready else []
        if job is not None:
            lead = self._time_until(job.latest)
            slowed = job.timing.collective_slowdown
            urgent = lead <= self._arrives_us(job, job.alone_us, after=bucket) * slowed
            soon = lead <= self._policy.horizon * self._lead_us[job.number]
            wanted = (urgent or (soon and not bucket)) and self._has_come(job.reload_us)
            if wanted and self._fits(job, job, job.launch_bytes):
                self._start_gathers(self._bucket_of(job))
                return True
        if bucket:
            self._start_reductions(bucket)
            return True
        return False

    def _gather_on(self, link: Link) -> Job | None:
        """Returns the first gather of a link that has not started."""
        left = self._left[link]
        while left and left[0].number in self._launch_of:
            left.popleft()
        return left[0] if left else None

    def _bucket_of(self, first: Job, *, forced: bool = False) -> list[Job]:
        """Returns the gathers that start together with `first`."""
        members = [first]
        if first.key.mode == "single":
            return members
        policy, clock = self._policy, self._clock
        until = self._time_until(first.latest)
        after = self._work_after(first.latest)
        enough = policy.gather_latencies * first.per_launch_us
        total, moving, reload_us = first.alone_us, first.transfer_us, first.reload_us
        launch_and_copies = _LaunchBytes(first)
        live: np.ndarray | None = None
        for job in itertools.islice(self._gathers, first.number + 1, None):
            if moving >= enough or len(members) >= _MOST_MEMBERS:
                break
            if job.number in self._launch_of or not can_share(first, job):
                continue
            arrives = self._arrives_us(first, total + job.transfer_us)
            in_time = (
                arrives * first.timing.collective_slowdown <= until
                or clock.now_us + arrives + after <= policy.end_us
                or job.transfer_us <= first.timing.issue_us  # a launch of its own costs more
            )
            if not in_time or (job.reload_us and not self._has_come(reload_us + job.reload_us)):
                break
            if live is None:
                live = self._live[self._slot :].copy()
                live[: max(0, first.latest - self._slot)] += first.ahead_bytes
            if not self._fits(first, job, launch_and_copies.with_member(job), live):
                break
            members.append(job)
            live[: max(0, job.latest - self._slot)] += job.ahead_bytes
            total += job.transfer_us
            moving += job.transfer_us
            reload_us += job.reload_us
        return members

    def _has_come(self, reload_us: float) -> bool:
        """Whether the next shards from the host are there, whose copies take so long."""
        return not reload_us or self._reloaded_us + reload_us <= self._clock.now_us

    def _reduction_bucket(self, ready: Sequence[Job]) -> list[Job]:
        """Returns the reductions that start together now; none if more should come first."""
        first = ready[0]
        members = [first]
        if first.key.mode == "single":
            return members
        enough = self._policy.reduction_latencies * first.per_launch_us
        moving = first.transfer_us
        for job in itertools.islice(ready, 1, None):
            if moving >= enough or len(members) >= _MOST_MEMBERS:
                break
            if can_share(first, job):
                members.append(job)
                moving += job.transfer_us
        patience = self._policy.collect_until
        # Nothing hides what starts in the last part of the graph, so little waits there.
        hidden = self._work_after(self._slot) > patience * self._cost(members).duration_us
        if moving < enough and hidden:
            return []
        return members

    def _finish(self) -> None:
        """Starts and awaits all that is left, at the end of the graph."""
        while self._pending:
            self._start_reductions(self._forced_bucket())
        for launch in list(self._flying):
            self._await(launch)

    # --- time -------------------------------------------------------------------------------------
    def _arrives_us(self, first: Job, duration: float, after: Sequence[Job] = ()) -> float:
        """Time until gathers that start now have arrived, with no kernel running beside them.

        Args:
            first: one of the gathers.
            duration: of their launch.
            after: reductions on the same link that start in a launch before them.
        """
        own, others = self._clock.left_us(first.channel)
        before = self._cost(after).duration_us if after else 0.0
        if after and after[0].channel != first.channel:
            others, before = others + before, 0.0
        own += before + duration
        return own + min(own, others)

    def _time_until(self, slot: int) -> float:
        """Duration of the kernels until a slot."""
        return float(self._work_before[slot] - self._work_before[self._slot])

    def _work_after(self, slot: int) -> float:
        return float(self._work_before[-1] - self._work_before[slot])

    # --- memory -----------------------------------------------------------------------------------
    def _held_bytes(self, slot: int) -> int:
        """Bytes that reductions hold during a segment, and that `self._live` does not contain."""
        return self._held.nbytes(slot) + self._flying_bytes

    def _fits(self, first: Job, job: Job, launch: int, live: np.ndarray | None = None) -> bool:
        """Whether a gather can start now, together with others that were found to fit.

        Args:
            first: the first gather of the launch.
            job: the last one.
            launch: bytes that the launch with both holds besides the full tensors.
            live: `self._live` from this slot on, with what the others hold ahead of their use.
        """
        start, use = self._slot, job.latest
        if use <= start:
            return True
        live = self._live[start:use] if live is None else live[: use - start]
        until = self._held_until(start, use)
        extra = self._held_bytes(start) + job.ahead_bytes + launch
        if int(live[: until - start].max(initial=0)) + extra > self._limit:
            return False
        beyond = live[until - start :]
        if not len(beyond):
            return True
        more = job.ahead_bytes + (launch if first.latest > until else 0)
        return int(beyond.max()) + more <= self._limit

    def _held_until(self, start: int, end: int) -> int:
        """First segment in which everything that reductions hold now is free again, at most
        `end`.
        """
        if not self._pending and not self._flying:
            return start + 1
        busy = max(sum(self._clock.left_us(Channel(link))) for link in self._left)
        if self._pending_us is None:
            self._pending_us = sum(job.alone_us for job in self._pending)
        busy += self._pending_us
        at = int(np.searchsorted(self._work_before, self._work_before[start] + busy))
        return min(max(at + 1, start + 1), end)

    def _free_for(self, slot: int) -> None:
        """Awaits reductions until the segment fits the limit."""
        while (self._pending or self._flying) and self._live[slot] + self._held_bytes(
            slot
        ) > self._limit:
            if not self._flying:
                self._start_reductions(self._forced_bucket())
            self._await(next(iter(self._flying)))

    def _forced_bucket(self) -> list[Job]:
        first = self._pending[0]
        members = [first]
        if first.key.mode != "single":
            members += [job for job in self._pending[1:] if can_share(first, job)]
        return members[:_MOST_MEMBERS]

    def _await_arrived(self) -> None:
        """Awaits the reductions that have ended."""
        for launch in list(self._flying):
            if launch in self._clock.done_us:
                self._await(launch)

    # --- actions ----------------------------------------------------------------------------------
    def _start_gathers(self, members: list[Job]) -> None:
        number, cost = self._start(members)
        for job in members:
            self._launch_of[job.number] = number
            self._live[self._slot : max(self._slot, job.latest)] += job.ahead_bytes
        wait = min(job.latest for job in members)
        self._live[self._slot : wait + 1] += cost.held_bytes
        self._live[wait : wait + 1] += cost.unpacked_bytes

    def _start_reductions(self, members: list[Job]) -> None:
        taken = set(members)
        self._pending = [job for job in self._pending if job not in taken]
        for left in self._pending_on.values():
            left[:] = [job for job in left if job not in taken]
        self._pending_us = None
        number, cost = self._start(members)
        self._flying[number] = cost
        self._flying_bytes += cost.held_bytes

    def _add_pending(self, job: Job) -> None:
        self._pending.append(job)
        self._pending_on[job.channel.link].append(job)
        self._pending_us = None
        self._held.add(job)

    def _start(self, members: list[Job]) -> tuple[int, LaunchCost]:
        number, cost = len(self._launches), self._cost(members)
        self._launches.append(tuple(job.number for job in members))
        self._actions.append(Action(self._slot, "start", number))
        if cost.reload_us:
            self._reloaded_us += cost.reload_us
            self._clock.idle_until(self._reloaded_us)
        self._clock.work(cost.start_work_us)
        self._clock.enqueue(number, cost.duration_us, members[0].timing)
        return number, cost

    def _cost(self, members: Sequence[Job]) -> LaunchCost:
        return launch_cost(self._problem, tuple(job.number for job in members))

    def _await(self, number: int) -> None:
        if number in self._awaited:
            return
        self._awaited.add(number)
        self._actions.append(Action(self._slot, "wait", number))
        self._clock.wait(number)
        self._clock.work(launch_cost(self._problem, self._launches[number]).wait_work_us)
        reductions = self._flying.pop(number, None)
        if reductions is not None:
            self._flying_bytes -= reductions.held_bytes
            for job in reductions.members:
                self._held.remove(job)


class _LaunchBytes:
    """`held_bytes` and `unpacked_bytes` of a launch that grows."""

    def __init__(self, first: Job) -> None:
        self._flat = first.key.mode == "flat" and first.is_gather
        self._nbytes = first.launch_bytes + self._of_copies(first)

    def with_member(self, job: Job) -> int:
        """Adds a gather. Returns the bytes of the launch with it."""
        self._nbytes += job.launch_bytes + self._of_copies(job)
        return self._nbytes

    def _of_copies(self, job: Job) -> int:
        return job.packed_bytes + (job.full_bytes if self._flat else 0)


_MOST_MEMBERS = 256
_COVER = 1.25
"""How much longer than the next kernels a link should have to do. More than 1, since kernels beside
collectives take longer."""


def can_share(first: Job, job: Job) -> bool:
    """Whether one launch may contain two collectives whose mode is not "single"."""
    return (
        job.key.mode == first.key.mode
        and job.key.compatibility == first.key.compatibility
        and job.is_gather == first.is_gather
        # Calls that find parameters cached leave out the launches that gather no others.
        and job.resident == first.resident
    )


def _leads(problem: ScheduleProblem, work_before: np.ndarray) -> dict[int, float]:
    """Returns how long before the consumer of each gather its link has to start it, so that
    nothing later is late: job number -> microseconds of compute.
    """
    leads: dict[int, float] = {}
    behind: dict[str, float] = {}
    at: dict[str, float] = {}
    events = sorted(
        problem.jobs,
        key=lambda job: (job.latest if job.is_gather else job.earliest, job.number),
        reverse=True,
    )
    for job in events:
        slot = job.latest if job.is_gather else job.earliest
        now, link = float(work_before[slot]), job.channel.link
        late = max(0.0, behind.get(link, 0.0) - (at.get(link, math.inf) - now))
        behind[link] = late + job.alone_us * job.timing.collective_slowdown
        at[link] = now
        if job.is_gather:
            leads[job.number] = behind[link]
    return leads
