"""Keeps functions of several CPU kernels from raising the peak of memory, as plans expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode, Scheduler

from zpasses.compat.inductor_memory import NodeMemory
from zpasses.compat.inductor_nodes import is_kernel


def end_kernel_groups(scheduler: Scheduler, workspace_of: Callable[[fx.Node], int]) -> None:
    """Has the scheduler of one graph end a function of CPU kernels where it would raise the peak.

    On CPUs, Inductor calls kernels that follow each other as one function, a kernel group. What
    they write is allocated before the call, and what they read is freed after it. A group ends
    early if the bytes that live during it would exceed the peak that the graph has without groups.
    """
    for device in {node.get_device() for node in scheduler.nodes}:
        if device is not None and type(scheduler.get_backend(device)) is CppScheduling:
            scheduler.backends[device] = _KernelGroups(scheduler, workspace_of)


class _KernelGroups(CppScheduling):
    """Inductor's code for CPUs, with kernel groups that keep to the peak."""

    def __init__(self, scheduler: Scheduler, workspace_of: Callable[[fx.Node], int]) -> None:
        super().__init__(scheduler)  # type: ignore[no-untyped-call]
        self._graph = scheduler
        self._workspace_of = workspace_of
        self._last: set[Any] | None = None

    def ready_to_flush(self) -> bool:
        """Whether the function of kernels ends after the current node. Asked after each node."""
        if self._last is None:  # now the order of nodes is final
            memory = NodeMemory(self._graph.nodes, self._workspace_of)
            self._last = _last_of_groups(self._graph.nodes, memory)
        is_full: bool = super().ready_to_flush()  # type: ignore[no-untyped-call]
        return is_full or self._graph.current_node in self._last


def _last_of_groups(nodes: list[BaseSchedulerNode], memory: NodeMemory) -> set[Any]:
    """Returns the kernels after which a group ends although a kernel follows."""
    most = max(memory.live)
    last: set[Any] = set()
    before: BaseSchedulerNode | None = None  # the last kernel of the group
    live = 0  # during the group
    for at, node in enumerate(nodes):
        if isinstance(node, NopKernelSchedulerNode):  # no code, so the group goes on
            continue
        if not is_kernel(node):
            before = None
            continue
        written_over = sum(buffer.freed for buffer in memory.written_over[at])
        added = sum(buffer.nbytes for buffer in memory.made[at]) - written_over
        if before is not None and live + added > most:
            last.add(before)
            before = None
        live = memory.live[at] if before is None else live + added
        before = node
    return last
