"""Measures peers in which Hugging Face's Trainer trains the GPT; `worker` measures the others.

accelerate applies FSDP only on accelerators; on the CPU it runs DDP instead, without a warning. So
the peer here tells accelerate's state that it runs FSDP2, which is what the state would say on an
accelerator. accelerate then prepares the model with `fsdp2_prepare_model`, as always.

The order of the data, the schedule of the learning rate and clipping are Trainer's. So losses equal
those of other peers of this file only.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses.integrations.transformers import prepare
from zpasses.tools.bench.launch import rank_main
from zpasses.tools.bench.measure import (
    ResidentMemory,
    observe_pass_time,
    settled_bytes,
    traffic,
)
from zpasses.tools.bench.model import GPT, ModelSize, batches, build_model
from zpasses.tools.bench.peers import LEARNING_RATE
from zpasses.tools.bench.worker import MEMORY_WARMUP, timed


class _Model(GPT):
    """The GPT with the output that Trainer expects."""

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(inputs, targets)}


class _Trainer(transformers.Trainer):  # type: ignore[misc]
    """Keeps the losses of all micro-batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[Tensor] = []
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.detach())
        return loss


class _FSDP2Trainer(_Trainer):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False,
        )
        for each in (state, PartialState()):
            each.distributed_type = DistributedType.FSDP
        self.is_fsdp_enabled = True


class _Times(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self.times_s: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if len(self.times_s) == self._warmup:
            self.before = traffic()
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times_s.append(time.perf_counter() - self._started)


class _Memory(transformers.TrainerCallback):  # type: ignore[misc]
    """Measures the last step."""

    def __init__(self, backwards: int) -> None:
        self._backwards, self._done = backwards, 0
        self.found: dict[str, Any] = {"window_bytes": 0, "after_bytes": 0, "gradient_norm": None}
        self._memory: ResidentMemory | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == MEMORY_WARMUP:
            dist.barrier()
            self.found["resting_bytes"] = settled_bytes()
            self._memory = ResidentMemory()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        if self._memory is not None:
            self._done += 1
            if self._done == self._backwards - 1:
                self.found["window_bytes"] = settled_bytes() - self.found["resting_bytes"]

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self._memory is not None:
            self.found["backward_peak_bytes"] = self._memory.peak_bytes()
            if self._backwards > 1:
                self.found["after_bytes"] = settled_bytes() - self.found["resting_bytes"]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self._memory is not None:
            self.found["peak_bytes"] = self._memory.peak_bytes()


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """One rank's results of a task, with the keys of `worker`."""
    transformers.utils.logging.set_verbosity_error()
    size, backwards, name = ModelSize(**task["size"]), task["backwards"], task["peer"]
    observes_time = task["kind"] == "time"
    count = task["warmup"] + task["steps"] if observes_time else MEMORY_WARMUP + 1
    args = transformers.TrainingArguments(
        output_dir=".",  # `run_ranks` starts ranks in a temporary folder
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=count,
        per_device_train_batch_size=size.batch,
        gradient_accumulation_steps=backwards,
        learning_rate=LEARNING_RATE,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    model = build_model(size)
    model.__class__ = _Model
    stage = {"trainer-zpasses-2": 2, "trainer-zpasses-3": 3}.get(name)
    if stage:
        prepare(model, options={"zero_stage": stage})
    times, memory = _Times(task["warmup"]), _Memory(backwards)
    samples = [
        {"inputs": inputs, "targets": targets}
        for batch in batches(size, count * backwards * dist.get_world_size(), 0)
        for inputs, targets in zip(*batch, strict=True)
    ]
    trainer = (_FSDP2Trainer if name == "trainer-fsdp2" else _Trainer)(
        model, args, train_dataset=samples, callbacks=[times if observes_time else memory]
    )
    with observe_pass_time() as work:
        trainer.train()
    is_sharded = name != "trainer-ddp"
    if isinstance(next(model.parameters()), DTensor) != is_sharded:
        raise RuntimeError(f"{name}: the Trainer has not sharded the model as expected")
    if observes_time:
        losses = torch.stack(trainer.losses).view(count, backwards).sum(1)
        return timed(times.times_s, task["warmup"], times.before, work, losses)
    if not is_sharded:  # DDP's buckets, which no Python object holds
        memory.found["resting_bytes"] += sum(param.nbytes for param in model.parameters())
    return memory.found


if __name__ == "__main__":
    rank_main(measure)
