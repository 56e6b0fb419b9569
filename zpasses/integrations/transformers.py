"""Train with Hugging Face's Trainer and what derives from it, such as SFTTrainer of trl.

    args = TrainingArguments(...)  # creates the process group
    prepare(model)  # shards the model and compiles it in place
    trainer = Trainer(model, args, train_dataset=...)

Everything else is written as for other models: see docs/trainers.md.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zpasses.checkpoint.model_tensors import sharding_groups
from zpasses.integrations.failures import fail_on_all_ranks
from zpasses.integrations.full_states import (
    AdapterStates,
    CheckpointState,
    adapter_states,
    full_state,
    is_adapted,
    takes_state_dict,
    unsharded,
)
from zpasses.integrations.preparation import prepare_model, uncompiled
from zpasses.integrations.trainer_class import install, last_checkpoint

__all__ = ["last_checkpoint", "prepare"]

M = TypeVar("M", bound=nn.Module)


def prepare(
    model: M,
    *,
    mesh: DeviceMesh | None = None,
    options: Mapping[str, Any] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    pack_mb: float | None = None,
) -> M:
    """Shard `model` and compile it in place, ready for `Trainer(model, ...)`. Returns `model`.

    Call it on every rank, after `TrainingArguments(...)`, which creates the process group, and
    before `Trainer(...)`. The Trainer then reduces gradients once per optimizer step, writes its
    checkpoints together with the other ranks, and resumes them on any number of ranks.

    The first call wraps `Trainer.__init__`. A Trainer that gets a prepared model becomes an
    instance of a subclass, `zpasses.integrations.trainer_class.ShardingTrainer`. Other Trainers are
    as before.

    Two methods of the model change: `save_pretrained` gathers the full weights, and `generate` runs
    without compiled code and keeps ranks in step. Call both on every rank.

    Args:
        model: a plain model, a `PreTrainedModel` or a `PeftModel`.
        mesh: one-dimensional; None takes all ranks.
        options: options of the backend, such as {"zero_stage": 2}; None is stage 3.
        param_dtype: gather and compute in this dtype, such as torch.bfloat16. The shards and the
            optimizer keep their dtype. `bf16=True` of TrainingArguments is autocast instead: it
            gathers fp32 and casts inside the graph. Both together gather bf16 and run under
            autocast.
        reduce_dtype: reduce gradients in this dtype.
        ignored_params: parameters to leave unsharded. Their gradients are not reduced.
        pack_mb: see `zpasses.shard`. None takes 64 if the model is on the host and the mesh on
            accelerators, so that each rank moves its own shards only.

    Raises:
        OptionError: for wrong options of the backend.
        ShardingError: for a model that cannot be sharded, or without a process group.
    """
    prepare_model(
        model,
        mesh,
        options,
        param_dtype,
        reduce_dtype,
        ignored_params,
        pack_mb,
        caller="zpasses.integrations.transformers.prepare",
    )
    install(adopt)
    adopt(model)
    return model


def adopt(model: nn.Module) -> None:
    """Replace the methods of a prepared model that need all ranks."""
    module: Any
    for module in model.modules():
        if hasattr(module, "generate") and hasattr(module, "config"):
            # `generate` and Seq2SeqTrainer ask for it: ranks go on until all have finished.
            module._is_fsdp_managed_module = True
            if "generate" not in vars(module):
                module.generate = uncompiled(module.generate)
        if hasattr(module, "save_pretrained") and "save_pretrained" not in vars(module):
            module.save_pretrained = _gathering(module, module.save_pretrained)


def _gathering(model: nn.Module, original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)
    keeps_names = "save_original_format" in signature.parameters
    takes_state = takes_state_dict(original)

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        if not sharding_groups(model):  # inside of `unsharded`, for a module that contains it
            original(*args, **kwargs)
            return
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        values = dict(given.arguments)
        values.update(values.pop("kwargs", {}))
        state = values.pop("state_dict", None)
        if state is not None:  # gathered by the caller
            _write(original, values, state, keeps_names)
            return
        if is_adapted(model):
            embeddings = values.get("save_embedding_layers", "auto")
            adapters = values.get("selected_adapters")
            state = adapter_states(model, adapters, save_embedding_layers=embeddings)
        else:
            state = full_state(model)
        with fail_on_all_ranks(model, "save_pretrained"):
            if state and takes_state:
                _write(original, values, state, keeps_names=False)
            elif state:
                with unsharded(model, state):
                    original(**values)

    return save_pretrained


def _write(
    original: Callable[..., None], values: dict[str, Any], state: dict[str, Any], keeps_names: bool
) -> None:
    if isinstance(state, AdapterStates):
        with state.written():
            original(**values)
        return
    if isinstance(state, CheckpointState) and keeps_names:
        values["save_original_format"] = False
    original(**values, state_dict=state)
