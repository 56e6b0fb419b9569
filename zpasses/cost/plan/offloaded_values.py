"""Values that forward saves for backward, and the peaks of a step without them.

A value that leaves the device frees its memory from its last use in forward to its first use in
backward. That lowers the peak of a step only if the peak lies in between.
`zpasses.cost.plan.leaving_values` says which of them are best to leave.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from zpasses.cost.plan.kept_params import StepProblem
from zpasses.cost.plan.one_ahead import OneAheadPeak
from zpasses.cost.plan.schedule_evaluation import live_bytes
from zpasses.cost.plan.schedule_problem import ScheduleProblem
from zpasses.cost.plan.simple_plans import one_ahead_plan
from zpasses.graph.aliases import buffer_readers, memory_base
from zpasses.graph.queries import nbytes, value_of


@dataclass(frozen=True)
class SavedValue:
    """A value that forward saves for backward, and that may rest on the host in between."""

    name: str
    """Name of the node in forward, and of the input of backward."""
    nbytes: int
    ready_slot: int
    """First segment of forward after the one that computes it."""
    forward_slot: int
    """First segment of forward after its last use."""
    backward_slot: int
    """Segment of backward with its first use."""
    held_us: float
    """Duration of the kernels in between."""


def saved_values(step: StepProblem, values: Sequence[fx.Node]) -> list[SavedValue]:
    """Returns what a planner has to know of saved values.

    Args:
        step: forward and backward.
        values: of the forward graph, as `zpasses.graph.host_copies.offloadable_values` returns
            them.
    """
    forward, backward = step.forward, step.backward
    work = np.concatenate([[0.0], np.cumsum(forward.work_us)])
    before = np.concatenate([[0.0], np.cumsum(backward.work_us)])
    place = {node: at for at, node in enumerate(forward.nodes)}
    uses = {
        node.name: min((position for position in _positions(backward, node.users)), default=0)
        for node in backward.nodes[-1].graph.find_nodes(op="placeholder")
    }
    found = []
    for node in values:
        base = memory_base(node)
        readers = (each for each in buffer_readers(base) if each.op != "output")
        last = max((place.get(each, 0) for each in (node, *readers)), default=0)
        after = min(bisect_right(forward.slots, last), forward.end)
        first = max(0, bisect_right(backward.slots, uses[node.name]) - 1)
        held = float(work[-1] - work[after] + before[first])
        ready = min(bisect_right(forward.slots, place.get(node, 0)), forward.end)
        found.append(SavedValue(node.name, nbytes(value_of(node)), ready, after, first, held))
    return found


def _positions(problem: ScheduleProblem, nodes: Iterable[fx.Node]) -> list[int]:
    wanted = set(nodes)
    return [at for at, node in enumerate(problem.nodes) if node in wanted]


def idle_at_peaks(
    rich: StepProblem, values: Sequence[SavedValue], limit_bytes: int
) -> list[SavedValue]:
    """Returns the values that nothing reads at some peak above a limit, in the same order."""
    forward, backward = (
        np.concatenate([[0], np.cumsum(live_bytes(each, one_ahead_plan(each)) > limit_bytes)])
        for each in (rich.forward, rich.backward)
    )
    return [
        each
        for each in values
        if forward[-1] > forward[each.forward_slot] or backward[each.backward_slot] > 0
    ]


def least_limit(step: StepProblem, values: Sequence[SavedValue]) -> int:
    """Returns about the least limit that a step fits without those of its values that are idle at
    a peak above it. With a lower one, values would leave although peaks remain.
    """
    peaks = _PeaksWithout(step)
    least, most = 0, peaks.peak_bytes
    while most - least > max(1, most // 100):
        middle = (least + most) // 2
        peaks = _PeaksWithout(step)
        for each in idle_at_peaks(step, values, middle):
            peaks.remove(each)
        least, most = (least, middle) if peaks.peak_bytes <= middle else (middle, most)
    return most


class _PeaksWithout:
    """The peak of a step with one gather and one reduction in flight, without some values."""

    def __init__(self, step: StepProblem) -> None:
        self._peaks = OneAheadPeak(step.forward), OneAheadPeak(step.backward)
        self._forward = np.zeros(len(step.forward.slots), dtype=np.int64)
        self._backward = np.zeros(len(step.backward.slots), dtype=np.int64)

    def remove(self, value: SavedValue) -> None:
        self._forward[value.forward_slot :] -= value.nbytes
        self._backward[: value.backward_slot] -= value.nbytes

    @property
    def peak_bytes(self) -> int:
        forward, backward = self._peaks
        return max(forward.peak_bytes(self._forward), backward.peak_bytes(self._backward))
