"""The suite "optimizer": processor time and operators of the step of AdamW on sharded models.

The gradients are drawn, so nothing communicates but the votes of ranks. Small widths show the time
until all operators have been dispatched, for which an accelerator would wait.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zpasses
from zpasses import compat
from zpasses.tools.bench.launch import rank_main, run_ranks
from zpasses.tools.bench.model import GPT, ModelSize, build_model
from zpasses.tools.bench.report import report_text

_WORKER = "zpasses.tools.bench.optimizer_steps"
_OPTIONS: dict[str, Any] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class OptimizerConfig:
    """What to measure."""

    width: int = 64
    """Width of the GPT."""
    layers: int = 24
    """Layers of the GPT."""
    steps: int = 15
    """Later steps, of which the median counts."""
    ranks: int = 2
    """Processes, each with one thread."""
    models: tuple[Literal["plain", "zpasses", "fsdp2"], ...] = ("plain", "zpasses", "fsdp2")
    """How the model is sharded."""
    modes: tuple[Literal["loop", "foreach", "fused"], ...] = ("loop", "foreach", "fused")
    """Implementations of AdamW."""
    timeout_s: float = 300.0
    """Time limit of one model and mode, in seconds."""


@dataclass(frozen=True)
class OptimizerResult:
    """One model and mode. Milliseconds of processor time of rank 0."""

    mode: str
    model: str
    params: int
    first_ms: float
    """The first step, which makes the states."""
    later_ms: float
    """The median of later steps."""
    operators: int
    """Operators of a later step on values of parameters. One on a list counts once."""
    of_dtensors: int
    """Those that DTensor dispatches."""


@dataclass
class OptimizerReport:
    config: OptimizerConfig
    results: list[OptimizerResult] = field(default_factory=list)


def run_optimizer(config: OptimizerConfig) -> OptimizerReport:
    """Measure every mode on every model, each in new processes.

    Raises:
        RankError: if a process fails.
    """
    report = OptimizerReport(config)
    for mode in config.modes:
        for model in config.models:
            task = {**asdict(config), "mode": mode, "model": model}
            first, *_ = run_ranks(_WORKER, task, ranks=config.ranks, timeout_s=config.timeout_s)
            report.results.append(OptimizerResult(**first))
    return report


def optimizer_table(report: OptimizerReport) -> str:
    """Processor time of first and later steps."""
    rows = [
        {name.replace("_", " "): value for name, value in asdict(result).items()}
        for result in report.results
    ]
    about = f"AdamW, {report.config.ranks} ranks, processor time of rank 0"
    return report_text(report, about, rows)


# --- in the measured process ----------------------------------------------------------------------
def measure(task: dict[str, Any]) -> OptimizerResult:
    """Measure one mode on one model in this process."""
    dist.init_process_group("gloo")
    model = build_model(ModelSize(width=task["width"], layers=task["layers"]))
    _SHARD[task["model"]](model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param).detach()
        _local(param.grad).normal_(std=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), **_OPTIONS[task["mode"]])
    first, *later = (_milliseconds(optimizer.step) for _ in range(1 + task["steps"]))
    with _Operators() as counted:
        optimizer.step()
    params, counts = len(list(model.parameters())), (counted.all, counted.of_dtensors)
    times = (first, statistics.median(later))
    return OptimizerResult(task["mode"], task["model"], params, *times, *counts)


def _plain(model: GPT) -> None: ...


def _fsdp2(model: GPT) -> None:
    for each in (*model.blocks, model):
        fully_shard(each, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _zpasses(model: GPT) -> None:
    zpasses.shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


_SHARD = {"plain": _plain, "zpasses": _zpasses, "fsdp2": _fsdp2}


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _milliseconds(step: Callable[[], Any]) -> float:
    started = time.process_time()
    step()
    return (time.process_time() - started) * 1e3


class _Operators(compat.TorchDispatchMode):
    """Counts the operators that compute with the values of parameters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all = self.of_dtensors = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = args[0] if args else None
        first = given[0] if isinstance(given, (list, tuple)) and given else given
        if isinstance(first, torch.Tensor) and first.dim() and not func.is_view:
            self.all += 1
            self.of_dtensors += isinstance(first, DTensor)
        return func(*args, **kwargs or {})


if __name__ == "__main__":
    rank_main(measure)
