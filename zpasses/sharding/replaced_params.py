"""Full parameters that `zpasses.shard` has replaced by sharded ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from zpasses.errors import ShardingError

__all__ = ["check_current", "mark_replaced", "sharded_form"]

_ATTRIBUTE = "_zpasses_sharded_as"


def mark_replaced(param: Any, sharded: nn.Parameter) -> None:
    """Remember the sharded parameter that took the place of a full one."""
    setattr(param, _ATTRIBUTE, weakref.ref(sharded))


def sharded_form(param: Tensor) -> nn.Parameter | None:
    """Return the sharded parameter that replaced this one; None if none did, or it is gone."""
    found: weakref.ref[nn.Parameter] | None = getattr(param, _ATTRIBUTE, None)
    return found() if found is not None else None


def check_current(optimizer: torch.optim.Optimizer) -> None:
    """Raise ShardingError if an optimizer steps parameters that `shard` has replaced."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gone = [param for param in params if sharded_form(param) is not None]
    if gone:
        raise ShardingError(
            f"{type(optimizer).__name__} was built before zpasses.shard: {len(gone)} of its "
            f"{len(params)} parameters (the first has the shape {list(gone[0].shape)}) are no "
            "longer in the model, because shard replaced them by DTensors, so its steps would "
            "train nothing. Call zpasses.shard(model, mesh=...) first and build the optimizer from "
            "model.parameters() after that, as with fully_shard of FSDP2."
        )
