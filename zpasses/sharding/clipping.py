"""Gradient clipping for models whose parts are sharded over different meshes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.runtime.early_steps import check_is_there
from zpasses.runtime.run_checks import limited_over


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients so that the norm of all of them together is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_`, which refuses DTensors of different meshes, and DTensors
    beside plain tensors. Call it on every rank: it communicates over each mesh. Every rank computes
    the same norm if the plain parameters, and parameters that are sharded over a part of the ranks,
    are equal on all ranks that do not share their mesh. Experts that differ between ranks must be
    DTensors over these ranks.

    Args:
        parameters: parameters; those without a gradient are skipped.
        max_norm: the largest norm.
        norm_type: order of the norm; may be `float("inf")`.
        error_if_nonfinite: raise if the norm is infinite or not a number.
        foreach: as in torch.

    Returns:
        The norm before clipping: 0-dimensional, a plain tensor.

    Raises:
        RuntimeError: if `error_if_nonfinite` and the norm is not finite.
        AgreementError: if another rank does not come within the `agreement_timeout_s` of the graphs
            that have run.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    groups: dict[Any, list[Tensor]] = {}
    for param in given:
        if (grad := param.grad) is not None:
            check_is_there(grad)
            key = None
            if isinstance(grad, DTensor):  # some may rest on the host
                key = grad.device_mesh, grad.placements, compat.local_of(grad).device
            groups.setdefault(key, []).append(param)
    if not groups:
        return torch.tensor(0.0)
    order = float(norm_type)
    grads = [[each.grad for each in group if each.grad is not None] for group in groups.values()]
    norms = []
    for each in grads:
        mesh = each[0].device_mesh if isinstance(each[0], DTensor) else None
        with limited_over(mesh, "clip_grad_norm_"):
            norms.append(_norms(each, order))
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.cat([each.to(device) for each in norms]), order)
    dtypes = {grad.dtype for each in grads for grad in each}
    total = total.to(functools.reduce(torch.promote_types, dtypes))
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            "clipped. Pass error_if_nonfinite=False to clip anyway."
        )
    for group in groups.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach=foreach)
    return total


def _norms(grads: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of each gradient, in at least float32, the same on all ranks of their mesh.

    Args:
        grads: plain tensors, or DTensors of one mesh and placements.
    """
    first = grads[0]
    if not isinstance(first, DTensor):
        return _local_norms(grads, order)
    if any(placement.is_partial() for placement in first.placements):
        return _local_norms([each.full_tensor() for each in grads if _is_dtensor(each)], order)
    norms = _local_norms([compat.local_of(each) for each in grads if _is_dtensor(each)], order)
    norms = norms.to(first.device_mesh.device_type)  # where its groups communicate
    finite = math.isfinite(order) and order != 0
    powers = norms**order if finite else norms
    how = dist.ReduceOp.SUM if math.isfinite(order) else _EXTREMES[order > 0]
    for dim, placement in enumerate(first.placements):
        if not placement.is_replicate():
            dist.all_reduce(powers, how, first.device_mesh.get_group(dim))
    return powers ** (1 / order) if finite else powers


_EXTREMES = {True: dist.ReduceOp.MAX, False: dist.ReduceOp.MIN}


def _is_dtensor(value: Tensor) -> TypeGuard[DTensor]:
    return isinstance(value, DTensor)


def _local_norms(tensors: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of each tensor; of one without elements, what changes no other norm."""
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in tensors), torch.float32)
    norms = [each.new_full((), math.inf if order < 0 else 0.0, dtype=dtype) for each in tensors]
    filled = [at for at, each in enumerate(tensors) if each.numel()]
    found = compat.foreach_norm([tensors[at] for at in filled], order, dtype)
    for at, norm in zip(filled, found, strict=True):
        norms[at] = norm
    return torch.stack(norms)
