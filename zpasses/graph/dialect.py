"""The dialect: operators that state that a parameter is gathered and its gradient reduced.

    zpasses::unshard(shard, rows, param_dtype, reduce_dtype, group, replicate_group, reshard_group,
                     encoding, device, grad_to_host) -> full parameter
    zpasses::reduce_grad(grad, rows, shard_rows, dtype, reduce_dtype, group, encoding)
        -> shard's gradient
    zpasses::average_grad(grad, dtype, group, encoding, shard_rows)
        -> shard's gradient, averaged over replicas; with `shard_rows`, between nodes
    zpasses::to_host(grad) -> shard's gradient on the host

Passes lower them to collectives. Their eager implementations are the reference: every lowered graph
must compute the same values. A parameter of `rows` rows is split into blocks of ceil(rows / world
size) rows, one block per rank; the last ranks may hold fewer rows, or none. A 0-dimensional
parameter is not split: every rank holds a full copy, and only its gradient communicates.

With hybrid sharding, `group` is one replica of the model, and the ranks of `replicate_group` hold
equal shards in different replicas. `unshard` gathers within its replica and only hands the second
group on: its backward is `reduce_grad` within the replica, then `average_grad` over replicas.

A pass may write one `reduce_grad` as two hops (`zpasses.passes.writers.two_hops`): `reduce_grad`
within a node, of rows in another order, then `average_grad` between nodes, which also scatters.

The gradient of a shard that rests on the host goes there at last. `to_host` does not communicate,
so it is not one of `DIALECT`. `zpasses.host.host_memory` runs it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.graph.encoding import Encoding, decode, decode_mean, encode
from zpasses.graph.padding import padded
from zpasses.graph.tags import Reduction

_library = torch.library.Library("zpasses", "DEF")
_library.define(
    "unshard(Tensor shard, SymInt rows, ScalarType? param_dtype, ScalarType? reduce_dtype, str "
    "group_name, str? replicate_group=None, str? reshard_group=None, str? encoding=None, Device? "
    "device=None, bool grad_to_host=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "reduce_grad(Tensor grad, SymInt rows, SymInt shard_rows, ScalarType dtype, ScalarType? "
    "reduce_dtype, str group_name, str? encoding=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "average_grad(Tensor grad, ScalarType dtype, str group_name, str? encoding=None, SymInt? "
    "shard_rows=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "to_host(Tensor grad) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)

UNSHARD: compat.OpOverload = torch.ops.zpasses.unshard.default
REDUCE_GRAD: compat.OpOverload = torch.ops.zpasses.reduce_grad.default
AVERAGE_GRAD: compat.OpOverload = torch.ops.zpasses.average_grad.default
TO_HOST: compat.OpOverload = torch.ops.zpasses.to_host.default
DIALECT: frozenset[compat.OpOverload] = frozenset({UNSHARD, REDUCE_GRAD, AVERAGE_GRAD})


@dataclass
class _Collectives:
    """What the eager operators start. `wait_tensor` awaits the results."""

    all_gather: Callable[[Tensor, int, str], Tensor]
    """Takes this rank's block, the number of ranks and the group."""
    reduce_scatter: Callable[[Tensor, str, int, str], Tensor]
    """Takes the blocks of all ranks, "avg", the number of ranks and the group."""
    guard: Callable[[str, Tensor, str], AbstractContextManager[None]]
    """Context of a collective until it has ended. Takes the name of the collective, its input and
    the group."""


_collectives = _Collectives(
    compat.functional.all_gather_into_tensor,
    compat.functional.reduce_scatter_tensor,
    lambda name, value, group: contextlib.nullcontext(),
)


def set_eager_collectives(
    all_gather: Callable[[Tensor, int, str], Tensor],
    reduce_scatter: Callable[[Tensor, str, int, str], Tensor],
) -> None:
    """Sets what eager gathers and reductions run, in place of torch's functional collectives.

    `zpasses.runtime.gloo` has the others.
    """
    _collectives.all_gather, _collectives.reduce_scatter = all_gather, reduce_scatter


def set_eager_guard(guard: Callable[[str, Tensor, str], AbstractContextManager[None]]) -> None:
    """Sets the context in which eager collectives run: `zpasses.runtime.run_checks` compares them
    between ranks.

    Args:
        guard: takes the name of the collective, its input and the process group.
    """
    _collectives.guard = guard


def _averaged(value: Tensor, group_name: str) -> Tensor:
    """Returns the average of a tensor over the ranks of a group."""
    with _collectives.guard("all_reduce", value, group_name):
        total: Tensor = compat.functional.wait_tensor(
            compat.functional.all_reduce(value, "avg", group_name)
        )
    return total


