"""What passes need that move collectives: the moves that are possible, and a bound on the memory
that they cost.

Ranks must plan alike, or they would wait for each other. Their graphs differ in little: in padding,
and in the rows that they keep of an uneven parameter. So plans count no bytes of nodes that belong
to one rank's shard."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.memory import Liveness, liveness, scratch_bytes
from zpasses.graph.nodes import collective_of, is_wait, nbytes, value_of
from zpasses.graph.tags import Tag, tag_of

__all__ = [
    "Launch",
    "MemoryCurve",
    "SchedulableCollective",
    "gather_launches",
    "movable_gathers",
    "movable_reductions",
    "reduction_launches",
]


@dataclass(frozen=True)
class SchedulableCollective:
    """A collective of one tensor, with what must move along."""

    started: fx.Node
    wait: fx.Node
    tag: Tag
    inputs: tuple[fx.Node, ...]
    """Nodes that make the input out of graph inputs alone (cast, padding), in order; for
    gathers."""
    results: tuple[fx.Node, ...]
    """Nodes that finish the output (slice, cast, copy) and are read by the graph's output alone, in
    order; for reductions."""
    full_bytes: int
    """Bytes of the full tensor: what a gather returns, what a reduction takes."""

    @property
    def source(self) -> fx.Node:
        """The tensor that communicates."""
        return self.started.all_input_nodes[0]


def movable_gathers(graph: fx.Graph) -> list[SchedulableCollective]:
    """Gathers of one tensor that depend on graph inputs alone and may start anywhere before their
    wait, in graph order."""
    return [item for node in graph.nodes if (item := _gather(node)) is not None]


def _gather(node: fx.Node) -> SchedulableCollective | None:
    tag, wait = tag_of(node), _only_wait(node)
    if (
        tag is None
        or tag.role != "gather"
        or wait is None
        or not _is(node, "all_gather_into_tensor")
    ):
        return None
    chain: list[fx.Node] = []
    source = node.all_input_nodes[0]
    while source.op == "call_function":
        if (
            len(source.all_input_nodes) != 1
            or collective_of(source) is not None
            or len(source.users) > 1
            or is_wait(source)
        ):
            return None
        chain.append(source)
        source = source.all_input_nodes[0]
    return (
        SchedulableCollective(node, wait, tag, tuple(reversed(chain)), (), nbytes(value_of(node)))
        if source.op == "placeholder"
        else None
    )


def movable_reductions(graph: fx.Graph) -> list[SchedulableCollective]:
    """Reductions of one tensor whose results nothing but the graph's output reads, in graph
    order."""
    return [item for node in graph.nodes if (item := _reduction(node)) is not None]


def _reduction(node: fx.Node) -> SchedulableCollective | None:
    tag, wait = tag_of(node), _only_wait(node)
    if (
        tag is None
        or tag.role != "reduce"
        or wait is None
        or not _is(node, "all_reduce", "reduce_scatter_tensor")
    ):
        return None
    results = epilogue(wait)
    if results is None:
        return None
    return SchedulableCollective(
        node, wait, tag, (), results, nbytes(value_of(node.all_input_nodes[0]))
    )


def epilogue(wait: fx.Node) -> tuple[fx.Node, ...] | None:
    """What follows a wait until the graph's output; None if anything else reads it."""
    found: dict[fx.Node, None] = {}
    queue = list(wait.users)
    while queue:
        node = queue.pop(0)
        if node.op == "output" or node in found:
            continue
        if collective_of(node) is not None or any(
            item is not wait and item not in found for item in node.all_input_nodes
        ):
            return None
        found[node] = None
        queue += node.users
    return tuple(found)


def _only_wait(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and is_wait(users[0]) else None


def _is(node: fx.Node, *names: str) -> bool:
    collective = collective_of(node)
    return (
        collective is not None
        and collective.op in names
        and node.target.namespace == "_c10d_functional"
    )  # type: ignore[union-attr]


@dataclass(frozen=True)
class Launch:
    """A collective of one or several tensors, with what must move along."""

    started: fx.Node
    before: tuple[fx.Node, ...]
    """Nodes that make its inputs out of graph inputs, in order; for gathers."""
    parts: tuple[fx.Node, ...]
    """The outputs, where there are several."""
    waits: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]
    """Nodes that finish its outputs, in order; for reductions."""
    nbytes: int
    """Memory that it takes from its start until it is awaited."""


