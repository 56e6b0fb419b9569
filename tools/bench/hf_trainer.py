"""The suite "trainer": Hugging Face's Trainer trains the GPT, sharded by zpasses or by its peers.

accelerate applies FSDP only on accelerators; on the CPU it runs DDP instead, without a warning. So
the peer here tells accelerate's state that it runs FSDP2, which is what the state would say on an
accelerator. accelerate then prepares the model with `fsdp2_prepare_model`, as always.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses.tools.bench.launch import run_ranks
from zpasses.tools.bench.measure import ResidentMemory, held_bytes
from zpasses.tools.bench.model import GPT, ModelSize, batches, build_model
from zpasses.tools.bench.train import LOSS_TOLERANCE

__all__ = ["PEERS", "TrainerConfig", "TrainerReport", "TrainerResult", "run_trainer"]

_WORKER = "zpasses.tools.bench.hf_trainer"
_SETTLE_S = 0.2
_MEMORY_WARMUP = 3


@dataclass(frozen=True)
class TrainerConfig:
    """What to train, and how often."""

    size: ModelSize
    peers: tuple[str, ...]
    baseline: str = "fsdp2"
    ranks: int = 2
    steps: int = 20
    """Timed steps per run."""
    warmup: int = 3
    """Untimed steps before them, which include compilation."""
    rounds: int = 1
    """Runs per peer, interleaved."""
    timeout_s: float = 600.0
    """Time limit of one run."""


@dataclass
class TrainerResult:
    """Results of one peer. Times are in seconds and those of the slowest rank. Bytes are the
    largest of all ranks.
    """

    peer: str
    rounds_s: list[float] = field(default_factory=list)
    """Median step time of each round: forward, backward, clipping, optimizer and scheduler."""
    step_s: float = 0.0
    """Median of the rounds."""
    ratio: float | None = None
    """Median over rounds of the step time relative to the baseline's in the same round."""
    resting_bytes: int = 0
    """Held between two steps."""
    backward_peak_bytes: int = 0
    """Peak of forward and backward, above the resting state."""
    peak_bytes: int = 0
    """Peak of a step, including its update, above the resting state."""
    peak_ratio: float | None = None
    """`peak_bytes` relative to the baseline's."""
    losses: list[float] = field(default_factory=list)
    """Mean over ranks, for every step from the first."""


@dataclass
class TrainerReport:
    config: TrainerConfig
    results: list[TrainerResult]
    failed: dict[str, str]
    """Peer -> how its training differs from that of the baseline."""


def run_trainer(config: TrainerConfig) -> TrainerReport:
    """Measure each peer in new processes.

    Raises:
        RankError: if a process fails or exceeds the time limit.
    """
    results = {name: TrainerResult(name) for name in config.peers}
    with tempfile.TemporaryDirectory(prefix="zpasses-bench-caches-") as caches:
        for number in range(config.rounds):
            for name, result in results.items():
                env = {"TORCHINDUCTOR_CACHE_DIR": str(Path(caches, name)), "HF_HUB_OFFLINE": "1"}
                ranks = _run(config, name, "time", env)
                result.rounds_s.append(max(rank["step_s"] for rank in ranks))
                if number:
                    continue
                losses = zip(*(rank["losses"] for rank in ranks), strict=True)
                result.losses = [statistics.fmean(each) for each in losses]
                memory = _run(config, name, "memory", {**env, **ResidentMemory.ENVIRONMENT})
                for item in ("resting_bytes", "backward_peak_bytes", "peak_bytes"):
                    setattr(result, item, max(rank[item] for rank in memory))
    report = TrainerReport(config, list(results.values()), {})
    _relate(report)
    return report


def _run(
    config: TrainerConfig, peer: str, kind: str, env: Mapping[str, str]
) -> Sequence[dict[str, Any]]:
    job = {
        "peer": peer,
        "kind": kind,
        "size": asdict(config.size),
        "warmup": config.warmup if kind == "time" else _MEMORY_WARMUP,
        "steps": config.steps if kind == "time" else 1,
    }
    return run_ranks(_WORKER, job, ranks=config.ranks, timeout_s=config.timeout_s, env=env)


