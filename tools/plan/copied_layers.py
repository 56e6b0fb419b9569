"""How often a step with many equal layers has what a joint graph with few of them has once.

The third layer of the joint graph stands for its copies (`zpasses.tools.plan.repeated_layers`).
What a linear program decides of it is the mean over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from zpasses.cost.plan.kept_params import StepProblem
from zpasses.cost.plan.schedule_problem import ScheduleProblem
from zpasses.tools.plan.joint_values import JointValues, Side, Value
from zpasses.tools.plan.repeated_layers import FEWEST_LAYERS, layer_starts


class CopiedLayers:
    """The kernels of the layer that is copied, and what belongs to them.

    Args:
        joint: what forward and backward compute.
        step: forward and backward of a partition of it that keeps no full parameter.
        copies: how many more such layers the step has; 0 leaves the graph as it is.

    Raises:
        ValueError: if there are too few layers to copy one of them.
    """

    def __init__(self, joint: JointValues, step: StepProblem, copies: int) -> None:
        self.copies, self._joint = copies, joint
        self.forward = self.backward = range(0)
        """Numbers of the kernels of the layer."""
        self._shared = 0
        """How many kernels of forward run before the first layer."""
        if copies:
            starts = [
                layer_starts(self._first_reads(side, problem))
                for side, problem in (
                    (joint.forward, step.forward),
                    (joint.backward, step.backward),
                )
            ]
            layers = sorted(starts[0].keys() & starts[1].keys())
            if len(layers) < FEWEST_LAYERS:
                raise ValueError(f"found {len(layers)} layers, and needs {FEWEST_LAYERS}")
            before, own, after = layers[1:4]
            self.forward = range(starts[0][own], starts[0][after])
            self.backward = range(starts[1][own], starts[1][before])
            self._shared = min(starts[0].values())
        self._places = self._all_places() if copies else {}

    def times(self, node: fx.Node) -> int:
        """Returns how often the step has a node of forward or backward."""
        part = self.backward if node in self._joint.in_backward else self.forward
        return 1 + self.copies * (self._places.get(node, -1) in part)

    def reads_own(self, node: fx.Node, value: Value) -> bool:
        """Whether a node of forward reads a value of the same layer, or one that all share; else
        each copy may read another one.
        """
        mine, other = self.times(node), self.times(value[0])
        return mine == other or (other == 1 and self._places.get(value[0], -1) < self._shared)

    def _first_reads(
        self, side: Side, problem: ScheduleProblem
    ) -> Iterator[tuple[int, tuple[str, ...]]]:
        for job in problem.jobs:
            item = problem.items[job.number]
            place = side.first_read.get((self._joint.named[item.started.name], 0))
            if job.is_gather and place is not None:
                yield place, item.tag.params

    def _all_places(self) -> dict[fx.Node, int]:
        """Returns the number of the kernel of each node: that of the first that needs it, or in
        backward, whose results collectives reduce, that of the last that it needs.
        """
        joint, found = self._joint, dict[fx.Node, int]()
        nodes = list(joint.named.values())
        for node in (each for each in nodes if each in joint.in_backward):
            made = [found[each] for each in node.all_input_nodes if each in found]
            found[node] = joint.backward.place.get(node, max(made, default=-1))
        for node in (each for each in reversed(nodes) if each in joint.in_forward):
            read = [found[each] for each in node.users if each in joint.in_forward]
            found[node] = joint.forward.place.get(node, min(read, default=-1))
        return found

    def moved_us(self, problem: ScheduleProblem, gathers: bool) -> float:
        """Returns the duration of the kernels that move with the collectives of the copies."""
        return sum(
            (job.start_us + job.wait_us) * (self.times(self._joint.named[item.source.name]) - 1)
            for job, item in zip(problem.jobs, problem.items, strict=True)
            if job.is_gather is gathers
        )
