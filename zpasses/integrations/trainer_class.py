"""The Trainer of prepared models. Everything that depends on the version of transformers is here.

Used from transformers 5.0 to 5.23: the methods of Trainer that `ShardingTrainer` overrides, and the
attributes `accelerator`, `args`, `model`, `optimizer` and `lr_scheduler`.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from zpasses.checkpoint.model_tensors import sharding_groups
from zpasses.checkpoint.safetensors_reader import load_safetensors
from zpasses.errors import OptionError, ZpassesError
from zpasses.integrations.accelerate import shard_with
from zpasses.integrations.full_states import (
    AdapterStates,
    CheckpointState,
    full_state,
    takes_state_dict,
    unsharded,
)
from zpasses.integrations.joint_states import (
    broadcast_buffers,
    fail_on_all_ranks,
    limit_s,
    load_states,
    save_states,
)
from zpasses.integrations.preparation import finish_preparation, preparation_of, prepared
from zpasses.integrations.pretrained import adopt
from zpasses.ranks.vote import store_barrier

OPTIMIZER_FOLDER = "optimizer"
SCHEDULER_FILE = "scheduler.pt"
STATE_FILE = "trainer_state.json"


def install() -> None:
    """Wrap `Trainer.__init__`, once, so that a Trainer of a prepared model becomes a
    `ShardingTrainer`.
    """
    original = Trainer.__init__
    if hasattr(original, "_zpasses_wrapped"):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        model: Any = given.get("model")
        if not isinstance(self, ShardingTrainer) and preparation_of(model) is not None:
            _check_arguments(given.get("args"))
            if getattr(given.get("args"), "load_best_model_at_end", False):
                _check_prompts(model, "load_best_model_at_end")
            finish_preparation(model)
            adopt(model)
            kind = type(self)
            self.__class__ = type(
                kind.__name__, (ShardingTrainer, kind), {"__module__": kind.__module__}
            )
        original(self, *args, **kwargs)

    __init__._zpasses_wrapped = True  # type: ignore[attr-defined]
    Trainer.__init__ = __init__


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint of a Trainer in a folder; None if there is none.

    A run that is killed while it saves leaves an incomplete checkpoint. This function skips it,
    unlike `transformers.trainer_utils.get_last_checkpoint`.
    """
    found = [
        (int(match[1]), path)
        for path in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and _is_complete(path)
    ]
    return str(max(found)[1]) if found else None


class ShardingTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose model was prepared. Its methods run on every rank."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        shard_with(self.accelerator)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        # An earlier call may have stopped between two backwards.
        prepared(self.model).reduction.flush()
        self.model.zero_grad()
        if resume_from_checkpoint is True:  # Trainer would take an incomplete one
            resume_from_checkpoint = last_checkpoint(self.args.output_dir) or True
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        self._meet("the end of Trainer.train")
        return result

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        pauses = self.control.should_save or self.control.should_evaluate
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if pauses:
            self._meet("the end of Trainer's checkpoint or evaluation, and of its callbacks")

    def _meet(self, occasion: str) -> None:
        """Wait for the other ranks. A callback may call on one rank what needs all of them. The
        others would go on into collectives of Trainer, which have no limit, and whose errors do not
        say why.
        """
        for group in sharding_groups(self.model):
            store_barrier(group, occasion, limit_s(self.model))

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if preparation_of(model) is None:  # `to` would take the shards out of their flat buffers
            super()._move_model_to_device(model, device)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        broadcast_buffers(self.model, "Trainer.evaluation_loop")
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        broadcast_buffers(self.model, "Trainer.save_model")
        # Some versions call `_save` on the main process only, so gather first.
        state = full_state(self.model, every_rank=self.args.save_on_each_node)
        as_named = _internal_call and not isinstance(state, AdapterStates)
        self._full_state = CheckpointState(state) if as_named else state
        if _internal_call and output_dir is not None:  # the first file of a checkpoint
            with fail_on_all_ranks(self.model, "removing an earlier checkpoint"):
                if self.args.should_save:
                    Path(output_dir, STATE_FILE).unlink(missing_ok=True)
        try:
            with fail_on_all_ranks(self.model, "Trainer.save_model"):
                super().save_model(output_dir, _internal_call)
        finally:
            del self._full_state

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        state = state_dict if state_dict is not None else getattr(self, "_full_state", None)
        save = getattr(self.model, "save_pretrained", None)
        if state is None or save is None or takes_state_dict(save):
            super()._save(output_dir, state_dict=state)
        elif self.args.should_save:  # it writes from every rank that calls it
            with unsharded(self.model, state):
                super()._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_states(
            os.path.join(output_dir, OPTIMIZER_FOLDER),
            self.model,
            [_inner(self.optimizer)],
            with_model=False,
        )
        with fail_on_all_ranks(self.model, "saving the scheduler"):
            if self.args.should_save:
                scheduler = self.lr_scheduler.state_dict()
                torch.save(scheduler, os.path.join(output_dir, SCHEDULER_FILE))

    def _save_scaler(self, output_dir: str) -> None:
        with fail_on_all_ranks(self.model, "saving the scale of gradients"):
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        # The state file comes next and says that the checkpoint is complete, on every rank.
        with fail_on_all_ranks(self.model, "saving the states of random generators"):
            super()._save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, scheduler = (
            os.path.join(checkpoint, OPTIMIZER_FOLDER),
            os.path.join(checkpoint, SCHEDULER_FILE),
        )
        if not os.path.isdir(folder):
            if os.path.exists(f"{folder}.pt") or os.path.exists(f"{folder}.bin"):
                raise ZpassesError(
                    f"{checkpoint} holds the optimizer of a model that was not sharded "
                    f"({OPTIMIZER_FOLDER}.pt), which has no rows to load. Start from its weights "
                    "instead: load the model with from_pretrained and train without "
                    "resume_from_checkpoint."
                )
            return  # saved with save_only_model=True
        load_states(folder, self.model, [_inner(self.optimizer)], with_model=False)
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not os.path.exists(os.path.join(resume_from_checkpoint, STATE_FILE)):
            complete = last_checkpoint(Path(resume_from_checkpoint).parent)
            raise ZpassesError(
                f"{resume_from_checkpoint} is incomplete: it has no {STATE_FILE}, which is written "
                "last. "
                + (f"Resume from {complete}." if complete else "None beside it is complete.")
                + " zpasses.integrations.transformers.last_checkpoint(folder) finds the newest "
                "complete one."
            )
        load: Any = super()._load_from_checkpoint
        if load.__func__ is not Trainer._load_from_checkpoint:  # a format of its own
            load(resume_from_checkpoint)
        elif _has_weights(resume_from_checkpoint) and not hasattr(self.model, "peft_config"):
            load_safetensors(model or self.model, resume_from_checkpoint)
        else:  # adapters
            _check_prompts(self.model, "resume_from_checkpoint")
            load(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best, load = self.state.best_model_checkpoint, super()._load_best_model
        own = load.__func__ is not Trainer._load_best_model
        if not own and _has_weights(best) and not hasattr(self.model, "peft_config"):
            load_safetensors(self.model, best)
        else:  # adapters, or a format of its own
            load()


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads(Path(checkpoint, STATE_FILE).read_text())
    except (OSError, ValueError):
        return False
    return True


def _has_weights(checkpoint: str) -> bool:
    names = ("model.safetensors", "model.safetensors.index.json")
    return any(os.path.exists(os.path.join(checkpoint, name)) for name in names)


def _check_prompts(model: Any, argument: str) -> None:
    """Raise OptionError for adapters whose file holds the prompts that a network has made, but not
    the network, such as p-tuning. PEFT would load the prompts as its input.
    """
    for adapter, encoder in getattr(model, "prompt_encoder", {}).items():
        networks = [name for name, _ in encoder.named_children() if name != "embedding"]
        if networks:
            raise OptionError(
                f"{argument}: PEFT saves the prompts of adapter {adapter!r}, and not the network "
                f"that makes them ({type(encoder).__name__}.{networks[0]}), so training cannot go "
                f"on from its file. Leave {argument} out, and load the file for inference with "
                "PeftModel.from_pretrained; or use prompt tuning, or prefix tuning without "
                "prefix_projection, which resume."
            )


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _check_arguments(args: Any) -> None:
    """Raise OptionError for TrainingArguments that compile or shard the model another way."""
    if args is None:
        return
    compiles = [
        f"{name}={value!r}"
        for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode")
        if (value := getattr(args, name, None))
    ]
    if compiles:
        raise OptionError(
            f"TrainingArguments({', '.join(compiles)}): zpasses.integrations.transformers.prepare "
            "has compiled the model in place, and Trainer would compile it again. Leave these "
            "arguments out, and pass prepare(model, options={...}); Inductor's options go in "
            "options={'inductor': {...}}."
        )
    for name in ("fsdp", "deepspeed"):
        if value := getattr(args, name, None):
            raise OptionError(
                f"TrainingArguments({name}={value!r}): zpasses.integrations.transformers.prepare "
                f"has sharded the model. Leave {name} out."
            )
