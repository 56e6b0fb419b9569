"""The suite "coalesce": one optimizer step with several backwards, with one reduction per backward
or one per step.

Each way runs in new processes, once for time and traffic and once for memory. One process measures
all window lengths. A step is the backwards and the reduction, without the optimizer, which is equal
for all ways.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

import zpasses
from zpasses.tools.bench.launch import RankError, run_ranks
from zpasses.tools.bench.measure import ResidentMemory, held_bytes, traffic
from zpasses.tools.bench.model import ModelSize, batches, build_model
from zpasses.tools.bench.peers import _DEEPSPEED, Peer

__all__ = ["WAYS", "CoalesceConfig", "CoalesceReport", "CoalesceResult", "Way", "run_coalesce"]

_WORKER = "zpasses.tools.bench.coalesce"
_SETTLE_S = 0.2
_MEMORY_WARMUP = 2

NORM_TOLERANCE = {"gpt": 1e-3, "mlp": 2e-2}
"""Largest relative difference of a gradient's norm to the first way's. The MLP computes and reduces
in bfloat16.
"""


@dataclass(frozen=True)
class CoalesceConfig:
    """What to run."""

    ways: tuple[str, ...]
    """Names of `WAYS`."""
    model: str = "mlp"
    """ "mlp": layers of width x width in bfloat16. "gpt": the GPT of the suite "train", in float32.
    """
    width: int = 4096
    layers: int = 8
    batch: int = 16
    """Samples per rank and backward."""
    seq: int = 64
    """Tokens per sample of the GPT."""
    backwards: tuple[int, ...] = (2, 4, 8)
    """Numbers of backwards per step."""
    ranks: int = 2
    steps: int = 5
    warmup: int = 2
    baseline: str = "ddp no_sync"
    """Way that ratios are compared with."""
    timeout_s: float = 600.0


@dataclass
class CoalesceResult:
    """One way with one number of backwards. Seconds and bytes are the largest of all ranks. Bytes
    are those of gradients and of the step itself, above what is held between steps.
    """

    way: str
    backwards: int
    wall_s: float
    """Median time of a step."""
    ratio: float | None
    """Time relative to the baseline's with the same number of backwards."""
    peak_bytes: int
    """Peak of a step."""
    window_bytes: int
    """Held right before the forward of the last backward."""
    after_bytes: int
    """Held after the gradients are reduced."""
    collectives: float
    """Gradient reductions per step, as counted by the process groups."""
    sent_bytes: float
    """Bytes that one rank sends for them."""
    gradient_norm: float | None
    """None if the way does not expose gradients."""


@dataclass
class CoalesceReport:
    config: CoalesceConfig
    results: list[CoalesceResult] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Way -> why it cannot run here."""
    failed: dict[str, str] = field(default_factory=dict)
    """Way -> the end of its log, or how its gradients differ."""


# --- ways -----------------------------------------------------------------------------------------
class Runner:
    """A model on one rank, and how it runs a step.

    Args:
        window: number of backwards -> context manager around a step.
        around: whether it is the last backward -> context manager around a forward and backward.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Tensor],
        window: Callable[[int], AbstractContextManager[Any]] = lambda count: (
            contextlib.nullcontext()
        ),
        around: Callable[[bool], AbstractContextManager[Any]] = lambda last: (
            contextlib.nullcontext()
        ),
    ) -> None:
        self.model, self.forward, self.window, self.around = model, forward, window, around
        self.untracked_bytes = 0
        """Memory for gradients that no Python object holds and that is kept between steps."""

    def step(self, data: Sequence[tuple[Tensor, ...]], before_last: Callable[[], object]) -> None:
        """Run one forward and backward per batch. Call `before_last` before the last forward."""
        with self.window(len(data)):
            for number, batch in enumerate(data):
                last = number == len(data) - 1
                if last:
                    before_last()
                with self.around(last):
                    self.backward(self.forward(*batch))

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradient_norm(self) -> float | None:
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        norm: Any = nn.utils.get_total_norm([grad.float() for grad in grads])
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def clear(self) -> None:
        self.model.zero_grad()


@dataclass(frozen=True)
class Way:
    """A way to accumulate gradients."""

    name: str
    summary: str
    build: Callable[[nn.Module, DeviceMesh], Runner]
    needs: str | None = None
    """A module that must be importable."""
    install: str = ""
    """How to install that module."""


