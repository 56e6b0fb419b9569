"""The suite "buckets": collectives of a model with many small and some large parameters. They run
one by one, coalesced, flat, or as `auto` chooses, with several bucket sizes. FSDP2, which gathers
one layer at a time, is the comparison.

Each form trains in new processes on the same data, once for time and once for memory. zpasses'
forms differ only in the options of the pass `bucket`.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import zpasses
from zpasses.cost.memory import liveness
from zpasses.passes import Bucket
from zpasses.pipeline.events import ObservedGraph, observe_graphs
from zpasses.pipeline.pipeline import Pipeline
from zpasses.tools.bench.launch import RankError, run_ranks
from zpasses.tools.bench.measure import ResidentMemory, traffic

__all__ = ["FORMS", "BucketsConfig", "BucketsReport", "BucketsResult", "run_buckets"]

_WORKER = "zpasses.tools.bench.buckets"
_PARAMS_PER_LAYER = 4
_LOSS_TOLERANCE = 1e-4
_MEMORY_WARMUP = 3
_SETTLE_S = 0.2

FORMS = ("single", "coalesced", "flat", "auto", "fsdp2")
"""What can be run. "single" is `bucket{cap_mb=0}`, the baseline."""


@dataclass(frozen=True)
class BucketsConfig:
    """The model, and how it is measured."""

    params: int = 400
    """Number of small parameters. Each layer has two of a LayerNorm and two of a linear map."""
    width: int = 64
    large: int = 0
    """Number of large parameters: square matrices among the layers."""
    large_width: int = 1024
    batch: int = 16
    stage: int = 3
    caps: tuple[float, ...] = ()
    """Bucket sizes in MiB; empty is the size of the stage's named pipeline."""
    memory_budget: str = "5%"
    codegen: str = "inductor"
    ranks: int = 2
    steps: int = 20
    """Timed steps per run."""
    warmup: int = 3
    """Untimed steps before them, which include compilation."""
    rounds: int = 1
    """Runs per form, interleaved, so that a form and the baseline run close together in time."""
    forms: tuple[str, ...] = FORMS
    timeout_s: float = 600.0

    def runs(self) -> list[tuple[str, float | None]]:
        """(form, bucket size) of each run."""
        bucketed = ("coalesced", "flat", "auto")
        return [
            (form, cap)
            for form in self.forms
            for cap in ((self.caps or (None,)) if form in bucketed else (None,))
        ]


@dataclass
class BucketsResult:
    """Results of one form: the slowest or the largest of all ranks."""

    form: str
    cap_mb: float | None
    rounds_s: list[float]
    """Median step time of each round, seconds."""
    collectives: float
    """Per step."""
    sent_bytes: float
    """Sent by one rank, per step."""
    peak_bytes: int
    """Peak memory of a step above the resting state, as the kernel counts it."""
    modelled_bytes: int | None
    """The larger of the peaks of forward and backward, by zpasses' memory model."""
    loss: float
    """Loss of the last step, averaged over ranks."""
    step_s: float = 0.0
    """Median of the rounds, seconds."""
    ratio: float | None = None
    """Median over rounds of the step time relative to the baseline's in the same round."""
    modelled_ratio: float | None = None
    """Modelled peak relative to the baseline's."""


@dataclass
class BucketsReport:
    config: BucketsConfig
    results: list[BucketsResult] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Form -> reason."""


def run_buckets(config: BucketsConfig) -> BucketsReport:
    """Measure each form, and compare it with the form "single"."""
    report = BucketsReport(config)
    found: dict[tuple[str, float | None], BucketsResult] = {}
    for _ in range(config.rounds):
        for form, cap in config.runs():
            if form in report.failed:
                continue
            try:
                ranks = _run(config, form, cap, "time")
                step_s = max(rank["step_s"] for rank in ranks)
                if (form, cap) in found:
                    found[form, cap].rounds_s.append(step_s)
                    continue
                peak = max(rank["peak_bytes"] for rank in _run(config, form, cap, "memory"))
            except RankError as error:
                report.failed[form] = str(error)
                continue
            modelled = max(
                (rank["modelled_bytes"] for rank in ranks if rank["modelled_bytes"]), default=None
            )
            loss = statistics.mean(rank["loss"] for rank in ranks)
            first = ranks[0]
            found[form, cap] = BucketsResult(
                form, cap, [step_s], first["collectives"], first["sent_bytes"], peak, modelled, loss
            )
    report.results = [found[run] for run in config.runs() if run in found]
    _relate(report)
    return report


def _run(config: BucketsConfig, form: str, cap: float | None, kind: str) -> list[Any]:
    job = {**asdict(config), "form": form, "cap": cap, "kind": kind}
    env = ResidentMemory.ENVIRONMENT if kind == "memory" else None
    return run_ranks(_WORKER, job, ranks=config.ranks, timeout_s=config.timeout_s, env=env)


def _relate(report: BucketsReport) -> None:
    for each in report.results:
        each.step_s = statistics.median(each.rounds_s)
    base = next((each for each in report.results if each.form == "single"), None)
    if base is None:
        return
    for each in report.results:
        each.ratio = statistics.median(
            own / other for own, other in zip(each.rounds_s, base.rounds_s, strict=False)
        )
        if each.modelled_bytes and base.modelled_bytes:
            each.modelled_ratio = each.modelled_bytes / base.modelled_bytes
        if abs(each.loss - base.loss) > _LOSS_TOLERANCE * abs(base.loss):
            report.failed[each.form] = (
                f"training differs: the last loss is {each.loss:.6g}, and that of single "
                f"{base.loss:.6g}"
            )


# --- in the measured processes --------------------------------------------------------------------
class Layer(nn.Module):
    """A linear map of a normalised input, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.mix(self.norm(x)))
        return y


