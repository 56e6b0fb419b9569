"""Buffers of a prepared model, equal on all ranks where a trainer validates or saves."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zpasses.checkpoint.model_tensors import (
    agree,
    copy_of_first_rank,
    largest_mesh,
    sharding_groups,
    state_names,
)
from zpasses.integrations.joint_failures import limit_s

__all__ = ["broadcast_buffers"]


def broadcast_buffers(model: nn.Module, occasion: str) -> None:
    """Give every rank the buffers of the first one that a checkpoint holds. Call it on every rank.

    So what is validated is what is saved, and a run that resumes goes on as the one that saved. DDP
    broadcasts them in each forward.

    Args:
        occasion: what the ranks are about to do, for the error.

    Raises:
        AgreementError: if another rank does not come in time, or has other buffers.
    """
    own = {id(buffer) for buffer in model.buffers()}
    buffers = {
        name: value
        for name, value in state_names(model).items()
        if id(value) in own and not isinstance(value, DTensor)
    }
    if not buffers:
        return
    described = [[name, list(each.shape), str(each.dtype)] for name, each in buffers.items()]
    mesh = largest_mesh(model)
    agree(
        sharding_groups(model), occasion, limit_s(model), described=described, what="their buffers"
    )
    with torch.no_grad():
        for buffer in buffers.values():
            buffer.copy_(copy_of_first_rank(buffer, mesh))
