"""What trainers do on all ranks together: wait, fail, broadcast buffers, and write checkpoints.

A checkpoint is a folder of torch.distributed.checkpoint (DCP), complete or refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from zpasses.checkpoint.model_tensors import (
    agree,
    agreed,
    copy_of_first_rank,
    largest_mesh,
    sharding_groups,
    state_names,
)
from zpasses.checkpoint.training_state import load_training_state, training_state
from zpasses.errors import ZpassesError
from zpasses.integrations.preparation import preparation_of
from zpasses.pipeline.options import Options
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S

METADATA = ".metadata"
"""File of DCP that lists what the others hold. It is written last."""


def limit_s(model: nn.Module) -> float:
    """Return how long the ranks of a prepared model wait for each other."""
    done = preparation_of(model)
    return DEFAULT_TIMEOUT_S if done is None else Options.parse(done.options).agreement_timeout_s


def fail_on_all_ranks(model: nn.Module, occasion: str) -> AbstractContextManager[None]:
    """If the block fails on a rank, such as by a full disk, raise on every rank at its end. Call it
    on every rank.

    The block must not communicate after what may fail on one rank only. Ranks wait for each other
    up to the option `agreement_timeout_s` with which the model was prepared.

    Args:
        model: the model over whose ranks the program runs.
        occasion: what the block does, for the error.

    Raises:
        ShardingError: on every rank, if the block failed on one.
        AgreementError: if another rank does not come in time.
    """
    return agreed(sharding_groups(model), f"the end of {occasion}", limit_s(model))


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
            buffer.copy_(copy_of_first_rank(buffer, mesh, limit_s(model)))


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
