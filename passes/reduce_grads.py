"""Lower every `reduce_grad` to one collective that averages a gradient and keeps this rank's rows.

Before
  mine = zpasses.reduce_grad(grad, 10, ...)
After, form=reduce_scatter                  After, form=all_reduce
  cast = _to_copy(grad, f32)                  cast = _to_copy(grad, f32)
  padded = constant_pad_nd(cast, [.., 2])     started = all_reduce(cast, ...)
  started = reduce_scatter_tensor(padded)     total = wait_tensor(started)
  block = wait_tensor(started)                mine = slice_copy(total, 0, 3, 6)
  mine = slice_copy(block, 0, 0, 3)

Contract: the result has the shard's rows and dtype, and owns its memory. A result that is a slice
of a larger tensor is copied, so the larger tensor can be freed. Casts, padding and slices exist
only if they change something.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.dialect import AVERAGE_GRAD, REDUCE_GRAD, group_size, rows_per_rank
from zpasses.graph.queries import Editor, calls, nbytes, replace_node, value_of
from zpasses.graph.tags import Reduction, Tag, add_tag, retag, tag_of
from zpasses.pipeline.passes import Level, Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class ReduceGrads(Pass):
    """Insert one reduction per gradient."""

    name: ClassVar[str] = "reduce-grads"
    level: ClassVar[Level] = Level.JOINT

    form: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"
    """`reduce_scatter` moves the fewest bytes. `all_reduce` moves twice as many, and needs no
    padding. It is for backends without a reduce-scatter.
    """

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of reductions lowered."""
        found = calls(graph, REDUCE_GRAD)
        for node in found:
            self._lower(graph, node)
        return len(found)

    def _lower(self, graph: fx.Graph, node: fx.Node) -> None:
        arguments: Any = node.args
        grad, rows, shard_rows, dtype, reduce_dtype, group = arguments
        tag = tag_of(node)
        lowering = _Lowering(
            Editor(graph, before=node),
            tag.params if tag else (grad.name,),
            self.name,
            str(group),
            reduce_dtype,
        )
        value = value_of(grad)
        if value.dim() and nbytes(value) == 0:
            mine = lowering.edit.call(
                aten.new_empty.default, grad, [shard_rows, *value.shape[1:]], dtype=dtype
            )
        elif value.dim() == 0:
            mine = lowering.all_reduce(lowering.cast(grad))
        elif lowering.size == 1:
            mine = lowering.cast(grad)
        elif self.form == "all_reduce":
            mine = lowering.slice_of_all_reduce(grad, rows, shard_rows, dtype)
        else:
            mine = lowering.reduce_scatter(grad, rows, shard_rows, dtype)
        mine = lowering.finish(mine, grad, dtype)
        full_rows = max(value.shape[0], 1) if value.dim() else 1
        whole = (
            nbytes(value)
            // value.element_size()
            // full_rows
            * rows_per_rank(full_rows, lowering.size)
            * dtype.itemsize
        )
        reduction = Reduction(rows, dtype, reduce_dtype, lowering.group)
        done = Tag("shard_grad", lowering.params, origin=self.name, block_bytes=whole)
        average = _average_of(node)
        if average is None:
            done = replace(done, reduction=reduction)
        else:
            _complete_tag(average, reduction, whole)
        add_tag(mine, done)
        replace_node(node, mine)


@dataclass
class _Lowering:
    """Inserts the nodes that reduce one gradient to a shard."""

    edit: Editor
    params: tuple[str, ...]
    origin: str
    group: str
    reduce_dtype: torch.dtype | None

    @property
    def size(self) -> int:
        return group_size(self.group)

    def cast(self, grad: fx.Node) -> fx.Node:
        if self.reduce_dtype is None or value_of(grad).dtype == self.reduce_dtype:
            return grad
        return self._prepare(self.edit.call(aten._to_copy.default, grad, dtype=self.reduce_dtype))

    def all_reduce(self, source: fx.Node) -> fx.Node:
        return self._await(
            self.edit.call(compat.functional.all_reduce.default, source, "avg", self.group), source
        )

    def slice_of_all_reduce(
        self, grad: fx.Node, rows: Any, shard_rows: Any, dtype: torch.dtype
    ) -> fx.Node:
        total = self.all_reduce(self.cast(grad))
        start = min(_group_rank(self.group) * rows_per_rank(rows, self.size), rows)
        return self._owning_slice(total, start, start + shard_rows, dtype)

    def reduce_scatter(
        self, grad: fx.Node, rows: Any, shard_rows: Any, dtype: torch.dtype
    ) -> fx.Node:
        source = self.cast(grad)
        block = rows_per_rank(rows, self.size)
        if block * self.size != rows:
            padding = [0, 0] * (value_of(grad).dim() - 1) + [0, block * self.size - rows]
            source = self._prepare(
                self.edit.call(aten.constant_pad_nd.default, source, padding, 0.0)
            )
        started = self.edit.call(
            compat.functional.reduce_scatter_tensor.default, source, "avg", self.size, self.group
        )
        mine = self._await(started, source)
        return mine if shard_rows == block else self._owning_slice(mine, 0, shard_rows, dtype)

    def _owning_slice(self, whole: fx.Node, start: Any, end: Any, dtype: torch.dtype) -> fx.Node:
        # A slice and a clone would not do: Inductor drops the clone, so the larger tensor could not
        # be freed. A cast copies in any case.
        copies = value_of(whole).dtype == dtype
        return self.edit.call(
            aten.slice_copy.Tensor if copies else aten.slice.Tensor, whole, 0, start, end
        )

    def finish(self, mine: fx.Node, grad: fx.Node, dtype: torch.dtype) -> fx.Node:
        dense = value_of(mine).is_contiguous()
        strides = {} if dense else {"memory_format": torch.contiguous_format}
        if value_of(mine).dtype != dtype:
            return self.edit.call(aten._to_copy.default, mine, dtype=dtype, **strides)
        if mine is grad or not dense:
            return self.edit.call(aten.clone.default, mine, **strides)
        return mine

    def _prepare(self, node: fx.Node) -> fx.Node:
        add_tag(node, Tag("reduce_input", self.params, origin=self.origin))
        return node

    def _await(self, started: fx.Node, source: fx.Node) -> fx.Node:
        add_tag(started, Tag("reduce", self.params, nbytes(value_of(source)), origin=self.origin))
        done = self.edit.call(compat.functional.wait_tensor.default, started)
        add_tag(done, Tag("reduced", self.params, origin=self.origin))
        return done


def _average_of(reduced: fx.Node) -> fx.Node | None:
    """Returns the average over replicas that reads a reduced gradient, if it is the only reader."""
    readers = list(reduced.users)
    return readers[0] if len(readers) == 1 and readers[0].target is AVERAGE_GRAD else None


def _complete_tag(average: fx.Node, within: Reduction, block_bytes: int) -> None:
    """Tags an average over replicas with the whole reduction of its gradient.

    Args:
        within: the reduction within a replica.
        block_bytes: bytes of a full block, in the dtype of that reduction.
    """
    _, dtype, group = average.args
    assert isinstance(dtype, torch.dtype)
    how = replace(within, dtype=dtype, replicate_group=compat.group_name(group))
    if tag_of(average) is not None:
        whole = block_bytes // within.dtype.itemsize * dtype.itemsize
        retag(average, reduction=how, block_bytes=whole)


def _group_rank(group: str) -> int:
    return compat.process_group(group).rank()
