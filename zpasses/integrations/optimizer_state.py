"""State of sharded models and their optimizers through torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

__all__ = ["load_states", "save_states"]


def save_states(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    with_model: bool,
) -> None:
    """Write the states, each rank its own rows. Call it on every rank.

    Args:
        with_model: write the model, too; a trainer may have written it in another format.
    """
    states = _states(model, optimizers, with_model)
    save(states, storage_writer=FileSystemWriter(os.fspath(folder), overwrite=True))


def load_states(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    with_model: bool,
) -> None:
    """Read what `save_states` wrote, on any number of ranks. Call it on every rank."""
    states = _states(model, optimizers, with_model)
    load(states, checkpoint_id=os.fspath(folder))
    if with_model:
        model.load_state_dict(states["model"])
    for number, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, states[f"optimizer_{number}"])


def _states(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], with_model: bool
) -> dict[str, Any]:
    states: dict[str, Any] = {
        f"optimizer_{number}": get_optimizer_state_dict(model, each)
        for number, each in enumerate(optimizers)
    }
    if with_model:
        states["model"] = model.state_dict()
    return states
