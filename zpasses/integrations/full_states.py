"""The full state of a prepared model on the main process, for code that writes it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zpasses.checkpoint.full import full_state_dict
from zpasses.checkpoint.model_tensors import agree, gather_full, sharding_groups, writing_rank
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S

__all__ = ["CheckpointState", "full_state"]


class CheckpointState(dict[str, Any]):
    """A state dict for a checkpoint, which keeps the names of the model.

    Without it, `save_pretrained` may rename and split tensors into an older format of the model.
    """


def full_state(model: nn.Module, *, every_rank: bool = False) -> dict[str, Any]:
    """Gather the state of a model, on the host. Call it on every rank.

    Only one rank gets it, unless `every_rank` is set. Of a model of PEFT, it holds what
    `save_pretrained` writes: the adapters, without the frozen base.

    Raises:
        AgreementError: on every rank, if another rank does not call it in time.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return full_state_dict(model, cpu_offload=True, rank0_only=not every_rank)
    from peft import get_peft_model_state_dict  # only for its models

    adapters: Any = model.peft_config
    sharded = model.state_dict()
    written = {
        id(value)
        for adapter in adapters
        for value in get_peft_model_state_dict(
            model, state_dict=sharded, adapter_name=adapter
        ).values()
    }
    chosen = {name: value for name, value in sharded.items() if id(value) in written}
    agree(sharding_groups(model), "save_pretrained", DEFAULT_TIMEOUT_S, described=[*chosen])
    destination = None if every_rank else writing_rank(model)
    full: dict[str, Any] = {}
    for name, value in chosen.items():
        if isinstance(value, DTensor):
            gathered = gather_full(value, destination)
            if gathered is not None:
                full[name] = gathered.cpu()
        elif destination in (None, dist.get_rank()):
            full[name] = value
    return full
