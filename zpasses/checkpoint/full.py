"""`zpasses.full_state_dict`: the state dict of the unsharded model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpasses.checkpoint.model_tensors import (
    agreed,
    check_no_step_under_way,
    copy_of_first_rank,
    gather_full,
    largest_mesh,
    sharding_groups,
    state_names,
    writing_rank,
)
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S

_OCCASION = "zpasses.full_state_dict"


def full_state_dict(
    model: nn.Module,
    *,
    cpu_offload: bool = False,
    rank0_only: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Any]:
    """Return the state dict of the unsharded model. Call it on every rank.

    Tensors are gathered one after the other. They are copies, detached, and in the dtype of the
    shards. Tied names share one tensor. Names have no `_orig_mod.`, so the result loads into the
    plain model, and `load_state_dict` of the sharded one takes it too. Buffers are those of the
    first rank, as in the other kinds of checkpoint.

    Args:
        model: a sharded module, a module that contains sharded ones, or `torch.compile` of one.
        cpu_offload: move each tensor to the CPU before the next is gathered.
        rank0_only: return the tensors only on the first rank of the mesh, and an empty dict on the
            others.
        timeout_s: seconds to wait for the other ranks, before the first gather and in each.

    Raises:
        ShardingError: on every rank, if parameters have stepped in backward, and `optimizer.step()`
            has not been called.
        AgreementError: on every rank, if another rank does not call it in time, passes another
            model, or has edited it otherwise.
    """
    values: dict[str, Any] = {}
    described: list[Any] = []
    groups = sharding_groups(model)
    with agreed(groups, _OCCASION, timeout_s, described=described, model=model, what="the model"):
        check_no_step_under_way(model)
        values |= state_names(model)
        described += [
            [name, str(value.dtype), list(value.shape)] if isinstance(value, Tensor) else [name]
            for name, value in values.items()
        ]
    destination = writing_rank(model) if rank0_only else None
    keeps = destination is None or not dist.is_initialized() or dist.get_rank() == destination
    state: dict[str, Any] = {}
    gathered: dict[int, Tensor | None] = {}
    mesh = largest_mesh(model)
    buffers = {id(buffer) for buffer in model.buffers()}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            if keeps:
                state[name] = value
            continue
        if id(value) not in gathered:
            if destination is None and id(value) in buffers and not isinstance(value, DTensor):
                full: Tensor | None = copy_of_first_rank(value, mesh, timeout_s)
            else:
                full = gather_full(value, destination, timeout_s)
            gathered[id(value)] = full.cpu() if cpu_offload and full is not None else full
        if keeps:
            state[name] = gathered[id(value)]
    return state
