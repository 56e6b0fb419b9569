"""Full parameters that `zpasses.shard` has replaced by sharded ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from zpasses import compat
from zpasses.errors import ShardingError

_ATTRIBUTE = "_zpasses_sharded_as"


class _ReplacedParameter(nn.Parameter):
    """A full parameter that is no longer in the model, and gets no gradient."""

    @property
    def grad(self) -> Tensor | None:
        """Raises ShardingError, because it would stay None: gradients of lists that a program kept
        would be clipped, scaled or logged as if there were none.
        """
        found: Tensor | None = _GET_GRAD(self)
        if found is not None or sharded_form(self) is None or compat.is_tracing():
            return found  # zpasses.backend.captured refuses graphs that read one
        if not _is_in_a_module():
            raise ShardingError(
                f"read the gradient of a parameter of shape {list(self.shape)} that is no longer "
                "in the model, because zpasses.shard replaced it by a DTensor. Call "
                "zpasses.shard(model, mesh=...) first, and build optimizers and lists from "
                "model.parameters() after that, as with fully_shard of FSDP2."
            )
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _SET_GRAD(self, value)

    @grad.deleter
    def grad(self) -> None:
        _SET_GRAD(self, None)


_GET_GRAD: Any = getattr(Tensor, "grad").__get__  # noqa: B009
_SET_GRAD: Any = getattr(Tensor, "grad").__set__  # noqa: B009


def _is_in_a_module() -> bool:
    """Whether a module reads it that still holds the parameter, such as one that was tied to the
    sharded model.
    """
    return any(compat.is_called_by(each, depth=2) for each in _READERS)


_READERS = (nn.Module.zero_grad, nn.Module._apply)


def mark_replaced(param: Any, sharded: nn.Parameter) -> None:
    """Remember the sharded parameter that took the place of a full one."""
    setattr(param, _ATTRIBUTE, weakref.ref(sharded))
    if type(param) is nn.Parameter:
        param.__class__ = _ReplacedParameter


def sharded_form(param: Tensor) -> nn.Parameter | None:
    """Return the sharded parameter that replaced this one; None if none did, or it is gone."""
    found: weakref.ref[nn.Parameter] | None = getattr(param, _ATTRIBUTE, None)
    return found() if found is not None else None


_SHARD_FIRST = (
    "Call zpasses.shard(model, mesh=...) first and build the optimizer from model.parameters() "
    "after that, as with fully_shard of FSDP2."
)


def check_current(optimizer: torch.optim.Optimizer, advice: str = _SHARD_FIRST) -> None:
    """Raise ShardingError if an optimizer steps parameters that `shard` has replaced.

    Args:
        advice: what to do, for the error.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gone = [param for param in params if sharded_form(param) is not None]
    if gone:
        raise ShardingError(
            f"{type(optimizer).__name__} was built before zpasses.shard: {len(gone)} of its "
            f"{len(params)} parameters (the first has the shape {list(gone[0].shape)}) are no "
            "longer in the model, because shard replaced them by DTensors, so its steps would "
            f"train nothing. {advice}"
        )
