"""The suite "buckets": a model of many small parameters, whose collectives go out one by one, coalesced, flat, or as `auto` chooses.

Each form trains in fresh processes, on the same data, with nothing different but the options of the pass `bucket`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from zpasses.tools.bench.launch import RankError, run_ranks
from zpasses.tools.bench.measure import traffic

__all__ = ["MODES", "BucketsConfig", "BucketsReport", "BucketsResult", "run_buckets"]

_WORKER = "zpasses.tools.bench.buckets"
_PARAMS_PER_LAYER = 4

MODES = ("single", "coalesced", "flat", "auto")
"""The forms; "single" is `bucket{mb=0}`, the baseline."""


@dataclass(frozen=True)
class BucketsConfig:
    """What is trained, and how it is measured."""

    params: int = 400
    """Parameters of the model: in each layer the two of a LayerNorm and the two of a linear map."""
    width: int = 64
    batch: int = 16
    stage: int = 3
    memory_budget: str = "5%"
    ranks: int = 2
    steps: int = 20
    """Timed steps of a run."""
    warmup: int = 3
    """Steps before those; compilation falls here."""
    rounds: int = 1
    """Runs of every form, interleaved, so that the ratio to the baseline is between neighbours in time."""
    modes: tuple[str, ...] = MODES
    timeout_s: float = 600.0


@dataclass
class BucketsResult:
    """One form; of all ranks the slowest."""

    mode: str
    rounds_s: list[float]
    """Median step time of each round, seconds."""
    collectives: float
    """Per step."""
    sent_bytes: float
    """By one rank, per step."""
    peak_bytes: int
    """The larger of forward's and backward's peak, by zpasses' memory model."""
    loss: float
    """The last one, the mean of all ranks."""
    step_s: float = 0.0
    """Median of the rounds."""
    ratio: float | None = None
    """Step time over the baseline's in the same round; the median of the rounds."""
    peak_ratio: float | None = None
    """Peak over the baseline's."""


@dataclass
class BucketsReport:
    config: BucketsConfig
    results: list[BucketsResult] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Form -> why."""


def run_buckets(config: BucketsConfig) -> BucketsReport:
    """Measure each form and relate it to the unbucketed one."""
    report = BucketsReport(config)
    found: dict[str, BucketsResult] = {}
    for _ in range(config.rounds):
        for mode in config.modes:
            if mode in report.failed:
                continue
            try:
                ranks = run_ranks(_WORKER, {**asdict(config), "mode": mode}, ranks=config.ranks, timeout_s=config.timeout_s)
            except RankError as error:
                report.failed[mode] = str(error)
                continue
            step_s = max(rank["step_s"] for rank in ranks)
            loss = statistics.mean(rank["loss"] for rank in ranks)
            if mode in found:
                found[mode].rounds_s.append(step_s)
            else:
                peak = max(rank["peak_bytes"] for rank in ranks)
                found[mode] = BucketsResult(mode, [step_s], ranks[0]["collectives"], ranks[0]["sent_bytes"], peak, loss)
    report.results = [found[mode] for mode in config.modes if mode in found]
    _relate(report)
    return report


def _relate(report: BucketsReport) -> None:
    for each in report.results:
        each.step_s = statistics.median(each.rounds_s)
    base = next((each for each in report.results if each.mode == "single"), None)
    if base is None:
        return
    for each in report.results:
        each.ratio = statistics.median(own / other for own, other in zip(each.rounds_s, base.rounds_s, strict=False))
        each.peak_ratio = each.peak_bytes / base.peak_bytes
        if abs(each.loss - base.loss) > 1e-4 * abs(base.loss):
            report.failed[each.mode] = f"trained something else: its last loss is {each.loss:.6g}, that of single {base.loss:.6g}"


# --- in the processes that measure -------------------------------------------------------------------------------------------------
class Layer(nn.Module):
    """A linear map of a normed input, beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.mix(self.norm(x)))
        return y


class Model(nn.Module):
    """As many layers as have so many parameters."""

    def __init__(self, params: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(params // _PARAMS_PER_LAYER))

    def forward(self, x: Tensor) -> Tensor:
        """A scalar; `x` is [batch, width]."""
        y = x
        for layer in self.layers:
            y = layer(y)
        return (y - x).square().mean()


def pipeline(stage: int, mode: str, memory_budget: str) -> str:
    """The named pipeline of a stage, with `bucket` as a form needs it."""
    from zpasses import Pipeline
    from zpasses.passes import Bucket

    changes: dict[str, Any] = {"mb": 0.0} if mode == "single" else {"mode": mode, "memory_budget": memory_budget}
    named = Pipeline.parse(f"zero{stage}")
    return ",".join(str(replace(each, **changes) if isinstance(each, Bucket) else each) for each in named)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One form on this rank."""
    import zpasses
    from zpasses.backend import GraphLog, observe_graphs
    from zpasses.memory import liveness

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = zpasses.shard(Model(job["params"], job["width"]), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    text = pipeline(job["stage"], job["mode"], job["memory_budget"])
    step = torch.compile(model, backend="zpasses", options={"pipeline": text})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(job["batch"], job["width"])
    peaks: list[int] = []

    def look(graph: GraphLog) -> None:
        if graph.kind in ("forward", "backward"):
            peaks.append(liveness(graph.graph).peak_bytes)

    times = []
    with observe_graphs(look):
        for number in range(job["warmup"] + job["steps"]):
            if number == job["warmup"]:
                before = traffic()
            started = time.perf_counter()
            loss = step(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
    ran = traffic().per_step(before, job["steps"])
    return {
        "step_s": statistics.median(times[job["warmup"] :]),
        "collectives": sum(ran.counts.values()),
        "sent_bytes": sum(ran.sent_bytes.values()),
        "peak_bytes": max(peaks),
        "loss": float(loss.detach()),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
    dist.barrier()
    dist.destroy_process_group()
