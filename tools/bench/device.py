"""The suite "device": one rank of a larger group on one accelerator, without the others.

The group is a fake one, whose collectives move nothing. So times are those of compute, of the
copies around collectives and of launches, and memory is that of a real rank. Losses mean nothing:
gathered parameters hold what memory held. The cost model's prediction for links that take no time
stands beside them.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zpasses import compat
from zpasses.cost.time.step_time import step_time
from zpasses.cost.time.target import Target
from zpasses.pipeline.events import ObservedGraph, observe_graphs
from zpasses.tools.bench.launch import interleaved, rank_main, run_ranks
from zpasses.tools.bench.model import GPT, ModelSize
from zpasses.tools.bench.peers import check_peers, peer_of
from zpasses.tools.bench.report import MIB, report_text, two_decimals

_WORKER = "zpasses.tools.bench.device"


@dataclass(frozen=True)
class DeviceConfig:
    """What to train, and where."""

    size: ModelSize = field(default_factory=ModelSize)
    peers: tuple[str, ...] = ("fsdp2-eager", "fsdp2-compiled", "zpasses-2", "zpasses-3")
    """What to run, in this order; others are compared with the first."""
    device: str = "cuda"
    """The accelerator, or cpu."""
    ranks: int = 8
    """Size of the fake group."""
    steps: int = 10
    """Timed steps of a run."""
    warmup: int = 3
    """Untimed steps before them, which include compilation."""
    rounds: int = 1
    """Runs of every peer, interleaved."""
    timeout_s: float = 600.0
    """Time limit of one run, in seconds."""

    def __post_init__(self) -> None:
        check_peers(self.peers)


@dataclass
class DeviceResult:
    """Results of one peer."""

    peer: str
    rounds_s: list[float] = field(default_factory=list)
    """Median step time of each round, seconds."""
    compile_s: float = 0.0
    """Time of the first step of the first round, seconds."""
    resting_bytes: int = 0
    """Allocated on the device between steps."""
    peak_bytes: int | None = None
    """Peak of a forward and a backward above that; None without an accelerator."""
    backward_s: float = 0.0
    """Median time of a forward and its backward in the first round, seconds."""
    predicted_s: float | None = None
    """What the cost model says of them, seconds; None for other peers than zpasses."""

    @property
    def step_s(self) -> float:
        return statistics.median(self.rounds_s)

    def ratio(self, other: DeviceResult) -> float:
        """Median over rounds of the step time relative to another peer's in the same round."""
        return statistics.median(
            ours / theirs for ours, theirs in zip(self.rounds_s, other.rounds_s, strict=True)
        )


@dataclass
class DeviceReport:
    config: DeviceConfig
    device_name: str = ""
    results: list[DeviceResult] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Peer -> reason."""


def run_device(config: DeviceConfig) -> DeviceReport:
    """Measure every peer in new processes."""
    report, results = DeviceReport(config), {name: DeviceResult(name) for name in config.peers}

    def run(name: str, number: int, env: dict[str, str]) -> None:
        task = {**asdict(config), "peer": name}
        (found,) = run_ranks(_WORKER, task, ranks=1, timeout_s=config.timeout_s, env=env)
        _add(results[name], found, first=number == 0)
        report.device_name = found["device_name"]

    report.failed = interleaved(results, config.rounds, run)
    report.results = [each for name, each in results.items() if name not in report.failed]
    return report


def _add(result: DeviceResult, found: dict[str, Any], *, first: bool) -> None:
    result.rounds_s.append(found["step_s"])
    if first:
        result.compile_s = found["compile_s"]
        result.resting_bytes, result.peak_bytes = found["resting_bytes"], found["peak_bytes"]
        result.backward_s, result.predicted_s = found["backward_s"], found["predicted_s"]


def device_table(report: DeviceReport) -> str:
    """One line per peer."""
    config, size = report.config, report.config.size
    rows = [
        {
            "peer": result.peer,
            "step ms": result.step_s * 1e3,
            "spread": f"{min(result.rounds_s) * 1e3:.1f} to {max(result.rounds_s) * 1e3:.1f}",
            "ratio": two_decimals(result.ratio(report.results[0])),
            "backward ms": result.backward_s * 1e3,
            "predicted": None if result.predicted_s is None else result.predicted_s * 1e3,
            "at rest MiB": f"{result.resting_bytes / MIB:.0f}",
            "peak MiB": None if result.peak_bytes is None else f"{result.peak_bytes / MIB:.0f}",
            "first step s": result.compile_s,
        }
        for result in report.results
    ]
    about = (
        f"one rank of {config.ranks} on {report.device_name}, which communicates nothing; bf16, "
        f"{size.layers} layers of width {size.width}, {size.batch} x {size.seq} tokens"
    )
    return report_text(report, about, rows)


# --- in the measured process ----------------------------------------------------------------------
_FAST_LINKS: dict[str, Any] = {
    "link_gb_s": 1e9,
    "network_gb_s": 1e9,
    "launch_us": 1e-3,
    "hop_us": 1e-3,
    "network_hop_us": 1e-3,
}
"""Figures of a target whose collectives take no time."""


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Train one peer in bf16 on this process's device."""
    dist.init_process_group("fake", store=compat.fake_store(), rank=0, world_size=task["ranks"])
    size, device = ModelSize(**task["size"]), torch.device(task["device"])
    memory: Any = None if device.type == "cpu" else torch.get_device_module(device)
    mesh = init_device_mesh(device.type, (task["ranks"],))
    torch.manual_seed(0)
    with device:
        model = GPT(size).to(torch.bfloat16)
        batch = torch.randint(size.vocab, (size.batch, size.seq))
    trainer = peer_of(task["peer"]).build(model, mesh)
    target, predicted = replace(Target.detect(), **_FAST_LINKS), list[float]()

    def predict(event: ObservedGraph) -> None:
        if event.kind in ("forward", "backward"):
            predicted.append(step_time([event.graph], target).total_us / 1e6)

    def wait() -> None:
        if memory is not None:
            memory.synchronize()

    def step(*, updates: bool = True) -> float:
        """Returns the duration of a step; without the update, if that is not asked for."""
        wait()
        started = time.perf_counter()
        trainer.backward(batch, batch)
        if updates:
            trainer.update()
        wait()
        took = time.perf_counter() - started
        if not updates:
            trainer.update()
        return took

    with observe_graphs(predict):
        warmup = [step() for _ in range(task["warmup"])]
    gc.collect()  # compiling leaves reference cycles that hold tensors
    resting, peak = 0, None
    if memory is not None:
        resting = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        trainer.backward(batch, batch)
        wait()
        peak = memory.max_memory_allocated() - resting
        trainer.update()
    return {
        "step_s": statistics.median(step() for _ in range(task["steps"])),
        "compile_s": warmup[0],
        "resting_bytes": resting,
        "peak_bytes": peak,
        "backward_s": statistics.median(step(updates=False) for _ in range(task["steps"])),
        "predicted_s": sum(predicted) if predicted else None,
        "device_name": "the CPU" if memory is None else memory.get_device_name(),
    }


if __name__ == "__main__":
    rank_main(measure)
