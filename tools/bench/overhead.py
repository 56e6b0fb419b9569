"""The suite "overhead": runtime cost of zpasses per parameter and step, compared with torch.compile
on the plain model.

There is one rank and no communication, and the parameters are so small that nothing else counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import zpasses
from zpasses.tools.bench.launch import rank_main, run_ranks
from zpasses.tools.bench.report import report_text

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
    """What to measure."""

    params: int = 200
    """Parameters of the model."""
    steps: int = 200
    """Steps of a block."""
    blocks: int = 7
    """Blocks of each model, which alternate."""
    stages: tuple[Literal[1, 2, 3], ...] = (2, 3)
    """ZeRO stages."""
    codegens: tuple[Literal["inductor", "eager"], ...] = ("inductor", "eager")
    """Code generators."""
    timeout_s: float = 300.0
    """Time limit of one stage and code generator, in seconds."""


@dataclass(frozen=True)
class OverheadResult:
    """Microseconds of CPU time, as medians of blocks. On an idle machine they equal wall time."""

    codegen: str
    stage: int
    plain_us: float
    """One step of the plain model."""
    step_us: float
    """One step of the sharded model."""
    overhead_us: float
    """The difference per parameter."""
    parts_us: dict[str, float]
    """The parts of this difference that the profiler can name. The profiler adds time, so these are
    upper bounds.
    """


@dataclass
class OverheadReport:
    config: OverheadConfig
    results: list[OverheadResult] = field(default_factory=list)


def run_overhead(config: OverheadConfig) -> OverheadReport:
    """Measure every combination of stage and code generator, each in a new process.

    Raises:
        RankError: if a process fails.
    """
    report = OverheadReport(config)
    for codegen in config.codegens:
        for stage in config.stages:
            task = {**asdict(config), "codegen": codegen, "stage": stage}
            (result,) = run_ranks(_WORKER, task, ranks=1, timeout_s=config.timeout_s)
            report.results.append(OverheadResult(**result))
    return report


def overhead_table(report: OverheadReport) -> str:
    """Microseconds per parameter and step, compared with torch.compile on the plain model."""
    rows = []
    for each in report.results:
        steps = {"plain us/step": each.plain_us, "zpasses us/step": each.step_us}
        parts = {"overhead": each.overhead_us, **each.parts_us}
        per_param = {f"{name} us/param": f"{value:.2f}" for name, value in parts.items()}
        rows.append({"codegen": each.codegen, "zero stage": each.stage, **steps, **per_param})
    about = f"{report.config.params} parameters, one rank, forward and backward"
    return report_text(report, about, rows)


# --- in the measured process ----------------------------------------------------------------------
class Layer(nn.Module):
    """A layer with one small parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Model(nn.Module):
    """Many parameters, and almost no compute."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(params))

    def forward(self, x: Tensor) -> Tensor:
        """A scalar; `x` is [8]."""
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def measure(task: dict[str, Any]) -> OverheadResult:
    """Measure one stage and code generator in this process."""
    dist.init_process_group("gloo")
    plain_step = _step(Model(task["params"]), backend=_PLAIN_BACKEND[task["codegen"]])
    model = zpasses.shard(Model(task["params"]), mesh=init_device_mesh("cpu", (1,)))
    step = _step(
        model, backend="zpasses", options={"zero_stage": task["stage"], "codegen": task["codegen"]}
    )
    plain_us, step_us = [], []
    for _ in range(task["blocks"]):
        plain_us.append(_block_us(plain_step, task["steps"]))
        step_us.append(_block_us(step, task["steps"]))
    plain, ours = _parts_us(plain_step, task["steps"]), _parts_us(step, task["steps"])
    differences = [ours_us - base_us for ours_us, base_us in zip(step_us, plain_us, strict=True)]
    return OverheadResult(
        codegen=task["codegen"],
        stage=task["stage"],
        plain_us=statistics.median(plain_us),
        step_us=statistics.median(step_us),
        overhead_us=statistics.median(differences) / task["params"],
        parts_us={part: (ours[part] - plain[part]) / task["params"] for part in _PARTS},
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
    rank_main(measure)
