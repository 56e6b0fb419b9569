"""Exchanges of rows: the implementations of `zpasses.graph.row_exchange`, on any backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zpasses import compat
from zpasses.graph.row_exchange import marked, no_rows


class _Exchange(compat.Work):  # type: ignore[misc]  # Work is Any to mypy
    """An all-to-all of rows, and what is left to do when they have arrived."""

    def __init__(self, work: Any, sent: Tensor, finish: Callable[[], object] | None) -> None:
        super().__init__()
        self._work, self._sent, self._finish = work, sent, finish

    def wait(self, timeout: Any = None) -> bool:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            if self._finish is not None:
                self._finish()
            self._sent = self._finish = None  # type: ignore[assignment]
        return True


def _start(
    sent: Tensor,
    counts: tuple[list[int], list[int]],
    arrived: Tensor,
    output: Tensor,
    group: Any,
    finish: Callable[[], object] | None = None,
) -> Tensor:
    """Starts to exchange rows, and makes `wait_tensor` of the output await them.

    Args:
        sent: rows in the order of the ranks to which they go.
        counts: how many go to each rank, and how many come from it.
        arrived: takes the rows, in the order of the ranks that send them.
        output: the result.
        finish: completes the output after the rows have arrived.
    """
    # As bytes, because backends do not move all dtypes.
    bytes_in, bytes_out = _bytes(sent), _bytes(arrived)
    work = dist.all_to_all_single(
        bytes_out, bytes_in, counts[1], counts[0], group=group, async_op=True
    )
    compat.register_work(output, _Exchange(work, sent, finish))
    return output


def _bytes(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)


def _all_to_all_rows(
    shard: Tensor,
    marks: Tensor,
    asked: Tensor,
    capacity: int,
    rows: int,
    param_dtype: torch.dtype | None,
    group_name: str,
) -> Tensor:
    """Fetches the marked rows of a table from their owners.

    Args:
        shard: this rank's rows, [shard_rows, ...].
        marks: the rows that this rank needs, of all owners (`distinct_rows`).
        asked: the marks of this rank's block, of all ranks that need its rows.
        capacity: rows of the result, at least as many as are marked.
        rows: rows of the table.
        param_dtype: dtype of the communication and of the result; None keeps the shard's.
        group_name: process group over which the table is sharded.

    Returns:
        The marked rows in order, then zeros, [capacity, ...].

    Raises:
        IndexError: on all ranks, if an index of one of them is no row.
    """
    group = compat.process_group(group_name)
    needed, given = (marked(each, rows, group.size()) for each in (marks, asked))
    to, from_, wrong = _read(given.sum(1), needed.sum(1), no_rows(asked, group.size()))
    if any(wrong):
        ranks = compat.group_ranks(group_name)
        found = (f"{row} on rank {rank}" for rank, row in zip(ranks, wrong, strict=True) if row)
        raise IndexError(
            f"index out of range in self: an embedding of {rows} rows, [{rows}, "
            f"{', '.join(map(str, shard.shape[1:]))}], is asked for row {', '.join(found)}"
        )
    sent = shard.index_select(0, given.nonzero()[:, 1]).to(param_dtype or shard.dtype)
    output = sent.new_empty((capacity, *shard.shape[1:]))
    count = sum(from_)
    output[count:].zero_()
    return _start(sent.contiguous(), (to, from_), output[:count], output, group)


def _all_to_all_grad_rows(
    grads: Tensor,
    marks: Tensor,
    asked: Tensor,
    rows: int,
    shard_rows: int,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    group_name: str,
) -> Tensor:
    """Sends the gradients of marked rows to their owners, who average them.

    Args:
        grads: gradients of the marked rows in order, then of unused rows, [capacity, ...].
        marks, asked, rows, group_name: as for `all_to_all_rows`.
        shard_rows: rows that this rank holds.
        dtype: dtype of the result, the shard's.
        reduce_dtype: dtype of the communication and of the sum; None keeps the gradient's.

    Returns:
        The gradient of the shard, [shard_rows, ...], averaged over the ranks.
    """
    group = compat.process_group(group_name)
    size, between = group.size(), reduce_dtype or grads.dtype
    needed, given = (marked(each, rows, size) for each in (marks, asked))
    to, from_ = _read(needed.sum(1), given.sum(1))
    sent = grads[: sum(to)].to(between).contiguous()
    arrived = sent.new_empty((sum(from_), *grads.shape[1:]))
    output = grads.new_empty((shard_rows, *grads.shape[1:]), dtype=dtype)
    places = given.nonzero()[:, 1].split(from_)

    def add() -> None:
        # The sum with -0.0 is exact, and so are sums with the 0.0 of ranks without a row: they
        # change only the sign of -0.0.
        total = arrived.new_full(output.shape, -0.0)
        for at, part in zip(places, arrived.split(from_), strict=True):
            total.index_add_(0, at, part)
        by_all = given.all(0)[:shard_rows].view(-1, *[1] * (total.dim() - 1))
        output.copy_(torch.where(by_all, total, total + 0.0).div_(size))

    return _start(sent, (to, from_), arrived, output, group, add)


def _read(*numbers: Tensor) -> list[list[int]]:
    """Returns numbers per rank of the group, for which the host waits."""
    found: list[list[int]] = torch.stack(numbers).tolist()
    return found


_library = torch.library.Library("zpasses", "FRAGMENT")
_library.impl("all_to_all_rows", _all_to_all_rows, "CompositeExplicitAutograd")
_library.impl("all_to_all_grad_rows", _all_to_all_grad_rows, "CompositeExplicitAutograd")
