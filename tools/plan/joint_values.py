"""The values of a joint graph: what computes them, and which kernels of forward and backward read
them, as far as it is equal in all partitions of the graph.

A value is an allocation. What Inductor may compute where it is read takes no time and no memory
here, although it keeps alive what it is computed from: a kernel may also write it, and then does
not. Kernels that move with collectives, and what reads reduced gradients, have no fixed place and
are left out. Forward is what its results need, and backward is what depends on incoming gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor, fx

from zpasses.cost.plan.kept_params import StepProblem
from zpasses.cost.time.fused_kernels import may_be_inlined, may_write_in_place
from zpasses.cost.time.roofline import durations_us
from zpasses.cost.time.step_time import transfer_of
from zpasses.cost.time.target import current_target
from zpasses.graph.aliases import is_alias, memory_root, root_output
from zpasses.graph.host_copies import FROM_HOST, LEAST_BYTES
from zpasses.graph.queries import nbytes, returned_values, value_of
from zpasses.graph.tags import GATHER_ROLES, tag_of
from zpasses.graph.walks import reachable

Value = tuple[fx.Node, int]
"""The node that allocates memory, and which of its outputs it is."""


class Side:
    """The kernels of forward or backward that stay in order, and the memory that they need.

    Args:
        kernels: in order.
        moved: those that have no fixed place.
        read_by: returns the values that a kernel reads.
        given: values that are there from the start.
        lasting: values that stay to the end.
        cost_us: duration of each kernel.
        inlined: kernels whose values may take no memory.
    """

    def __init__(
        self,
        kernels: Sequence[fx.Node],
        moved: Iterable[fx.Node],
        read_by: Callable[[fx.Node], Sequence[Value]],
        given: Collection[Value],
        lasting: Iterable[Value],
        cost_us: Mapping[fx.Node, float],
        inlined: Collection[fx.Node] = (),
    ) -> None:
        self.place = {node: at for at, node in enumerate(kernels)}
        self.work_us = np.array([cost_us[node] for node in kernels])
        self.moved_us = sum(cost_us[node] for node in moved)
        self.first_read: dict[Value, int] = {}
        self.last_read: dict[Value, int] = {}
        for at, node in enumerate(kernels):
            for value in read_by(node):
                self.first_read.setdefault(value, at)
                self.last_read[value] = at
        end = len(kernels)
        self.lasting = frozenset(lasting)
        changes = np.zeros(end + 1, dtype=np.int64)
        made = {(node, at): place for node, place in self.place.items() for at in outputs_of(node)}
        there = {value: 0 for value in given if value in self.first_read}
        self.first = {**self.first_read, **made, **there}
        """Kernel that makes a value, or else that reads it first."""
        for value, first in self.first.items():
            if value[0] in inlined:
                continue
            last = end - 1 if value in self.lasting else self.last_read.get(value, first)
            changes[first] += value_bytes(value)
            changes[last + 1] -= value_bytes(value)
        self.live_bytes = np.cumsum(changes[:-1])
        spared = np.zeros_like(self.live_bytes)
        for value, last in self.last_read.items():
            writer = kernels[last]
            if value not in self.lasting and value[0] not in inlined and may_write_in_place(writer):
                most = min(value_bytes(value), nbytes(value_of(writer)))
                spared[last] = max(spared[last], most)
        self.live_bytes -= spared
        """During each kernel, of what it and those before it have made and later ones read."""

    @property
    def end(self) -> int:
        """How many kernels there are."""
        return len(self.place)


class JointValues:
    """What forward and backward compute and read. Use it with the graph's target.

    Args:
        joint: the joint graph.
        step: forward and backward of a partition of it.
        user_outputs: how many values forward returns before those that it saves.
    """

    def __init__(self, joint: fx.Graph, step: StepProblem, user_outputs: int) -> None:
        self.named = {node.name: node for node in joint.nodes}
        nodes = [node for node in joint.nodes if node.op == "call_function"]
        found = durations_us(nodes, current_target())
        self._inlined = set(filter(may_be_inlined, nodes))
        self.cost_us = {
            node: cost if _costs(node) and node not in self._inlined else 0.0
            for node, cost in zip(nodes, found, strict=True)
        }
        returned = returned_values(joint)
        user = [each for each in returned[:user_outputs] if isinstance(each, fx.Node)]
        grads = [each for each in returned[user_outputs:] if isinstance(each, fx.Node)]
        tangents = [
            node for node in joint.find_nodes(op="placeholder") if node.name.startswith("tangents")
        ]
        self.in_backward = set(reachable(tangents, lambda node: node.users))
        needed = set(reachable(user, lambda node: node.all_input_nodes))
        self.in_forward = needed - self.in_backward
        self._moving = self._movable(step)
        kernels = [node for node in nodes if self._stays(node)]
        apart = [node for node in nodes if node in self._moving]
        self.inputs = {node: self.read_by(node) for node in nodes if not is_alias(node)}
        """The values that each kernel or collective reads, but for those of the caller."""
        self.forward, self.backward = (
            Side(
                [node for node in kernels if node in side],
                [node for node in apart if node in side],
                self.read_by,
                given,
                filter(None, map(self.value_behind, ends)),
                self.cost_us,
                self._inlined,
            )
            for side, given, ends in (
                (self.in_forward, (), user),
                (self.in_backward, {(node, 0) for node in tangents}, grads),
            )
        )
        own = {value for value in self.backward.first if value[0] in self.in_backward}
        direct = [each for each in self.backward.first_read if each not in own]
        self.needed, self.remade = self.sources_of(direct, lambda value: False)

    def value_behind(self, node: fx.Node) -> Value | None:
        """Returns the value that a node is, or is a view of; None for memory of the caller."""
        value = root_output(memory_root(node))
        made = value[0].op == "call_function" or value[0] in self.in_backward
        return value if made and isinstance(_tensor(value), Tensor) else None

    def read_by(self, node: fx.Node) -> list[Value]:
        """Returns the values that a node reads."""
        found = map(self.value_behind, node.all_input_nodes)
        return [each for each in dict.fromkeys(found) if each is not None]

    def sources_of(
        self, values: Iterable[Value], is_there: Callable[[Value], bool]
    ) -> tuple[list[Value], list[fx.Node]]:
        """Returns the values from which others can be made again, with these, and what makes them.

        Args:
            values: what is to be made.
            is_there: whether a value is in memory, so that nothing need make it.
        """
        found = list(
            reachable(
                (each for each in values if not is_there(each)),
                lambda value: [each for each in self.inputs[value[0]] if not is_there(each)],
            )
        )
        return found, list(dict.fromkeys(value[0] for value in found))

    def may_leave(self, value: Value) -> bool:
        """Whether a value may rest on the host, as far as `offloadable_values` could say so."""
        tag, tensor = tag_of(value[0]), _tensor(value)
        return (
            (tag is None or tag.role not in (*GATHER_ROLES, "part"))
            and isinstance(tensor, Tensor)
            and tensor.is_floating_point()
            and value_bytes(value) >= LEAST_BYTES
        )

    def _stays(self, node: fx.Node) -> bool:
        tag = tag_of(node)
        return (
            node not in self._moving
            and not is_alias(node)
            and transfer_of(node) is None
            and not (tag is not None and tag.role == "part")
        )

    def _movable(self, step: StepProblem) -> set[fx.Node]:
        """Nodes that move with collectives, or may once more collectives do."""
        items = [each for side in (step.forward, step.backward) for each in side.items]
        names = {
            node.name
            for each in items
            for node in (*each.inputs, each.started, each.wait, *each.results)
        }
        reduced = [
            node for node in self.in_backward if tag_of(node) and transfer_of(node) is not None
        ]
        found = {self.named[name] for name in names if name in self.named}
        return found.union(reachable(reduced, lambda node: node.users))


def outputs_of(node: fx.Node) -> range:
    """Returns the numbers of the outputs of a node."""
    value = value_of(node)
    return range(len(value)) if isinstance(value, (list, tuple)) else range(1)


def value_bytes(value: Value) -> int:
    """Returns the bytes of an allocation."""
    return nbytes(_tensor(value))


def _tensor(value: Value) -> object:
    whole = value_of(value[0])
    return whole[value[1]] if isinstance(whole, (list, tuple)) else whole


def _costs(node: fx.Node) -> bool:
    """Whether each graph with a node spends the node's duration: copies from the host are counted
    with their gathers, parts of parameters may be left out, and the dialect is lowered.
    """
    tag = tag_of(node)
    return (
        node.target is not FROM_HOST
        and not (tag is not None and tag.role == "part")
        and transfer_of(node) is None
    )
