"""The suite "overhead": what our runtime costs per parameter and step, next to torch.compile on the
plain model.

One rank and no collectives, and parameters so small that nothing else counts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from zpasses.tools.bench.launch import run_ranks

__all__ = ["OverheadConfig", "OverheadReport", "OverheadResult", "run_overhead"]

_WORKER = "zpasses.tools.bench.overhead"
_PLAIN_BACKEND = {"inductor": "inductor", "eager": "aot_eager"}
_PARTS = {
    "Dynamo guards": ("TorchDynamo Cache Lookup",),
    "shards in": ("_LocalShards",),
    "gradients out": ("_LocalShardsBackward",),
    "gradient stored": ("torch::autograd::AccumulateGrad",),
}
"""Part -> the profiler's names for it."""


@dataclass(frozen=True)
class OverheadConfig:
    params: int = 200
    steps: int = 200
    """Steps of a block; blocks of both models alternate."""
    blocks: int = 7
    stages: tuple[int, ...] = (2, 3)
    codegens: tuple[str, ...] = ("inductor", "eager")
    timeout_s: float = 300.0


@dataclass(frozen=True)
class OverheadResult:
    """Microseconds of CPU time, which on an idle machine is wall time; medians of blocks."""

    codegen: str
    stage: int
    plain_us: float
    """A step of the plain model."""
    step_us: float
    """A step of the sharded one."""
    overhead_us: float
    """Their difference, per parameter."""
    parts_us: dict[str, float]
    """The same difference where the profiler can name it; it slows, so that these are upper
    bounds."""


@dataclass
class OverheadReport:
    config: OverheadConfig
    params: int
    results: list[OverheadResult] = field(default_factory=list)


def run_overhead(config: OverheadConfig) -> OverheadReport:
    """Measure every combination of stage and codegen, each in a fresh process.

    Raises:
        RankError: when one fails.
    """
    report = OverheadReport(config, config.params)
    for codegen in config.codegens:
        for stage in config.stages:
            job = {**asdict(config), "codegen": codegen, "stage": stage}
            (result,) = run_ranks(_WORKER, job, ranks=1, timeout_s=config.timeout_s)
            report.results.append(OverheadResult(**result))
    return report


# --- in the process that measures -----------------------------------------------------------------
class Layer(nn.Module):
    """One small parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Model(nn.Module):
    """Many parameters, next to no work."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(params))

    def forward(self, x: Tensor) -> Tensor:
        """A scalar; `x` is [8]."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def measure(job: dict[str, Any]) -> OverheadResult:
    """One stage and codegen, in this process."""
    import zpasses

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain_step = _step(Model(job["params"]), backend=_PLAIN_BACKEND[job["codegen"]])
    model = zpasses.shard(Model(job["params"]), mesh=init_device_mesh("cpu", (1,)))
    step = _step(
        model, backend="zpasses", options={"zero_stage": job["stage"], "codegen": job["codegen"]}
    )
    plain_us, step_us = [], []
    for _ in range(job["blocks"]):
        plain_us.append(_block_us(plain_step, job["steps"]))
        step_us.append(_block_us(step, job["steps"]))
    plain, ours = _parts_us(plain_step, job["steps"]), _parts_us(step, job["steps"])
    differences = [sharded - alone for sharded, alone in zip(step_us, plain_us, strict=True)]
    return OverheadResult(
        codegen=job["codegen"],
        stage=job["stage"],
        plain_us=statistics.median(plain_us),
        step_us=statistics.median(step_us),
        overhead_us=statistics.median(differences) / job["params"],
        parts_us={part: (ours[part] - plain[part]) / job["params"] for part in _PARTS},
    )


def _step(model: nn.Module, **compile_options: Any) -> Callable[[], None]:
    compiled = torch.compile(model, fullgraph=True, **compile_options)
    x, params = torch.ones(8), list(model.parameters())

    def step() -> None:
        compiled(x).backward()
        for param in params:
            param.grad = None

    for _ in range(3):
        step()
    return step


def _block_us(step: Callable[[], None], steps: int) -> float:
    started = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - started) / steps * 1e6


def _parts_us(step: Callable[[], None], steps: int) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            step()
    total_us: dict[str, float] = {
        event.key: event.cpu_time_total for event in profiled.key_averages()
    }
    return {
        part: sum(total_us.get(name, 0.0) for name in names) / steps
        for part, names in _PARTS.items()
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        json.dumps(asdict(measure(json.loads(Path(sys.argv[1]).read_text()))))
    )
