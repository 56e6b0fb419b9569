"""How one parameter of a module is sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.runtime.layout import ParamLayout


@dataclass(frozen=True)
class ParamShardSpec:
    """How one parameter of a module is sharded and read."""

    name: str
    layout: ParamLayout
    param_dtype: torch.dtype | None
    """Gather and compute in this dtype; None keeps the shard's dtype."""
    reduce_dtype: torch.dtype | None
    """Reduce gradients in this dtype; None keeps the gradient's dtype."""
    device: torch.device | None = None
    """Where the shard, which rests on the host, comes for each read; None if it rests there."""
    is_trained: bool = False
    """Whether a parameter on the host may be trained: its gradients go to the host."""

    @property
    def places(self) -> tuple[Any, ...]:
        """The process groups and the device that `unshard` takes, as few as it needs."""
        layout = self.layout
        if self.device is None and layout.reshard_group is None:
            return layout.sharding_groups
        group, replicate_group, *_ = (*layout.sharding_groups, None)
        groups = group, replicate_group, layout.reshard_group
        if self.device is None:
            return groups
        return (*groups, None, self.device, *[True] * self.is_trained)


def trained_on_host(name: str) -> str:
    """Returns the text of an error."""
    return (
        f"parameter {name!r} rests on the host and is trained (requires_grad), but it was frozen "
        "when it went there. Freeze it again, or let its gradients go to the host, too: "
        "zpasses.offload_parameters(model, trained=True)."
    )


def shard_tensor(param: Tensor, layout: ParamLayout) -> DTensor:
    """Shard a full parameter, as a DTensor with memory of its own.

    Nothing is communicated. The shard is copied, so that the full tensor can be freed.

    Args:
        param: the full parameter, equal on every rank; or a DTensor on the layout's inner mesh. A
            0-dimensional one is replicated.
    """
    return layout.wrap(layout.owned(own_part(param, layout)), param.shape)


def own_part(param: Tensor, layout: ParamLayout) -> Tensor:
    """Return this rank's shard of a parameter as a detached view: the whole of a 0-dimensional one.

    Args:
        param: as for `shard_tensor`.
    """
    full = param.detach()
    if not isinstance(full, DTensor):
        return layout.local_part(full)
    piece = compat.local_of(full)
    return piece.narrow(layout.dim, *layout.row_range(full.shape)) if full.dim() else piece
