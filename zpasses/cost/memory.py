"""Peak memory of a graph, from the order of its nodes: what is alive while each of them runs.

The model is that of a graph run node by node with inputs freed at their last use. Views share the
memory of what they view, and an all-reduce writes over its input where it may; what a collective
reads and writes lives until it is awaited, with the scratch memory that its backend takes. Memory
that the caller holds (parameters, the batch) is not counted: figures are bytes above the state
before the call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.nodes import collective_of, is_wait, nbytes, value_of
from zpasses.graph.tags import tag_of

__all__ = [
    "Buffer",
    "Liveness",
    "liveness",
    "reinplaceable_all_reduces",
    "saved_for_backward",
    "scratch_bytes",
]

aten = torch.ops.aten
_ALIASES = {
    aten._unsafe_view.default,
    aten.lift_fresh_copy.default,
    torch.ops._c10d_functional.wait_tensor.default,
}


@dataclass(eq=False)
class Buffer:
    """One piece of memory."""

    node: fx.Node
    """Who allocates it."""
    nbytes: int
    first: int
    """Index of the node during which it is allocated."""
    last: int
    """Index of the last node that needs it."""
    scratch: bool = False
    """Whether it is working memory of a collective's backend, which no value lives in."""


@dataclass(frozen=True)
class Liveness:
    """Bytes alive during each node of a graph."""

    nodes: tuple[fx.Node, ...]
    live_bytes: tuple[int, ...]
    """One figure a node, inputs and outputs of the node included."""
    buffers: tuple[Buffer, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    @property
    def peak_node(self) -> fx.Node:
        """The first node at which the peak is reached."""
        return self.nodes[self.live_bytes.index(self.peak_bytes)]

    def alive_at(self, node: fx.Node) -> list[Buffer]:
        """What is alive while `node` runs, largest first."""
        at = self.nodes.index(node)
        return sorted(
            (each for each in self.buffers if each.first <= at <= each.last),
            key=lambda each: -each.nbytes,
        )


def saved_for_backward(graph: fx.Graph) -> set[fx.Node]:
    """The inputs of a backward graph that die with their last use: what forward saved, and the
    incoming gradients.

    Empty for other graphs: their inputs belong to the caller, as parameters and the batch do in a
    backward graph."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if not any(node.name.startswith("tangents") for node in inputs):
        return set()
    return {node for node in inputs if tag_of(node) is None and not node.name.startswith("primals")}


def liveness(
    graph: fx.Graph,
    *,
    bytes_of: Callable[[fx.Node], int | None] | None = None,
    is_view: Callable[[fx.Node], bool] = lambda node: False,
) -> Liveness:
    """What is alive while each node runs.

    Args:
        bytes_of: overrides what a node allocates; None from it means what the node's value says.
        is_view: nodes to take for views of their first input besides those that are.
    """
    nodes = tuple(graph.nodes)
    tracker = _Tracker(
        nodes, saved_for_backward(graph), reinplaceable_all_reduces(graph), bytes_of, is_view
    )
    for index, node in enumerate(nodes):
        tracker.visit(index, node)
    changes = [0] * (len(nodes) + 1)
    for buffer in tracker.buffers:
        changes[buffer.first] += buffer.nbytes
        changes[buffer.last + 1] -= buffer.nbytes
    live, curve = 0, []
    for change in changes[:-1]:
        live += change
        curve.append(live)
    return Liveness(nodes, tuple(curve), tuple(tracker.buffers))


def reinplaceable_all_reduces(graph: fx.Graph) -> set[fx.Node]:
    """All-reduces that may write over what they read: the graph made it, and nothing reads it
    afterwards. Generated code does so."""
    reductions = [node for node in graph.nodes if node.target in _ALL_REDUCES]
    if not reductions:
        return set()
    position = {node: index for index, node in enumerate(graph.nodes)}
    found = set()
    for node in reductions:
        bases = [_base(item) for item in node.all_input_nodes]
        whole = all(
            isinstance(value := value_of(item), Tensor) and value.is_contiguous()
            for item in node.all_input_nodes
        )
        own = (
            whole
            and len(set(bases)) == len(bases)
            and all(base.op == "call_function" for base in bases)
        )
        if own and all(
            position[reader] <= position[node] for base in bases for reader in _readers(base)
        ):
            found.add(node)
    return found


_ALL_REDUCES = (
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_reduce_coalesced.default,
)


def _base(node: fx.Node) -> fx.Node:
    """The node that made the memory which this one's value lies in."""
    while _is_alias(node):
        node = node.all_input_nodes[0]
    return node


def _readers(base: fx.Node) -> Iterator[fx.Node]:
    queue, seen = [base], {base}
    while queue:
        for user in queue.pop().users:
            yield user
            if user not in seen and _is_alias(user):
                seen.add(user)
                queue.append(user)


def _is_alias(node: fx.Node) -> bool:
    known = node.target is operator.getitem or node.target in _ALIASES or _returns_argument(node)
    return node.op == "call_function" and bool(node.all_input_nodes) and known


class _Tracker:
    """Follows buffers through views, collectives and their waits."""

    def __init__(
        self,
        nodes: tuple[fx.Node, ...],
        dying: set[fx.Node],
        overwriting: set[fx.Node],
        bytes_of: Callable[[fx.Node], int | None] | None,
        is_view: Callable[[fx.Node], bool],
    ) -> None:
        self.buffers: list[Buffer] = []
        self._held: dict[fx.Node, list[Buffer | None]] = {}
        """What each node's output tensors live in; None for memory of the caller."""
        self._pending: dict[fx.Node, list[Buffer]] = {}
        """What a collective that was started needs until it is awaited."""
        self._storages: dict[int, Buffer] = {}
        self._retained: list[fx.Node] = []
        """Full parameters that outlive the call, whether or not the graph returns them yet."""
        self._overwriting = overwriting
        self._dying, self._bytes_of, self._is_view, self._end = (
            dying,
            bytes_of,
            is_view,
            len(nodes) - 1,
        )

    def visit(self, index: int, node: fx.Node) -> None:
        for item in (*node.all_input_nodes, *(self._retained if node.op == "output" else ())):
            for buffer in self._held.get(item, ()):
                if buffer is not None:
                    buffer.last = index
        if node.op == "placeholder":
            self._held[node] = [self._saved(node)] if node in self._dying else [None]
        elif node.op == "call_function":
            self._held[node] = self._aliased(node) or self._allocate(index, node)
            self._communicate(index, node)
            tag = tag_of(node)
            if tag is not None and tag.cached:
                self._retained.append(node)

    def _saved(self, node: fx.Node) -> Buffer | None:
        """What forward handed over: values that are views of one tensor keep that tensor alive, and
        it once."""
        value = value_of(node)
        if not isinstance(value, Tensor):
            return None
        key = compat.storage_id(value)
        if key not in self._storages:
            self._storages[key] = Buffer(
                node, compat.size_hint(value.untyped_storage().nbytes()), 0, 0
            )
            self.buffers.append(self._storages[key])
        return self._storages[key]

    def _aliased(self, node: fx.Node) -> list[Buffer | None] | None:
        inputs = node.all_input_nodes
        if not inputs:
            return None
        if node.target is operator.getitem:
            whole, at = self._held.get(inputs[0], [None]), node.args[1]
            return [whole[at]] if isinstance(at, int) and len(whole) > 1 else whole[:1]
        if node in self._overwriting:
            return [self._held[item][0] for item in inputs]
        if _is_alias(node) or self._is_view(node):
            return self._held.get(inputs[0], [None])[:1]
        return None

    def _allocate(self, index: int, node: fx.Node) -> list[Buffer | None]:
        value = value_of(node)
        given = self._bytes_of(node) if self._bytes_of is not None else None
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
        made = [Buffer(node, nbytes(part), index, index) for part in parts]
        if given is not None:
            for buffer in made:
                buffer.nbytes = 0
            made[0].nbytes = given
        self.buffers += made
        return list(made)

    def _communicate(self, index: int, node: fx.Node) -> None:
        if collective_of(node) is not None and node.target is not operator.getitem:
            scratch = Buffer(node, scratch_bytes(node), index, index, scratch=True)
            if scratch.nbytes:
                self.buffers.append(scratch)
            # Outputs belong to it as well: of several, none is let go before all were awaited.
            involved = [*node.all_input_nodes, node]
            needed = [
                buffer
                for item in involved
                for buffer in self._held.get(item, ())
                if buffer is not None
            ]
            self._pending[node] = [*needed, scratch]
        elif is_wait(node):
            started = node.all_input_nodes[0]
            source = started.all_input_nodes[0] if started.target is operator.getitem else started
            for buffer in self._pending.get(source, ()):
                buffer.last = max(buffer.last, index)


def _returns_argument(node: fx.Node) -> bool:
    call = node.target
    if not isinstance(call, compat.OpOverload):
        return False
    returned = [each.alias_info for each in call._schema.returns]
    return call.is_view or (len(returned) == 1 and returned[0] is not None)


def scratch_bytes(node: fx.Node) -> int:
    """Memory of a collective besides its inputs and outputs.

    gloo packs several tensors into one, and gathers into a flat tensor of its own that it copies
    out of; a copy engine that gathers several tensors in one call does both."""
    collective: Any = collective_of(node)
    by_engine = collective.op.startswith("sdma_")
    if by_engine and len(collective.shapes) > 1:
        return int(collective.nbytes) + nbytes(value_of(node))
    if not (by_engine or node.target.namespace == "_c10d_functional") or not compat.is_gloo(
        collective.group
    ):  # type: ignore[union-attr]
        return 0
    packed = collective.nbytes if len(collective.shapes) > 1 else 0
    return packed + (nbytes(value_of(node)) if "gather" in collective.op else 0)