def group_size(group_name: str) -> int:
    """Returns the number of ranks in a process group."""
    return compat.process_group(group_name).size()


def rows_per_rank(rows: int, size: int) -> int:
    """Returns the number of rows in one rank's block, padding included."""
    return -(-rows // size)


def padded_grad(grad: Tensor, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Returns the blocks of all ranks of a gradient in `dtype`, [size * ceil(rows / size), ...].

    Raises:
        ValueError: if the gradient has another number of rows.
    """
    if grad.shape[0] != rows:
        raise ValueError(f"reduce_grad: got a gradient of {grad.shape[0]} rows; expected {rows}.")
    return padded(grad, rows_per_rank(rows, size) * size, dtype)


def is_local_call(target: object, source: Tensor, rows: int | None = None) -> bool:
    """Whether a call of the dialect has nothing to communicate: its value has no element, or it
    gathers a parameter that every rank holds in full.

    Args:
        target: the operator. Returns False for operators of others.
        source: the first argument.
        rows: the argument of that name, which `unshard` has.
    """
    if target is UNSHARD:
        return source.dim() == 0 or rows == 0 or 0 in source.shape[1:]
    return target in DIALECT and source.numel() == 0


def _unshard(
    shard: Tensor,
    rows: int,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    group_name: str,
    replicate_group: str | None = None,
    reshard_group: str | None = None,
    encoding: str | None = None,
    device: torch.device | None = None,
    grad_to_host: bool = False,
) -> Tensor:
    """Gathers a parameter.

    Args:
        shard: this rank's rows, [shard_rows, ...]; 0-dimensional for a parameter that every rank
            holds in full.
        rows: rows of the full parameter.
        param_dtype: dtype of the communication and of the result; None keeps the shard's.
        reduce_dtype: dtype in which backward reduces the gradient. Forward ignores it.
        group_name: process group over which the parameter is sharded.
        replicate_group: process group of the ranks that hold equal shards, over which backward
            averages the gradient; None if there is no other such rank. Forward ignores it.
        reshard_group: process group of consecutive ranks of the group, from which the pass
            `reshard-after-forward` gathers the parameter again; None for the whole group. Only the
            pass reads it.
        encoding: each rank's block is gathered as `zpasses.graph.encoding` encodes it; None gathers
            exact values. Passes set it. The gradient is that of the decoded parameter.
        device: where a shard that rests on the host comes first; None if it is there already.
        grad_to_host: whether backward copies the gradient of the shard to the host. Forward ignores
            it.

    Returns:
        The full parameter, [rows, ...], in `param_dtype`; never an alias of `shard`.
    """
    dtype = param_dtype or shard.dtype
    if device is not None:
        shard = shard.to(device, non_blocking=True)
    if is_local_call(UNSHARD, shard, rows):
        if shard.dim() == 0:
            return shard.to(dtype, copy=True)
        return shard.new_empty((rows, *shard.shape[1:]), dtype=dtype)
    size = group_size(group_name)
    if encoding is None:
        block = padded(shard, rows_per_rank(rows, size), dtype)
    else:
        how = Encoding.parse(encoding)
        block = encode(shard, rows_per_rank(rows, size) * math.prod(shard.shape[1:]), 1, how)
    with _collectives.guard("all_gather", block, group_name):
        started = _collectives.all_gather(block, size, group_name)
        full: Tensor = compat.functional.wait_tensor(started)
    return (
        full[:rows]
        if encoding is None
        else decode(full, [rows, *shard.shape[1:]], size, dtype, how)
    )


def _unshard_fake(
    shard: Tensor,
    rows: int,
    param_dtype: torch.dtype | None,
    *rest: object,
    device: torch.device | None = None,
    **others: object,
) -> Tensor:
    shape = (rows, *shard.shape[1:]) if shard.dim() else ()
    device = rest[5] if len(rest) > 5 else device  # type: ignore[assignment]
    return shard.new_empty(shape, dtype=param_dtype or shard.dtype, device=device)


def _reduce_grad(
    grad: Tensor,
    rows: int,
    shard_rows: int,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
    group_name: str,
    encoding: str | None = None,
) -> Tensor:
    """Averages a gradient over the group and returns this rank's rows.

    Args:
        grad: gradient of the full parameter, [rows, ...], in the compute dtype.
        rows: rows of the full parameter.
        shard_rows: rows that this rank holds.
        dtype: dtype of the result, the shard's.
        reduce_dtype: dtype of the communication and of the sum; None keeps the gradient's.
        group_name: process group to average over.
        encoding: each rank sends its blocks as `zpasses.graph.encoding` encodes them, and receivers
            sum what they decode in fp32, in the order of ranks; None sends exact values. Passes set
            it.

    Returns:
        The gradient of the shard, [shard_rows, ...], in `dtype`.
    """
    if is_local_call(REDUCE_GRAD, grad):
        return grad.new_empty((shard_rows, *grad.shape[1:]), dtype=dtype)
    between = reduce_dtype or grad.dtype
    if grad.dim() == 0:
        return _averaged(grad.to(between), group_name).to(dtype, copy=True)
    size = group_size(group_name)
    if encoding is not None:
        return _reduce_encoded(grad, rows, shard_rows, dtype, group_name, Encoding.parse(encoding))
    blocks = padded_grad(grad, rows, size, between)
    with _collectives.guard("reduce_scatter", blocks, group_name):
        mine: Tensor = compat.functional.wait_tensor(
            _collectives.reduce_scatter(blocks, "avg", size, group_name)
        )
    return mine[:shard_rows].to(dtype, copy=True)


def _reduce_encoded(
    grad: Tensor, rows: int, shard_rows: int, dtype: torch.dtype, group_name: str, how: Encoding
) -> Tensor:
    size, shape = group_size(group_name), [shard_rows, *grad.shape[1:]]
    count = rows_per_rank(rows, size) * math.prod(shape[1:])
    arrived = _exchanged(encode(grad, count, size, how), group_name)
    return decode_mean(arrived, shape, count, size, dtype, how)


def _exchanged(records: Tensor, group_name: str) -> Tensor:
    """Sends each rank its part of the records, and returns what arrives from each."""
    size = group_size(group_name)
    splits = [records.numel() // size] * size
    with _collectives.guard("all_to_all", records, group_name):
        arrived: Tensor = compat.functional.wait_tensor(
            compat.functional.all_to_all_single(records, splits, splits, group_name)
        )
    return arrived


def _reduce_grad_fake(
    grad: Tensor, rows: int, shard_rows: int, dtype: torch.dtype, *rest: object
) -> Tensor:
    shape = (shard_rows, *grad.shape[1:]) if grad.dim() else ()
    return grad.new_empty(shape, dtype=dtype)


def _average_grad(
    grad: Tensor,
    dtype: torch.dtype,
    group_name: str,
    encoding: str | None = None,
    shard_rows: int | None = None,
) -> Tensor:
    """Averages the gradient of a shard over the replicas.

    Args:
        grad: gradient of the shard, [shard_rows, ...], averaged within this replica. Its dtype is
            that of the communication and of the sum. With `shard_rows`, the gradients of the
            shards of all ranks of the group, [ranks * block rows, ...], averaged within this node.
        dtype: dtype of the result, the shard's.
        group_name: process group of the ranks that hold equal shards.
        encoding: each rank averages a part of the values, of which the others send it codes, and
            sends codes of the result; None sends exact values. Passes set it.
        shard_rows: each rank averages and keeps its own block, of which it holds so many rows; None
            averages equal shards. Passes set it, together with `encoding`.

    Returns:
        The gradient of the shard, [shard_rows, ...], in `dtype`; never an alias of `grad`.
    """
    if shard_rows is not None:
        if encoding is None:
            raise ValueError(
                "average_grad: got shard_rows without an encoding. Use reduce_grad, which is exact."
            )
        return _reduce_grad(grad, grad.shape[0], shard_rows, dtype, None, group_name, encoding)
    if is_local_call(AVERAGE_GRAD, grad):
        return grad.to(dtype, copy=True)
    if encoding is not None:
        return _average_encoded(grad, dtype, group_name, Encoding.parse(encoding))
    return _averaged(grad, group_name).to(dtype, copy=True)


def _average_encoded(grad: Tensor, dtype: torch.dtype, group_name: str, how: Encoding) -> Tensor:
    size = group_size(group_name)
    count = -(-grad.numel() // size)
    arrived = _exchanged(encode(grad, count, size, how), group_name)
    mean = decode_mean(arrived, [count], count, size, torch.float32, how)
    mine = encode(mean, count, 1, how)
    with _collectives.guard("all_gather", mine, group_name):
        records: Tensor = compat.functional.wait_tensor(
            _collectives.all_gather(mine, size, group_name)
        )
    return decode(records, [grad.numel()], size, dtype, how).view(grad.shape)


def _average_grad_fake(
    grad: Tensor,
    dtype: torch.dtype,
    group_name: str,
    encoding: str | None = None,
    shard_rows: int | None = None,
) -> Tensor:
    rows = grad.shape[:1] if shard_rows is None else (shard_rows,)
    return grad.new_empty((*rows, *grad.shape[1:]), dtype=dtype)


def _unshard_setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, rows, _, reduce_dtype, group_name, replicate_group, *_, to_host = inputs
    state: Any = ctx
    state.shard_rows = shard.shape[0] if shard.dim() else 0
    state.how = Reduction(rows, shard.dtype, reduce_dtype, group_name, replicate_group, to_host)


GradHook = Callable[[Tensor, Reduction], Tensor | None]
"""Called with the full gradient and how it is to be reduced.

Returns the gradient to reduce now, or None to skip the reduction.
"""


def _reduce_immediately(grad: Tensor, reduction: Reduction) -> Tensor | None:
    return grad


_grad_hook: GradHook = _reduce_immediately


def set_grad_hook(hook: GradHook) -> None:
    """Sets the hook that the backward of every eager `unshard` calls with the full gradient.

    `zpasses.runtime.windows` sets it on import, to defer reductions.
    """
    global _grad_hook
    _grad_hook = hook


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if grad.layout is not torch.strided:
        raise ShardingError(
            f"the gradient of a sharded parameter of shape {list(grad.shape)} has the layout "
            f"{grad.layout}, as of F.embedding(..., sparse=True). Expected torch.strided, because "
            "sparse gradients cannot be reduced to shards. Set sparse=False, or pass the parameter "
            "as ignored_params."
        )
    value = _grad_hook(grad, ctx.how)
    if value is not None:
        for operator, arguments in reduction_calls(ctx.how, ctx.shard_rows, grad.dtype):
            value = operator(value, *arguments)
    return (value, *[None] * 9)


def reduction_calls(
    how: Reduction, shard_rows: int, dtype: torch.dtype
) -> list[tuple[compat.OpOverload, tuple[Any, ...]]]:
    """Returns the operators that reduce a gradient, and their arguments after the first.

    The first argument is the gradient, or the result of the operator before.

    Args:
        how: rows, dtypes and process groups.
        shard_rows: rows that this rank holds.
        dtype: of the gradient.
    """
    found: list[tuple[compat.OpOverload, tuple[Any, ...]]] = []
    if how.group is not None:
        # Replicas communicate in the same dtype.
        after = how.dtype if how.replicate_group is None else how.reduce_dtype or dtype
        found.append((REDUCE_GRAD, (how.rows, shard_rows, after, how.reduce_dtype, how.group)))
    if how.replicate_group is not None:
        found.append((AVERAGE_GRAD, (how.dtype, how.replicate_group)))
    if how.to_host:
        found.append((TO_HOST, ()))
    return found


def _reduce_grad_setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, rows, _, _, reduce_dtype, group_name, _ = inputs
    state: Any = ctx
    state.call = (rows, grad.dtype, reduce_dtype, group_name)


def _reduce_grad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # The loss is the mean of the ranks' losses. Each rank contributes 1/N of an averaged value, so
    # its gradient is 1/N of the value's gradient.
    rows, dtype, reduce_dtype, group_name = ctx.call
    full = torch.ops.zpasses.unshard(grad, rows, dtype, reduce_dtype, group_name)
    return (full / group_size(group_name), *[None] * 6)


def _average_grad_setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, _, group_name, *_ = inputs
    state: Any = ctx
    state.call = (grad.dtype, group_name)


def _average_grad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Every replica uses the average in its own loss, so each gradient is the average of theirs.
    dtype, group_name = ctx.call
    return (torch.ops.zpasses.average_grad(grad, dtype, group_name), *[None] * 4)


def _to_host_setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
    state: Any = ctx
    state.device = inputs[0].device


def _to_host_backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad.to(ctx.device)


torch.library.register_fake(
    "zpasses::to_host",
    lambda grad: torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device="cpu"),
    lib=_library,
)
torch.library.register_autograd(
    "zpasses::to_host", _to_host_backward, setup_context=_to_host_setup_context, lib=_library
)


def _unshard_in_transform(*args: Any, **kwargs: Any) -> Tensor:
    with compat.outside_transforms():
        full: Tensor = UNSHARD(*args, **kwargs)
        return full


_library.impl("unshard", _unshard_in_transform, "FuncTorchDynamicLayerFrontMode")

for _name, _impl, _fake, _setup_context, _backward in (
    ("unshard", _unshard, _unshard_fake, _unshard_setup_context, _unshard_backward),
    (
        "reduce_grad",
        _reduce_grad,
        _reduce_grad_fake,
        _reduce_grad_setup_context,
        _reduce_grad_backward,
    ),
    (
        "average_grad",
        _average_grad,
        _average_grad_fake,
        _average_grad_setup_context,
        _average_grad_backward,
    ),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zpasses::{_name}", _fake, lib=_library)
    torch.library.register_autograd(
        f"zpasses::{_name}", _backward, setup_context=_setup_context, lib=_library
    )