def _ddp(no_sync: bool) -> Callable[[nn.Module, DeviceMesh], Runner]:
    def build(model: nn.Module, mesh: DeviceMesh) -> Runner:
        wrapped = nn.parallel.DistributedDataParallel(
            model, process_group=mesh.get_group(), gradient_as_bucket_view=True
        )

        def around(last: bool) -> AbstractContextManager[Any]:
            return wrapped.no_sync() if no_sync and not last else contextlib.nullcontext()

        runner = Runner(wrapped, torch.compile(wrapped), around=around)
        runner.untracked_bytes = sum(param.nbytes for param in model.parameters())  # DDP's buckets
        return runner

    return build


def _fsdp2(deferred: bool) -> Callable[[nn.Module, DeviceMesh], Runner]:
    def build(model: nn.Module, mesh: DeviceMesh) -> Runner:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        whole: Any = fully_shard(model, mesh=mesh)

        def around(last: bool) -> AbstractContextManager[Any]:
            whole.set_requires_gradient_sync(last or not deferred)
            return contextlib.nullcontext()

        return Runner(model, model, around=around)

    return build


def _zpasses(stage: int, mode: str) -> Callable[[nn.Module, DeviceMesh], Runner]:
    def build(model: nn.Module, mesh: DeviceMesh) -> Runner:
        zpasses.shard(model, mesh=mesh)

        def window(count: int) -> AbstractContextManager[Any]:
            if mode == "per backward":
                return contextlib.nullcontext()
            return zpasses.coalesce_grad_reduction(
                model, backwards=count if mode == "coalesced" else None
            )

        return Runner(
            model, torch.compile(model, backend="zpasses", options={"zero_stage": stage}), window
        )

    return build


class _DeepSpeed(Runner):
    """DeepSpeed owns backward and the gradients."""

    def __init__(self, model: nn.Module, stage: int, coalesced: bool) -> None:
        import deepspeed

        numel = sum(param.numel() for param in model.parameters())
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": numel,
                "allgather_bucket_size": numel,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": next(model.parameters()).dtype is torch.bfloat16},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        window = (
            (lambda count: self._engine.coalesce_grad_reduction())
            if coalesced
            else (lambda count: contextlib.nullcontext())
        )
        super().__init__(model, self._engine, window)

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def gradient_norm(self) -> float | None:
        return None

    def clear(self) -> None:
        self._engine.step()  # only a step frees its gradients; the learning rate is 0


def _deepspeed(stage: int, coalesced: bool) -> Callable[[nn.Module, DeviceMesh], Runner]:
    return lambda model, mesh: _DeepSpeed(model, stage, coalesced)


def _all_ways() -> list[Way]:
    ways = [
        Way("ddp per backward", "DistributedDataParallel, compiled", _ddp(no_sync=False)),
        Way("ddp no_sync", "the same, all but the last backward under no_sync", _ddp(no_sync=True)),
        Way("fsdp2 per backward", "fully_shard per block and root, eager", _fsdp2(deferred=False)),
        Way(
            "fsdp2 deferred",
            "the same, with set_requires_gradient_sync in the last backward only",
            _fsdp2(deferred=True),
        ),
    ]
    for stage in (1, 2, 3):
        ways.append(
            Way(
                f"zpasses-{stage} per backward",
                "zpasses without a window",
                _zpasses(stage, "per backward"),
            )
        )
        ways.append(
            Way(
                f"zpasses-{stage} coalesced",
                "a window that reduces in the last backward",
                _zpasses(stage, "coalesced"),
            )
        )
        ways.append(
            Way(
                f"zpasses-{stage} flushed",
                "a window that reduces when it ends",
                _zpasses(stage, "flushed"),
            )
        )
    for stage in (1, 2, 3):
        for coalesced, mode in ((False, "per backward"), (True, "coalesced")):
            ways.append(
                Way(
                    f"deepspeed-{stage} {mode}",
                    f"DeepSpeed, stage {stage}",
                    _deepspeed(stage, coalesced),
                    "deepspeed",
                    _DEEPSPEED,
                )
            )
    return ways


WAYS: dict[str, Way] = {way.name: way for way in _all_ways()}
"""Every way by name, in execution order."""


# --- running --------------------------------------------------------------------------------------
def run_coalesce(config: CoalesceConfig) -> CoalesceReport:
    """Measure every way that is installed. A way that fails is reported and does not stop the
    others.
    """
    report = CoalesceReport(config)
    for name in tqdm(config.ways):
        way = WAYS[name]
        missing = Peer(way.name, way.summary, lambda *_: None, way.needs, way.install).missing()  # type: ignore[arg-type]
        if missing:
            report.skipped[name] = missing
            continue
        try:
            timed, held = (_run(config, name, kind) for kind in ("time", "memory"))
        except RankError as error:
            report.failed[name] = str(error)
            continue
        report.results += [_result(name, count, timed, held) for count in config.backwards]
    _relate(report)
    return report


