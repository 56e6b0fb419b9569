"""Peak memory of a graph, computed from the order of its nodes and the lifetimes of their values.

The model executes the graph node by node and frees inputs at their last use. Views share the memory
of their base. An all-reduce writes over its input where it may. The inputs and outputs of a
collective live until its wait, and so does the scratch memory of its backend. A value that comes
from the host takes memory from the start of its copy on; on the host it takes none. All inputs and
outputs of a subgraph live during its call. Memory that the caller holds (parameters, the batch) is
not counted: all figures are bytes above the state before the call.

Inductor's code does not compute a graph operator by operator. Inside `use_fusion`, a value that is
inlined in its readers (zpasses.cost.time.fused_kernels) takes no memory and keeps alive what it is
computed from, and an elementwise kernel writes over an input of its size that nothing needs later,
unless autograd or the model's caller may hold it. What `cat` joins is written right into its
result.
"""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.memory.layout_copies import (
    copied_bytes,
    copied_inputs,
    has_shown_layout,
    is_copied_back,
    is_saved_copy,
    remembered_layouts,
)
from zpasses.cost.memory.workspaces import workspace_bytes
from zpasses.cost.time.fused_kernels import FusedKernels, Load, fuses, is_addmm
from zpasses.graph.aliases import GETITEM, buffer_readers, is_alias, is_view, memory_root, view_base
from zpasses.graph.cached_params import held_bytes, held_node, is_held
from zpasses.graph.dialect import AVERAGE_GRAD, TO_HOST, group_size
from zpasses.graph.encoding import Encoding
from zpasses.graph.host_copies import RELOAD, RELOAD_WAIT, host_copy_of, is_on_host
from zpasses.graph.queries import (
    Collective,
    collective_of,
    is_wait,
    named_arguments,
    nbytes,
    numel,
    saved_inputs,
    started_by,
    value_of,
)
from zpasses.graph.row_exchange import ROW_EXCHANGES
from zpasses.graph.tags import tag_of

NOTABLE_BYTES = 1 << 20
"""The least excess over a memory budget that is worth a warning."""


@dataclass(eq=False)
class Buffer:
    """One allocation."""

    node: fx.Node
    """The node that allocates it."""
    nbytes: int
    first: int
    """Index of the node that allocates it."""
    last: int
    """Index of the last node that needs it."""
    scratch: bool = False
    """Whether it holds no value of the graph: scratch memory of a collective's backend, or what a
    subgraph needs besides its inputs and outputs."""
    output: int = 0
    """Which of the node's outputs it holds, if the node has several."""


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
    tracker.join_parts()
    tracker.lay_out()
    tracker.write_in_place()
    tracker.hold()
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
    """Returns the all-reduces that may write over their inputs. Generated code runs them in place.

    The graph must have computed the input, and nothing may read it after the all-reduce.
    """
    reductions = [node for node in graph.nodes if node.target in _ALL_REDUCES]
    if not reductions:
        return set()
    position = {node: index for index, node in enumerate(graph.nodes)}
    found = set()
    for node in reductions:
        bases = [memory_root(item) for item in node.all_input_nodes]
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
            position[reader] <= position[node] for base in bases for reader in buffer_readers(base)
        ):
            found.add(node)
    return found


_ALL_REDUCES = (
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_reduce_coalesced.default,
)


