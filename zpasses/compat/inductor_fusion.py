"""Keeps Inductor's fusion of kernels from raising the peak of memory, which a plan counts on."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.dependencies import MemoryDep, WeakDep
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ForeachKernelSchedulerNode,
    FusedSchedulerNode,
    NopKernelSchedulerNode,
    Scheduler,
    SchedulerNode,
)
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V

from zpasses.compat.inductor_kernel_groups import end_kernel_groups
from zpasses.compat.inductor_memory import NodeMemory
from zpasses.compat.inductor_nodes import hint, is_kernel

aten = torch.ops.aten
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_MARGIN = 500
"""Part of the peak by which neighbours may raise it."""
_ASKED_FOR = "zpasses_after"
"""How what `_run_after` adds is named."""
_MOST_NEIGHBOURS = 64
"""Kernels with a buffer in common that Inductor compares with each kernel."""


class FusionWithinPeak(CustomSchedulerPass):
    """Has kernels run where the graph has them, and Inductor fuse none across an operator where
    that raises the peak of the graph.

    Inductor fuses kernels that read the same values. The fused kernel runs where the first of them
    would, after all that the others depend on, and all that it writes lives from there on:

        x1 = kernel(h)                             dx = mm(dy, w)
        dw = mm(dy, x1)                =>          x1, dh = kernel(h, dx)
        dx = mm(dy, w)                             dw = mm(dy, x1)
        dh = kernel(h, dx)

    That saves a read of `h`, and `dx` and `dh` live beside `dy`. A collective or a wait may stand
    between them, too. This pass goes through the pairs of kernels that Inductor may fuse, in the
    order of the graph. It allows a pair if the bytes that live earlier for it and for all pairs
    allowed before fit below the peak that the graph has without fusion; so the peak is kept
    whichever of them Inductor then fuses. Otherwise, the second kernel depends on an operator
    between, and this operator on the first, by dependencies that order and keep no buffer alive.

    Args:
        before: a pass of the user that runs before, if there is one.
        workspace_of: returns the bytes that a call takes besides its inputs and outputs, until its
            waits if there are some, and those of an input that live for this graph alone.
    """

    def __init__(
        self, before: CustomSchedulerPass | None, workspace_of: Callable[[fx.Node], int]
    ) -> None:
        self._before = before
        self._workspace_of = workspace_of

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        """Orders the nodes and adds the dependencies."""
        if self._before is not None:
            nodes = self._before(nodes)
        if nodes:
            nodes = _in_planned_order(nodes)
            fusions = _Fusions(nodes, self._workspace_of)
            fusions.restrict()
            _allowed[nodes[0].scheduler] = fusions.peak + fusions.peak // _MARGIN
            end_kernel_groups(nodes[0].scheduler, self._workspace_of)
        return nodes

    def uuid(self) -> Any:
        """What decides the code, for Inductor's cache."""
        before = None if self._before is None else self._before.uuid()
        return "zpasses.FusionWithinPeak.30", before


_allowed: WeakKeyDictionary[Scheduler, int] = WeakKeyDictionary()
"""Scheduler -> what the peak of its nodes may be after fusion, in bytes."""


def allowed_peak(nodes: list[BaseSchedulerNode]) -> int | None:
    """Returns what the peak of fused nodes may be, or None if `FusionWithinPeak` did not run."""
    return _allowed.get(nodes[0].scheduler)


def fusion_within_peak(
    before: Callable[..., Any] | None, workspace_of: Callable[[fx.Node], int]
) -> Callable[..., Any]:
    """Returns `FusionWithinPeak` after a pass of the user. Inductor caches no code of a pass that
    is a plain function, so neither does it here. While a plan is counted, it is there already.
    """
    if isinstance(before, FusionWithinPeak):
        return before
    if before is None or isinstance(before, CustomSchedulerPass):
        return FusionWithinPeak(before, workspace_of)
    function = before
    return lambda nodes: FusionWithinPeak(None, workspace_of)(function(nodes))


