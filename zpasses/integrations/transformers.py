"""Train with Hugging Face's Trainer and what derives from it, such as SFTTrainer of trl.

    args = TrainingArguments(...)  # creates the process group
    prepare(model)  # shards the model and compiles it in place
    trainer = Trainer(model, args, train_dataset=...)

Everything else is written as for other models: see docs/trainers.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zpasses.integrations.preparation import prepare_model
from zpasses.integrations.pretrained import adopt
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
    install()
    adopt(model)
    return model
