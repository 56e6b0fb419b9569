"""Orders the kernels that Inductor has fused, and takes some apart, so that a plan's peak holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import fx
from torch._inductor.codegen.cpp import CppScheduling, OuterLoopFusedSchedulerNode
from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import BaseSchedulerNode, FusedSchedulerNode

from zpasses.compat.code_peaks import observed_peaks
from zpasses.compat.inductor_fusion import allowed_peak, is_asked_for
from zpasses.compat.inductor_memory import NodeMemory

_Halves = tuple[Sequence[Any], Sequence[Any]]
"""The parts of two kernels in place of one: those that run first, and the others."""
_MOST_TRIALS = 64
"""How often kernels of one graph are taken apart to see what that saves."""


class FusedWithinPeak(CustomSchedulerPass):
    """Has what a fused kernel needs run before it in the order of the graph: Inductor sorts it by
    the names of buffers, and more would live at once. Then takes fused kernels apart, where that
    lowers the peak, while more lives than `FusionWithinPeak` allowed, which counts what a fusion
    adds before Inductor decides which others to fuse. Counts the peak for `observing_peaks`.

    Args:
        after: a pass of the user that runs after it, if there is one.
        workspace_of: as of `FusionWithinPeak`.
    """

    def __init__(
        self, after: CustomSchedulerPass | None, workspace_of: Callable[[fx.Node], int]
    ) -> None:
        self._after = after
        self._workspace_of = workspace_of

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        """Orders the nodes and takes some apart."""
        if not nodes:
            return nodes if self._after is None else self._after(nodes)
        found = _within_peak(_in_order_of_places(nodes), self._workspace_of)
        if self._after is not None:
            found = self._after(found)
        peaks = observed_peaks()
        if peaks is not None and found:
            peaks.append(max(NodeMemory(found, self._workspace_of).live))
        return found

    def uuid(self) -> Any:
        """What decides the code, for Inductor's cache."""
        return "zpasses.FusedWithinPeak.4", None if self._after is None else self._after.uuid()


def fused_within_peak(
    after: Callable[..., Any] | None, workspace_of: Callable[[fx.Node], int]
) -> Callable[..., Any]:
    """Returns `FusedWithinPeak` before a pass of the user, as `fusion_within_peak` does."""
    if isinstance(after, FusedWithinPeak):
        return after
    if after is None or isinstance(after, CustomSchedulerPass):
        return FusedWithinPeak(after, workspace_of)
    function = after
    return lambda nodes: function(FusedWithinPeak(None, workspace_of)(nodes))


