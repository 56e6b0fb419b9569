"""Cuts a graph into its compute and the collectives at its borders.

A gather that reads only shards can start before its graph runs, and a reduction whose result the
graph only returns can end after it. The body is the rest of the graph. It takes the gathered
tensors as further inputs, after its own, and returns the tensors that are to be reduced as further
outputs. zpasses.runtime.hoisted runs the parts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.queries import (
    append_placeholder,
    collective_of,
    erase_dead,
    is_wait,
    returned_values,
    value_of,
)
from zpasses.graph.tags import REDUCE_ROLES, tag_of


@dataclass(frozen=True)
class GatherPart:
    """The gathers before a graph."""

    graph: fx.GraphModule
    """Takes the shards of `params`, and returns what the body takes. What `in_flight` lists must
    be awaited first."""
    params: tuple[str, ...]
    """Names of the parameters."""
    in_flight: tuple[int, ...]
    """Positions of the outputs that collectives write."""
    collectives: tuple[str, ...]
    """Names of the gathers, in graph order."""


@dataclass(frozen=True)
class ReductionPart:
    """The reductions after a graph."""

    start: fx.GraphModule
    """Takes the first `inputs` further outputs of the body, and starts the reductions."""
    inputs: int
    end: fx.GraphModule
    """Takes the outputs of `start`, then the other further outputs of the body. Awaits the
    reductions, and returns `gradients`."""
    gradients: Mapping[int, str]
    """Position among the outputs of the graph -> name of the parameter whose gradient it is."""
    collectives: tuple[str, ...]
    """Names of the reductions that `start` starts, in graph order."""


@dataclass(frozen=True)
class HoistedGraph:
    """The parts of a graph."""

    body: fx.GraphModule
    extra_inputs: list[Any]
    """Fake values of the further inputs of the body."""
    outputs: int
    """Number of the outputs of the graph. The body returns None for hoisted gradients."""
    gathers: GatherPart | None
    reductions: ReductionPart | None

    def params(self) -> list[str]:
        """Names of the parameters that are gathered before, or whose gradients are reduced
        after the body.
        """
        gathered = self.gathers.params if self.gathers is not None else ()
        reduced = self.reductions.gradients.values() if self.reductions is not None else ()
        return [*gathered, *reduced]

    def shard_positions(self) -> list[int]:
        """Positions of the shards that the gathers read, among the inputs of the graph."""
        given = [node.name for node in self.body.graph.find_nodes(op="placeholder")]
        read = self.gathers.graph.graph.find_nodes(op="placeholder") if self.gathers else ()
        return [given.index(node.name) for node in read]

    def summary(self) -> str:
        """Says what leaves the graph, equally on all ranks."""
        gathers = self.gathers.collectives if self.gathers is not None else ()
        reductions = self.reductions.collectives if self.reductions is not None else ()
        return f"{len(gathers)} before, {len(reductions)} after"


def hoist_collectives(
    gm: fx.GraphModule, gradients: Mapping[int, Sequence[fx.Node]] | None = None
) -> HoistedGraph | None:
    """Cut a graph after its passes into parts; `gm` is not changed.

    Args:
        gradients: position of an output -> the reduced gradients that it sums, as from
            `returned_gradients`; None for a graph that is no backward.

    Returns:
        None if no collective can be hoisted.
    """
    gathers = _gathers(gm.graph)
    reductions = _Reductions.of(gm.graph, gradients or {})
    if not gathers.started and not reductions.started:
        return None
    body = compat.clone_graph_module(gm)
    names = {node.name: node for node in body.graph.nodes}
    output = body.graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    count = len(values)
    for position in reductions.gradients:
        values[position] = None
    sent = [names[node.name] for node in (*reductions.sent, *reductions.needed_later)]
    before = output.all_input_nodes
    output.args = ((*values, *sent),)
    extra = [_give(body.graph, names[node.name], i) for i, node in enumerate(gathers.crossing)]
    erase_dead(body.graph, [*before, *(names[node.name] for node in gathers.crossing)])
    strides = {count + i: value_of(node).stride() for i, node in enumerate(sent)}
    compat.pin_output_strides(output, strides)
    body.graph.lint()
    body.recompile()
    return HoistedGraph(body, extra, count, gathers.part(gm), reductions.part(gm))


# --- gathers --------------------------------------------------------------------------------------
@dataclass
class _Gathers:
    shards: list[fx.Node] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    started: list[fx.Node] = field(default_factory=list)
    crossing: list[fx.Node] = field(default_factory=list)
    """The nodes that the rest of the graph reads."""

    def part(self, gm: fx.GraphModule) -> GatherPart | None:
        if not self.started:
            return None
        outputs = {node for start in self.started for node in (start, *start.users)}
        return GatherPart(
            _extract(gm, self.shards, self.nodes, self.crossing),
            tuple(_param(node) for node in self.shards),
            tuple(i for i, node in enumerate(self.crossing) if node in outputs),
            tuple(node.name for node in self.started),
        )


def _gathers(graph: fx.Graph) -> _Gathers:
    shards = [
        node
        for node in graph.find_nodes(op="placeholder")
        if (tag := tag_of(node)) is not None and tag.role == "shard"
    ]
    of_shards = dict.fromkeys(shards)
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if inputs and all(each in of_shards for each in inputs) and _is_plain(node):
            of_shards[node] = None
    started = [node for node in of_shards if _is_started(node)]
    needed = set(started)
    for node in reversed(of_shards):
        if needed.intersection(node.users) and node.op != "placeholder":
            needed.add(node)
    needed |= {user for node in started for user in node.users if user.target is operator.getitem}
    nodes = [node for node in of_shards if node in needed]
    crossing = [node for node in nodes if any(user not in needed for user in node.users)]
    if not all(isinstance(value_of(node), Tensor) for node in crossing):
        return _Gathers()
    read = {each for node in nodes for each in node.all_input_nodes}
    return _Gathers([node for node in shards if node in read], nodes, started, crossing)


def _is_plain(node: fx.Node) -> bool:
    """Whether a node calls something that reads nothing but its inputs, and changes nothing. Waits
    stay where results are read.
    """
    if node.op != "call_function" or is_wait(node):
        return False
    if node.target is operator.getitem:
        return True
    target = node.target
    if not isinstance(target, compat.OpOverload) or target._schema.is_mutable:
        return False
    return collective_of(node) is None or _is_started(node)


def _is_started(node: fx.Node) -> bool:
    """Whether a node starts a collective that `wait_tensor` awaits."""
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, compat.OpOverload)
        and target.namespace == "_c10d_functional"
        and not target._schema.is_mutable
        and collective_of(node) is not None
    )


def _param(node: fx.Node) -> str:
    tag = tag_of(node)
    assert tag is not None
    return tag.params[0]


def _give(graph: fx.Graph, node: fx.Node, number: int) -> Any:
    """Make a node, and its waits, a further input. Returns the fake value of the input."""
    given = append_placeholder(graph, f"gathered_{number}", node)
    for user in list(node.users):
        if is_wait(user):
            if (tag := tag_of(user)) is not None:
                given.meta["zpasses"] = tag
            user.replace_all_uses_with(given)
            graph.erase_node(user)
    node.replace_all_uses_with(given)
    return value_of(given)


# --- reductions -----------------------------------------------------------------------------------
@dataclass
class _Reductions:
    gradients: dict[int, str] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)
    started: list[fx.Node] = field(default_factory=list)
    """Reductions that read nothing of other reductions."""
    sent: list[fx.Node] = field(default_factory=list)
    """What they read."""
    needed_later: list[fx.Node] = field(default_factory=list)
    """What the other nodes read of the rest of the graph."""

    @classmethod
    def of(cls, graph: fx.Graph, gradients: Mapping[int, Sequence[fx.Node]]) -> _Reductions:
        positions: dict[fx.Node, list[int]] = {}
        for position, value in enumerate(returned_values(graph)):
            if isinstance(value, fx.Node):
                positions.setdefault(value, []).append(position)
        only_returned: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            at = positions.get(node, [])
            ends = all(each in gradients for each in at) and len(at) <= 1
            users = [user for user in node.users if user.op != "output"]
            if node.op == "call_function" and ends and all(u in only_returned for u in users):
                only_returned.add(node)
        moved: dict[fx.Node, None] = {}
        for node in graph.nodes:
            if node in only_returned and (
                _is_reduction(node) or any(each in moved for each in node.all_input_nodes)
            ):
                moved[node] = None
        found = cls(nodes=list(moved))
        found.started = [
            node
            for node in moved
            if _is_reduction(node) and not any(each in moved for each in node.all_input_nodes)
        ]
        first = set(found._first())
        found.sent = _outside(found.started, moved)
        later = [node for node in moved if node not in first]
        found.needed_later = _outside(later, moved)
        for node, at in positions.items():
            if node in moved:
                found.gradients[at[0]] = _param(gradients[at[0]][0])
        values = [value_of(node) for node in (*found.sent, *found.needed_later)]
        if not all(isinstance(value, Tensor) for value in values):
            return cls()
        return found

    def _first(self) -> list[fx.Node]:
        """The nodes of the part that starts the reductions."""
        parts = [
            user for node in self.started for user in node.users if user.target is operator.getitem
        ]
        first = {*self.started, *parts}
        return [node for node in self.nodes if node in first]

    def part(self, gm: fx.GraphModule) -> ReductionPart | None:
        if not self.started:
            return None
        first = self._first()
        later = [node for node in self.nodes if node not in set(first)]
        returned = returned_values(gm.graph)
        grads = [returned[position] for position in self.gradients]
        between = [
            node
            for node in first
            if any(user not in first for user in node.users) and isinstance(value_of(node), Tensor)
        ]
        return ReductionPart(
            _extract(gm, self.sent, first, between),
            len(self.sent),
            _extract(gm, [*between, *self.needed_later], later, grads),
            self.gradients,
            tuple(node.name for node in self.started),
        )


def _is_reduction(node: fx.Node) -> bool:
    tag = tag_of(node)
    return _is_started(node) and tag is not None and tag.role in REDUCE_ROLES


def _outside(nodes: Iterable[fx.Node], inside: Collection[fx.Node]) -> list[fx.Node]:
    found = {each: None for node in nodes for each in node.all_input_nodes if each not in inside}
    return list(found)


# --- parts ----------------------------------------------------------------------------------------
def _extract(
    gm: fx.GraphModule,
    inputs: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> fx.GraphModule:
    """A new graph of some nodes of a graph, in their order."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    copied: Callable[[fx.Node], fx.Node] = copies.__getitem__
    for node in nodes:
        copies[node] = graph.node_copy(node, copied)
    graph.output(tuple(copies[node] for node in outputs))
    graph.lint()
    return fx.GraphModule(gm, graph)