class Wide(nn.Module):
    """One large square matrix, applied to copies of a narrow input."""

    def __init__(self, width: int, large: int) -> None:
        super().__init__()
        self.copies = large // width
        self.mix = nn.Linear(large, large, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (
            torch.tanh(self.mix(x.repeat(1, self.copies))).unflatten(1, (self.copies, -1)).mean(1)
        )
        return x + y


class Model(nn.Module):
    """Layers with small parameters, and large parameters spread among them."""

    def __init__(self, params: int, width: int, large: int, large_width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [Layer(width) for _ in range(params // _PARAMS_PER_LAYER)]
        for number in range(large):
            layers.insert((number + 1) * len(layers) // (large + 1), Wide(width, large_width))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """A scalar; `x` is [batch, width]."""
        y = x
        for layer in self.layers:
            y = layer(y)
        return (y - x).square().mean()


def pipeline(stage: int, form: str, cap_mb: float | None, memory_budget: str) -> str:
    """A stage with `bucket`, as text, with the options of `bucket` that a form needs."""
    changes: dict[str, Any] = (
        {"cap_mb": 0.0} if form == "single" else {"mode": form, "memory_budget": memory_budget}
    )
    if cap_mb is not None:
        changes["cap_mb"] = cap_mb
    named = Pipeline.parse(f"zero{max(stage, 2)}-one-ahead")
    return ",".join(
        str(replace(each, **changes) if isinstance(each, Bucket) else each) for each in named
    )


def _build(job: dict[str, Any], mesh: DeviceMesh) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = Model(job["params"], job["width"], job["large"], job["large_width"])
    if job["form"] == "fsdp2":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, model
    zpasses.shard(model, mesh=mesh)
    text = pipeline(job["stage"], job["form"], job["cap"], job["memory_budget"])
    return model, torch.compile(
        model, backend="zpasses", options={"pipeline": text, "codegen": job["codegen"]}
    )


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one form on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, step = _build(job, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(job["batch"], job["width"])
    modelled: list[int] = []

    def look(graph: ObservedGraph) -> None:
        if graph.kind in ("forward", "backward"):
            modelled.append(liveness(graph.graph).peak_bytes)

    def train() -> Tensor:
        loss = step(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with observe_graphs(look):
        if job["kind"] == "memory":
            return {"peak_bytes": _peak_bytes(train)}
        times = []
        for number in range(job["warmup"] + job["steps"]):
            if number == job["warmup"]:
                before = traffic()
            started = time.perf_counter()
            loss = train()
            times.append(time.perf_counter() - started)
    ran = traffic().per_step(before, job["steps"])
    return {
        "step_s": statistics.median(times[job["warmup"] :]),
        "collectives": sum(ran.counts.values()),
        "sent_bytes": sum(ran.sent_bytes.values()),
        "modelled_bytes": max(modelled, default=None),
        "loss": float(loss),
    }


def _peak_bytes(train: Callable[[], Tensor]) -> int:
    for _ in range(_MEMORY_WARMUP):
        train()
    dist.barrier()
    gc.collect()
    time.sleep(_SETTLE_S)  # gloo's threads release a collective's tensors some time after its wait
    memory = ResidentMemory()
    train()
    return memory.peak_bytes()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
    dist.barrier()
    dist.destroy_process_group()
