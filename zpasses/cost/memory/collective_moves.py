"""Which collectives of a graph can move, and the memory of a graph as all ranks count it.

The pass `schedule` uses it. All ranks must make the same plan, because a different order of
collectives is a deadlock. Their graphs differ slightly: in padding, and in the number of rows that
a rank has of an unevenly sharded parameter. `equal_liveness` therefore replaces bytes that depend
on the rank by the bytes of a full block, which are equal on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.memory.collective_memory import scratch_bytes
from zpasses.cost.memory.liveness import Liveness, liveness
from zpasses.cost.time.fused_kernels import FusedKernels
from zpasses.graph.dialect import AVERAGE_GRAD
from zpasses.graph.host_copies import host_copy_of
from zpasses.graph.queries import collective_of, is_wait, nbytes, started_by, value_of
from zpasses.graph.tags import Tag, tag_of


@dataclass(frozen=True)
class SchedulableCollective:
    """A collective of one tensor, or a copy to the host or back, with the nodes that must move with
    it. A copy to the host behaves as a reduction, and one from the host as a gather.
    """

    started: fx.Node
    wait: fx.Node
    tag: Tag
    inputs: tuple[fx.Node, ...]
    """For gathers: nodes that compute the input from graph inputs only (cast, padding), in order.
    """
    results: tuple[fx.Node, ...]
    """For reductions: the nodes that complete the output (slice, cast, copy) and that only the
    graph's output reads, in order.
    """
    full_bytes: int
    """Bytes of the full tensor: a gather's output, a reduction's input."""

    @property
    def is_host_copy(self) -> bool:
        """Whether it is a copy to the host or back."""
        return self.tag.role in ("offload", "reload")

    @property
    def source(self) -> fx.Node:
        """The input tensor of the collective."""
        return self.started.all_input_nodes[0]

    @property
    def is_gather(self) -> bool:
        """Whether it is a gather; else a reduction."""
        return self.tag.role in ("gather", "reload")

    @property
    def prepared_bytes(self) -> int:
        """Bytes of its prepared input, and of the scratch memory of its backend and of an average
        that follows.
        """
        if self.is_host_copy:
            return 0
        averages = [node for node in self.results if node.target is AVERAGE_GRAD]
        scratch = sum(map(scratch_bytes, (self.started, *averages)))
        return scratch + sum(map(block_bytes, self.inputs))


def movable_collectives(graph: fx.Graph) -> list[SchedulableCollective]:
    """Returns what can move, each kind in graph order: gathers of one tensor that depend on graph
    inputs only, reductions of one tensor whose results only the output reads, and copies to the
    host and back.

    Gathers and copies from the host may start anywhere before their wait. Reductions and copies to
    the host may be awaited anywhere until the end of the graph.
    """
    kinds = (_gather, _reduction, _host_copy)
    return [item for kind in kinds for node in graph.nodes if (item := kind(node)) is not None]


def _gather(node: fx.Node) -> SchedulableCollective | None:
    tag, wait = tag_of(node), _only_wait(node)
    if (
        tag is None
        or tag.role != "gather"
        or wait is None
        or not _is_functional_collective(node, "all_gather_into_tensor")
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


def _host_copy(node: fx.Node) -> SchedulableCollective | None:
    copy, tag = host_copy_of(node), tag_of(node)
    if copy is None or tag is None or len(node.users) != 1:
        return None
    (wait,) = node.users
    return SchedulableCollective(node, wait, tag, (), (), tag.nbytes)


def _reduction(node: fx.Node) -> SchedulableCollective | None:
    tag, wait = tag_of(node), _only_wait(node)
    if (
        tag is None
        or tag.role != "reduce"
        or wait is None
        or not _is_functional_collective(
            node, "all_reduce", "all_to_all_single", "reduce_scatter_tensor"
        )
    ):
        return None
    results = _epilogue(wait)
    if results is None:
        return None
    return SchedulableCollective(
        node, wait, tag, (), results, nbytes(value_of(node.all_input_nodes[0]))
    )


def _epilogue(wait: fx.Node) -> tuple[fx.Node, ...] | None:
    """Returns the nodes between a wait and the graph's output.

    The average over replicas is one of them, because a later pass starts it after its own launch.
    Returns None if they include another collective, or read a value other than the wait and each
    other.
    """
    found: dict[fx.Node, None] = {}
    queue = list(wait.users)
    while queue:
        node = queue.pop(0)
        if node.op == "output" or node in found:
            continue
        communicates = collective_of(node) is not None and node.target is not AVERAGE_GRAD
        if communicates or any(
            item is not wait and item not in found for item in node.all_input_nodes
        ):
            return None
        found[node] = None
        queue += node.users
    return tuple(found)


def _only_wait(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and is_wait(users[0]) else None


def _is_functional_collective(node: fx.Node, *names: str) -> bool:
    collective = collective_of(node)
    if collective is None or not isinstance(node.target, compat.OpOverload):
        return False
    return collective.op in names and node.target.namespace == "_c10d_functional"


def block_bytes(node: fx.Node) -> int:
    """Returns the bytes of a value on a rank with a full block of rows, as its tag says."""
    tag = tag_of(node)
    return tag.block_bytes if tag is not None else 0


def equal_liveness(graph: fx.Graph, kernels: FusedKernels | None = None) -> Liveness:
    """Returns the live memory of a graph as all ranks count it.

    Args:
        kernels: those of the graph, if the caller has them.
    """
    return liveness(
        graph, bytes_of=_rank_independent_bytes, is_view=_drops_padding, kernels=kernels
    )


def _rank_independent_bytes(node: fx.Node) -> int | None:
    """Returns the bytes of a full block for values whose size depends on the rank, else None."""
    tag = tag_of(node)
    if tag is not None and tag.role == "reload":
        return tag.nbytes
    return (
        tag.block_bytes
        if tag is not None
        and (tag.role in ("gather_input", "shard_grad") or node.target is AVERAGE_GRAD)
        else None
    )


def _drops_padding(node: fx.Node) -> bool:
    """Whether a node slices the padding off a reduced block.

    Ranks with a full block have no such node.
    """
    if node.target is not torch.ops.aten.slice_copy.Tensor or not is_wait(node.all_input_nodes[0]):
        return False
    collective = collective_of(started_by(node.all_input_nodes[0]))
    return collective is not None and "reduce_scatter" in collective.op
