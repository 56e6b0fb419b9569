"""Gradients of full values of sharded tensors (`full_tensor`)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zpasses import compat
from zpasses.graph.dialect import AVERAGE_GRAD


class _AveragesGrad(torch.autograd.Function):
    """Returns its input. Its gradient is the average of those of the ranks of a mesh."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.groups = [
            compat.group_name(mesh.get_group(dim)) for dim in range(mesh.ndim) if mesh.size(dim) > 1
        ]
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for group in ctx.groups:
            grad = AVERAGE_GRAD(grad.contiguous(), grad.dtype, group)
        return grad, None


def with_averaged_grad(full: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns a full value that all ranks of a mesh hold, whose gradient is their average.

    DTensor takes each rank's part of that rank's own gradient, which is right only if all ranks
    compute the same from the value. The losses of ranks differ, as their batches do.
    """
    if not (torch.is_grad_enabled() and full.requires_grad):
        return full
    return cast(Tensor, _AveragesGrad.apply(full, mesh))  # type: ignore[no-untyped-call]