def gather_launches(graph: fx.Graph) -> list[Launch]:
    """Parameter gathers that depend on graph inputs alone, in graph order."""
    found = []
    for node in graph.nodes:
        tag = tag_of(node)
        if tag is None or tag.role != "gather" or collective_of(node) is None:
            continue
        before, ends = _preparation(node), _parts_and_waits(node)
        if before is not None and ends is not None:
            held = (
                nbytes(value_of(node))
                + sum(_block_bytes(each) for each in before)
                + scratch_bytes(node)
            )
            found.append(Launch(node, before, *ends, (), held))
    return found


def reduction_launches(graph: fx.Graph) -> list[Launch]:
    """Gradient reductions whose results nothing but the graph's output reads, in graph order."""
    found = []
    for node in graph.nodes:
        tag, collective = tag_of(node), collective_of(node)
        if tag is None or tag.role != "reduce" or collective is None:
            continue
        ends = _parts_and_waits(node)
        after = [epilogue(wait) for wait in ends[1]] if ends is not None else [None]
        if ends is not None and all(each is not None for each in after):
            last = tuple(dict.fromkeys(step for each in after if each is not None for step in each))
            held = collective.nbytes + (
                0 if "all_reduce" in collective.op else nbytes(value_of(node))
            )
            found.append(Launch(node, (), *ends, last, held))
    return found


def _block_bytes(node: fx.Node) -> int:
    tag = tag_of(node)
    return tag.block_bytes if tag is not None else 0


def _preparation(started: fx.Node) -> tuple[fx.Node, ...] | None:
    """What makes a gather's inputs, in graph order; None unless that is casts, padding, packing and
    views of graph inputs."""
    found: set[fx.Node] = set()
    queue = list(started.all_input_nodes)
    while queue:
        node = queue.pop()
        if node.op == "placeholder" or node in found:
            continue
        tag = tag_of(node)
        view = isinstance(node.target, compat.OpOverload) and (
            node.target.is_view or node.target is torch.ops.aten.reshape.default
        )
        if not view and (tag is None or tag.role != "gather_input"):
            return None
        found.add(node)
        queue += node.all_input_nodes
    if not found:
        return ()
    ordered: list[fx.Node] = []
    node = started.prev
    while len(ordered) < len(found):
        if node in found:
            ordered.append(node)
        node = node.prev
    return tuple(reversed(ordered))


def _parts_and_waits(started: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]] | None:
    users = list(started.users)
    parts = tuple(user for user in users if user.target is operator.getitem)
    ends = [user for part in (parts or (started,)) for user in part.users]
    if (parts and len(parts) != len(users)) or not ends or not all(is_wait(each) for each in ends):
        return None
    return parts, tuple(ends)


class MemoryCurve:
    """Bytes alive along a graph, while moves are planned, and the most that they may become.

    Positions are indices of the graph's nodes as they were when the curve was made.
    """

    def __init__(self, graph: fx.Graph, budget: float | int) -> None:
        self.base: Liveness = liveness(graph, bytes_of=_common_bytes, is_view=_cuts_own_rows)
        self.live_bytes = list(self.base.live_bytes)
        self.position = {node: index for index, node in enumerate(self.base.nodes)}
        self._budget = budget
        self.rebase()

    def rebase(self) -> None:
        """Take the limit from the curve as it is now."""
        peak, budget = max(self.live_bytes, default=0), self._budget
        self.limit_bytes = (
            int(peak * (1 + budget)) if isinstance(budget, float) else max(budget, peak)
        )

    def add(self, start: int, end: int, added_bytes: int) -> None:
        for index in range(start, end):
            self.live_bytes[index] += added_bytes


def _common_bytes(node: fx.Node) -> int | None:
    """Of what differs between ranks, what is the same on all of them."""
    tag = tag_of(node)
    return (
        tag.block_bytes if tag is not None and tag.role in ("gather_input", "shard_grad") else None
    )


def _cuts_own_rows(node: fx.Node) -> bool:
    """Whether a node drops the padding of a reduced block, which ranks with a full block have no
    node for."""
    if node.target is not torch.ops.aten.slice_copy.Tensor or not is_wait(node.all_input_nodes[0]):
        return False
    collective = collective_of(_launch_of(node.all_input_nodes[0]))
    return collective is not None and "reduce_scatter" in collective.op


def _launch_of(wait: fx.Node) -> fx.Node:
    started = wait.all_input_nodes[0]
    return started.all_input_nodes[0] if started.target is operator.getitem else started
