"""Counts the memory of the kernels and operators that Inductor's scheduler has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx
from torch._inductor import ir, memory
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    NopKernelSchedulerNode,
)
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from zpasses.compat.fx_graph import HELD, MOVED_NAMESPACES
from zpasses.compat.inductor_nodes import hint, is_in_no_memory, is_kernel, may_write_over


@dataclass(eq=False)
class NodeBuffer:
    """A buffer, with the positions of the nodes that make and read it."""

    nbytes: int
    maker: int
    """-1 for an input."""
    readers: frozenset[int] | None
    """None if the graph returns it."""
    last: int
    """The position of the node after which it is freed."""
    freed: int
    """Bytes that are then freed; of a part of what another node makes, `nbytes` are 0."""


class NodeMemory:
    """The memory of the nodes of a graph that run in their order. `workspace_of` returns the bytes
    that a call takes besides its inputs and outputs, until its waits if there are some, and those
    of an input that live for this graph alone.
    """

    def __init__(
        self, nodes: list[BaseSchedulerNode], workspace_of: Callable[[fx.Node], int]
    ) -> None:
        self._nodes = nodes
        self._workspace_of = workspace_of
        inputs = OrderedSet(V.graph.graph_inputs)
        outputs = OrderedSet(V.graph.get_output_names())
        known = nodes[0].scheduler.name_to_buf
        given = memory.get_freeable_input_buf(nodes, inputs)
        memory.assign_memory_planning_info_for_scheduler_buffers(nodes, known)
        buffers, position, _ = memory.compute_memory_timeline(nodes, given, outputs)
        succ_nodes = {id(each): each.buffer.mpi_buffer.succ_nodes for each in buffers}
        for made in known.values():  # other passes would take it for that of fused nodes
            made.mpi_buffer = memory.MemoryPlanningInfoForBuffer()
        self.made: list[list[NodeBuffer]] = [[] for _ in nodes]
        """Node -> what it makes."""
        self.read: list[list[NodeBuffer]] = [[] for _ in nodes]
        """Node -> what it reads."""
        self.joined: list[list[NodeBuffer]] = [[] for _ in nodes]
        """Node -> buffers of `cat` that it writes a part of, and another node the first part."""
        self._changes = [0] * (len(nodes) + 1)
        dying: dict[tuple[str, int], dict[str, NodeBuffer | str]] = defaultdict(dict)
        """Part of a node and bytes -> names of what the part may write over -> the buffer; of what
        never leaves the kernel, the part that makes it."""
        made_by: dict[NodeBuffer, str] = {}
        concatenated, on_host = _concatenated(nodes), _on_host(nodes)
        placeholders = _lowered_graph().find_nodes(op="placeholder")
        held = {each.name for each in placeholders if HELD in each.meta}
        parts = {name for each in concatenated.values() for name in each}
        made_at = {name: at for at, node in enumerate(nodes) for name in node.get_buffer_names()}
        for each in buffers:
            is_input = isinstance(each.buffer, memory.FreeableInputBuffer)
            maker = -1 if is_input else each.start_step
            name = each.buffer.get_name()
            if is_input:
                each.size_alloc = each.size_free = _input_bytes(name)
            if name in on_host or name in parts:  # the latter are parts of other buffers
                each.size_alloc = each.size_free = 0
            elif name in concatenated:
                maker = min((made_at[part] for part in concatenated[name]), default=maker)
            readers = frozenset(position[node] for node in succ_nodes[id(each)])
            returned = each.end_step == -1 or (is_input and name in held)
            is_inner = not (is_input or returned) and readers <= {maker}
            if is_inner and is_in_no_memory(each.buffer, nodes[maker]):
                inner: Any = each.buffer
                for part in _in_place_readers(each, nodes):
                    dying[part, each.size_free][name] = inner.defining_op_name()
                each.size_alloc = each.size_free = 0
            last = len(nodes) if returned else each.end_step
            left = None if returned else readers
            buffer = NodeBuffer(each.size_alloc, maker, left, last, each.size_free)
            self._add(buffer, readers)
            for at in {made_at[part] for part in concatenated.get(name, ())} - {maker}:
                self.joined[at].append(buffer)
            if not returned:
                self._changes[each.end_step + 1] -= each.size_free
                if is_input or each.start_step < each.end_step:
                    for part in _in_place_readers(each, nodes):
                        dying[part, each.size_free][name] = buffer
            if not isinstance(each.buffer, memory.FreeableInputBuffer):
                made_by[buffer] = each.buffer.defining_op_name()
        uncounted = _uncounted_inputs(nodes, set(given).union(outputs), held, workspace_of)
        for size, read_at in (*_incoming_gradients(nodes, inputs - outputs), *uncounted):
            self._add(NodeBuffer(size, -1, read_at, max(read_at), size), read_at)
            self._changes[max(read_at) + 1] -= size
        self.written_over = self._written_over(dying, made_by)
        """Node -> the inputs that it writes over."""
        self.live = self._live_bytes()
        """Bytes that live during each node."""

    def _written_over(
        self,
        dying: Mapping[tuple[str, int], Mapping[str, NodeBuffer | str]],
        made_by: Mapping[NodeBuffer, str],
    ) -> list[list[NodeBuffer]]:
        """Returns node -> the inputs that it writes over. A part writes over the first that it
        reads of what it may; if that never leaves the kernel, over what was given to its maker.

        Args:
            dying: part of a node and bytes -> names of what the part may write over -> the buffer,
                or the part that makes it.
            made_by: buffer -> the part that makes it.
        """
        parts = {part.get_name(): part for node in self._nodes for part in node.get_nodes()}

        def given(part: str, nbytes: int) -> NodeBuffer | None:
            may = dying.get((part, nbytes), {})
            names = (dep.name for dep in parts[part].read_writes.reads)
            found = next((may[name] for name in names if name in may), None)
            return given(found, nbytes) if isinstance(found, str) else found

        found: list[list[NodeBuffer]] = [[] for _ in self._nodes]
        taken: set[NodeBuffer] = set()
        for at, node in enumerate(self._nodes):
            for buffer in self.made[at] if is_kernel(node) else ():
                over = given(made_by[buffer], buffer.nbytes) if buffer.maker == at else None
                if over is not None and over not in taken:
                    taken.add(over)
                    found[at].append(over)
        return found

    def _live_bytes(self) -> list[int]:
        changed = accumulate(self._changes[:-1])
        found = [
            live - sum(buffer.freed for buffer in over)
            for live, over in zip(changed, self.written_over, strict=True)
        ]
        for at in range(len(self._nodes)):
            within, end = self._taken_within(at)
            for place in range(at, end):
                found[place] += within
        return found

    def _taken_within(self, at: int) -> tuple[int, int]:
        """Returns the bytes that a node takes besides its inputs and outputs, and the position of
        the first one during which it no longer does. What a copy from the host makes is there from
        its start, and an output of its wait alone.
        """
        node = self._nodes[at]
        if _operator_of(node) == "zpasses.reload.default":
            awaited = _awaited_at(self._nodes, at)
            return _copied_bytes(self._nodes[awaited]), awaited
        within = _workspace(node, self._workspace_of)
        return within, _awaited_at(self._nodes, at) + 1 if within else at

    def without_collectives(self) -> list[int]:
        """Returns the bytes that live during each node without what collectives, and copies from
        and to the host, make and take, unless the graph returns it: passes move these.
        """
        changes, names = [0] * (len(self.live) + 1), set[str]()
        for at, node in enumerate(self._nodes):
            kernel: Any = node.node
            is_part = isinstance(kernel, ir.MultiOutput)
            if is_part and names.isdisjoint(dep.name for dep in node.read_writes.reads):
                continue
            if not is_part and getattr(kernel, "op_overload", None) is None:
                continue
            if not is_part and kernel.op_overload.namespace not in MOVED_NAMESPACES:
                continue
            names |= set(node.get_buffer_names())
            for buffer in self.made[at]:
                changes[at] -= buffer.nbytes
                changes[at if buffer.readers is None else buffer.last + 1] += buffer.freed
            if not is_part:
                within, end = self._taken_within(at)
                changes[at] -= within
                changes[end] += within
        taken = accumulate(changes[:-1])
        return [live + change for live, change in zip(self.live, taken, strict=True)]

    def _add(self, buffer: NodeBuffer, readers: frozenset[int]) -> None:
        self._changes[max(buffer.maker, 0)] += buffer.nbytes
        if buffer.maker >= 0:
            self.made[buffer.maker].append(buffer)
        for reader in readers:
            self.read[reader].append(buffer)


def _lowered_graph() -> fx.Graph:
    interpreter: fx.Interpreter = V.graph
    return interpreter.graph


def _workspace(node: BaseSchedulerNode, workspace_of: Callable[[fx.Node], int]) -> int:
    """Returns the bytes that an operator takes besides its inputs and outputs."""
    kernel: Any = node.node
    if not isinstance(kernel, (ir.ExternKernelAlloc, ir.ExternKernelOut)):
        return 0
    calls = (call for call in kernel.get_origins() if call.op == "call_function")
    return max(map(workspace_of, calls), default=0)


def _operator_of(node: BaseSchedulerNode) -> str:
    """Returns the name of the operator that a node calls; "None" if it calls none."""
    return str(getattr(node.node, "op_overload", None))


def _copied_bytes(wait: BaseSchedulerNode) -> int:
    """Returns the bytes of what a wait for a copy from the host returns."""
    kernel: Any = wait.node
    values = (call.meta.get("val") for call in kernel.get_origins() if "wait" in str(call.target))
    sizes = (each.numel() * each.element_size() for each in values if hasattr(each, "numel"))
    return max(map(int, map(hint, sizes)), default=0)


def _awaited_at(nodes: list[BaseSchedulerNode], at: int) -> int:
    """Returns the position of the last wait for an operator; its own if it has none. Waits for a
    collective also depend on what it was given, which operators of torch have made.
    """
    names, last = set(nodes[at].get_buffer_names()), at
    kernel: Any = nodes[at].node
    if getattr(getattr(kernel, "op_overload", None), "namespace", None) == "aten":
        return last
    for place in range(at + 1, len(nodes)):
        if names.isdisjoint(dep.name for dep in nodes[place].unmet_dependencies):
            continue
        if isinstance(nodes[place].node, ir.MultiOutput):
            names |= set(nodes[place].get_buffer_names())
        elif "wait" in _operator_of(nodes[place]):
            last = place
    return last


def _on_host(nodes: list[BaseSchedulerNode]) -> set[str]:
    """Returns the buffers that rest on the host: what copies from there read, and what copies to
    there make. Inductor counts them as memory of the device.
    """
    found: set[str] = set()
    for node in nodes:
        operator = _operator_of(node)
        reads = {dep.name for dep in node.read_writes.reads}
        if operator in ("zpasses.reload.default", "zpasses.from_host.default"):
            found |= reads
        elif operator in ("zpasses.offload_wait.default", "zpasses.to_host.default") or (
            isinstance(node.node, ir.MultiOutput) and not reads.isdisjoint(found)
        ):
            found |= set(node.get_buffer_names())
    return found


def _concatenated(nodes: list[BaseSchedulerNode]) -> dict[str, list[str]]:
    """Returns the buffers of `cat` -> those that are written right into each."""
    found = {}
    for node in nodes:
        kernel: Any = node.node
        if isinstance(kernel, ir.ConcatKernel):
            inputs: list[Any] = list(kernel.inputs)
            found[kernel.get_name()] = [
                each.get_name() for each in inputs if isinstance(each.layout, ir.NonOwningLayout)
            ]
    return found


def _in_place_readers(each: Any, nodes: list[BaseSchedulerNode]) -> Iterator[str]:
    """Yields the parts of a buffer's last reader that may write over it: a part that reads elements
    only where it writes them, after all other parts that read them. An input must be donated, too.
    None writes over the result of a `cat`.
    """
    node = nodes[each.end_step]
    buffer = each.buffer
    if isinstance(getattr(buffer, "defining_op", None), NopKernelSchedulerNode):
        return
    if isinstance(buffer, memory.FreeableInputBuffer):
        buffer = node.scheduler.name_to_donated_buffer.get(buffer.get_name())
    if buffer is None or not may_write_over(buffer, node):
        return
    last = OrderedSet(part.get_name() for part in node.get_nodes())
    users = [each for each in buffer.users if each.get_name() in last]
    for user in users:
        others = {each.get_name() for each in users} - {user.get_name()}
        if user.can_inplace and others <= user.node.ancestors:
            yield user.get_name()


def _incoming_gradients(
    nodes: list[BaseSchedulerNode], inputs: OrderedSet[str]
) -> Iterator[tuple[int, frozenset[int]]]:
    """Yields the bytes and readers of each gradient that a backward graph is given. Inductor's
    count does not free them, and its code does.
    """
    reads: dict[str, set[int]] = defaultdict(set)
    for at, node in enumerate(nodes):
        for dep in node.read_writes.reads:
            if dep.name in inputs and dep.name.startswith("tangents"):
                reads[dep.name].add(at)
    for name, read_at in reads.items():
        yield _input_bytes(name), frozenset(read_at)


def _uncounted_inputs(
    nodes: list[BaseSchedulerNode],
    counted: set[str],
    held: set[str],
    workspace_of: Callable[[fx.Node], int],
) -> Iterator[tuple[int, frozenset[int]]]:
    """Yields the bytes and readers of each input that Inductor's count takes for the caller's, and
    that lives for this graph alone: copies of inputs in another layout, which forward saves, and
    what no code reads, which is never freed.
    """
    reads: dict[str, set[int]] = defaultdict(set)
    for at, node in enumerate(nodes):
        for dep in node.read_writes.reads:
            reads[dep.name].add(at)
    kernels: list[Any] = [part.node for node in nodes for part in node.get_nodes()]
    calls = (call for kernel in kernels if kernel is not None for call in kernel.get_origins())
    first: fx.Node | None = next(calls, None)
    for each in () if first is None else first.graph.nodes:
        if each.op != "placeholder" or each.name in counted or each.name.startswith("tangents"):
            continue
        size = workspace_of(each)
        if size:
            read_at = () if each.name in held else reads.get(each.name, ())
            yield size, frozenset(read_at or range(len(nodes)))


def _input_bytes(name: str) -> int:
    """Returns the bytes of an input. Inductor's count has the elements that are read, some of which
    are read several times.
    """
    given: Any = V.graph.graph_inputs[name]
    return int(hint(sympy_product(given.get_size())) * given.get_dtype().itemsize)