def _in_planned_order(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Has each kernel run where the graph has its last call, and returns the nodes in that order.
    Inductor puts a kernel before the first operator that reads its result, so that all that it
    reads lives until there.
    """
    called_at = _called_at(nodes)
    needs = _positions_of_needs(nodes)
    # What only fills memory, such as that which a scatter adds to, frees none by running early.
    kernels = (at for at, node in enumerate(nodes) if is_kernel(node) and node.read_writes.reads)
    waiting = deque(sorted(kernels, key=lambda at: called_at[at]))
    order: dict[int, None] = {}
    for at in range(len(nodes)):
        while waiting and called_at[waiting[0]] < called_at[at]:
            kernel = waiting.popleft()
            if needs[kernel] <= order.keys():
                order.setdefault(kernel)
        order.setdefault(at)
    ordered = [nodes[at] for at in order]
    for at, node in enumerate(ordered):
        for each in (node, *node.get_nodes()):  # fusion sorts by these
            each.min_order = each.max_order = at
    return ordered


def _called_at(nodes: list[BaseSchedulerNode]) -> list[int]:
    """Returns node -> the position in the graph of the last call that it runs, or 0."""
    calls = [[call for part in node.get_nodes() for call in _calls_of(part)] for node in nodes]
    graph = next((each[0].graph for each in calls if each), None)
    position = {} if graph is None else {call: at for at, call in enumerate(graph.nodes)}
    return [max((position.get(call, 0) for call in each), default=0) for each in calls]


def _calls_of(node: BaseSchedulerNode) -> list[fx.Node]:
    """Returns the calls that a node runs. Inductor names the convolution, too, for a kernel that
    writes its result in the layout that the convolution wants.
    """
    calls: list[fx.Node] = [] if node.node is None else list(node.node.get_origins())
    if not is_kernel(node) or _read_in_another_layout(node) is not None:
        return calls
    return [each for each in calls if each.target not in _CONVOLUTIONS]


def _positions_of_needs(nodes: list[BaseSchedulerNode]) -> list[set[int]]:
    """Returns node -> the positions of those that it depends on."""
    made_at = {name: at for at, node in enumerate(nodes) for name in node.get_buffer_names()}
    return [
        {made_at[dep.name] for dep in node.unmet_dependencies if dep.name in made_at}
        for node in nodes
    ]


class _Fusions:
    """The pairs of kernels of one graph that Inductor may fuse. Nodes go by their positions."""

    def __init__(
        self, nodes: list[BaseSchedulerNode], workspace_of: Callable[[fx.Node], int]
    ) -> None:
        self._unfused = nodes
        self._nodes = nodes = with_only_readers(nodes)
        self._needs = _positions_of_needs(nodes)
        self._memory = NodeMemory(nodes, workspace_of)
        self._live = self._memory.live  # with what the allowed fusions add at most
        self.peak = max(self._live)
        """What the peak may be after fusion."""
        self._operators = [at for at, node in enumerate(nodes) if _is_call(node)]
        self._place = list(range(len(nodes)))
        """Where each node runs at the earliest, after the fusions that are allowed."""
        self._group = list(range(len(nodes)))
        """The first kernel of those that each may be fused with."""
        self._members = [[at] for at in self._group]
        self._after: dict[int, set[int]] = defaultdict(set)
        """Node -> those that it is to run after."""

    def restrict(self) -> None:
        """Adds the dependencies that keep kernels apart."""
        users: dict[str, list[int]] = defaultdict(list)
        for at, node in enumerate(self._nodes):
            if not is_kernel(node) or isinstance(node, ForeachKernelSchedulerNode):
                continue
            names = node.used_buffer_names()
            near = {each for name in names for each in users[name][-_MOST_NEIGHBOURS:]}
            for other in sorted(near, reverse=True):
                alike = other in self._needs[at] or _elements(self._nodes[other]) == _elements(node)
                if not alike or self._are_apart(other, at):
                    continue
                if _is_layout_copy(self._nodes[other], node) and not self._may_write_copy(
                    other, at
                ):
                    V.graph.no_fuse_buffer_names |= node.get_buffer_names()
                else:
                    self._decide(other, at)
            for name in names:
                users[name].append(at)
        for at in sorted(self._after):
            others = [self._nodes[each] for each in sorted(self._after[at])]
            for node in self._nodes[at].get_nodes():
                _run_after(node, [part for other in others for part in other.get_nodes()])
        if self._after:
            _find_ancestors(self._unfused)

    def _may_write_copy(self, maker: int, copy: int) -> bool:
        """Whether a kernel may write what it makes in another layout, instead of a kernel that
        copies it. It then writes over nothing, and what it reads lives beside the copy.
        """
        made = sum(each.nbytes for each in self._memory.made[maker])
        copied = sum(each.nbytes for each in (*self._memory.made[copy], *self._memory.joined[copy]))
        is_inner = all(each.readers == frozenset({copy}) for each in self._memory.made[maker])
        added = copied - (made if is_inner and not self._memory.written_over[maker] else 0)
        places = range(maker, copy)
        if any(self._live[at] + added > self.peak for at in places):
            return False
        for at in places:
            self._live[at] += max(added, 0)
        return True

    def _are_apart(self, other: int, at: int) -> bool:
        """Whether an operator reads what a kernel leads to, and leads to a later kernel. Inductor
        fuses no such pair. If it leads to some parts of the later kernel only, it keeps the others
        apart, too.
        """
        low, high = (bisect_left(self._operators, each) for each in (other, at))
        names = self._nodes[other].get_operation_names()
        between = [
            (each, self._nodes[each].get_operation_names())
            for each in self._operators[low:high]
            if not names.isdisjoint(self._nodes[each].ancestors)
        ]
        apart_by = [
            next((each for each, made in between if not part.ancestors.isdisjoint(made)), None)
            for part in self._nodes[at].get_nodes()
        ]
        operators = [each for each in apart_by if each is not None]
        if operators and None in apart_by:
            self._after[at].add(operators[0])
        return bool(operators)

    def _decide(self, other: int, at: int) -> None:
        """Allows two kernels to be fused, or keeps them apart."""
        first, second = sorted((self._group[other], self._group[at]))
        low, high = (bisect_left(self._operators, each) for each in (first, second))
        # Those that an allowed fusion needs earlier run before both.
        between = [each for each in self._operators[low:high] if self._place[each] > first]
        if not between:
            self._decide_neighbours(first, second)
            return
        pair = first, second, other, at
        known = self._after[second] | self._after[at]
        barrier = next((each for each in between if each in known), None)
        if barrier is None:
            added = self._added(first, second)
            beyond = self._beyond(added, self._freed(first, second))
            if beyond is None:
                for position, size in added.items():
                    self._live[position] += max(size, 0)
                self._join(first, second)
                return
            barrier = next((each for each in between if each >= beyond), between[-1])
        for each in pair:
            if self._group[each] == first:
                self._after[barrier].add(each)
            else:
                self._after[each].add(barrier)

    def _decide_neighbours(self, first: int, second: int) -> None:
        """Allows two kernels without an operator between to be fused, which hardly changes the
        peak, or keeps the second one from all fusions.
        """
        if first == second:
            return
        added = self._added(first, second)
        margin = self.peak // _MARGIN
        is_beyond = any(
            size > 0 and self._live[at] + size > self.peak + margin for at, size in added.items()
        )
        node = self._nodes[second]
        if is_beyond and type(node) is SchedulerNode and len(self._members[second]) == 1:
            V.graph.no_fuse_buffer_names |= node.get_buffer_names()
            return
        for position, size in added.items():
            self._live[position] += max(size, 0)
        self._join(first, second)

    def _join(self, first: int, second: int) -> None:
        if first == second:
            return
        for each in self._moved(first, second):
            self._place[each] = first
        for each in self._members[second]:
            self._group[each] = first
        self._members[first] += self._members[second]

    def _moved(self, first: int, second: int) -> set[int]:
        """Returns what runs earlier if a second group of kernels is fused with a first one."""
        moved: set[int] = set()
        pending = [second]
        while pending:
            for each in self._members[self._group[pending.pop()]]:
                if self._place[each] > first and each not in moved:
                    moved.add(each)
                    pending += self._needs[each]
        return moved

    def _added(self, first: int, second: int) -> dict[int, int]:
        """Returns position -> bytes that live there in addition if two groups are fused."""
        moved = self._moved(first, second)
        together = moved.union(self._members[first])
        added: dict[int, int] = defaultdict(int)
        for each in moved:
            for buffer in self._memory.made[each]:
                inner = buffer.readers is not None and buffer.readers <= together
                for position in range(first, first + 1 if inner else self._place[each]):
                    added[position] += buffer.nbytes
        wholes = {id(whole): whole for each in moved for whole in self._memory.joined[each]}
        for whole in wholes.values():  # unless a part moves that was counted with it
            for position in range(first, 0 if whole.maker in moved else self._place[whole.maker]):
                added[position] += whole.nbytes
        for each in together:  # a kernel writes over what one of its parts reads
            for buffer in self._memory.written_over[each]:
                is_shared = len(together.intersection(buffer.readers or ())) > 1
                if each in moved and not is_shared:
                    added[first] -= buffer.freed
                elif each not in moved and is_shared:
                    added[first] += buffer.freed
        return added

    def _freed(self, first: int, second: int) -> dict[int, int]:
        """Returns position -> bytes that live there no longer if a kernel is fused with a first
        one, as it and what it needs reads them earlier.
        """
        moved: set[int] = set()
        pending = [second]
        while pending:
            each = pending.pop()
            if each > first and each not in moved:
                moved.add(each)
                pending += self._needs[each]
        read = {id(buffer): buffer for each in moved for buffer in self._memory.read[each]}
        freed: dict[int, int] = defaultdict(int)
        for buffer in read.values():
            if buffer.readers is None or buffer.maker in moved:
                continue
            last = max(first if each in moved else each for each in buffer.readers)
            for position in range(last + 1, max(buffer.readers) + 1):
                freed[position] += buffer.nbytes
        return freed

    def _beyond(self, added: dict[int, int], freed: dict[int, int]) -> int | None:
        """Returns the first position where the peak would be exceeded."""
        over = (
            at
            for at, size in added.items()
            if size > freed.get(at, 0) and self._live[at] + size - freed.get(at, 0) > self.peak
        )
        return min(over, default=None)


def with_only_readers(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Returns the nodes with each kernel as a part of the one kernel that reads what it makes, if
    that reads each element where it is written, and no operator stands between them. Inductor fuses
    these if no other kernel is fused with one of them before, and plans count on it.
    """
    readers: dict[str, set[int]] = defaultdict(set)
    for at, node in enumerate(nodes):
        for dep in node.unmet_dependencies:
            if not is_asked_for(dep):
                readers[dep.name].add(at)
    outputs = set(V.graph.get_output_names())
    parts = [[node] for node in nodes]
    place = list(range(len(nodes)))
    end = len(nodes)  # the next operator
    for at in reversed(range(len(nodes))):
        node, made = nodes[at], nodes[at].get_buffer_names()
        if not is_kernel(node):
            end = at if _is_operator(node) else end
            continue
        read_at = {each for name in made for each in readers[name]}
        only = min(read_at, default=end)
        if (
            len(read_at) == 1
            and only < end
            and outputs.isdisjoint(made)
            and _is_read_as_written(node, nodes[only])
        ):
            place[at] = place[only]
            parts[place[at]] = [*parts[at], *parts[place[at]]]
            parts[at] = []
    return [
        FusedSchedulerNode(each[0].scheduler, each) if len(each) > 1 else each[0]
        for each in parts
        if each
    ]


def _is_read_as_written(maker: BaseSchedulerNode, reader: BaseSchedulerNode) -> bool:
    """Whether a kernel reads the elements of another one in the order in which they are written."""
    if not isinstance(maker, SchedulerNode) or not isinstance(reader, SchedulerNode):
        return False
    written = set(map(_element, maker.read_writes.writes))
    names = {dep.name for dep in maker.read_writes.writes}
    reads = [dep for dep in reader.read_writes.reads if dep.name in names]
    if _is_layout_copy(maker, reader):
        return False
    return all(isinstance(dep, MemoryDep) and _element(dep) in written for dep in reads)


def _is_layout_copy(maker: BaseSchedulerNode, reader: BaseSchedulerNode) -> bool:
    """Whether a kernel reads what another one makes, alone, and writes it in another layout."""
    read = _read_in_another_layout(reader)
    return read is not None and read.name in maker.get_buffer_names()


def _read_in_another_layout(kernel: BaseSchedulerNode) -> MemoryDep | None:
    """Returns what a kernel reads if that is one value, which it writes in another layout."""
    reads, writes = (list(each) for each in (kernel.read_writes.reads, kernel.read_writes.writes))
    if not isinstance(kernel, SchedulerNode) or len(reads) != 1 or len(writes) != 1:
        return None
    (read,), (written,) = reads, writes
    if not isinstance(read, MemoryDep) or not isinstance(written, MemoryDep):
        return None
    is_all = hint(sympy_product(read.size)) == hint(sympy_product(written.size))
    return read if is_all and _element(read)[1:] != _element(written)[1:] else None


def _element(dep: Any) -> Any:
    """Which element of which buffer each step of a loop reads or writes."""
    return (dep.name, dep.index, dep.size) if isinstance(dep, MemoryDep) else dep.name


def _is_operator(node: BaseSchedulerNode) -> bool:
    """Whether a node runs an operator such as a product. Collectives, copies from the host and
    waits do not count.
    """
    namespace = getattr(getattr(node.node, "op_overload", None), "namespace", None)
    return _is_call(node) and namespace not in ("_c10d_functional", "zpasses")


def _is_call(node: BaseSchedulerNode) -> bool:
    """Whether a node runs no kernel. The outputs of another call do not count, nor does what makes
    no buffer, because dependencies name one.
    """
    if is_kernel(node) or isinstance(node, NopKernelSchedulerNode):
        return False
    return bool(node.get_buffer_names()) and not isinstance(node.node, ir.MultiOutput)


def _elements(node: Any) -> Any:
    """How many elements a kernel goes through. Kernels of other numbers are not fused."""
    ranges = node.get_nodes()[0].get_ranges()
    return hint(sympy_product(size for part in ranges for size in part))


def _run_after(node: BaseSchedulerNode, others: Iterable[BaseSchedulerNode]) -> None:
    known = {dep.name for dep in node.unmet_dependencies}  # twice, it could not be written over
    for other in others:
        name = next(iter(other.get_buffer_names()))
        if name not in known:  # none writes to a buffer with the second name
            node.add_fake_dep(WeakDep(name, f"{_ASKED_FOR}_{name}", is_fake=True))


def is_asked_for(dep: Any) -> bool:
    """Whether `_run_after` added a dependency."""
    return str(getattr(dep, "mutating_buf", "")).startswith(_ASKED_FOR)


def _find_ancestors(nodes: list[BaseSchedulerNode]) -> None:
    """Adds what the new dependencies depend on. Fusion looks there for cycles."""
    known: dict[str, Any] = {}
    for node in nodes:
        found = node.ancestors.copy()
        for dep in node.unmet_dependencies:
            buffer = node.scheduler.name_to_buf.get(dep.name)
            if buffer is not None:
                name = buffer.defining_op_name()
                found.add(name)
                found |= known.get(name, ())
        node.ancestors = found
        known.update(dict.fromkeys(node.get_operation_names(), found))
