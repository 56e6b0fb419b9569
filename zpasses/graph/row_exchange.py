"""Operators that exchange rows of a table instead of the table.

    zpasses::distinct_rows(indices, rows, parts) -> [marks, places of indices[0], ...]
    zpasses::all_to_all_rows(shard, marks, asked, capacity, rows, param_dtype, group)
        -> [capacity, ...]
    zpasses::all_to_all_grad_rows(grads, marks, asked, rows, shard_rows, dtype, reduce_dtype, group)
        -> gradient of the shard, [shard_rows, ...]

Each rank marks the rows that its indices name, with one bit per row of the table, and sends each
owner the bits of its block. So the sizes of all exchanged marks are known before they are. An index
that is no row follows the bits, so that all ranks raise its error, before any row is sent. The rows
of a rank form a table of their own, in the order in which they lie in the whole table, with unused
rows at its end. `places` are the indices of the tokens into it.

Both exchanges are started, and awaited by `wait_tensor`. How many rows each rank sends follows from
the marks, which the host reads when an exchange starts. `zpasses.runtime.exchanged_rows` implements
them. Summands of a gradient are added in the order of ranks, with zeros for those of ranks without
the row, as a reduction of whole tables over gloo does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zpasses import compat
from zpasses.graph.dialect import rows_per_rank
from zpasses.graph.padding import padded_last

_library = torch.library.Library("zpasses", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides)
for _schema in (
    "distinct_rows(Tensor[] indices, SymInt rows, SymInt parts) -> Tensor[]",
    "all_to_all_rows(Tensor shard, Tensor marks, Tensor asked, SymInt capacity, SymInt rows, "
    "ScalarType? param_dtype, str group_name) -> Tensor",
    "all_to_all_grad_rows(Tensor grads, Tensor marks, Tensor asked, SymInt rows, SymInt "
    "shard_rows, ScalarType dtype, ScalarType? reduce_dtype, str group_name) -> Tensor",
):
    _library.define(_schema, tags=_TAGS)

DISTINCT_ROWS: compat.OpOverload = torch.ops.zpasses.distinct_rows.default
ALL_TO_ALL_ROWS: compat.OpOverload = torch.ops.zpasses.all_to_all_rows.default
ALL_TO_ALL_GRAD_ROWS: compat.OpOverload = torch.ops.zpasses.all_to_all_grad_rows.default
ROW_EXCHANGES = frozenset({ALL_TO_ALL_ROWS, ALL_TO_ALL_GRAD_ROWS})


_INDEX_BYTES = 8


def mark_bytes(rows: Any, parts: int) -> Any:
    """Returns the bytes of the marks of one part: one bit per row of a block, and an index."""
    return _bit_bytes(rows, parts) + _INDEX_BYTES


def _bit_bytes(rows: Any, parts: int) -> Any:
    return -(-rows_per_rank(rows, parts) // 8)


def expected_distinct(rows: int, indices: int) -> float:
    """Returns how many rows of a table random indices name on average, if all are as likely. Tokens
    of text name fewer.
    """
    if rows < 2:
        return float(min(rows, indices))
    return -rows * math.expm1(indices * math.log1p(-1.0 / rows))


def _distinct_rows(indices: Sequence[Tensor], rows: int, parts: int) -> list[Tensor]:
    """Marks the rows that indices name, and numbers them.

    Args:
        indices: of any shape and integer dtype.
        rows: rows of the table.
        parts: number of blocks of rows.

    Returns:
        Marks, uint8[parts * mark_bytes(rows, parts)]: for each part one bit per row, and an index
        that is no row (`no_rows`); then for each tensor of indices one of its shape, int64: how
        many marked rows come before the one that it names.
    """
    named = torch.cat([each.reshape(-1) for each in indices]).long()
    wrong = named.masked_fill((named >= 0) & (named < rows), 0)
    wrong = torch.cat([wrong, wrong.new_zeros(1)])
    worst = wrong[wrong.abs().argmax()].view(1).view(torch.uint8)
    is_named = named.new_zeros((rows, 1), dtype=torch.uint8)
    is_named[named.clamp(0, rows - 1)] = 1
    numbers = is_named.cumsum(0, dtype=torch.int64) - 1
    places = [
        torch.embedding(numbers, each.long().clamp(0, rows - 1)).squeeze(-1) for each in indices
    ]
    block = rows_per_rank(rows, parts)
    blocks = padded_last(is_named.view(-1), parts * block).view(parts, block)
    bits = padded_last(blocks, _bit_bytes(rows, parts) * 8).view(-1, 8)
    marks = (bits << _places_of_bits(bits)).sum(1, dtype=torch.uint8).view(parts, -1)
    return [torch.cat([marks, worst.expand(parts, -1)], 1).view(-1), *places]


def _distinct_rows_fake(indices: Sequence[Tensor], rows: Any, parts: Any) -> list[Tensor]:
    first = indices[0]
    marks = first.new_empty(parts * mark_bytes(rows, parts), dtype=torch.uint8)
    return [marks, *(each.new_empty(each.shape, dtype=torch.int64) for each in indices)]


def marked(marks: Tensor, rows: int, parts: int) -> Tensor:
    """Returns marks as bool[parts, rows per part]."""
    bits = marks.view(parts, -1, 1)[:, :-_INDEX_BYTES] >> _places_of_bits(marks) & 1
    return bits.view(parts, -1)[:, : rows_per_rank(rows, parts)].bool()


def no_rows(marks: Tensor, parts: int) -> Tensor:
    """Returns an index of each part's rank that is no row of the table, int64[parts]; 0 if all
    are.
    """
    return marks.view(parts, -1)[:, -_INDEX_BYTES:].contiguous().view(torch.int64).view(-1)


def _places_of_bits(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _all_to_all_rows_fake(
    shard: Tensor, marks: Tensor, asked: Tensor, capacity: Any, rows: Any, dtype: Any, *rest: object
) -> Tensor:
    return shard.new_empty((capacity, *shard.shape[1:]), dtype=dtype or shard.dtype)


def _all_to_all_grad_rows_fake(
    grads: Tensor, marks: Tensor, asked: Tensor, rows: Any, shard_rows: Any, dtype: Any, *rest: Any
) -> Tensor:
    return grads.new_empty((shard_rows, *grads.shape[1:]), dtype=dtype)


_library.impl("distinct_rows", _distinct_rows, "CompositeExplicitAutograd")
for _name, _fake in (
    ("distinct_rows", _distinct_rows_fake),
    ("all_to_all_rows", _all_to_all_rows_fake),
    ("all_to_all_grad_rows", _all_to_all_grad_rows_fake),
):
    torch.library.register_fake(f"zpasses::{_name}", _fake, lib=_library)
for _op in ROW_EXCHANGES:
    compat.declare_collective(_op)