aten = torch.ops.aten
_AVERAGE_BACKWARDS = (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
_LARGEST_WINDOW = 25
"""Elements of the largest window for which Inductor writes a kernel."""
_FIXES_LAYOUT = (
    aten.mm.default,
    aten._int_mm.default,
    aten.convolution_backward.default,
)
"""Readers for which Inductor fixes the layout of a value where it is computed."""
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
"""Operators that write to memory which is given."""


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
        self._elementwise: list[tuple[fx.Node, Mapping[fx.Node, Load], int]] = []
        """Kernels, their inputs as `FusedKernels.inputs` returns them, and the number of calls
        before that are no such kernels. Those with the same number may be fused."""
        self._others = 0
        self._index: dict[fx.Node, int] = {}
        """Kernel -> its position."""
        self._readers: dict[tuple[int, int], list[fx.Node]] = {}
        """Buffer and number of calls before, as above -> the kernels that read it."""
        self._written_over: set[int] = set()
        """Buffers that a kernel writes over."""
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
            self._index[node] = index
            self._memory_of[node] = (
                self._inlined(node)
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
        tag = tag_of(node)
        if tag is not None and tag.cached:
            self._at_end.append(held_node(node))
        elif _is_moved_last(node) or (node.op != "output" and is_held(node)):
            self._at_end.append(node)

    def _read_by(self, node: fx.Node) -> list[fx.Node]:
        """Returns what a node reads. A kernel for the gradient of an average needs the shape of the
        second operand alone, and code that reads an input nowhere never frees it.
        """
        read = node.all_input_nodes
        if self._kernels is None or node.target not in _AVERAGE_BACKWARDS:
            return read
        gradient, averaged, window = node.args[:3]
        if averaged is gradient or math.prod(window) > _LARGEST_WINDOW:  # type: ignore[arg-type]
            return read
        read.remove(averaged)  # type: ignore[arg-type]
        if averaged.op == "placeholder" and len(averaged.users) == 1:  # type: ignore[union-attr]
            self._at_end.append(averaged)  # type: ignore[arg-type]
        return read

    def _copied_at_end(self, node: fx.Node) -> int:
        """Returns the bytes of the copy of a saved view that Inductor's code makes, one at a time:
        of a result that it makes contiguous for a product, and the graph shows otherwise.
        """
        base = view_base(node)
        if self._kernels is None or base is node or not self._kernels.has_kernel(base):
            return 0
        value = value_of(base)
        _, *shown = _layout(value) if isinstance(value, Tensor) else (None,)
        multiplied = any(each.target is aten.bmm.default for each in buffer_readers(base))
        return nbytes(value) if len(shown) > 1 and multiplied else 0

    def write_in_place(self) -> None:
        """Ends the life of what elementwise kernels write over right before them."""
        read_by = [
            [
                (self._memory_of.get(each, [None])[0], load.in_place)
                for each, load in sources.items()
            ]
            for _, sources, _ in self._elementwise
        ]
        readers = self._readers
        for (node, _, others), read in zip(self._elementwise, read_by, strict=True):
            for buffer in {id(buffer) for buffer, _ in read}:
                readers.setdefault((buffer, others), []).append(node)
        for (node, _, others), read in zip(self._elementwise, read_by, strict=True):
            made = self._memory_of[node][0]
            kept = [buffer for buffer, in_place in read if not in_place]
            if made is None or made.node is not node:
                continue
            for dying, _ in read:
                if (
                    dying is not None
                    and dying not in kept
                    and dying not in self._in_parts
                    and _takes_over(made, dying)
                    and _needs_all(node, readers[id(dying), others])
                ):
                    dying.last = made.first - 1
                    self._written_over.add(id(dying))
                    break

    def hold(self) -> None:
        """Has what a kernel reads and writes live until the last of those that it is fused with."""
        fused = _fused_kernels(self._elementwise, self._memory_of, self._readers, self._kernels)
        first_of = {each: group[0] for group in fused for each in group}
        last_of = {group[0]: self._index[group[-1]] for group in fused}
        for node, sources, _ in self._elementwise:
            if node not in first_of:
                continue
            first, last = self._index[first_of[node]], last_of[first_of[node]]
            for each in (node, *sources):
                for buffer in self._memory_of.get(each, ()):
                    if buffer is None or id(buffer) in self._written_over:
                        continue
                    if first <= buffer.last < last:
                        buffer.last = last

    def lay_out(self) -> None:
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

    def join_parts(self) -> None:
        """Has each result of `cat` live as long as what is written into it."""
        for whole, part in self._parts:
            whole.last = max(whole.last, part.last)

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

    def _inlined(self, node: fx.Node) -> list[Buffer | None] | None:
        """Returns the memory of what a value is computed from, if that happens where it is read."""
        kernels = self._kernels
        if kernels is None:
            return None
        if is_view(node) and kernels.is_inlined(view_base(node)):
            return self._memory_of[node.all_input_nodes[0]]
        if not kernels.is_inlined(node):
            if kernels.has_kernel(node):
                self._elementwise.append((node, kernels.inputs(node), self._others))
            elif not is_view(node) and node.target is not operator.getitem:
                self._others += 1
            return None
        held = [each for item in node.all_input_nodes for each in self._memory_of.get(item, ())]
        return list(dict.fromkeys(held)) or [None]

    def _aliased(self, node: fx.Node) -> list[Buffer | None] | None:
        inputs = node.all_input_nodes
        if not inputs:
            return None
        if node.target is operator.getitem:
            whole, at = self._memory_of.get(inputs[0], [None]), node.args[1]
            return [whole[at]] if isinstance(at, int) and len(whole) > 1 else whole[:1]
        if node in self._reinplaceable:
            return [self._memory_of[item][0] for item in inputs]
        if is_alias(node) or self._is_view(node) or node.target is RELOAD_WAIT:
            return self._memory_of.get(inputs[0], [None])[:1]
        return None

    def _joined(self, index: int, node: fx.Node) -> list[Buffer | None] | None:
        """Returns the memory of a `cat`, into which kernels and products write their results. If
        they are kernels alone that only it reads, Triton's code computes them where it is.
        """
        kernels = self._kernels
        if kernels is None or node.target is not aten.cat.default:
            return None
        items = list(dict.fromkeys(node.all_input_nodes))
        into = [
            item
            for item in items
            if (kernels.has_kernel(item) or item.target in _PRODUCTS or is_addmm(item))
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
            if not at_once:
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
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
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
            scratch = Buffer(node, _of_backend(node, found), index, index, scratch=True)
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


def _is_held_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and is_held(node)


def _is_moved_last(node: fx.Node) -> bool:
    """Whether a value is an average that goes to the host, at the end of the graph."""
    return node.target is AVERAGE_GRAD and any(user.target is TO_HOST for user in node.users)


def _fused_kernels(
    kernels: Sequence[tuple[fx.Node, Mapping[fx.Node, Load], int]],
    memory_of: Mapping[fx.Node, list[Buffer | None]],
    readers: Mapping[tuple[int, int], list[fx.Node]],
    known: FusedKernels | None,
) -> list[list[fx.Node]]:
    """Returns kernels that are fused because one reads what another one makes, in the order of the
    graph: those that go through the same elements, and reductions of their rows.
    """
    if known is None:
        return []
    region = {node: others for node, _, others in kernels}
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node, sources, others in kernels:
        group = [node]
        for source in sources:
            maker = source.all_input_nodes[0] if source.target is GETITEM else source
            before = groups.get(maker)
            if before is None or before is group or region[maker] != others:
                continue
            if known.elements(maker) != known.elements(node):
                continue
            buffer = memory_of[maker][0]
            between = [
                each
                for each in readers.get((id(buffer), others), ())
                if each < node and groups[each] is not before
            ]
            if any(_needs_all(node, [each]) for each in between):
                continue
            before += group
            for each in group:
                groups[each] = before
            group = before
        groups[node] = group
    unique = {id(group): group for group in groups.values() if len(group) > 1}
    return [sorted(group) for group in unique.values()]


def _needs_all(node: fx.Node, readers: list[fx.Node]) -> bool:
    """Whether a kernel needs the results of all others that read a value. If it does not, both may
    be parts of one kernel, and none knows which of them reads the value last.
    """
    missing = {each for each in readers if each is not node}
    pending, seen = [node] if missing else [], {node}
    while missing and pending:
        for each in pending.pop().all_input_nodes:
            if each not in seen and each >= readers[0]:
                seen.add(each)
                pending.append(each)
                missing.discard(each)
    return not missing


def _takes_over(made: Buffer, dying: Buffer) -> bool:
    """Whether a kernel writes its result over a buffer that is needed no longer."""
    ours, theirs = value_of(made.node), value_of(dying.node)
    return (
        dying.last == made.first > dying.first
        and made.nbytes == dying.nbytes
        and isinstance(ours, Tensor)
        and isinstance(theirs, Tensor)
        and _layout(ours) == _layout(theirs)
        and (
            _planned(ours.shape) == _planned(theirs.shape)
            or (has_shown_layout(made.node) and has_shown_layout(dying.node))
        )
        and collective_of(dying.node) is None
        and (dying.node.op != "placeholder" or compat.may_overwrite(dying.node))
    )


def _planned(sizes: Iterable[int]) -> list[int]:
    return [compat.planned_size(size) for size in sizes]


def _layout(value: Tensor) -> tuple[Any, ...]:
    """Dtype, sizes and strides, with dimensions merged that one index goes through. Symbols count
    by their hints.
    """
    merged: list[tuple[int, int]] = []
    for size, stride in zip(value.shape, value.stride(), strict=True):
        size, stride = compat.planned_size(size), compat.planned_size(stride)
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    return value.dtype, *merged


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
        is_given = node in saved_inputs(node.graph.nodes) or is_saved_copy(node)
        return nbytes(value_of(node)) if is_given else 0
    collective = collective_of(node)
    return workspace_bytes(node) if collective is None else _of_backend(node, collective)


GLOO_PACKED_BYTES = 64 << 10
"""Largest message over gloo that is packed with others. The copies of a larger one take longer than
the message that they save."""


def gloo_packs(message_bytes: Sequence[int]) -> list[int]:
    """Returns which tensors of one collective over gloo share a message, by their indices.

    Args:
        message_bytes: for each tensor, the bytes that each other rank receives.
    """
    small = [number for number, size in enumerate(message_bytes) if size <= GLOO_PACKED_BYTES]
    return small if len(small) > 1 else []


def gloo_packing_bytes(message_bytes: int, ranks: int) -> int:
    """Returns the bytes of the buffers that one tensor of a merged collective over gloo adds.

    Args:
        message_bytes: bytes that each other rank receives.
        ranks: size of the group.
    """
    return (1 + ranks) * message_bytes if message_bytes <= GLOO_PACKED_BYTES else 0


def scratch_bytes(node: fx.Node, collective: Collective | None = None) -> int:
    """Returns the bytes that a collective needs besides its inputs and outputs.

    Over gloo, small tensors are packed, and a reduce-scatter receives a part from every other rank,
    one of them in its output. gloo itself packs the tensors of an all-reduce. A copy engine that
    gathers several tensors in one call packs them, and copies them out of a flat tensor. An
    exchange of rows packs what it sends. An average between nodes will exchange records. Gradients
    of convolutions are copied, because their layout is another.

    Args:
        node: a node that communicates.
        collective: what `collective_of` returns for it, if the caller knows it.
    """
    collective = collective or collective_of(node)
    assert collective is not None
    return _of_backend(node, collective) + (copied_bytes(node) if fuses() else 0)


def engine_packing_bytes(node: fx.Node, collective: Collective) -> int:
    """Returns what a copy engine packs for a gather: several tensors, before and after it."""
    several = len(collective.shapes) > 1
    return collective.nbytes + nbytes(value_of(node)) if several else 0


def _of_backend(node: fx.Node, collective: Collective) -> int:
    call: Any = node.target
    if collective.op.startswith("sdma_"):
        return engine_packing_bytes(node, collective)
    if call in ROW_EXCHANGES:
        return collective.nbytes
    if call is AVERAGE_GRAD:
        how = named_arguments(node, call)
        if how.get("shard_rows") is None:
            return 0
        ranks = group_size(collective.group)
        count = numel(value_of(node.all_input_nodes[0])) // ranks
        return 2 * ranks * int(Encoding.parse(how["encoding"]).record_bytes(count))
    is_plain = call.namespace == "_c10d_functional" or collective.op.startswith("gloo_")
    if not is_plain or not compat.is_gloo(collective.group):
        return 0
    if "all_reduce" in collective.op:
        return collective.nbytes if len(collective.shapes) > 1 else 0
    ranks = len(compat.group_ranks(collective.group))
    given: Any = node.args[0]
    sizes = [nbytes(value_of(each)) for each in (given if isinstance(given, list) else [given])]
    if "gather" in collective.op:
        return sum(gloo_packing_bytes(sizes[number], ranks) for number in gloo_packs(sizes))
    if "reduce_scatter" not in collective.op:
        return 0
    parts = [size // ranks for size in sizes]
    packing = sum(gloo_packing_bytes(parts[number], ranks) for number in gloo_packs(parts))
    return packing + max(ranks - 2, 0) * sum(parts)
