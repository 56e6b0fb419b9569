"""Lower every `unshard` to one all-gather that writes the full parameter in place.

Before
  full = zpasses.unshard(shard, 10, bf16, ...)
  y = mm(x, full)
After
  cast = _to_copy(shard, dtype=bf16)
  padded = constant_pad_nd(cast, [0, 0, 0, 1])
  started = all_gather_into_tensor(padded, 4, group)
  gathered = wait_tensor(started)
  full = slice(gathered, 0, 0, 10)
  y = mm(x, full)

Contract: each rank holds a block of ceil(rows / ranks) rows; the last ranks may hold fewer. The
cast exists only if the dtype changes. It precedes the gather, so bf16 moves half the bytes. The
padding exists only on ranks whose block is not full. The slice exists only if the number of rows is
not divisible by the number of ranks. Otherwise the collective reads the shard itself and its output
is the parameter, without copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.dialect import UNSHARD, group_size, rows_per_rank
from zpasses.graph.queries import Editor, calls, nbytes, replace_node, value_of
from zpasses.graph.tags import Tag, add_tag, tag_of
from zpasses.pipeline.passes import Level, Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class GatherParams(Pass):
    """Insert one all-gather per parameter read."""

    name: ClassVar[str] = "gather-params"
    level: ClassVar[Level] = Level.JOINT

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of reads lowered."""
        reads = calls(graph, UNSHARD)
        for read in reads:
            self._lower(graph, read)
        return len(reads)

    def _lower(self, graph: fx.Graph, read: fx.Node) -> None:
        shard: Any = read.args[0]
        rows, dtype, group = read.args[1], read.args[2], read.args[4]
        again = read.args[6] if len(read.args) > 6 else None
        tag = tag_of(read)
        params = tag.params if tag else (shard.name,)
        edit = Editor(graph, before=read)
        full = self._gather(edit, shard, rows, dtype, group, again, params)
        add_tag(full, Tag("full", params, origin=self.name))
        replace_node(read, full)

    def _gather(
        self,
        edit: Editor,
        shard: fx.Node,
        rows: Any,
        dtype: Any,
        group: Any,
        again: Any,
        params: tuple[str, ...],
    ) -> fx.Node:
        value = value_of(shard)
        size = group_size(group)
        if value.dim() == 0 or size == 1:
            strides = {} if value.is_contiguous() else {"memory_format": torch.contiguous_format}
            return (
                edit.call(aten._to_copy.default, shard, dtype=dtype or value.dtype, **strides)
                if dtype
                else edit.call(aten.clone.default, shard, **strides)
            )
        block = rows_per_rank(rows, size)
        if block == 0 or 0 in value.shape[1:]:
            return edit.call(
                aten.empty.memory_format,
                [rows, *value.shape[1:]],
                dtype=dtype or value.dtype,
                device=value.device,
            )
        source = shard
        # Ranks may need different steps to prepare the input. The tag on the last step holds the
        # size, because the collective reads that node on every rank.
        whole, padded = 0, value.shape[0] < block
        if dtype is not None and dtype != value.dtype:
            source = edit.call(aten._to_copy.default, source, dtype=dtype)
            whole = (
                block
                * math.prod(compat.size_hint(size) for size in value.shape[1:])
                * dtype.itemsize
            )
            add_tag(
                source,
                Tag("gather_input", params, origin=self.name, block_bytes=0 if padded else whole),
            )
        if padded:
            padding = [0, 0] * (value.dim() - 1) + [0, block - value.shape[0]]
            source = edit.call(aten.constant_pad_nd.default, source, padding, 0.0)
            add_tag(source, Tag("gather_input", params, origin=self.name, block_bytes=whole))
        started = edit.call(compat.functional.all_gather_into_tensor.default, source, size, group)
        sent = nbytes(value_of(source))
        add_tag(started, Tag("gather", params, sent, origin=self.name, reshard_group=again))
        full = edit.call(compat.functional.wait_tensor.default, started)
        if block * size != rows:
            add_tag(full, Tag("gathered", params, origin=self.name))
            full = edit.call(aten.slice.Tensor, full, 0, 0, rows)
        return full
