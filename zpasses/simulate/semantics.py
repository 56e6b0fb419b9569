"""Reference implementations of collectives, on the real tensors of all ranks of a group at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zpasses.graph.dialect import REDUCE_GRAD, UNSHARD, padded_grad, rows_per_rank
from zpasses.graph.encoding import Encoding, decode, decode_mean, encode
from zpasses.graph.padding import padded
from zpasses.graph.row_exchange import marked

Semantics = Callable[[Sequence[Tensor], Sequence[Mapping[str, Any]]], Sequence[Tensor]]
"""(one input per rank, each rank's call arguments by name) -> one output per rank. No output
aliases an input or another output.
"""


def _all_gather(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    _check_group_size(inputs, calls)
    return [torch.cat(list(inputs)) for _ in inputs]


def _reduce_scatter(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    _check_group_size(inputs, calls)
    size, rows = len(inputs), inputs[0].shape[0]
    if rows % size:
        raise ValueError(f"{rows} rows cannot be scattered over {size} ranks evenly")
    return (
        [part.clone() for part in reduce(inputs, str(calls[0]["reduce_op"])).chunk(size)]
        if rows
        else [each.clone() for each in inputs]
    )


def _all_reduce(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    total = reduce(inputs, str(calls[0]["reduce_op"]))
    return [total.clone() for _ in inputs]


def _broadcast(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    source = calls[0]["src"]
    if not 0 <= source < len(inputs):
        raise ValueError(f"source {source} is not a rank of a group of {len(inputs)}")
    return [inputs[source].clone() for _ in inputs]


def _all_to_all(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Rank r's output is part r of every rank's input, in rank order."""
    sent = [call["input_split_sizes"] for call in calls]
    received = [call["output_split_sizes"] for call in calls]
    for source, _ in enumerate(calls):
        for target, _ in enumerate(calls):
            if sent[source][target] != received[target][source]:
                raise ValueError(
                    f"rank {source} of the group sends {sent[source][target]} rows to rank "
                    f"{target}, which expects "
                    f"{received[target][source]}"
                )
    parts = [tensor.split(list(sizes)) for tensor, sizes in zip(inputs, sent, strict=True)]
    return [torch.cat([part[target] for part in parts]) for target, _ in enumerate(calls)]


# --- the dialect ----------------------------------------------------------------------------------
def _unshard(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    rows, dtype = calls[0]["rows"], calls[0]["param_dtype"]
    block, (shard, *_) = rows_per_rank(rows, len(inputs)), inputs
    if encoding := calls[0].get("encoding"):
        how, count = Encoding.parse(encoding), block * math.prod(shard.shape[1:])
        records = torch.cat([encode(each, count, 1, how) for each in inputs])
        shape = [rows, *shard.shape[1:]]
        full = decode(records, shape, len(inputs), dtype or shard.dtype, how)
    else:
        full = torch.cat([padded(each, block, dtype or each.dtype) for each in inputs])[:rows]
    return [full.clone() for _ in inputs]


def _reduce_grad(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    rows, dtype, reduce_dtype = (calls[0][name] for name in ("rows", "dtype", "reduce_dtype"))
    if encoding := calls[0].get("encoding"):
        how, size, (grad, *_) = Encoding.parse(encoding), len(inputs), inputs
        count = rows_per_rank(rows, size) * math.prod(grad.shape[1:])
        records = torch.stack([encode(each, count, size, how).view(size, -1) for each in inputs], 1)
        return [
            decode_mean(
                arrived.reshape(-1), [call["shard_rows"], *grad.shape[1:]], count, size, dtype, how
            )
            for arrived, call in zip(records, calls, strict=True)
        ]
    total = reduce([grad.to(reduce_dtype or grad.dtype) for grad in inputs], "avg")
    if total.dim() == 0:
        return [total.to(dtype, copy=True) for _ in inputs]
    blocks = padded_grad(total, rows, len(inputs), dtype).chunk(len(inputs))
    return [each[: call["shard_rows"]].clone() for each, call in zip(blocks, calls, strict=True)]


def _average_grad(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    dtype = calls[0]["dtype"]
    if calls[0].get("shard_rows") is not None:
        exact = {"rows": inputs[0].shape[0], "reduce_dtype": None}
        return _reduce_grad(inputs, [{**call, **exact} for call in calls])
    if encoding := calls[0].get("encoding"):
        how, size, (grad, *_) = Encoding.parse(encoding), len(inputs), inputs
        count = -(-grad.numel() // size)
        parts = torch.stack([encode(each, count, size, how).view(size, -1) for each in inputs], 1)
        means = [
            decode_mean(arrived.reshape(-1), [count], count, size, torch.float32, how)
            for arrived in parts
        ]
        records = torch.cat([encode(mean, count, 1, how) for mean in means])
        mean = decode(records, [grad.numel()], size, dtype, how)
        return [mean.view(grad.shape).clone() for _ in inputs]
    total = reduce(inputs, "avg")
    return [total.to(dtype, copy=True) for _ in inputs]


def _all_to_all_rows(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    full, *_ = _unshard(inputs, calls)
    return [
        padded(full[named], call["capacity"], full.dtype)
        for call, named in zip(calls, _marked_rows(calls), strict=True)
    ]


def _all_to_all_grad_rows(
    inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]
) -> list[Tensor]:
    grads = []
    for each, named in zip(inputs, _marked_rows(calls), strict=True):
        grads.append(each.new_zeros((len(named), *each.shape[1:])))
        grads[-1][named] = each[: int(named.sum())]
    return _reduce_grad(grads, calls)


def _marked_rows(calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Which rows of the table each rank needs, as bool[rows]."""
    size, rows = len(calls), calls[0]["rows"]
    for rank, call in enumerate(calls):
        sent = torch.cat([each["marks"].chunk(size)[rank] for each in calls])
        if not torch.equal(call["asked"], sent):
            raise ValueError(f"rank {rank} of the group was asked for other rows than it knows")
    return [marked(call["marks"], rows, size).reshape(-1)[:rows] for call in calls]


def _unshard_held(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    _check_rows([shard.shape[0] for shard in inputs], calls[0]["rows"])
    return _unshard(inputs, calls)


def _reduce_grad_held(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    if inputs[0].dim():
        _check_rows([call["shard_rows"] for call in calls], calls[0]["rows"])
    return _reduce_grad(inputs, calls)


PADDED_DIALECT: Mapping[Any, Semantics] = {UNSHARD: _unshard, REDUCE_GRAD: _reduce_grad}
"""The dialect where a rank may hold fewer rows than its block has, which are then padded."""


def reduce(inputs: Sequence[Tensor], reduce_op: str) -> Tensor:
    """Combine in rank order; "avg" divides after the sum."""
    if reduce_op == "avg":
        total, size = reduce(inputs, "sum"), len(inputs)
        return (
            total / size
            if total.is_floating_point() or total.is_complex()
            else total.div(size, rounding_mode="trunc")
        )
    combine = _REDUCTIONS.get(reduce_op)
    if combine is None:
        raise ValueError(
            f"reduce op {reduce_op!r} is not simulated; known: avg, {', '.join(_REDUCTIONS)}"
        )
    return functools.reduce(combine, inputs).clone()


def _check_group_size(inputs: Sequence[Tensor], calls: Sequence[Mapping[str, Any]]) -> None:
    for rank, call in enumerate(calls):
        if call["group_size"] != len(inputs):
            raise ValueError(
                f"rank {rank} passes group_size={call['group_size']}, but the group has "
                f"{len(inputs)} ranks"
            )


def _check_rows(held: Sequence[int], rows: int) -> None:
    size, block = len(held), rows_per_rank(rows, len(held))
    for rank, given in enumerate(held):
        expected = max(0, min(block, rows - rank * block))
        if given != expected:
            raise ValueError(
                f"rank {rank} of the group of {size} holds {given} of {rows} rows; expected "
                f"{expected}"
            )


_REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

SEMANTICS: Mapping[str, Semantics] = {
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "sdma_all_gather": _all_gather,
    "sdma_reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_to_all_single": _all_to_all,
    "unshard": _unshard_held,
    "reduce_grad": _reduce_grad_held,
    "average_grad": _average_grad,
    "all_to_all_rows": _all_to_all_rows,
    "all_to_all_grad_rows": _all_to_all_grad_rows,
}
"""Reference implementations by op name, without the suffixes `_coalesced`, `_out` and `_`, which
only change where outputs go.
"""
