"""The step of a model with many equal layers, from that of one with few.

The layers in the middle of a captured step are a part of each graph that begins and ends with the
first use of a parameter. Further layers are copies of that part: kernels take as long, collectives
have the same bytes, and each copy saves the same for backward. Copies are inserted behind the part
in forward, and in the opposite order in backward. Nothing is captured or partitioned for them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from zpasses.cost.plan.bucket_keys import BucketKey
from zpasses.cost.plan.kept_params import KeptParam, StepProblem
from zpasses.cost.plan.offloaded_values import SavedValue
from zpasses.cost.plan.schedule_problem import FixedEvent, Job, ScheduleProblem
from zpasses.cost.time.step_time import host_copy_timing
from zpasses.cost.time.target import current_target
from zpasses.graph.host_copies import HostCopy


@dataclass(frozen=True)
class _Part:
    """The segments of one graph that repeat."""

    problem: ScheduleProblem
    first: int
    after: int

    @property
    def length(self) -> int:
        return self.after - self.first

    def copies_of(self, slot: int, copies: int) -> range:
        """How many lengths what is at a slot moves by: one figure for each of its copies."""
        if slot < self.first:
            return range(1)
        return range(copies + 1) if slot < self.after else range(copies, copies + 1)


@dataclass(frozen=True)
class RepeatedLayers:
    """A captured step, and the segments of one of its layers, of which there may be more copies."""

    step: StepProblem
    forward: _Part
    backward: _Part
    layers: int
    """That the captured model has."""

    @classmethod
    def of(cls, step: StepProblem) -> RepeatedLayers:
        """Finds the layers of a step by the names of its parameters, such as
        "model.layers.1.mlp.weight".

        Raises:
            ValueError: if there are too few equal layers.
        """
        forward, backward = (_starts(each) for each in (step.forward, step.backward))
        layers = sorted(forward.keys() & backward.keys())
        if len(layers) < FEWEST_LAYERS:
            raise ValueError(f"found {len(layers)} layers, and needs {FEWEST_LAYERS}")
        parts = (
            _Part(step.forward, forward[layers[2]], forward[layers[3]]),
            _Part(step.backward, backward[layers[2]], backward[layers[1]]),
        )
        if any(part.length <= 0 or _straddles(part) for part in parts):
            raise ValueError("the layers do not run one after another")
        return cls(step, *parts, len(layers))

    def extended(
        self, layers: int, kept: Sequence[KeptParam] = (), saved: Sequence[SavedValue] = ()
    ) -> tuple[StepProblem, list[KeptParam], list[SavedValue]]:
        """Returns the step with so many layers, and its parameters and saved values.

        Args:
            layers: at least as many as the captured model has.
            kept: parameters of the captured step, the copies of which are returned.
            saved: values of the captured step, the copies of which are returned.

        Raises:
            ValueError: if one of them has not as many copies in forward as in backward.
        """
        copies = layers - self.layers
        forward, backward = self.forward, self.backward
        grown = _growth(forward)
        step = replace(
            self.step,
            forward=_repeated(forward, copies, 0, grown),
            backward=_repeated(backward, copies, copies * grown, _growth(backward)),
        )
        before = [_work_before(each) for each in (step.forward, step.backward)]

        def held_us(out: int, back: int) -> float:
            return float(before[0][-1] - before[0][out] + before[1][back])

        numbers = [_numbers(each, copies) for each in (forward, backward)]
        params = []
        for each in kept:
            jobs = forward.problem.jobs[each.forward_job], backward.problem.jobs[each.backward_job]
            for copy, back in self._copies(jobs[0].latest, jobs[1].latest, copies):
                out = min(each.forward_slot + copy * forward.length, step.forward.end)
                job = numbers[1][each.backward_job, back]
                params.append(
                    replace(
                        each,
                        name=_name(each.name, copy),
                        held_us=held_us(out, step.backward.jobs[job].latest),
                        forward_slot=out,
                        backward_slot=min(
                            each.backward_slot + back * backward.length, step.backward.end
                        ),
                        forward_job=numbers[0][each.forward_job, copy],
                        backward_job=job,
                        part_slot=each.part_slot + copy * forward.length * bool(each.part_bytes),
                    )
                )
        ends = forward.problem.end, step.forward.end
        values = [
            replace(each, held_us=held_us(each.forward_slot, each.backward_slot))
            for each in self._values(saved, copies, *ends)
        ]
        return step, sorted(params, key=lambda each: (-each.value, each.name)), values

    def _values(
        self, saved: Sequence[SavedValue], copies: int, old_end: int, end: int
    ) -> Iterator[SavedValue]:
        """Yields the copies of saved values. Those that are there until forward ends, given by its
        last segment before and now, belong to where they are made.

        A part of backward may begin within a layer: it has the first use of a value of one layer,
        and that of another value of the layer before. Both have copies in forward, where a layer
        is as long as the part, so their copies are equal values of all layers in order.
        """
        forward, backward = self.forward, self.backward
        apart: dict[tuple[int, int], list[SavedValue]] = defaultdict(list)
        for value in saved:
            lasts = value.forward_slot == old_end
            at = value.ready_slot if lasts else value.forward_slot
            try:
                pairs = self._copies(at - 1, value.backward_slot, copies)
            except ValueError:
                apart[value.nbytes, value.forward_slot % forward.length].append(value)
                continue
            for copy, back in pairs:
                yield replace(
                    value,
                    name=_name(value.name, copy),
                    ready_slot=value.ready_slot + copy * forward.length,
                    forward_slot=end if lasts else value.forward_slot + copy * forward.length,
                    backward_slot=value.backward_slot + back * backward.length,
                )
        for equal in apart.values():
            outs = sorted(
                each.forward_slot + copy * forward.length
                for each in equal
                for copy in forward.copies_of(each.forward_slot - 1, copies)
            )
            firsts = sorted(
                each.backward_slot + copy * backward.length
                for each in equal
                for copy in backward.copies_of(each.backward_slot, copies)
            )
            if len(outs) != len(firsts):
                raise ValueError("the layers save different values")
            for number, (out, first) in enumerate(zip(outs, reversed(firsts), strict=True)):
                yield replace(
                    equal[0],
                    name=_name(equal[0].name, number),
                    ready_slot=out - equal[0].forward_slot + equal[0].ready_slot,
                    forward_slot=out,
                    backward_slot=first,
                )

    def _copies(self, out: int, back: int, copies: int) -> list[tuple[int, int]]:
        """Returns the numbers of the copies, in forward and backward, of what is at two places."""
        first, second = self.forward.copies_of(out, copies), self.backward.copies_of(back, copies)
        if len(first) != len(second):
            raise ValueError("forward and backward differ in where a layer begins")
        return list(zip(first, reversed(second), strict=True))


FEWEST_LAYERS = 4
"""Of which the third is copied: its neighbours are equal layers, too."""

_LAYER = re.compile(r"(?<![^.])(\d+)(?![^.])")


def layer_starts(params: Iterable[tuple[int, Sequence[str]]]) -> dict[int, int]:
    """Returns for each layer the first place where one of its parameters is read.

    Args:
        params: places, and names of parameters that are read there.
    """
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for at, names in params:
        for name in names:
            layer = _LAYER.search(name)
            if layer is not None:
                starts = found[name[: layer.start()]]
                number = int(layer[1])
                starts[number] = min(starts.get(number, at), at)
    return max(found.values(), key=len, default={})


def _starts(problem: ScheduleProblem) -> dict[int, int]:
    return layer_starts(
        (job.latest, problem.items[job.number].tag.params) for job in problem.jobs if job.is_gather
    )


def _straddles(part: _Part) -> bool:
    """Whether a collective that does not move starts outside of the part and ends in it, or the
    opposite.
    """
    inside: dict[int, set[bool]] = defaultdict(set)
    for event in part.problem.fixed:
        inside[event.number].add(part.first <= event.slot < part.after)
    return any(len(each) > 1 for each in inside.values())


def _growth(part: _Part) -> int:
    """By how many bytes the live memory grows from one copy of the part to the next."""
    live = part.problem.live_bytes
    return int(live[part.after] - live[part.first])


def _name(name: str, copy: int) -> str:
    return f"{name}@{copy}" if copy else name


def _work_before(problem: ScheduleProblem) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(problem.work_us)])


def _repeated(part: _Part, copies: int, more: int, growth: int) -> ScheduleProblem:
    """Returns a graph with copies of its part.

    Args:
        more: bytes that are alive from the start, besides those of the graph.
        growth: bytes by which each copy raises what is alive after it.
    """
    problem, first, after = part.problem, part.first, part.after
    order = [*range(after), *([*range(first, after)] * copies), *range(after, len(problem.slots))]
    lifts = np.zeros(len(order), dtype=np.int64)
    for copy in range(1, copies + 1):
        lifts[first + copy * part.length :] += growth
    end = len(order) - 1
    jobs = tuple(
        _moved(problem.jobs[old], new, copy * part.length, problem.end, end)
        for new, (old, copy) in enumerate(_job_order(part, copies))
    )
    count = len(problem.fixed) + 1
    fixed = [
        FixedEvent(event.slot + copy * part.length, event.number - copy * count, event.timing)
        for event in problem.fixed
        for copy in part.copies_of(event.slot, copies)
    ]
    return replace(
        problem,
        slots=tuple(range(len(order))),
        work_us=tuple(problem.work_us[each] for each in order),
        live_bytes=problem.live_bytes[order] + more + lifts,
        jobs=jobs,
        items=(),
        fixed=tuple(sorted(fixed, key=lambda event: event.slot)),
        inside_kernels=frozenset(
            new for new, old in enumerate(order) if old in problem.inside_kernels
        ),
    )


def _anchor(job: Job) -> int:
    return job.latest if job.is_gather else job.earliest


def _job_order(part: _Part, copies: int) -> list[tuple[int, int]]:
    """Returns the number of each job and of its copy, in the order of the repeated graph."""
    jobs = part.problem.jobs
    found = []
    for is_gather in (True, False):
        own = [job for job in jobs if job.is_gather is is_gather]
        for copy in range(copies + 1):
            found += [
                (job.number, copy) for job in own if copy in part.copies_of(_anchor(job), copies)
            ]
    return found


def _numbers(part: _Part, copies: int) -> Mapping[tuple[int, int], int]:
    """Returns the number of each copy of a job in the repeated graph."""
    return {each: number for number, each in enumerate(_job_order(part, copies))}


def _moved(job: Job, number: int, by: int, old_end: int, end: int) -> Job:
    others = {
        route: _moved(each, number, by, old_end, end) for route, each in job.on_routes.items()
    }
    held = end if job.held_from == old_end else job.held_from + by
    at = _anchor(job) + by
    return replace(
        job,
        number=number,
        earliest=0 if job.is_gather else at,
        latest=at if job.is_gather else end,
        held_from=at if job.is_gather else held,
        on_routes=others,
    )


def with_values_on_host(
    step: StepProblem, values: Sequence[SavedValue], kept: Sequence[KeptParam] = ()
) -> tuple[StepProblem, list[KeptParam]]:
    """Returns the step in which values rest on the host between forward and backward.

    It is that of the graphs after `zpasses.graph.host_copies.offload_saved`, without nodes.

    Args:
        step: the step with all values on the device.
        values: what rests on the host.
        kept: parameters of the step, which are returned as those of the new step.
    """
    forward, backward = step.forward, step.backward
    live = forward.live_bytes.copy(), backward.live_bytes.copy()
    for each in values:
        live[0][each.forward_slot :] -= each.nbytes
        live[1][: each.backward_slot] -= each.nbytes
    out = [
        _copy("out", each.nbytes, each.ready_slot, forward.end, each.forward_slot)
        for each in values
    ]
    back = [_copy("in", each.nbytes, 0, each.backward_slot, each.backward_slot) for each in values]
    first, numbers = _with_jobs(forward, out, live[0])
    second, numbers_back = _with_jobs(backward, back, live[1])
    return replace(step, forward=first, backward=second), [
        replace(
            each,
            forward_job=numbers[each.forward_job],
            backward_job=numbers_back[each.backward_job],
        )
        for each in kept
    ]


def _with_jobs(
    problem: ScheduleProblem, more: Sequence[Job], live: np.ndarray
) -> tuple[ScheduleProblem, list[int]]:
    """Returns a graph with more jobs, and the new numbers of its own ones."""
    jobs = sorted((*problem.jobs, *more), key=lambda job: (not job.is_gather, _anchor(job)))
    new = {id(job): number for number, job in enumerate(jobs)}
    numbered = tuple(job.numbered(number) for number, job in enumerate(jobs))
    changed = replace(problem, jobs=numbered, items=(), live_bytes=live)
    return changed, [new[id(job)] for job in problem.jobs]


def _copy(
    direction: Literal["out", "in"], size: int, earliest: int, latest: int, held_from: int
) -> Job:
    target, back = current_target(), direction == "in"
    return Job(
        0,
        back,
        BucketKey("single", "reload" if back else "offload"),
        earliest=earliest,
        latest=latest,
        timing=host_copy_timing(HostCopy(direction, size), target),
        latency_us=target.kernel_us,
        full_bytes=size,
        launch_bytes=0,
        packed_bytes=0,
        held_from=held_from,
        result_bytes=0,
        start_us=0.0,
        wait_us=0.0,
        packing_us=(0.0, 0.0),
    )
