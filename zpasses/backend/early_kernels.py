"""Kernels of a backward graph that run before the product they come after, because that frees
memory for it.

Before                                      After
  hidden = gelu(saved)                        hidden = gelu(saved)
  weight_grad = mm(grad.t(), hidden)          into = gelu_backward(grad_hidden, saved)
  into = gelu_backward(grad_hidden, saved)    weight_grad = mm(grad.t(), hidden)

A kernel that writes over one of its inputs, and is the last to read another one, takes no memory
and frees some. As soon as all that it reads is there, nothing is gained by a later place: each
operator before it runs beside what it would free. In the example, `into` is written over
`grad_hidden`, and `saved` is free before the weight's gradient is made. Inductor then computes both
elementwise kernels in one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.fused_kernels import FusedKernels, is_elementwise
from zpasses.graph.aliases import (
    GETITEM,
    buffer_readers,
    is_view,
    memory_root,
    root_output,
    view_base,
)
from zpasses.graph.queries import (
    collective_of,
    is_wait,
    nbytes,
    restore_order,
    saved_inputs,
    started_by,
    value_of,
)

aten = torch.ops.aten


def run_early(backward: fx.Graph) -> list[fx.Node]:
    """Moves such kernels of a backward graph, and returns them. None moves if the peak would rise
    by all of them.
    """
    before = list(backward.nodes)
    moved = _Mover(backward).run()
    if not moved:
        return []
    after, peak = list(backward.nodes), liveness(backward).peak_bytes
    restore_order(before)
    if peak > liveness(backward).peak_bytes:
        return []
    restore_order(after)
    return moved


class _Mover:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._kernels = graph, FusedKernels()
        self._saved = saved_inputs(graph.nodes)
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        """Value in memory -> what reads it, in the order of the graph."""
        for node in graph.nodes:
            for base in dict.fromkeys(map(memory_root, self._read_by(node))):
                self._readers.setdefault(base, []).append(node)

    def _read_by(self, node: fx.Node) -> Iterable[fx.Node]:
        if self._is_inside(node) or node.target is GETITEM:
            return ()
        if is_wait(node) and collective_of(started_by(node)) is not None:
            return [*node.all_input_nodes, *started_by(node).all_input_nodes]
        return self._kernels.inputs(node) if node.op == "call_function" else node.all_input_nodes

    def run(self) -> list[fx.Node]:
        inputs, moved = self._graph.find_nodes(op="placeholder"), list[fx.Node]()
        for node in list(self._graph.nodes):
            if not (is_elementwise(node) and self._has_kernel(node)):
                continue
            after = self._ready_after(node)
            if after is None or not self._runs_beside_operators(node, after):
                continue
            after = max((after, *inputs[-1:]))  # inputs come first
            inside = self._computed_in(node, after)
            if any(each > after and each not in inside for each in _inputs_of(inside)):
                continue
            for each in inside:
                after.append(each)
                after = each
            moved.append(node)
        return moved

    def _ready_after(self, kernel: fx.Node) -> fx.Node | None:
        """Returns the last node that a kernel must come after so that it frees more than it takes;
        None if it does not.
        """
        made, loads = value_of(kernel), self._kernels.inputs(kernel)
        loaded = {memory_root(each): True for each in loads}
        for each, load in loads.items():
            loaded[memory_root(each)] &= load.in_place
        dying = [each for each in loaded if self._dies_at(each, kernel)]
        over = [
            each
            for each in dying
            if loaded[each]
            and nbytes(value_of(each)) == nbytes(made)
            and value_of(each).dtype == made.dtype
            and _may_be_written_over(each)
        ]
        if any(each.target is aten.cat.default for each in buffer_readers(kernel)):
            return None  # it writes into what the `cat` makes, which would be made early
        if not over or sum(nbytes(value_of(each)) for each in dying) < 2 * nbytes(made):
            return None
        return max(
            (
                *map(view_base, loads),
                *(other for each in dying for other in self._readers[each][:-1]),
            )
        )

    def _dies_at(self, value: fx.Node, kernel: fx.Node) -> bool:
        is_freed = value.op == "call_function" or value in self._saved
        return is_freed and self._readers[value][-1] is kernel

    def _runs_beside_operators(self, kernel: fx.Node, after: fx.Node) -> bool:
        """Whether an operator runs between two nodes."""
        node = after.next
        while node is not kernel:
            if not (
                node.op != "call_function"
                or node.target is GETITEM
                or self._is_inside(node)
                or self._has_kernel(node)
                or is_wait(node)
                or collective_of(node) is not None
            ):
                return True
            node = node.next
        return False

    def _computed_in(self, kernel: fx.Node, after: fx.Node) -> list[fx.Node]:
        """Returns a kernel and what is computed in it after a node, in the order of the graph."""
        found, pending = {kernel}, [kernel]
        while pending:
            for each in pending.pop().all_input_nodes:
                if each > after and each not in found and self._is_inside(each):
                    found.add(each)
                    pending.append(each)
        return sorted(found)

    def _is_inside(self, node: fx.Node) -> bool:
        """Whether kernels and operators that read a value compute it, or see it as a view."""
        return is_view(node) or self._kernels.is_inlined(node)

    def _has_kernel(self, node: fx.Node) -> bool:
        return node.op == "call_function" and self._kernels.has_kernel(node)


def _inputs_of(nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
    return (each for node in nodes for each in node.all_input_nodes)


def _may_be_written_over(value: fx.Node) -> bool:
    if value.op == "placeholder":
        return compat.may_overwrite(value)
    return collective_of(root_output(value)[0]) is None
