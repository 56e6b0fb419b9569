"""Gradient clipping for models whose parts are sharded over different meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients so that the norm of all of them together is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_`, which refuses DTensors of different meshes. Call it on
    every rank: it communicates over each mesh. Every rank computes the same norm if the plain
    parameters, and parameters that are sharded over a part of the ranks, are equal on all ranks
    that do not share their mesh. Experts that differ between ranks must be DTensors over these
    ranks.

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
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    by_mesh: dict[Any, list[Tensor]] = {}
    for param in given:
        if param.grad is not None:
            mesh = param.grad.device_mesh if isinstance(param.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(param)
    norms = []
    for members in by_mesh.values():
        grads = [param.grad for param in members if param.grad is not None]
        norm = nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(device) for norm in norms]), norm_type
    )
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            "clipped. Pass error_if_nonfinite=False to clip anyway."
        )
    for members in by_mesh.values():
        nn.utils.clip_grads_with_norm_(members, max_norm, total, foreach=foreach)
    return total
