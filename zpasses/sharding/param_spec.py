"""How one parameter of a module is sharded."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def groups(self) -> tuple[str | None, ...]:
        """The process groups that `unshard` takes, as few as it needs."""
        sharding = self.layout.sharding_groups
        if self.layout.reshard_group is None:
            return sharding
        return (*sharding, *(() if len(sharding) > 1 else (None,)), self.layout.reshard_group)


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
