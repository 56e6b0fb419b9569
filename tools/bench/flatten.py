"""The suite "flatten": one flat buffer made of the same tensors on the host, on the device, and in
parts by all ranks.

Every form runs in new processes on the same tensors, and must produce the same bits. Without an
accelerator the host stands in for the device. The graphs are then the same, but both sides share
memory and cores, so times are no estimate for accelerators.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zpasses import compat, pack_parameters
from zpasses.graph.nodes import calls, nbytes, value_of
from zpasses.pipeline.events import ObservedGraph, observe_graphs
from zpasses.tools.bench.launch import RankError, run_ranks
from zpasses.tools.bench.measure import MemoryProfile, traffic

__all__ = ["FORMS", "FlattenConfig", "FlattenReport", "FlattenResult", "run_flatten"]

_WORKER = "zpasses.tools.bench.flatten"
_MIB = 1 << 20

FORMS = ("host", "plain", "distributed")
"""Forms in execution order."""


@dataclass(frozen=True)
class FlattenConfig:
    """What to flatten, and where."""

    mib: int = 512
    """Size of all tensors together, MiB."""
    tensors: int = 200
    """Number of tensors."""
    ranks: int = 2
    rounds: int = 5
    """Timed runs of each form."""
    device: str = "cpu"
    """Device of the buffer."""
    forms: tuple[str, ...] = FORMS
    timeout_s: float = 600.0


@dataclass(frozen=True)
class FlattenResult:
    """Results of one form: the slowest or the largest of all ranks."""

    form: str
    run_s: float
    """Median time to make the buffer."""
    graph_s: float
    """Median time to trace and rewrite the graph that makes it."""
    moved_bytes: int
    """Copied from the host to the device."""
    host_bytes: int
    """Concatenated on the host."""
    device_bytes: int
    """Concatenated on the device."""
    sent_bytes: float
    """Sent to other ranks."""
    host_peak_bytes: int | None
    """Peak of the host's memory above the tensors; None if the host stands in for the device."""
    device_peak_bytes: int
    """Peak of the device's memory."""
    digest: str
    """Digest of the buffer's bytes."""


@dataclass
class FlattenReport:
    config: FlattenConfig
    results: list[FlattenResult] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Form -> reason."""


def run_flatten(config: FlattenConfig) -> FlattenReport:
    """Measure each form, and compare the buffers."""
    report = FlattenReport(config)
    for form in config.forms:
        try:
            ranks = run_ranks(
                _WORKER,
                {**asdict(config), "form": form},
                ranks=config.ranks,
                timeout_s=config.timeout_s,
            )
        except RankError as error:
            report.failed[form] = str(error)
            continue
        worst = {key: _worst([rank[key] for rank in ranks]) for key in ranks[0]}
        report.results.append(FlattenResult(**worst))
        digests = {rank["digest"] for rank in ranks} | {result.digest for result in report.results}
        if len(digests) > 1:
            report.failed[form] = (
                f"the buffer differs from that of {report.results[0].form}, or between ranks"
            )
    return report


def _worst(values: list[Any]) -> Any:
    return None if None in values else max(values)


# --- in the measured processes --------------------------------------------------------------------
def measure(job: dict[str, Any]) -> FlattenResult:
    """Measure one form on this rank."""
    device = _start(job["device"])
    seen: list[tuple[float, ObservedGraph]] = []
    with (
        observe_graphs(lambda graph: seen.append((time.perf_counter(), graph))),
        MemoryProfile() as memory,
    ):
        tensors = _tensors(job["mib"], job["tensors"])
        _pack(tensors[:2], device, job)  # a warm-up, because the first call loads modules
        seen.clear()
        before = traffic()
        _synchronize(device)
        with memory.mark("flatten"):
            buffer = _pack(tensors, device, job)
            _synchronize(device)
    sent = sum(traffic().sent_bytes.values()) - sum(before.sent_bytes.values())
    digest = hashlib.sha256(buffer.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    del buffer
    timed = [_timed(tensors, device, job, seen) for _ in range(job["rounds"])]
    on_host = device.type == "cpu"
    peaks = {
        each: memory.read("flatten", each)[1]
        for each in ("CPU", *(() if on_host else (device.type.upper(),)))
    }
    moved, host, laid = _bytes(seen[-1][1].graph, job["form"])
    return FlattenResult(
        form=job["form"],
        run_s=statistics.median(run_s for run_s, _ in timed),
        graph_s=statistics.median(graph_s for _, graph_s in timed),
        moved_bytes=moved,
        host_bytes=host,
        device_bytes=laid,
        sent_bytes=sent,
        host_peak_bytes=None if on_host else peaks["CPU"],
        device_peak_bytes=peaks["CPU" if on_host else device.type.upper()],
        digest=digest,
    )


def _start(kind: str) -> torch.device:
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    torch.get_device_module(kind).set_device(device)
    dist.init_process_group(dist.get_default_backend_for_device(kind), device_id=device)
    return device


def _tensors(mib: int, count: int) -> list[torch.Tensor]:
    """Tensors of different sizes, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(count, generator=generator) + 0.1
    sizes = (shares / shares.sum() * mib * _MIB / 4).long().clamp(min=1)
    return [torch.rand(int(size), generator=generator) for size in sizes]


def _pack(tensors: list[torch.Tensor], device: torch.device, job: dict[str, Any]) -> torch.Tensor:
    options = {"tier": job["form"], **({"device": "cpu"} if device.type == "cpu" else {})}
    group = compat.group_name(dist.group.WORLD)
    (flat,) = pack_parameters(
        list(tensors), device=device, group=group, replicated=True, options=options
    )
    return flat.buffer


def _timed(
    tensors: list[torch.Tensor],
    device: torch.device,
    job: dict[str, Any],
    seen: list[tuple[float, Any]],
) -> tuple[float, float]:
    """(seconds to run the graph, seconds to make it)."""
    with observe_graphs(lambda graph: seen.append((time.perf_counter(), graph))):
        dist.barrier()
        _synchronize(device)
        started = time.perf_counter()
        buffer = _pack(tensors, device, job)
        _synchronize(device)
        ended = time.perf_counter()
    del buffer
    return ended - seen[-1][0], seen[-1][0] - started


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


def _bytes(graph: torch.fx.Graph, form: str) -> tuple[int, int, int]:
    """(bytes copied to the device, concatenated on the host, concatenated on the device)."""
    moved = sum(
        nbytes(value_of(node))
        for node in calls(graph, torch.ops.aten._to_copy.default)
        if "device" in node.kwargs
    )
    laid = sum(nbytes(value_of(node)) for node in calls(graph, torch.ops.aten.cat.default))
    return (moved, laid, 0) if form == "host" else (moved, 0, laid)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        json.dumps(asdict(measure(json.loads(Path(sys.argv[1]).read_text()))))
    )
    dist.barrier()
    dist.destroy_process_group()
