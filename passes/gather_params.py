"""Lower every `unshard` to one all-gather that writes the full parameter in place.

Before
  full = zpasses.unshard(shard, 10, bf16, ...)
  y = mm(x, full)
After                                     After, encode=int8
  cast = _to_copy(shard, dtype=bf16)        record = zpasses.encode(shard, ...)
  padded = constant_pad_nd(cast, ...)       started = all_gather(record, ...)
  started = all_gather(padded, ...)         gathered = wait_tensor(started)
  gathered = wait_tensor(started)           full = zpasses.decode(gathered, ...)
  full = slice(gathered, 0, 0, 10)          y = mm(x, full)
  y = mm(x, full)

Contract: each rank holds a block of ceil(rows / ranks) rows; the last ranks may hold fewer. The
cast exists only if the dtype changes. It precedes the gather, so bf16 moves half the bytes. The
padding exists only on ranks whose block is not full. The slice exists only if the number of rows is
not divisible by the number of ranks. Otherwise the collective reads the shard itself and its output
is the parameter, without copies.

A shard that rests on the host is copied first, by `zpasses::from_host(shard, device)`.

With `encode`, the parameter that the model reads is rounded to codes of one byte
(zpasses.graph.encoding): one record of codes and scales per rank and parameter moves in one launch.
The graph equals, bit for bit, the one whose `unshard` has the argument `encoding`. Gradients are
exact, and are those of the rounded parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.dialect import UNSHARD, group_size, is_local_call, rows_per_rank
from zpasses.graph.encoding import DECODE, ENCODE, Encoding
from zpasses.graph.host_copies import FROM_HOST
from zpasses.graph.padding import call_padded
from zpasses.graph.queries import (
    Editor,
    calls,
    derived_values,
    named_arguments,
    nbytes,
    replace_node,
    value_of,
)
from zpasses.graph.tags import Tag, add_tag, tag_of
from zpasses.passes.writers.encode_options import EXACT_BELOW_KIB, EncodeOptions, EncodingPass
from zpasses.pipeline.base_pass import Level

aten = torch.ops.aten


@dataclass(frozen=True)
class GatherParams(EncodingPass):
    """Insert one all-gather per parameter read."""

    name: ClassVar[str] = "gather-params"
    encoded: ClassVar[compat.OpOverload] = UNSHARD
    level: ClassVar[Level] = Level.JOINT

    encode: Literal["int8", "fp8", "mxfp8"] | None = None
    """Gather codes of one byte per value instead of exact values: integers, `float8_e4m3fn`, or
    these with scales that are powers of two. Scalars and vectors, such as norms and biases, and
    small parameters stay exact. See docs/encoding.md."""
    block: int | None = None
    """Most values that share one scale; `none` takes 128, or 32 of mxfp8. Needs `encode`."""
    exact_below_kib: float = EXACT_BELOW_KIB
    """Parameters that are smaller than this in full, in KiB, stay exact."""

    def choose_encoding(self, node: fx.Node, options: EncodeOptions) -> None:
        shard, rows, dtype, _, group, *_, known, device, to_host = arguments = _arguments(node)
        value = value_of(shard)
        encoding = options.chosen(value, rows, dtype or value.dtype, group)
        if encoding is not None and known is None:
            node.args, node.kwargs = (*arguments[:-3], str(encoding), device, bool(to_host)), {}

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of reads lowered."""
        self.choose_encodings(graph)
        self.say_if_exact(graph)
        reads = calls(graph, UNSHARD)
        decoded = {reader for read in reads for reader in read.users if reader.target is DECODE}
        for read in reads:
            self._lower(graph, read)
        # Shards that rest encoded: what is kept for backward are codes.
        for node in derived_values(graph, decoded.__contains__):
            compat.mark_recompute(node)
        return len(reads)

    def _lower(self, graph: fx.Graph, read: fx.Node) -> None:
        shard, rows, dtype, _, group, _, again, encoding, device, _ = _arguments(read)
        tag = tag_of(read)
        params = tag.params if tag else (shard.name,)
        dtype = dtype or value_of(shard).dtype
        gather = _Gather(Editor(graph, before=read), params, self.name, group, again)
        value = value_of(shard)
        alone = value.dim() == 0 or (gather.size == 1 and encoding is None)
        empty = not alone and is_local_call(UNSHARD, value, rows)
        if device is not None and not empty:
            shard = gather.from_host(shard, rows, device)
        if alone:
            full = gather.copy(shard, dtype)
        elif empty:
            shape = [rows, *value.shape[1:]]
            full = gather.edit.call(
                aten.empty.memory_format, shape, dtype=dtype, device=device or value.device
            )
        elif encoding is None:
            full = gather.exact(shard, rows, dtype)
        else:
            full = gather.encoded(shard, rows, dtype, Encoding.parse(encoding))
        add_tag(full, Tag("full", params, origin=self.name))
        replace_node(read, full)


