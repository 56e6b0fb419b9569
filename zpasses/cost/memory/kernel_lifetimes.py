"""How long kernels need values: what they write over, and what fused kernels hold.

An elementwise kernel writes over an input of its size that nothing needs later, unless autograd or
the model's caller may hold it. What several kernels read that Inductor fuses lives until the last
of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.memory.buffers import Buffer, layout_of, planned_sizes
from zpasses.cost.memory.layout_copies import has_shown_layout
from zpasses.cost.time.fused_kernels import (
    FusedKernels,
    Load,
    is_elementwise,
    loaded_inputs,
    reads_elsewhere,
)
from zpasses.graph.aliases import GETITEM, is_view
from zpasses.graph.queries import collective_of, value_of


class KernelLifetimes:
    """The kernels of a graph, and the lifetimes of what they read and write.

    Args:
        kernels: those of the graph.
        memory_of: buffer of each output tensor of a node; None for memory of the caller.
    """

    def __init__(
        self, kernels: FusedKernels, memory_of: Mapping[fx.Node, list[Buffer | None]]
    ) -> None:
        self._known, self._memory_of = kernels, memory_of
        self._kernels: dict[fx.Node, tuple[Mapping[fx.Node, Load], int]] = {}
        """Kernel -> its inputs, and the number of calls before that are no such kernels. Those with
        the same number may be fused."""
        self._index: dict[fx.Node, int] = {}
        """Kernel -> its position."""
        self._others = 0
        self._readers: dict[tuple[int, int], list[fx.Node]] = {}
        """Buffer and number of calls before, as above -> the kernels that read it."""
        self._written_over: set[int] = set()
        """Buffers that a kernel writes over."""
        self._groups: list[list[fx.Node]] = []
        """Kernels that are fused, in the order of the graph."""

    def add(self, index: int, node: fx.Node) -> None:
        """Adds a kernel at its position in the graph."""
        self._kernels[node] = self._known.inputs(node), self._others
        self._index[node] = index

    def add_other(self) -> None:
        """Adds a call that is no such kernel. No kernel before it is fused with one after it."""
        self._others += 1

    def write_in_place(self, whole: set[Buffer]) -> None:
        """Ends the life of what kernels write over right before them.

        Args:
            whole: buffers that no kernel writes over.
        """
        for node, (sources, others) in self._kernels.items():
            for read in {id(self._memory_of.get(each, [None])[0]) for each in sources}:
                self._readers.setdefault((read, others), []).append(node)
        self._groups = self._fused()
        first_of = {each: group[0] for group in self._groups for each in group}
        for node, (sources, _) in self._kernels.items():
            made = self._memory_of[node][0]
            if made is None or made.node is not node:
                continue
            read_as: dict[Buffer, list[fx.Node]] = {}
            for each in sources:
                buffer = self._memory_of.get(each, [None])[0]
                if buffer is not None:
                    read_as.setdefault(buffer, []).append(each)
            for dying, values in read_as.items():
                if (
                    dying not in whole
                    and _takes_over(made, dying)
                    and _needs_all(node, self._later_readers(dying, first_of.get(node, node)))
                    and (
                        (_are_alike(made, dying) and all(sources[each].in_place for each in values))
                        or all(self._is_read_where_written(each, node) for each in values)
                    )
                ):
                    dying.last = made.first - 1
                    self._written_over.add(id(dying))
                    break

    def _later_readers(self, buffer: Buffer, first: fx.Node) -> list[fx.Node]:
        """Returns the kernels that read a buffer and may be a part of the one which starts with a
        kernel, without those that reduce columns before it: their loops fit no others on a CPU.
        """
        readers = self._readers[id(buffer), self._kernels[first][1]]
        if not self._known.on_cpu:
            return readers
        return [each for each in readers if each >= first or not self._known.reduces_columns(each)]

    def hold(self) -> None:
        """Has what a kernel reads and writes live until the last of those that it is fused with."""
        first_of = {each: group[0] for group in self._groups for each in group}
        last_of = {group[0]: self._index[group[-1]] for group in self._groups}
        for node, (sources, _) in self._kernels.items():
            if node not in first_of:
                continue
            first, last = self._index[first_of[node]], last_of[first_of[node]]
            for each in (node, *sources):
                for buffer in self._memory_of.get(each, ()):
                    if buffer is None or id(buffer) in self._written_over:
                        continue
                    if first <= buffer.last < last:
                        buffer.last = last

    def _fused(self) -> list[list[fx.Node]]:
        """Returns kernels that are fused because one reads what another one makes, in the order of
        the graph: those that go through the same elements, and reductions of their rows.
        """
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node, (sources, others) in self._kernels.items():
            group = [node]
            for source in sources:
                maker = source.all_input_nodes[0] if source.target is GETITEM else source
                before = groups.get(maker)
                if before is None or before is group or self._kernels[maker][1] != others:
                    continue
                if self._known.elements(maker) != self._known.elements(node):
                    continue
                buffer = self._memory_of[maker][0]
                between = [
                    each
                    for each in self._readers.get((id(buffer), others), ())
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

    def _is_read_where_written(self, leaf: fx.Node, kernel: fx.Node) -> bool:
        """Whether a kernel loads each element of a value from where it writes in its result, seen
        through the views between them.
        """
        if not (has_shown_layout(leaf) and has_shown_layout(kernel)):
            return False
        seen = {leaf: _strided(value_of(leaf))}
        for node in self._between(leaf, kernel):
            loaded = [seen[each] for each in loaded_inputs(node) if each in seen]
            if not loaded:
                continue
            places = _places_through(node, loaded)
            if places is None:
                return False
            seen[node] = places
        return _places(seen[kernel]) == _places(_strided(value_of(kernel)))

    def _between(self, leaf: fx.Node, kernel: fx.Node) -> list[fx.Node]:
        """Returns a kernel and what is computed from a value in it, in the order of the graph."""
        passed, pending = {kernel}, [kernel]
        while pending:
            for each in loaded_inputs(pending.pop()):
                is_inside = is_view(each) or self._known.is_inlined(each)
                if each is not leaf and each not in passed and is_inside:
                    passed.add(each)
                    pending.append(each)
        return sorted(passed)


def _strided(value: Tensor) -> Tensor:
    """Returns a tensor without memory that is laid out like a value."""
    sizes, strides = planned_sizes(value.shape), planned_sizes(value.stride())
    first = compat.planned_size(value.storage_offset())
    furthest = sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    memory = torch.empty(first + furthest + 1, dtype=value.dtype, device="meta")
    return memory.as_strided(sizes, strides, first)


def _places(value: Tensor) -> tuple[Any, ...]:
    """Where the elements of a tensor lie, in the order of its dimensions."""
    steps = [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]
    return value.storage_offset(), *steps


def _places_through(node: fx.Node, loaded: list[Tensor]) -> Tensor | None:
    """Returns a tensor that lies where a call loads the elements of its result from; None if that
    is more than one place for an element, or none that strides describe.

    Args:
        node: a view, or an elementwise operator.
        loaded: the same for those of its inputs that come from the same value.
    """
    if reads_elsewhere(node) or node.target is torch.ops.aten.view.dtype:
        return None
    if is_view(node):
        source = node.all_input_nodes[0]
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs),
            lambda each: loaded[0] if each is source else compat.planned_size(value_of(each)),
        )
        call: Any = node.target
        try:
            return call(*args, **kwargs)  # type: ignore[no-any-return]
        except (RuntimeError, ValueError):  # no strides describe it
            return None
    if not is_elementwise(node):
        return None
    broadcast = [each.expand(planned_sizes(value_of(node).shape)) for each in loaded]
    return broadcast[0] if len({_places(each) for each in broadcast}) == 1 else None


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
    """Whether a kernel may write its result over a buffer that is needed no longer."""
    ours, theirs = value_of(made.node), value_of(dying.node)
    return (
        dying.last == made.first > dying.first
        and made.nbytes == dying.nbytes > 0
        and isinstance(ours, Tensor)
        and isinstance(theirs, Tensor)
        and ours.dtype == theirs.dtype
        and collective_of(dying.node) is None
        and (dying.node.op != "placeholder" or compat.may_overwrite(dying.node))
    )


def _are_alike(made: Buffer, dying: Buffer) -> bool:
    """Whether two buffers are laid out in one way."""
    ours, theirs = value_of(made.node), value_of(dying.node)
    is_shown = has_shown_layout(made.node) and has_shown_layout(dying.node)
    is_one_shape = planned_sizes(ours.shape) == planned_sizes(theirs.shape)
    return (is_one_shape or is_shown) and layout_of(ours) == layout_of(theirs)