def _in_order_of_places(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Returns each node after what it needs, which runs in the order of places. The orders that
    `FusionWithinPeak` asked for may form a circle with a fused kernel, and then give way, or a
    kernel would run before what it reads is made. Those of Inductor, such as that of collectives,
    stay.
    """
    maker = {name: node for node in nodes for name in node.get_buffer_names()}
    for with_orders in (True, False):
        needs = {
            node: {
                maker[dep.name]
                for dep in node.unmet_dependencies
                if dep.name in maker and (with_orders or not is_asked_for(dep))
            }
            - {node}
            for node in nodes
        }
        ordered: dict[BaseSchedulerNode, None] = {}
        begun: set[BaseSchedulerNode] = set()
        pending = sorted(nodes, key=_place, reverse=True)
        while pending:
            node = pending[-1]
            if node in begun:
                ordered.setdefault(pending.pop())
                continue
            begun.add(node)
            pending += sorted(needs[node] - begun, key=_place, reverse=True)
        place = {node: at for at, node in enumerate(ordered)}
        if all(place[each] < place[node] for node in nodes for each in needs[node]):
            return list(ordered)
    return nodes


def _place(node: BaseSchedulerNode) -> int:
    """Where a node runs without fusion, the first part of a fused one."""
    return node.min_order


def _within_peak(
    nodes: list[BaseSchedulerNode], workspace_of: Callable[[fx.Node], int]
) -> list[BaseSchedulerNode]:
    """Returns the nodes, with some of the fused ones in two where that lowers the peak, while more
    than allowed lives.
    """
    most = allowed_peak(nodes)
    if most is None:
        return nodes
    live, left = NodeMemory(nodes, workspace_of).live, _MOST_TRIALS
    is_cut = False
    while max(live) > most and left:
        at = max(range(len(nodes)), key=live.__getitem__)
        best, least = None, _excess(live, most)
        for fused, halves in itertools.islice(_cuts(nodes, at), left):
            left -= 1
            trial = _in_order_of_places(_taken_apart(nodes, fused, halves))
            found = NodeMemory(trial, workspace_of).live
            if _excess(found, most) < least:
                best, live, least = trial, found, _excess(found, most)
        if best is None:
            break
        nodes, is_cut = best, True
    if is_cut:
        _tell_scheduler(nodes)
    return nodes


def _excess(live: list[int], most: int) -> tuple[int, int]:
    """The peak, and what lives above a limit: where it is exceeded twice, the peak falls last."""
    return max(live), sum(max(each - most, 0) for each in live)


def _cuts(nodes: list[BaseSchedulerNode], at: int) -> Iterator[tuple[FusedSchedulerNode, _Halves]]:
    """Yields the fused kernels of which a part would run before a node and another one after it,
    with the parts of both; of the node itself, each way to take it apart.
    """
    scheduler, place = nodes[at].scheduler, _place(nodes[at])
    written: set[str] = set(itertools.chain(*scheduler.mutation_real_name.items()))
    for node in (nodes[at], *(each for each in nodes if each is not nodes[at])):
        # Once kernels are fused, Inductor drops what orders their parts around a write.
        if not isinstance(node, FusedSchedulerNode) or node.is_template() or _uses(node, written):
            continue
        for early, late in _halves(node):
            is_around = max(map(_place, early)) <= place < min(map(_place, late))
            if (is_around or node is nodes[at]) and all(map(_is_one_kernel, (early, late))):
                yield node, (early, late)


def _halves(fused: FusedSchedulerNode) -> Iterator[_Halves]:
    """Yields each way to divide the parts of a fused kernel: at the loops that run inside common
    outer ones, or else by their places.
    """
    if type(fused) is OuterLoopFusedSchedulerNode:
        loops = fused.get_outer_nodes()
        for count in range(1, len(loops)):
            yield loops[:count], loops[count:]
    elif type(fused) is FusedSchedulerNode:
        parts = fused.get_nodes()
        for last in sorted(set(map(_place, parts)))[:-1]:
            early = [part for part in parts if _place(part) <= last]
            yield early, [part for part in parts if part not in early]


def _uses(node: BaseSchedulerNode, names: set[str]) -> bool:
    """Whether a node reads or writes one of these buffers, or runs after a read of one."""
    deps = (*node.read_writes.reads_and_writes(), *node.unmet_dependencies)
    is_ordered = any(isinstance(dep, WeakDep) and not is_asked_for(dep) for dep in deps)
    return is_ordered or not names.isdisjoint(dep.name for dep in deps)


def _is_one_kernel(kernels: Sequence[Any]) -> bool:
    """Whether parts of a fused kernel can be a kernel: of one size, or of a reduction, what it goes
    through, and what it makes. Code for CPUs has loops of several sizes.
    """
    if isinstance(kernels[0].scheduler.get_backend(kernels[0].get_device()), CppScheduling):
        return True
    sizes = {part.group[1] for part in kernels}
    if len(sizes) == 1:
        return True
    reduced = {part.group[1] for part in kernels if part.is_reduction()}
    if len(reduced) != 1:
        return False
    ((outer, inner),) = reduced
    return sizes <= {(outer, inner), (outer * inner, 1), (outer, 1)}


def _taken_apart(
    nodes: list[BaseSchedulerNode], fused: FusedSchedulerNode, halves: _Halves
) -> list[BaseSchedulerNode]:
    """Returns the nodes with a fused one as two."""

    def kernel(parts: Sequence[Any]) -> BaseSchedulerNode:
        if len(parts) == 1:
            return cast(BaseSchedulerNode, parts[0])
        if isinstance(fused, OuterLoopFusedSchedulerNode):
            return type(fused)(fused.scheduler, list(parts), fused.outer_loop_fusion_depth)
        return FusedSchedulerNode(fused.scheduler, list(parts))

    apart = list(map(kernel, halves))
    return list(itertools.chain.from_iterable(apart if node is fused else [node] for node in nodes))


def _tell_scheduler(nodes: list[BaseSchedulerNode]) -> None:
    """Has Inductor find the nodes that parts are in now, and the streams that they run on."""
    scheduler = nodes[0].scheduler
    for node in nodes:
        for part in node.get_nodes():
            before = scheduler.name_to_fused_node.get(part.get_name(), node)
            if before is node:
                continue
            if before in scheduler.node_to_stream:
                scheduler.node_to_stream[node] = scheduler.node_to_stream[before]
            scheduler.name_to_fused_node[part.get_name()] = node
