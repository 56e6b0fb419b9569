"""The least time that a step can take within a memory limit, over all choices of what to keep.

A plan decides for each value that backward reads whether it stays in memory, rests on the host, or
is made again: computed from other values, or gathered. Here, each decision is a fraction, and the
least time over all fractions is the solution of a linear program. Every plan is one of its points,
so none is faster:

- **Time.** Each graph takes at least as long as its kernels, as the bytes of each link, and as both
  where their contention leaves them (`zpasses.cost.plan.bound`), of which copies and gathers are in
  proportion to the fractions. A value that is computed again costs at least its own kernel, and
  what that reads must be there, too. Latencies of collectives are left out.
- **Memory.** At some points of forward, what is read later and the part of the saved values that
  stays must fit. At some points of backward, what kernels read before and after the point must fit,
  and the part of the values in memory from which the later kernels can be fed: each of these is in
  memory, or comes from the host, or is computed again from such values. Fewer points only lower
  the result. No value counts twice, and scratch memory and collectives in flight do not count.

- **Layers.** If the step has further copies of a layer, the fractions of that layer are the mean of
  those of its copies, and count as often. Memory and links count where no copy is under way, and a
  layer is taken to have what the one before it hands on.

Kernels have the order of the joint graph. That is their order in every plan, because a partition
inserts what it computes again before its reader, and passes move only collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np
from torch import fx

from zpasses.backend.step_trials import StepTrials
from zpasses.cost.plan.kept_params import StepProblem, keepable_params
from zpasses.cost.plan.schedule_problem import Job, ScheduleProblem
from zpasses.cost.time.clock import CollectiveTiming
from zpasses.cost.time.step_time import host_copy_timing, transfer_of
from zpasses.cost.time.target import current_target
from zpasses.graph.host_copies import HostCopy
from zpasses.graph.queries import is_dialect
from zpasses.tools.plan.copied_layers import CopiedLayers
from zpasses.tools.plan.joint_values import JointValues, Side, Value, value_bytes
from zpasses.tools.plan.linear_program import Linear, LinearProgram, can_solve
from zpasses.tools.plan.plan_table import PlanPoint


class Relaxation:
    """The linear program of one joint graph. Use it with the graph's target and process groups.

    Args:
        joint: the joint graph.
        step: forward and backward of a partition of it that keeps no full parameter.
        user_outputs: how many values forward returns before those that it saves.
        host_bytes: how many bytes of the host the saved values may take.
        copies: how many more layers like its third one the step has.

    Raises:
        ValueError: if there are too few layers to copy one of them.
    """

    def __init__(
        self,
        joint: fx.Graph,
        step: StepProblem,
        user_outputs: int,
        host_bytes: int,
        copies: int = 0,
    ) -> None:
        self._joint = JointValues(joint, step, user_outputs)
        self._copied = CopiedLayers(self._joint, step, copies)
        self._step, self._host_bytes = step, host_bytes
        self._program = LinearProgram()
        self._choose()
        self._fit_forward()
        self._fit_backward()
        self._take_time()

    def least_us(self, limit_bytes: int) -> float | None:
        """Returns the least mean duration of a forward and its backward, in microseconds; None if
        no plan fits the limit.
        """
        return self._program.least(limit_bytes / _UNIT)

    # --- choices ----------------------------------------------------------------------------------
    def _choose(self) -> None:
        """Adds the fractions of each value, and what backward needs of them."""
        program, joint = self._program, self._joint
        self._again = {node: program.variable(1.0) for node in joint.remade}
        self._saved = {value: program.variable(1.0) for value in joint.needed}
        movable = [each for each in joint.needed if self._host_bytes and joint.may_leave(each)]
        self._hosted = {value: program.variable(1.0) for value in movable}
        program.at_most(self._bytes(self._hosted), self._host_bytes / _UNIT)
        self._require(joint.backward.first_read, self._saved, self._again)
        self._cached: dict[Value, int] = {}
        """Full parameters that stay throughout the step, and so until backward, too."""
        self._unchanged: dict[Value, float] = {}
        for each in keepable_params(self._step):
            value = joint.value_behind(joint.named[each.name])
            if each.unchanged > 0 and value is not None and value in self._saved:
                self._unchanged[value] = each.unchanged
                at = self._cached[value] = program.variable(1.0)
                program.at_most({at: 1.0, self._saved[value]: -1.0}, 0.0)

    def _require(
        self, read: Iterable[Value], held: Mapping[Value, int], again: Mapping[fx.Node, int]
    ) -> None:
        """Requires that values are held, come from the host, or are made again of such values."""

        def sources(value: Value) -> dict[int, float]:
            found = held[value], self._hosted.get(value), again.get(value[0])
            return {at: 1.0 for at in found if at is not None}

        for value in (each for each in read if each in held):
            self._program.at_least(sources(value), 1.0)
        for node, made in again.items():
            for value in (each for each in self._joint.inputs[node] if each in held):
                if not self._copied.reads_own(node, value):
                    continue
                self._program.at_least({**sources(value), made: -1.0}, 0.0)

    # --- memory -----------------------------------------------------------------------------------
    def _fit_forward(self) -> None:
        side = self._joint.forward
        for at in _points(side.live_bytes, self._copied.forward):
            stays = {
                value: number
                for value, number in self._saved.items()
                if value not in side.lasting
                and side.last_read.get(value, side.first.get(value, side.end)) < at
            }
            early = {
                value: number
                for value, number in self._cached.items()
                if at < side.first.get(value, 0)
            }
            self._limit(_sum(self._bytes(stays), self._bytes(early)), side.live_bytes[at])

    def _fit_backward(self) -> None:
        self._limit(self._bytes(self._saved), 0.0)
        side = self._joint.backward
        for point in _points(side.live_bytes, self._copied.backward):
            later = [value for value, first in side.first_read.items() if first > point]
            self._fit_point(point, [value for value in later if value in self._saved])

    def _fit_point(self, point: int, later: Sequence[Value]) -> None:
        """Requires that what is alive at a point of backward fits, and feeds the later kernels."""
        program, side = self._program, self._joint.backward

        def is_there(value: Value) -> bool:
            return side.first_read.get(value, side.end) <= point <= side.last_read.get(value, -1)

        needed, remade = self._joint.sources_of(later, is_there)
        held = {value: program.variable(1.0) for value in needed}
        again = {node: program.variable(1.0) for node in remade}
        for node, at in again.items():
            program.at_most({at: 1.0, self._again[node]: -1.0}, 0.0)
        for value, at in held.items():
            # It was saved, or it was made before the point.
            before = {self._saved[value]: -1.0, self._again[value[0]]: -1.0, again[value[0]]: 1.0}
            program.at_most({at: 1.0, **before}, 0.0)
        self._require(later, held, again)
        late = {
            value: at
            for value, at in self._cached.items()
            if side.last_read.get(value, -1) < point and value not in held
        }
        self._limit(_sum(self._bytes(held), self._bytes(late)), side.live_bytes[point])

    def _limit(self, sums: Linear, more: float) -> None:
        self._program.at_most(sums, -float(more) / _UNIT, limits=1.0)

    def _bytes(self, values: Mapping[Value, int]) -> dict[int, float]:
        """Returns what values take of the memory, per fraction."""
        times = self._copied.times
        return {at: times(value[0]) * value_bytes(value) / _UNIT for value, at in values.items()}

    # --- time -------------------------------------------------------------------------------------
    def _take_time(self) -> None:
        joint, step = self._joint, self._step
        times = self._copied.times
        moves = self._fixed_moves(step.forward, joint.in_forward)
        for job, value in self._jobs(step.forward):
            less = {}
            if value in self._cached:
                less = {self._cached[value]: -self._unchanged[value]}
            place = joint.forward.first_read.get(value, 0)
            moves.append(_Move.of(job, place, times(value[0]), 1.0, less))
        moves += self._copies("out")
        more = self._copied.moved_us(step.forward, gathers=True)
        self._take(joint.forward, self._copied.forward, moves, {}, more)

        moves = self._fixed_moves(step.backward, joint.in_backward)
        for job, value in self._jobs(step.backward):
            if not job.is_gather:
                source = joint.named[step.backward.items[job.number].source.name]
                place = joint.backward.place.get(source, -1) + 1
                moves.append(_Move.of(job, place, times(source), 1.0))
            elif value[0] in self._again:
                first = joint.backward.first_read.get(value, joint.backward.end)
                again = {self._again[value[0]]: 1.0}
                moves.append(_Move.of(job, first, times(value[0]), 0.0, again))
        moves += self._copies("in")
        remade = {at: times(node) * joint.cost_us[node] for node, at in self._again.items()}
        more = self._copied.moved_us(step.backward, gathers=False)
        self._take(joint.backward, self._copied.backward, moves, remade, more)

    def _jobs(self, problem: ScheduleProblem) -> Iterator[tuple[Job, Value]]:
        for job in problem.jobs:
            yield job, (self._joint.named[problem.items[job.number].started.name], 0)

    def _copies(self, direction: Literal["out", "in"]) -> Iterator[_Move]:
        """Yields the copies of values to the host, or back."""
        target, forward, backward = current_target(), self._joint.forward, self._joint.backward
        for value, at in self._hosted.items():
            timing = host_copy_timing(HostCopy(direction, value_bytes(value)), target)
            place = (
                forward.first.get(value, -1) + 1
                if direction == "out"
                else backward.first_read.get(value, backward.end)
            )
            took = max(0.0, timing.duration_us - target.kernel_us)
            times = self._copied.times(value[0])
            yield _Move(timing, took, target.kernel_us, direction == "in", place, times, {at: 1.0})

    def _fixed_moves(self, problem: ScheduleProblem, nodes: Container[fx.Node]) -> list[_Move]:
        """Returns the transfers of a graph that stay where they are, if they are of these nodes of
        the joint graph.
        """
        timings = (event.timing for event in problem.fixed if event.timing is not None)
        starts = (
            self._joint.named.get(node.name)
            for node in problem.nodes
            if transfer_of(node) is not None and not is_dialect(node)
        )
        return [
            _Move(timing, timing.duration_us, 0.0, False, 0, self._copied.times(node), {}, 1.0)
            for node, timing in zip(starts, timings, strict=True)
            if node is not None and node in nodes
        ]

    def _take(
        self, side: Side, part: range, moves: Sequence[_Move], remade: Linear, more_us: float
    ) -> None:
        """Adds the duration of one graph, which is at least what its kernels and links take.

        Args:
            side: its kernels.
            part: those that are copied.
            moves: its transfers.
            remade: duration of what may be computed again, per fraction.
            more_us: duration of the kernels that move with the collectives of the copies.
        """
        program, took = self._program, self._program.variable(cost=1.0)
        issued = {
            at: move.times * move.timing.issue_us
            for move in moves
            for at in move.sums
            if not move.fixed
        }
        work_us = side.work_us.copy()
        work_us[part.start : part.stop] *= 1 + self._copied.copies
        kernels = float(work_us.sum()) + side.moved_us + more_us
        program.at_least(_sum({took: 1.0}, _sum(remade, issued), -1.0), kernels)
        links: dict[str, list[_Move]] = defaultdict(list)
        for move in moves:
            links[move.timing.channel.link].append(move)
        before = np.concatenate([[0.0], np.cumsum(work_us)])
        for same in links.values():
            _Link(program, took, before, part, same, remade).take()


class _Link:
    """Adds what one link takes in a graph, for pairs of cuts as in `zpasses.cost.plan.bound`.

    Args:
        program: the linear program.
        took: the duration of the graph.
        before: duration of the kernels before each kernel, and of all.
        part: the kernels that are copied, between which there are no cuts.
        moves: the transfers on the link.
        remade: duration of what may be computed again, per fraction.
    """

    def __init__(
        self,
        program: LinearProgram,
        took: int,
        before: np.ndarray,
        part: range,
        moves: Sequence[_Move],
        remade: Linear,
    ) -> None:
        self._program, self._took, self._before, self._part = program, took, before, part
        self._moves, self._remade = moves, remade
        self._moved = _moved(moves)
        slows = min(move.timing.compute_slowdown for move in moves)
        slowed = min(move.timing.collective_slowdown for move in moves)
        self._ratio, self._gain = slows / slowed, max(0.0, slowed / slows + 1 - slowed)

    def take(self) -> None:
        fixed, sums = self._moved
        self._program.at_least(_sum({self._took: 1.0}, sums, -1.0), fixed)
        end = len(self._before) - 1
        gathers = [each for each in self._moves if each.is_gather]
        others = [each for each in self._moves if not each.is_gather]
        heads = _cuts({0, *(each.place for each in gathers)}, self._part, end)
        tails = _cuts({end, *(each.place for each in others)}, self._part, end)
        for head in heads:
            early = [each for each in gathers if each.place <= head and self._all_by(each, head)]
            for tail in (each for each in tails if each >= head):
                late = [each for each in others if each.place >= tail and self._all_by(each, tail)]
                self._take_cut(head, tail, [[*each, *_launch(each)] for each in (early, late)])

    def _all_by(self, move: _Move, cut: int) -> bool:
        """Whether all copies of a transfer are on the side of a cut where it is itself."""
        after = cut >= self._part.stop if move.is_gather else cut <= self._part.start
        return move.times == 1 or after

    def _take_cut(self, head: int, tail: int, forced: Sequence[Sequence[_Move]]) -> None:
        """Adds one pair of cuts, and what must move before the first and after the second.

        As much as possible runs beside kernels, and what is computed again may be in any part.
        """
        program, total = self._program, float(self._before[-1])
        ends = float(self._before[head]), total - float(self._before[tail])
        hidden = [program.variable() for _ in range(3)]
        took, (fixed, sums) = {self._took: 1.0}, self._moved
        least = total + fixed
        within = [program.variable() for _ in ends] if self._remade else []
        if within:
            program.at_most(_sum(dict.fromkeys(within, 1.0), self._remade, -1.0), 0.0)
        for number, (kernels, moves) in enumerate(zip(ends, forced, strict=True)):
            more = {within[number]: -self._ratio} if within else {}
            program.at_most({hidden[number]: 1.0, **more}, self._ratio * kernels)
            own_fixed, own = _moved(moves)
            program.at_most(_sum({hidden[number]: 1.0}, own, -1.0), own_fixed)
            launch, launch_sums = _moved(moves[-1:])
            fixed, sums = fixed - own_fixed + launch, _sum(_sum(sums, own, -1.0), launch_sums)
            took, least = _sum(took, launch_sums, -1.0), least + launch
        all_hidden = dict.fromkeys(hidden, 1.0)
        room = _sum(all_hidden, self._remade, -self._ratio)
        program.at_most(room, self._ratio * total)
        program.at_most(_sum({hidden[2]: 1.0}, sums, -1.0), fixed)
        took = _sum(_sum(took, self._moved[1], -1.0), self._remade, -1.0)
        program.at_least(_sum(took, all_hidden, self._gain), least)


_UNIT = float(1 << 20)
"""Bytes of a unit of memory: HiGHS wants figures of similar size."""
_POINTS = 12
"""At how many points of each graph the memory must suffice."""
_CUTS = 6
"""How many cuts of a graph to combine in pairs."""


@dataclass(frozen=True)
class _Move:
    """A transfer, or the part of it that happens."""

    timing: CollectiveTiming
    took_us: float
    """How long its bytes take."""
    latency_us: float
    """How much longer a launch takes that it is alone in."""
    is_gather: bool
    place: int
    """For a gather, the first kernel that needs it, by number; else how many kernels run before it
    can start."""
    times: int
    """How many there are, one after another in the copies of a layer."""
    sums: Linear
    """How much of it happens, besides `fixed`."""
    fixed: float = 0.0

    @classmethod
    def of(
        cls,
        job: Job,
        place: int,
        times: int,
        fixed: float,
        sums: Linear = MappingProxyType({}),
    ) -> _Move:
        job = job.fastest
        took, latency = job.transfer_us, job.latency_us
        return cls(job.timing, took, latency, job.is_gather, place, times, sums, fixed)


def _launch(moves: Sequence[_Move]) -> list[_Move]:
    """Returns the latency of the shortest launch that moves any of these, as a transfer."""
    if not moves:
        return []
    surely = next((each for each in moves if each.fixed and not each.sums), moves[0])
    return [replace(surely, took_us=min(each.latency_us for each in moves), times=1)]


def _moved(moves: Iterable[_Move]) -> tuple[float, dict[int, float]]:
    """Returns how long transfers take: a constant, and per fraction."""
    sums: dict[int, float] = defaultdict(float)
    for move in moves:
        for at, factor in move.sums.items():
            sums[at] += factor * move.times * move.took_us
    return sum(move.fixed * move.times * move.took_us for move in moves), sums


def _sum(sums: Linear, more: Linear, factor: float = 1.0) -> dict[int, float]:
    found = dict(sums)
    for at, each in more.items():
        found[at] = found.get(at, 0.0) + factor * each
    return found


def _cuts(places: Iterable[int], part: range, end: int) -> list[int]:
    """Returns some of the places that are not within a part, always with the first and the last."""
    ordered = sorted(each for each in places if each <= end and each not in part[1:])
    return sorted({*ordered[:: max(1, len(ordered) // _CUTS)], ordered[-1]})


def _points(live: np.ndarray, part: range) -> list[int]:
    """Returns points of a graph: that with the most memory of each of equal parts, but for those
    within a part.
    """
    places = np.delete(np.arange(len(live)), slice(part.start, part.stop))
    parts = np.array_split(places, _POINTS)
    return [int(each[np.argmax(live[each])]) for each in parts if len(each)]


class LeastTimes:
    """Durations that no plan of a step can beat, whatever it saves, keeps, moves and computes in
    chunks. Needs scipy.

    Args:
        trials: of the step's joint graph. Use it with its target and process groups.
        copies: how many more layers like its third one the step has.
    """

    def __init__(self, trials: StepTrials, copies: int = 0) -> None:
        self._trials, self._copies = trials, copies

    @cached_property
    def _relaxations(self) -> list[Relaxation]:
        """With the loss as one, and in each number of chunks."""
        trials = self._trials
        return [
            Relaxation(
                each.gm.graph,
                each.trial(1.0).step,
                each.user_outputs,
                each.host_bytes,
                self._copies,
            )
            for each in (trials, *map(trials.in_chunks, trials.chunk_counts()))
        ]

    def least_us(self, limit_bytes: int) -> float | None:
        """Returns the least duration of any plan whose graphs have at most this peak; None if there
        is none.

        Raises:
            ValueError: if there are too few layers to copy one of them.
        """
        found = (each.least_us(limit_bytes) for each in self._relaxations)
        return min((each for each in found if each is not None), default=None)

    def of(self, point: PlanPoint) -> PlanPoint:
        """Returns a plan with the least time within its limit, if scipy is there to find it."""
        if point.limit_bytes is None or not can_solve():
            return point
        return replace(point, least_us=self.least_us(point.limit_bytes))
