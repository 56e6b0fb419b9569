"""Reductions that torch cannot do, or does wrongly, on the rows of a rank.

- Of tensors of which a rank has no element, such as a norm of a bias with one element. A maximum of
  nothing is an error. So on that rank an operator raises before the communication that the other
  ranks wait for. Such operators get the full tensor instead, on all ranks.
- Losses that take a mean, such as `mse_loss`. torch divides by the number of elements of a rank, so
  their gradients are too large by the number of ranks, and if the rows do not divide, the average
  of the ranks is not the mean (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from zpasses import compat
from zpasses.runtime.inplace import is_sharded

aten = torch.ops.aten
NEED_ELEMENTS = frozenset(
    getattr(packet, name)
    for packet in (
        *(aten.linalg_vector_norm, aten.norm, aten._foreach_norm, aten._foreach_max),
        *(aten.max, aten.min, aten.amax, aten.amin, aten.aminmax, aten.argmax, aten.argmin),
    )
    for name in packet.overloads()
)
"""Operators that raise, at least with some arguments, for a tensor without elements."""

OVER_DIMS = frozenset((aten.sum.dim_IntList, aten.mean.dim))
"""Reductions whose second argument is a list of dimensions."""

_LOSSES = {
    getattr(aten, name).default: at
    for name, at in (
        *(("mse_loss", 2), ("smooth_l1_loss", 2), ("huber_loss", 2), ("soft_margin_loss", 2)),
        *(("binary_cross_entropy", 3), ("binary_cross_entropy_with_logits", 4)),
    )
}
"""Losses -> the position of the argument `reduction`."""
_LOSS_GRADIENTS = {
    getattr(aten, f"{name}_backward").default: at
    for name, at in (
        *(("mse_loss", 3), ("smooth_l1_loss", 3), ("huber_loss", 3), ("soft_margin_loss", 3)),
        ("binary_cross_entropy", 4),
    )
}
_NONE, _MEAN, _SUM = 0, 1, 2


def takes_mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `mean_loss` has to run an operator."""
    at = _LOSSES.get(func) or _LOSS_GRADIENTS.get(func)
    return at is not None and (args[at] if at < len(args) else kwargs.get("reduction", 1)) == _MEAN


def mean_loss(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
) -> Any:
    """Run a loss that takes the mean over all elements, or its backward.

    Args:
        call: runs an operator on DTensors by torch's own rules.
    """
    given, named = list(args), dict(kwargs)
    backward = func in _LOSS_GRADIENTS
    at = _LOSS_GRADIENTS[func] if backward else _LOSSES[func]
    reduction = _SUM if backward else _NONE
    if at < len(given):
        given[at] = reduction
    else:
        named["reduction"] = reduction
    if backward:
        # As in torch, the mean is taken of the products: quotients of a half-precision gradient
        # would be too small for its dtype.
        return call(func, *given, **named) / given[1].numel()
    return call(aten.mean.default, call(func, *given, **named))


def with_all_dims(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments of a reduction with the dimensions that an empty list stands for."""
    if len(args) > 1 and args[1] == []:
        return args[0], list(range(args[0].dim())), *args[2:]
    return args


def has_empty_part(value: object) -> bool:
    """Whether a value is a sharded DTensor with elements, of which a rank has none. Equal on all
    ranks.
    """
    return is_sharded(value) and compat.has_empty_part(compat.spec_of(value))


def with_full_inputs(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with full tensors in place of those of which a rank has no element."""
    return tuple(list(map(_full, arg)) if isinstance(arg, list) else _full(arg) for arg in args)


def _full(value: Any) -> Any:
    if not has_empty_part(value):
        return value
    made: DTensor = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return made
