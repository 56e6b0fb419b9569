"""Peak memory of a graph, computed from the order of its nodes and the lifetimes of their values.

The model executes the graph node by node and frees inputs at their last use. Views share the memory
of their base. An all-reduce writes over its input where it may. The inputs and outputs of a
collective live until its wait, and so does the scratch memory of its backend. A value that comes
from the host takes memory from the start of its copy on; on the host it takes none. All inputs and
outputs of a subgraph live during its call. Memory that the caller holds (parameters, the batch) is
not counted: all figures are bytes above the state before the call.

Inductor's code does not compute a graph operator by operator. Inside `use_fusion`, a value that is
inlined in its readers (zpasses.cost.time.fused_kernels) takes no memory and keeps alive what it is
computed from. What kernels write over and hold is in zpasses.cost.memory.kernel_lifetimes. What
`cat` joins is written right into its result.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.memory.buffers import Buffer, layout_of
from zpasses.cost.memory.code_memory import added_by_code
from zpasses.cost.memory.collective_memory import backend_bytes, reinplaceable_all_reduces
from zpasses.cost.memory.kernel_lifetimes import KernelLifetimes
from zpasses.cost.memory.layout_copies import (
    copied_inputs,
    is_copied_back,
    is_saved_copy,
    remembered_layouts,
)
from zpasses.cost.memory.workspaces import workspace_bytes
from zpasses.cost.time.fused_kernels import (
    BY_ROWS,
    FusedKernels,
    fuses,
    is_addmm,
    is_elementwise,
    loaded_inputs,
)
from zpasses.graph.aliases import buffer_readers, is_alias, is_view, view_base
from zpasses.graph.cached_params import held_bytes, held_node, is_held
from zpasses.graph.dialect import AVERAGE_GRAD, TO_HOST
from zpasses.graph.host_copies import RELOAD, RELOAD_WAIT, host_copy_of, is_on_host
from zpasses.graph.queries import (
    collective_of,
    is_wait,
    nbytes,
    saved_inputs,
    started_by,
    value_of,
)
from zpasses.graph.tags import tag_of

NOTABLE_BYTES = 1 << 20
"""The least excess over a memory budget that is worth a warning."""


@dataclass(frozen=True)
class Liveness:
    """Live memory at each node of a graph."""

    nodes: tuple[fx.Node, ...]
    live_bytes: tuple[int, ...]
    """One entry per node: bytes alive during the node, including its inputs and outputs."""
    buffers: tuple[Buffer, ...]

    @property
    def peak_bytes(self) -> int:
        """The largest entry of `live_bytes`; 0 for an empty graph."""
        return max(self.live_bytes, default=0)

    @property
    def peak_node(self) -> fx.Node:
        """The first node at the peak."""
        return self.nodes[self.live_bytes.index(self.peak_bytes)]

    def alive_at(self, node: fx.Node) -> list[Buffer]:
        """Returns the buffers that are alive during `node`, largest first."""
        at = self.nodes.index(node)
        return sorted(
            (each for each in self.buffers if each.first <= at <= each.last),
            key=lambda each: -each.nbytes,
        )


def liveness(
    graph: fx.Graph,
    *,
    bytes_of: Callable[[fx.Node], int | None] | None = None,
    is_view: Callable[[fx.Node], bool] = lambda node: False,
    kernels: FusedKernels | None = None,
) -> Liveness:
    """Computes the live memory at each node.

    Args:
        graph: a graph with fake values.
        bytes_of: overrides the bytes that a node allocates; if it returns None, the node's value
            decides.
        is_view: nodes to treat as views of their first input, besides actual views.
        kernels: those of the graph, if the caller has them.
    """
    nodes = tuple(graph.nodes)
    own = (kernels or FusedKernels()) if fuses() else None
    given = saved_inputs(nodes).union(each for each in nodes if _is_held_input(each))
    tracker = _Tracker(given, reinplaceable_all_reduces(graph), bytes_of, is_view, own)
    with remembered_layouts():
        for index, node in enumerate(nodes):
            tracker.visit(index, node)
    tracker.finish()
    changes = [0] * (len(nodes) + 1)
    for buffer in tracker.buffers:
        changes[buffer.first] += buffer.nbytes
        changes[buffer.last + 1] -= buffer.nbytes
    live, curve = 0, []
    for change in changes[:-1]:
        live += change
        curve.append(live)
    return Liveness(nodes, tuple(curve), tuple(tracker.buffers))


aten = torch.ops.aten
_FIXES_LAYOUT = (
    aten.mm.default,
    aten._int_mm.default,
    aten.convolution_backward.default,
)
"""Readers for which Inductor fixes the layout of a value where it is computed."""
_INTO_GIVEN = BY_ROWS | {aten.mm.default, aten.addmm.default, aten.bmm.default}
"""Operators that write to memory which is given, by kernels or themselves."""


class _Tracker:
    """Computes buffers and their lifetimes, through views, collectives and waits."""

    def __init__(
        self,
        saved_inputs: set[fx.Node],
        reinplaceable: set[fx.Node],
        bytes_of: Callable[[fx.Node], int | None] | None,
        is_view: Callable[[fx.Node], bool],
        kernels: FusedKernels | None,
    ) -> None:
        self.buffers: list[Buffer] = []
        self._memory_of: dict[fx.Node, list[Buffer | None]] = {}
        """Buffer of each output tensor of a node; None for memory of the caller."""
        self._pending: dict[fx.Node, list[Buffer]] = {}
        """Buffers that a started collective needs until its wait."""
        self._storages: dict[int, Buffer] = {}
        self._at_end: list[fx.Node] = []
        """Full parameters that outlive the call, even if the graph does not return them yet or only
        reads them, and averages, which go to the host at the end."""
        self._saved_inputs, self._reinplaceable = saved_inputs, reinplaceable
        self._bytes_of, self._is_view = bytes_of, is_view
        self._kernels = kernels
        self._lifetimes = None if kernels is None else KernelLifetimes(kernels, self._memory_of)
        self._parts: list[tuple[Buffer, Buffer]] = []
        """Buffers of `cat` and of what is written right into each."""
        self._in_parts: set[Buffer] = set()
        """Buffers of `cat` that kernels of their own fill. No kernel writes over one."""
        self._copies: list[tuple[int, Buffer, Buffer | None]] = []
        """Operators, copies in another layout that they read, and what each is a copy of."""

    def visit(self, index: int, node: fx.Node) -> None:
        for item in (*self._read_by(node), *(self._at_end if node.op == "output" else ())):
            for buffer in self._memory_of.get(item, ()):
                if buffer is not None:
                    buffer.last = index
        if is_on_host(node) and node.target is not RELOAD:
            self._memory_of[node] = [None]
        elif node.op == "placeholder":
            self._memory_of[node] = [self._given(index, node)]
        elif node.op == "call_function":
            self._memory_of[node] = (
                self._inlined(index, node)
                or self._aliased(node)
                or self._joined(index, node)
                or self._allocate(index, node)
            )
            self._communicate(index, node)
            self._copy_inputs(index, node)
            within = subgraph_bytes(node) + workspace_bytes(node)
            if self._kernels is not None and is_copied_back(node):  # after the call
                within = max(within, nbytes(value_of(node)))
            if within:
                self.buffers.append(Buffer(node, within, index, index, scratch=True))
        elif node.op == "output":
            if held := held_bytes(node.graph):
                self.buffers.append(Buffer(node, held, 0, index))
            if copied := max(map(self._copied_at_end, node.all_input_nodes), default=0):
                self.buffers.append(Buffer(node, copied, index, index, scratch=True))
        if self._kernels is not None and (added := added_by_code(node)):
            self.buffers.append(Buffer(node, added, index, index, scratch=True))
        tag = tag_of(node)
        if tag is not None and tag.cached:
            self._at_end.append(held_node(node))
        elif _is_moved_last(node) or (node.op != "output" and is_held(node)):
            self._at_end.append(node)

    def _read_by(self, node: fx.Node) -> list[fx.Node]:
        """Returns what a node reads. Code that reads an input nowhere never frees it."""
        read = node.all_input_nodes
        if self._kernels is None:
            return read
        loaded = loaded_inputs(node)
        for each in read:
            if each not in loaded and each.op == "placeholder" and len(each.users) == 1:
                self._at_end.append(each)
        return loaded

    def _copied_at_end(self, node: fx.Node) -> int:
        """Returns the bytes of the copy of a saved view that Inductor's code makes, one at a time:
        of a result that it makes contiguous for a product, and the graph shows otherwise.
        """
        base = view_base(node)
        if self._kernels is None or base is node or not self._kernels.has_kernel(base):
            return 0
        value = value_of(base)
        _, *shown = layout_of(value) if isinstance(value, Tensor) else (None,)
        multiplied = any(each.target is aten.bmm.default for each in buffer_readers(base))
        return nbytes(value) if len(shown) > 1 and multiplied else 0

    def finish(self) -> None:
        """Has buffers live as long as the code needs them that computes several nodes at once."""
        for whole, part in self._parts:  # what is written into a `cat` lives as long as it
            whole.last = max(whole.last, part.last)
        self._lay_out()
        if self._lifetimes is not None:
            self._lifetimes.write_in_place(self._in_parts)
            self._lifetimes.hold()

    def _lay_out(self) -> None:
        """Has what is copied in another layout die with its copy, before the operator runs. Copies
        are made one after another.
        """
        for index, group in itertools.groupby(self._copies, key=operator.itemgetter(0)):
            copies = list(group)
            dying = [
                source if source is not None and source.last == index > source.first else None
                for _, _, source in copies
            ]
            left = sum(each.nbytes for each in dying if each is not None)
            made, most = 0, 0
            total = left + sum(copy.nbytes for _, copy, _ in copies)
            for (_, copy, _), source in zip(copies, dying, strict=True):
                copy.first = index - 1
                made += copy.nbytes
                most = max(most, made + left)
                if source is not None:
                    source.last = index - 1
                    left -= source.nbytes
            unneeded = total - most  # at most all copies but the first
            for _, copy, _ in reversed(copies):
                cut = min(unneeded, copy.nbytes)
                if cut:
                    copy.first = index
                    rest = Buffer(copy.node, copy.nbytes - cut, index - 1, index - 1, scratch=True)
                    self.buffers.append(rest)
                unneeded -= cut

    def _given(self, index: int, node: fx.Node) -> Buffer | None:
        """Returns the buffer of an input, or of the copy of it that forward saves."""
        if node in self._saved_inputs:
            return self._saved(node)
        if self._kernels is None or not is_saved_copy(node):
            return None
        copy = Buffer(node, nbytes(value_of(node)), index, index)
        self.buffers.append(copy)
        return copy

    def _saved(self, node: fx.Node) -> Buffer | None:
        """Returns the buffer of a saved value. Saved views of one tensor share one buffer."""
        value = value_of(node)
        if not isinstance(value, Tensor):
            return None
        key = compat.storage_id(value)
        if key not in self._storages:
            self._storages[key] = Buffer(
                node, compat.planned_size(value.untyped_storage().nbytes()), 0, 0
            )
            self.buffers.append(self._storages[key])
        return self._storages[key]

    def _inlined(self, index: int, node: fx.Node) -> list[Buffer | None] | None:
        """Returns the memory of what a value is computed from, if that happens where it is read."""
        kernels, lifetimes = self._kernels, self._lifetimes
        if kernels is None or lifetimes is None:
            return None
        if is_view(node) and kernels.is_inlined(view_base(node)):
            return self._memory_of[node.all_input_nodes[0]]
        if not kernels.is_inlined(node):
            if kernels.has_kernel(node):
                lifetimes.add(index, node)
            elif not is_view(node) and node.target is not operator.getitem:
                lifetimes.add_other()
            return None
        held = [each for item in loaded_inputs(node) for each in self._memory_of.get(item, ())]
        return list(dict.fromkeys(held)) or [None]

    def _aliased(self, node: fx.Node) -> list[Buffer | None] | None:
        inputs = node.all_input_nodes
        if not inputs:
            return None
        if node.target is operator.getitem:
            whole, at = self._memory_of.get(inputs[0], [None]), node.args[1]
            if not isinstance(at, int) or len(whole) < 2:
                return whole[:1]
            sizes = [len(compat.pytree.tree_leaves(part)) for part in value_of(inputs[0])]
            before = sum(sizes[:at])
            return whole[before : before + sizes[at]]
        if node in self._reinplaceable:
            return [self._memory_of[item][0] for item in inputs]
        if is_alias(node) or self._is_view(node) or node.target is RELOAD_WAIT:
            return self._memory_of.get(inputs[0], [None])[:1]
        return None

    def _joined(self, index: int, node: fx.Node) -> list[Buffer | None] | None:
        """Returns the memory of a `cat`, into which kernels and products write their results. If
        they are kernels alone that only it reads, Triton's code computes them where it is. So does
        all code with those of which only it reads a view.
        """
        kernels = self._kernels
        if kernels is None or node.target is not aten.cat.default:
            return None
        viewed = {
            each: view_base(each)
            for each in node.all_input_nodes
            if is_elementwise(view_base(each)) and _is_only_viewed(each)
        }
        items = list(dict.fromkeys(viewed.get(each, each) for each in node.all_input_nodes))
        late = set(viewed.values())
        into = [
            item
            for item in items
            if (kernels.has_kernel(item) or item.target in _INTO_GIVEN or is_addmm(item))
            and not self._has_layout_before(item, node)
        ]
        at_once = not kernels.on_cpu and all(
            kernels.has_kernel(item) and len(item.users) == 1 for item in items
        )
        whole = Buffer(node, nbytes(value_of(node)), index, index)
        if not at_once:
            self._in_parts.add(whole)
        for item in into:
            (part,) = self._memory_of[item]
            if part is None or part.node is not item:
                continue
            part.nbytes = 0
            self._parts.append((whole, part))
            if not at_once and item not in late:
                whole.first = min(whole.first, part.first)
                continue
            for each in kernels.inputs(item):
                for buffer in self._memory_of.get(each, ()):
                    if buffer is not None:
                        buffer.last = index
        self.buffers.append(whole)
        return [whole]

    def _has_layout_before(self, node: fx.Node, cat: fx.Node) -> bool:
        """Whether the layout of a value is fixed before a `cat`, so that it is copied there: the
        graph returns it, a product reads it, or another operator reads it first.
        """
        kernels = self._kernels
        assert kernels is not None
        for each in buffer_readers(node):
            if each.op == "output":
                return True
            if is_alias(each) or kernels.has_kernel(each) or kernels.is_inlined(each):
                continue
            if each.target in _FIXES_LAYOUT and node in each.all_input_nodes:
                return True
            if each < cat and not is_addmm(each) and each.target is not aten.addmm.default:
                return True
        return False

    def _allocate(self, index: int, node: fx.Node) -> list[Buffer | None]:
        value = value_of(node)
        given = self._bytes_of(node) if self._bytes_of is not None else None
        if given is None and node.target is RELOAD:
            copy = host_copy_of(node)
            given = copy.nbytes if copy is not None else None
        parts = compat.pytree.tree_leaves(value) if isinstance(value, (list, tuple)) else [value]
        made = [
            Buffer(node, nbytes(part), index, index, output=at) for at, part in enumerate(parts)
        ]
        if given is not None:
            for buffer in made:
                buffer.nbytes = 0
            made[0].nbytes = given
        self.buffers += made
        return list(made)

    def _copy_inputs(self, index: int, node: fx.Node) -> None:
        """Adds the copies in another layout that an operator reads."""
        if self._kernels is None:
            return
        if is_saved_copy(node):
            self.buffers.append(Buffer(node, nbytes(value_of(node)), index, index, scratch=True))
        for source in copied_inputs(node):
            copy = Buffer(node, nbytes(value_of(source)), index, index, scratch=True)
            self.buffers.append(copy)
            self._copies.append((index, copy, self._memory_of[source][0]))
            if node in self._pending:
                self._pending[node].append(copy)
            if node.target is aten.scatter_add.default:  # into what is made before
                made = self._memory_of[node][0]
                assert made is not None
                made.first = min(made.first, index - 1)

    def _communicate(self, index: int, node: fx.Node) -> None:
        found = collective_of(node)
        if found is not None:
            scratch = Buffer(node, backend_bytes(node, found), index, index, scratch=True)
            if scratch.nbytes:
                self.buffers.append(scratch)
            # The outputs count too: none of several outputs is freed before all are awaited.
            copied = copied_inputs(node) if self._kernels is not None else ()
            involved = [*(each for each in node.all_input_nodes if each not in copied), node]
            needed = [
                buffer
                for item in involved
                for buffer in self._memory_of.get(item, ())
                if buffer is not None
            ]
            self._pending[node] = [*needed, scratch]
        elif is_wait(node):
            for buffer in self._pending.get(started_by(node), ()):
                buffer.last = max(buffer.last, index)


def _is_only_viewed(view: fx.Node) -> bool:
    """Whether a value is a view, and all that reads what it views is one user of it."""
    node = view
    while is_view(node) and len(node.users) == 1:
        node = node.all_input_nodes[0]
    return node is not view and not is_view(node) and len(node.users) == 1


def _is_held_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and is_held(node)


def _is_moved_last(node: fx.Node) -> bool:
    """Whether a value is an average that goes to the host, at the end of the graph."""
    return node.target is AVERAGE_GRAD and any(user.target is TO_HOST for user in node.users)


_subgraph_bytes: weakref.WeakKeyDictionary[fx.GraphModule, dict[bool, int]]
_subgraph_bytes = weakref.WeakKeyDictionary()
"""Bytes with and without fusion."""


def subgraph_bytes(node: fx.Node) -> int:
    """Returns the most bytes that the subgraph which a node calls needs besides its inputs and
    outputs, all of which count as alive; 0 for other nodes.
    """
    body = compat.subgraph_of(node)
    if body is None:
        return 0
    known = _subgraph_bytes.setdefault(body, {})
    if fuses() not in known:
        known[fuses()] = max(0, liveness(body.graph).peak_bytes - nbytes(value_of(node)))
    return known[fuses()]


def bytes_within(node: fx.Node) -> int:
    """Returns the bytes that a call takes besides its inputs and outputs, until its wait if it
    communicates. Copies that Inductor's code makes by kernels of their own do not count. Of an
    input, returns the bytes that live for this graph alone.
    """
    if node.op == "placeholder":
        inputs = reversed(node.graph.find_nodes(op="placeholder", sort=False))
        gradient = next((each for each in inputs if each.name.startswith("tangents")), node)
        is_given = node in saved_inputs((node, gradient)) or is_saved_copy(node)
        return nbytes(value_of(node)) if is_given else 0
    collective = collective_of(node)
    return workspace_bytes(node) if collective is None else backend_bytes(node, collective)
