"""Checkpoints of trainers: a folder of torch.distributed.checkpoint (DCP), complete or refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from zpasses.checkpoint.training_state import load_training_state, training_state
from zpasses.errors import ZpassesError
from zpasses.integrations.joint_failures import fail_on_all_ranks, limit_s

__all__ = ["discard_states", "load_states", "save_states"]

METADATA = ".metadata"
"""File of DCP that lists what the others hold. It is written last."""


def discard_states(folder: str | os.PathLike[str], model: nn.Module) -> None:
    """Make earlier states in a folder incomplete, before they are overwritten. Call it on every
    rank.

    Otherwise, the metadata of the earlier states would describe the files of the next ones, if the
    program is killed while it writes these.
    """
    with fail_on_all_ranks(model, "removing an earlier checkpoint"):
        if dist.get_rank() == 0:
            Path(folder, METADATA).unlink(missing_ok=True)


def save_states(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    with_model: bool,
    drop_pending: bool = False,
) -> None:
    """Write the states, each rank its own rows. Call it on every rank.

    Args:
        with_model: write the model, too; a trainer may have written it in another format.
        drop_pending: leave out gradients that are pending in a window, instead of refusing them.
    """
    states = training_state(
        model,
        optimizers,
        weights=with_model,
        drop_pending=drop_pending,
        timeout_s=limit_s(model),
    )
    discard_states(folder, model)
    save(states, storage_writer=FileSystemWriter(os.fspath(folder), overwrite=True))


def load_states(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    with_model: bool,
) -> None:
    """Read what `save_states` wrote, on any number of ranks. Call it on every rank.

    Raises:
        ZpassesError: if the states are incomplete.
    """
    if not Path(folder, METADATA).exists():
        raise ZpassesError(
            f"{folder} is incomplete: it has no {METADATA}, which is written last. A program that "
            "is killed while it saves leaves such a folder. Load an earlier checkpoint."
        )
    load_training_state(folder, model, optimizers, weights=with_model, timeout_s=limit_s(model))