def _arguments(read: fx.Node) -> tuple[Any, ...]:
    """Returns the arguments of an `unshard`, with the defaults of those that it leaves out."""
    given = named_arguments(read, UNSHARD)
    return tuple(given.get(each.name) for each in UNSHARD._schema.arguments)


@dataclass
class _Gather:
    """Inserts the nodes that gather one parameter."""

    edit: Editor
    params: tuple[str, ...]
    origin: str
    group: str
    reshard_group: str | None

    @property
    def size(self) -> int:
        return group_size(self.group)

    def from_host(self, shard: fx.Node, rows: Any, device: torch.device) -> fx.Node:
        value = value_of(shard)
        copied = self.edit.call(FROM_HOST, shard, device)
        self._prepared(copied, self._block_bytes(value, rows, value.dtype))
        return copied

    def _block_bytes(self, value: Any, rows: Any, dtype: torch.dtype) -> int:
        widths = (compat.size_hint(size) for size in value.shape[1:])
        block = rows_per_rank(rows, self.size) if value.dim() else 1
        return block * math.prod(widths) * dtype.itemsize

    def copy(self, shard: fx.Node, dtype: torch.dtype) -> fx.Node:
        value = value_of(shard)
        if shard.target is FROM_HOST and dtype == value.dtype and value.is_contiguous():
            return shard
        strides = {} if value.is_contiguous() else {"memory_format": torch.contiguous_format}
        if dtype != value.dtype:
            return self.edit.call(aten._to_copy.default, shard, dtype=dtype, **strides)
        return self.edit.call(aten.clone.default, shard, **strides)

    def exact(self, shard: fx.Node, rows: Any, dtype: torch.dtype) -> fx.Node:
        value, source = value_of(shard), shard
        block = rows_per_rank(rows, self.size)
        # Ranks may need different steps to prepare the input. The tag on the last step holds the
        # size, because the collective reads that node on every rank.
        whole, padded = 0, value.shape[0] < block
        if dtype != value.dtype:
            source = self.edit.call(aten._to_copy.default, source, dtype=dtype)
            whole = self._block_bytes(value, rows, dtype)
            self._prepared(source, 0 if padded else whole)
        if padded:
            source = call_padded(self.edit.call, source, block - value.shape[0])
            self._prepared(source, whole)
        full = self._gathered(source)
        if block * self.size != rows:
            add_tag(full, Tag("gathered", self.params, origin=self.origin))
            full = self.edit.call(aten.slice.Tensor, full, 0, 0, rows)
        return full

    def encoded(self, shard: fx.Node, rows: Any, dtype: torch.dtype, how: Encoding) -> fx.Node:
        value = value_of(shard)
        count = rows_per_rank(rows, self.size) * math.prod(value.shape[1:])
        record = self.edit.call(ENCODE, shard, count, 1, str(how))
        self._prepared(record, nbytes(value_of(record)))
        records = self._gathered(record, str(how))
        add_tag(records, Tag("gathered", self.params, origin=self.origin))
        shape = [rows, *value.shape[1:]]
        full = self.edit.call(DECODE, records, shape, self.size, dtype, str(how))
        # Memory holds a byte per value until backward, and backward decodes again.
        compat.mark_recompute(full)
        return full

    def _prepared(self, source: fx.Node, block_bytes: int) -> None:
        tag = Tag("gather_input", self.params, origin=self.origin, block_bytes=block_bytes)
        add_tag(source, tag)

    def _gathered(self, source: fx.Node, encoding: str = "") -> fx.Node:
        gather, group = compat.functional.all_gather_into_tensor.default, self.group
        started = self.edit.call(gather, source, self.size, group)
        tag = Tag("gather", self.params, nbytes(value_of(source)), origin=self.origin)
        add_tag(started, replace(tag, reshard_group=self.reshard_group, encoding=encoding))
        return self.edit.call(compat.functional.wait_tensor.default, started)