def _run(config: CoalesceConfig, way: str, kind: str) -> list[Any]:
    job = {"kind": kind, "way": way, "config": dataclasses.asdict(config)}
    env = ResidentMemory.ENVIRONMENT if kind == "memory" else None
    return run_ranks(_WORKER, job, ranks=config.ranks, timeout_s=config.timeout_s, env=env)


def _result(way: str, count: int, timed: Sequence[Any], held: Sequence[Any]) -> CoalesceResult:
    key = str(count)
    largest = {
        name: max(rank[key][name] for rank in held)
        for name in ("peak_bytes", "window_bytes", "after_bytes")
    }
    first = timed[0][key]
    wall_s = max(rank[key]["wall_s"] for rank in timed)
    return CoalesceResult(
        way,
        count,
        wall_s,
        None,
        **largest,
        **{name: first[name] for name in ("collectives", "sent_bytes", "gradient_norm")},
    )


def _relate(report: CoalesceReport) -> None:
    base = {
        result.backwards: result
        for result in report.results
        if result.way == report.config.baseline
    }
    norms: dict[int, float] = {}
    for result in report.results:
        if result.backwards in base:
            result.ratio = result.wall_s / base[result.backwards].wall_s
        if result.gradient_norm is None:
            continue
        expected = norms.setdefault(result.backwards, result.gradient_norm)
        if (
            not abs(result.gradient_norm - expected)
            <= NORM_TOLERANCE[report.config.model] * expected
        ):
            report.failed[result.way] = (
                f"gradient norm {result.gradient_norm:.6g} instead of {expected:.6g}, "
                f"{result.backwards} backwards"
            )


# --- one rank -------------------------------------------------------------------------------------
class Mlp(nn.Module):
    """Square layers with ReLU. The loss is the mean square of the output."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.float().square().mean()


def _build(config: Mapping[str, Any]) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """The model, equal in every process, and this rank's data."""
    count, rank = max(config["backwards"]), dist.get_rank()
    if config["model"] == "gpt":
        size = ModelSize(
            width=config["width"], layers=config["layers"], seq=config["seq"], batch=config["batch"]
        )
        return build_model(size), list(batches(size, count, rank))
    torch.manual_seed(0)
    model = Mlp(config["width"], config["layers"]).bfloat16()
    draw = torch.Generator().manual_seed(1 + rank)
    return model, [
        (torch.randn(config["batch"], config["width"], generator=draw).bfloat16(),)
        for _ in range(count)
    ]


def _time(job: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    config = job["config"]
    model, data = _build(config)
    runner = WAYS[job["way"]].build(model, mesh)
    found = {}
    for count in config["backwards"]:
        times: list[float] = []
        norm = None
        for number in range(config["warmup"] + config["steps"]):
            if number == config["warmup"]:
                before = traffic()
            dist.barrier()
            started = time.perf_counter()
            runner.step(data[:count], lambda: None)
            times.append(time.perf_counter() - started)
            norm = runner.gradient_norm() if number == 0 else norm
            runner.clear()
        ran = traffic().per_step(before, config["steps"])
        reductions = [kind for kind in ran.counts if "reduce" in kind]
        found[count] = {
            "wall_s": statistics.median(times[config["warmup"] :]),
            "gradient_norm": norm,
            "collectives": sum(ran.counts[kind] for kind in reductions),
            "sent_bytes": sum(ran.sent_bytes[kind] for kind in reductions),
        }
    return found


def _memory(job: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    config = job["config"]
    model, data = _build(config)
    runner = WAYS[job["way"]].build(model, mesh)
    found = {}
    for count in config["backwards"]:
        for _ in range(_MEMORY_WARMUP):
            runner.step(data[:count], lambda: None)
            runner.clear()
        held: list[int] = []

        def look(held: list[int] = held) -> None:
            gc.collect()
            time.sleep(
                _SETTLE_S
            )  # gloo's threads release a collective's tensors some time after its wait
            held.append(held_bytes())

        look()
        memory = ResidentMemory()
        runner.step(data[:count], look)
        peak = memory.peak_bytes() + runner.untracked_bytes
        look()
        runner.clear()
        before, window, after = held
        found[count] = {
            "peak_bytes": peak,
            "window_bytes": window - before,
            "after_bytes": after - before,
        }
    return found


def _main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    result = {"time": _time, "memory": _memory}[job["kind"]](job, mesh)
    dist.barrier()
    Path(result_file).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
