"""The state of a training run, by name: parameters, buffers, and what optimizers hold.

torch.distributed.checkpoint (DCP) writes and reads it, each rank its own rows. A checkpoint holds

    model.<name>                            a parameter, a buffer, or other state of a module
    optimizer_<number>.state.<name>.<key>   a value that the optimizer holds for a parameter
    optimizer_<number>.groups.<name>        a parameter group, under the name of its first parameter
    random_states.<rank>                    the random generators of a rank

DCP decides for each plain tensor by itself which rank writes it, so a checkpoint would mix the
buffers of several ranks. Here, what is no DTensor is in the state of one rank only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zpasses import compat
from zpasses.checkpoint.model_tensors import (
    agreed,
    check_no_step_under_way,
    encoding_advice,
    plain_name,
    sharding_groups,
    state_names,
    writing_rank,
)
from zpasses.checkpoint.optimizer_states import (
    OptimizerTarget,
    is_rank,
    optimizer_state,
    saved_paths,
)
from zpasses.checkpoint.random_states import packed_random_states, restore_random_states
from zpasses.errors import ShardingError, ZpassesError
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S
from zpasses.runtime.early_steps import forget_steps
from zpasses.runtime.edits import counted_as_one_edit
from zpasses.runtime.residuals import drop_residuals
from zpasses.runtime.windows import GRAD_STATE_ATTRIBUTE, drop_accumulated
from zpasses.sharding.module import check_is_module

RANDOM_STATES = "random_states"


def training_state(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    weights: bool = True,
    drop_pending: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Any]:
    """Return the state of a training run, for `torch.distributed.checkpoint.save` and `async_save`.
    Call it on every rank.

    DTensors are in the state of every rank, and so are its own random generators, if there are
    optimizers. Everything else, such as buffers and learning rates, is in that of one rank only,
    the first one of the mesh. Tensors share the memory of the run. Add what else the program needs
    to the dict, under keys of your own.

    Args:
        model: a sharded module, a module that contains sharded ones, or `torch.compile` of one.
        optimizers: optimizers over parameters of the model.
        weights: whether the model is in the state, too.
        drop_pending: leave the pending gradients of a window out of the state, instead of raising
            an error. The first step of a run that resumes lacks them.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        ShardingError: on every rank, if gradients of a window are pending, if parameters have
            stepped in backward and the optimizer's step is still to come, for a parameter that is
            not in the model, or for state of an optimizer that is neither whole nor laid out as its
            parameter is.
        AgreementError: on every rank, if another rank does not call it in time, or has another
            model or other state.
    """
    check_is_module("training_state", model)
    writer = writing_rank(model)
    state: dict[str, Any] = {}
    held: list[Any] = []
    groups = sharding_groups(model)
    with agreed(groups, "zpasses.training_state", timeout_s, described=held, model=model):
        check_no_step_under_way(model)
        if not drop_pending:
            _check_nothing_pending(model)
        names = _names(model)
        listed = _listed(optimizers, "training_state")
        for number, optimizer in enumerate(listed):
            state[f"optimizer_{number}"] = optimizer_state(optimizer, names, writer, held)
        if listed:
            state[RANDOM_STATES] = {str(compat.global_rank()): packed_random_states()}
        if weights:
            shards = model.state_dict()
            held.append(list(state_names(model)))
            state["model"] = {
                # DCP would take a dict apart, which a module may have as its extra state.
                plain_name(name): value if isinstance(value, Tensor) else (value,)
                for name, value in shards.items()
                if isinstance(value, DTensor) or is_rank(writer)
            }
    return state


def load_training_state(
    source: str | os.PathLike[str] | StorageReader,
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    weights: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> None:
    """Read a `training_state` that DCP wrote, on any number of ranks. Call it on every rank.

    The optimizers then hold the state that they held, by the names of the parameters: a parameter
    without state in the checkpoint has none afterwards. The settings of a parameter group are those
    in the checkpoint; settings that only the optimizer has stay. A group whose parameters were in
    no optimizer stays as it is. The optimizers may have other groups than they had.

    If as many ranks read optimizers as wrote them, the default random generators of each rank are
    set to what they were: of torch, the current accelerator, Python and NumPy. Otherwise they stay.
    Residuals of error feedback are dropped, and so are pending gradients and the steps that
    parameters have made in backward. `param.grad` stays as it is.

    Args:
        source: the folder, or a reader of DCP.
        model: the model, built and sharded as for training.
        optimizers: the optimizers, in the order in which they were saved. None of them reads the
            model only.
        weights: whether to read the model, too.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        ShardingError: on every rank, before anything is changed, if the checkpoint lacks a
            parameter or buffer of the model, if it has state of a parameter that is in no
            optimizer, or if one group has the parameters of groups with different settings.
            After changes: if a rank cannot take what was read, such as for lack of memory.
        AgreementError: on every rank, if another rank does not call it in time.
    """
    if not isinstance(source, (str, os.PathLike, StorageReader)):
        raise ZpassesError(
            f"load_training_state: got {type(source).__name__} as its first argument; expected the "
            "folder of a checkpoint, or a reader of DCP: load_training_state(source, model, "
            "optimizers)."
        )
    check_is_module("load_training_state", model)
    occasion, ranks = "zpasses.load_training_state", sharding_groups(model)
    reader = source if isinstance(source, StorageReader) else FileSystemReader(source)
    targets: list[OptimizerTarget] = []
    settings: dict[str, Any] = {}
    with agreed(ranks, occasion, timeout_s):
        listed = _listed(optimizers, "load_training_state")
        metadata = reader.read_metadata()
        _check_number(metadata, listed)
        names = _names(model)
        for number, optimizer in enumerate(listed):
            targets.append(OptimizerTarget(optimizer, names, metadata, _key(metadata, number)))
            settings.update(targets[-1].first_read())
    generators = _random_states_key(metadata)
    if listed:
        if generators is not None:
            settings[generators] = None
        load(settings, storage_reader=reader)
    tensors: dict[str, Any] = {}
    parts: dict[str, str] = {}
    with agreed(ranks, occasion, timeout_s):
        for target in targets:
            tensors.update(target.second_read(settings))
        shards = model.state_dict() if weights else {}
        for name, value in shards.items():
            parts[name] = f"model.{plain_name(name)}"
            tensors[parts[name]] = value if isinstance(value, Tensor) else None
        _check_found(parts, metadata)
    load(tensors, storage_reader=reader)
    with agreed(ranks, f"the end of {occasion}", timeout_s):
        try:
            with counted_as_one_edit(model.parameters(), "load_training_state"):
                if weights:
                    values = {name: _unwrapped(tensors[key]) for name, key in parts.items()}
                    model.load_state_dict(values)
                for target in targets:
                    target.apply({**settings, **tensors})
            for drop in (drop_residuals, drop_accumulated, forget_steps):
                drop(model.parameters())
        except Exception as error:
            raise ShardingError(
                f"{type(error).__name__}: {error}. The model and its optimizers are incomplete; "
                "load them again."
            ) from error
        if listed and generators is not None:
            restore_random_states(settings[generators])


# --- the state of a rank --------------------------------------------------------------------------
def _listed(optimizers: Optimizer | Sequence[Optimizer], function: str) -> list[Optimizer]:
    listed: Any = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    for each in listed:
        if not isinstance(each, Optimizer):
            raise ZpassesError(
                f"{function}: got {type(each).__name__} as an optimizer; expected a "
                "torch.optim.Optimizer, or a sequence of them."
            )
    return list(listed)


def _names(model: nn.Module) -> dict[Tensor, str]:
    """Parameter -> its name; the first one if it is tied."""
    found: dict[Tensor, str] = {}
    for name, param in model.named_parameters():
        found.setdefault(param, plain_name(name))
    return found


def _check_nothing_pending(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        entry = getattr(param, GRAD_STATE_ATTRIBUTE, None)
        if entry is not None and entry.pending:
            raise ShardingError(
                f"the gradient of {plain_name(name)} is pending in a gradient window, and a "
                "checkpoint would lose it. Save after the optimizer's step, or call "
                "zpasses.training_state with drop_pending=True: the first step of a run that "
                "resumes then lacks what this step has summed so far."
            )


# --- what a checkpoint holds ----------------------------------------------------------------------
def _key(metadata: Metadata, number: int) -> str:
    """Return the key of an optimizer; "optimizer" for a state of torch's `get_state_dict`."""
    key = f"optimizer_{number}"
    return "optimizer" if number == 0 and key not in _tops(metadata) else key