def _relate(report: TrainerReport) -> None:
    baseline = next((r for r in report.results if r.peer == report.config.baseline), None)
    for result in report.results:
        result.step_s = statistics.median(result.rounds_s)
        if baseline is None:
            continue
        result.ratio = statistics.median(
            ours / theirs for ours, theirs in zip(result.rounds_s, baseline.rounds_s, strict=True)
        )
        if baseline.peak_bytes:
            result.peak_ratio = result.peak_bytes / baseline.peak_bytes
        for step, (ours, theirs) in enumerate(zip(result.losses, baseline.losses, strict=True)):
            if not abs(ours - theirs) <= LOSS_TOLERANCE * abs(theirs):  # also true for NaN
                report.failed[result.peer] = (
                    f"training differs from {baseline.peer}: loss {ours:.6f} instead of "
                    f"{theirs:.6f} at step {step}"
                )
                break


# --- peers ----------------------------------------------------------------------------------------
def _use_fsdp2(trainer: Any) -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    for each in (state, PartialState()):
        each.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def _prepare(stage: int) -> Callable[[GPT], None]:
    def prepare(model: GPT) -> None:
        from zpasses.integrations.transformers import prepare

        prepare(model, options={"zero_stage": stage})

    return prepare


@dataclass(frozen=True)
class _Peer:
    summary: str
    prepare: Callable[[GPT], None] = lambda model: None
    """Called before the Trainer is made."""
    configure: Callable[[Any], None] = lambda trainer: None
    """Called with the Trainer when it has made its Accelerator."""
    is_sharded: bool = True


PEERS: dict[str, _Peer] = {
    "ddp": _Peer("Trainer with DDP", is_sharded=False),
    "fsdp2": _Peer("Trainer with accelerate's FSDP2", configure=_use_fsdp2),
    "zpasses-2": _Peer("Trainer with zpasses, ZeRO stage 2", _prepare(2)),
    "zpasses-3": _Peer("Trainer with zpasses, ZeRO stage 3", _prepare(3)),
}
"""Every peer by name, in execution order."""


# --- in the measured process ----------------------------------------------------------------------
class _Model(GPT):
    """The GPT with the output that Trainer expects."""

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(inputs, targets)}


def measure(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Step times and losses of one rank, or the memory of its last step."""
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    size, peer = ModelSize(**job["size"]), PEERS[job["peer"]]
    count = job["warmup"] + job["steps"]
    args = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=count,
        per_device_train_batch_size=size.batch,
        learning_rate=3e-4,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    model = build_model(size)
    model.__class__ = _Model
    peer.prepare(model)
    observer = _memory_observer(job["warmup"]) if job["kind"] == "memory" else _time_observer()
    losses: list[Tensor] = []

    class MeasuredTrainer(transformers.Trainer):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            peer.configure(self)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.detach())
            return loss

    data = batches(size, count * dist.get_world_size(), 0)
    samples = [
        {"inputs": inputs, "targets": targets}
        for batch in data
        for inputs, targets in zip(*batch, strict=True)
    ]
    trainer = MeasuredTrainer(model, args, train_dataset=samples, callbacks=[observer])
    trainer.train()
    if isinstance(next(model.parameters()), DTensor) != peer.is_sharded:
        raise RuntimeError(f"{job['peer']}: the Trainer has not sharded the model as expected")
    if job["kind"] == "memory":
        found = dict(observer.found)
        if not peer.is_sharded:  # DDP's buckets, which no Python object holds
            found["resting_bytes"] += sum(param.nbytes for param in model.parameters())
        return found
    return {
        "step_s": statistics.median(observer.times_s[job["warmup"] :]),
        "losses": [float(loss) for loss in losses],
    }


def _time_observer() -> Any:
    import transformers

    class Times(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times_s: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self._started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.times_s.append(time.perf_counter() - self._started)

    return Times()


def _memory_observer(warmup: int) -> Any:
    import transformers

    class Memory(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.found: dict[str, int] = {}
            self._memory: ResidentMemory | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == warmup:
                dist.barrier()
                gc.collect()  # compiling leaves reference cycles that hold tensors
                time.sleep(_SETTLE_S)  # gloo's threads release tensors some time after a wait
                self.found["resting_bytes"] = held_bytes()
                self._memory = ResidentMemory()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            if self._memory is not None:
                self.found["backward_peak_bytes"] = self._memory.peak_bytes()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if self._memory is not None:
                self.found["peak_bytes"] = self._memory.peak_bytes()

    return Memory()


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    with tempfile.TemporaryDirectory(prefix="zpasses-bench-") as folder:
        result = measure(job, folder)
    dist.barrier()
    Path(result_file).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
