"""What nodes of Inductor's scheduler compute, and which of their buffers are in no memory."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.dependencies import MemoryDep, WeakDep
from torch._inductor.scheduler import BaseSchedulerNode, FusedSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

_MOST_PER_STEP = 300
"""Steps of an inner loop per step of the outer ones up to which Inductor has common outer loops."""


def last_calls(nodes: list[BaseSchedulerNode]) -> list[str]:
    """Returns for each node the name of the last node of the graph that it computes, or ""."""
    kernels: list[list[Any]] = [[part.node for part in node.get_nodes()] for node in nodes]
    calls = [
        [call for kernel in each if kernel is not None for call in kernel.get_origins()]
        for each in kernels
    ]
    graphs = Counter(call.graph for each in calls for call in each)  # some are of subgraphs
    most = graphs.most_common(1)
    position = {call: at for graph, _ in most for at, call in enumerate(graph.nodes)}
    known = [[call for call in each if call in position] for each in calls]
    return [max(each, key=lambda call: position[call]).name if each else "" for each in known]


def is_kernel(node: BaseSchedulerNode) -> bool:
    """Whether a node is a kernel that Inductor writes, fused or not."""
    return isinstance(node, (SchedulerNode, FusedSchedulerNode)) and not node.is_template()


def hint(size: Any) -> Any:
    """Returns a number for a size, 0 for one that is not known."""
    sizes: Any = V.graph.sizevars
    return sizes.optimization_hint(size, fallback=0)


def is_in_no_memory(buffer: Any, kernel: BaseSchedulerNode) -> bool:
    """Whether a buffer that a kernel makes for itself alone is never allocated: a part computes it
    where it is read. Code for CPUs may run the loops of several parts inside common outer loops.
    What goes from one of these loops to another one is allocated, unless it is local.
    """
    if type(kernel) is not OuterLoopFusedSchedulerNode:
        return type(kernel) is FusedSchedulerNode
    for loop in kernel.get_outer_nodes():
        parts = loop.get_nodes()
        if buffer.defining_op in parts and all(user.node in parts for user in buffer.users):
            return True
    return _is_local(buffer, kernel)


def may_write_over(buffer: Any, kernel: BaseSchedulerNode) -> bool:
    """Whether a part of a kernel that reads a buffer may write its result there."""
    if type(kernel) is not OuterLoopFusedSchedulerNode:
        return True
    return _has_common_loops(kernel) and not _is_local(buffer, kernel)


def _is_local(buffer: Any, kernel: OuterLoopFusedSchedulerNode) -> bool:
    """Whether a kernel with outer loops has a small buffer of its own for what it makes in one of
    their steps.
    """
    part = buffer.defining_op
    return (
        part in kernel.get_nodes()
        and all(user.node in kernel.get_nodes() for user in buffer.users)
        and not part.is_reduction()
        and len(part.get_outputs()) == 1
        and buffer.node.get_layout().is_contiguous()
        and all(len(each) == kernel.outer_loop_fusion_depth + 1 for each in _loops(kernel))
        and _has_common_loops(kernel)
    )


def _has_common_loops(kernel: OuterLoopFusedSchedulerNode) -> bool:
    """Whether code runs the loops of a kernel inside common outer loops, as the scheduler expects.
    Inductor decides that when it writes code, and does not if the inner loops are long, or have
    other tiles, as those may that go through elements in another order.
    """
    depth: int = kernel.outer_loop_fusion_depth
    are_short = all(
        len(each) <= depth or each[depth] <= _MOST_PER_STEP * math.prod(each[:depth])
        for each in _loops(kernel)
    )
    return are_short and all(map(_goes_through_rows, kernel.get_nodes()))


def _loops(kernel: OuterLoopFusedSchedulerNode) -> list[list[int]]:
    """Returns how many steps the loops of each part of a kernel have, from the outer to the inner
    ones.
    """
    groups = [
        max(loop.get_nodes(), key=lambda part: part.is_reduction()).group[1]
        for loop in kernel.get_outer_nodes()
    ]
    return [[hint(size) for size in (*outer, *inner)] for outer, inner in groups]


def _goes_through_rows(part: BaseSchedulerNode) -> bool:
    """Whether the innermost loop of a part goes through elements that lie next to each other."""
    deps = [dep for dep in part.read_writes.reads_and_writes() if not isinstance(dep, WeakDep)]
    return all(
        isinstance(dep, MemoryDep)
        and (not dep.var_names or dep.index.diff(dep.var_names[-1]) in (0, 1))
        for dep in deps
    )