def _tops(metadata: Metadata) -> set[str]:
    return {str(path[0]) for path in saved_paths(metadata).values()}


def _random_states_key(metadata: Metadata) -> str | None:
    """Return the key of this rank's generators; None if the checkpoint has none for this rank, or
    is of another number of ranks.
    """
    saved = [key for key, path in saved_paths(metadata).items() if path[0] == RANDOM_STATES]
    key = f"{RANDOM_STATES}.{compat.global_rank()}"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return key if len(saved) == ranks and key in saved else None


def _check_number(metadata: Metadata, optimizers: Sequence[Optimizer]) -> None:
    found = sum(
        key.removeprefix("optimizer_").isdigit() or key == "optimizer" for key in _tops(metadata)
    )
    if optimizers and found != len(optimizers):
        raise ShardingError(
            f"got {len(optimizers)} optimizers, and the checkpoint holds {found}. Pass those that "
            "were saved, in the same order; or none, to read the model only."
        )


def _check_found(keys: Mapping[str, str], metadata: Metadata) -> None:
    missing = [name for name, key in keys.items() if key not in metadata.state_dict_metadata]
    if missing:
        raise ShardingError(
            f"the checkpoint has no {missing[0]} of the model, nor {len(missing) - 1} others of "
            f"its {len(keys)} parameters and buffers. "
            f"{_encoding_advice(keys, metadata) or 'Build the model as it was saved.'}"
        )


def _encoding_advice(keys: Mapping[str, str], metadata: Metadata) -> str | None:
    held = metadata.state_dict_metadata
    return encoding_advice((key for key in keys.values() if key not in held), held)


def _unwrapped(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value
