"""Tiny models, data and Trainers that the tests of integrations run on ranks."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import Dataset

from tests.models.families import of_transformers
from tests.models.sizes import TOKENS, VOCABULARY, WIDTHS
from zpasses import compat

OPTIONS = {"codegen": "eager"}


def as_started_by_torchrun():
    """The ranks of a pool live on, so forget what accelerate remembers of earlier tests."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def llama(**changes):
    attention = {"num_key_value_heads": 1, "max_position_embeddings": 32}
    return of_transformers("LlamaForCausalLM", **{**TOKENS, **WIDTHS, **attention, **changes})


def t5():
    widths = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    others = {"vocab_size": VOCABULARY, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return of_transformers("T5ForConditionalGeneration", **widths, **others)


def vit():
    images = {"image_size": 8, "patch_size": 4, "num_labels": 3}
    return of_transformers("ViTForImageClassification", **WIDTHS, **images)


class Samples(Dataset):
    """Random samples of a task, equal on all ranks."""

    def __init__(self, task, count=32):
        self.task, self.count = task, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        source = torch.Generator().manual_seed(index)
        if self.task is vit:
            pixels = torch.randn(3, 8, 8, generator=source)
            return {"pixel_values": pixels, "labels": torch.tensor(index % 3)}
        ids = torch.randint(3, VOCABULARY, (10,), generator=source)
        return {"input_ids": ids, "labels": ids.flip(0) if self.task is t5 else ids}


def arguments(folder, kind=transformers.TrainingArguments, **changes):
    device = {"use_cpu": True, "ddp_backend": "gloo", "dataloader_pin_memory": False}
    device |= {"ddp_find_unused_parameters": False}
    steps = {"max_steps": 3, "learning_rate": 1e-2, "max_grad_norm": 0.5}
    steps |= dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 2)
    said = {"logging_steps": 1, "logging_nan_inf_filter": False, "disable_tqdm": True}
    said |= {"save_strategy": "no", "report_to": "none"}
    return kind(str(folder), **{**device, **steps, **said, **changes})


QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
"""Arguments of Lightning's Trainer."""


def quiet(trainer):
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def logged(trainer, *names):
    """The values that a Trainer has logged, in order."""
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


_counted = {"entries": 0, "reductions": 0}


def reductions():
    """Count the reductions that the process groups have run so far, from their flight record.

    The record holds the last 2,000 collectives, so what is older was counted by earlier calls.
    """
    for entry in compat.flight_recorder_entries():
        if entry["record_id"] >= _counted["entries"]:
            _counted["entries"] = entry["record_id"] + 1
            _counted["reductions"] += "reduce" in entry["profiling_name"]
    return _counted["reductions"]


def weights_of(folder):
    from safetensors.torch import load_file

    return load_file(Path(folder, "model.safetensors"))
