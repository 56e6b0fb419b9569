"""One rank of a training measurement: `python -m zpasses.tools.bench.worker TASK RESULT`, which
`launch.run_ranks` starts.

The kind of the task selects what to do. "time" trains and records times, losses and collectives.
"memory" trains three steps and measures the memory of the process in a fourth. "bounds" times bare
collectives over the bytes of all parameters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zpasses.tools.bench.launch import rank_main
from zpasses.tools.bench.measure import (
    PassTime,
    ResidentMemory,
    Traffic,
    observe_pass_time,
    sent_bytes,
    settled_bytes,
    traffic,
)
from zpasses.tools.bench.model import (
    GPT,
    ModelSize,
    ParallelBlock,
    batches,
    build_model,
    parallelize,
)
from zpasses.tools.bench.peers import peer_of
from zpasses.tools.capture.mesh_shapes import MeshShape

MEMORY_WARMUP = 3
_BOUND_REPEATS = 5


def measure(task: dict[str, Any]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    return _KINDS[task["kind"]](task, ModelSize(**task["size"]), _meshes_of(task))


@dataclass(frozen=True)
class _Meshes:
    data: DeviceMesh
    """Over which the model is sharded: one dimension, or (replicate, shard)."""
    tensor: DeviceMesh | None
    """That of tensor parallelism."""
    part: int
    """Number of this rank's batches: ranks of tensor parallelism share theirs."""


def _meshes_of(task: dict[str, Any]) -> _Meshes:
    if task["mesh"] is None:
        data = init_device_mesh("cpu", (dist.get_world_size(),))
        return _Meshes(data, None, dist.get_rank())
    shape = MeshShape.parse(task["mesh"])
    mesh = init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)
    names = shape.data_names
    part = 0
    for name in names:
        part = part * mesh[name].size() + mesh[name].get_local_rank()
    data = mesh if names == shape.names else mesh[names if len(names) > 1 else names[0]]
    return _Meshes(data, mesh["tp"] if "tp" in shape.names else None, part)


def _model(size: ModelSize, meshes: _Meshes) -> GPT:
    if meshes.tensor is None:
        return build_model(size)
    model = build_model(size, ParallelBlock)
    parallelize(model, meshes.tensor)
    return model


def _steps(
    task: dict[str, Any], count: int, size: ModelSize, meshes: _Meshes
) -> list[list[tuple[Tensor, Tensor]]]:
    """The batches of each step on this rank."""
    each = task["backwards"]
    data = batches(size, count * each, meshes.part)
    return [data[start : start + each] for start in range(0, len(data), each)]


def _time(task: dict[str, Any], size: ModelSize, meshes: _Meshes) -> dict[str, Any]:
    """Seconds of every step, the losses, and what communicated in the timed steps."""
    warmup, steps = task["warmup"], task["steps"]
    data = _steps(task, warmup + steps, size, meshes)
    losses: list[Tensor] = []
    times = []
    with observe_pass_time() as work:
        trainer = peer_of(task["peer"]).build(_model(size, meshes), meshes.data)
        for number, step in enumerate(data):
            if number == warmup:
                before = traffic()
            started = time.perf_counter()
            losses.append(trainer.accumulate(step, task["reduce"] == "step"))
            trainer.update()
            times.append(time.perf_counter() - started)
    return timed(times, warmup, before, work, losses)


def timed(
    times: Sequence[float], warmup: int, before: Traffic, work: PassTime, losses: Iterable[Tensor]
) -> dict[str, Any]:
    """The result of a run that has just ended.

    Args:
        times: seconds of every step.
        before: collectives until the first timed step.
        losses: of every step.
    """
    step_s = statistics.median(times[warmup:])
    communicated = traffic().per_step(before, len(times) - warmup)
    return {
        "step_s": step_s,
        "compile_s": sum(max(each - step_s, 0.0) for each in times[:warmup]),
        "passes_s": work.passes_s,
        "checks_s": work.checks_s,
        "losses": [float(loss) for loss in losses],
        "collectives": communicated.counts,
        "sent_bytes": communicated.sent_bytes,
    }


def _memory(task: dict[str, Any], size: ModelSize, meshes: _Meshes) -> dict[str, Any]:
    """Bytes held at several points of a step, the peak that it adds, and the norm of a gradient."""
    data = _steps(task, MEMORY_WARMUP + 1, size, meshes)
    once = task["reduce"] == "step"
    trainer = peer_of(task["peer"]).build(_model(size, meshes), meshes.data)
    for step in data[:-1]:
        trainer.accumulate(step, once)
        norm = trainer.gradient_norm()
        trainer.update()
    dist.barrier()
    held: list[int] = []

    def look() -> None:
        held.append(settled_bytes() + trainer.untracked_bytes)

    look()
    memory = ResidentMemory()
    inside = look if task["backwards"] > 1 else lambda: None
    trainer.accumulate(data[-1], once, inside)
    backward_peak = memory.peak_bytes()
    inside()
    trainer.update()
    return {
        "resting_bytes": held[0],
        "peak_bytes": memory.peak_bytes(),
        "backward_peak_bytes": backward_peak,
        "window_bytes": held[1] - held[0] if held[1:] else 0,
        "after_bytes": held[-1] - held[0],
        "gradient_norm": norm,
    }


def _bounds(task: dict[str, Any], size: ModelSize, meshes: _Meshes) -> dict[str, Any]:
    """Median seconds of one collective over the bytes of all parameters, and what a rank sends for
    it.
    """
    ranks = dist.get_world_size()
    rows = -(-sum(param.numel() for param in build_model(size).parameters()) // ranks)
    full, part = torch.zeros(rows * ranks), torch.zeros(rows)
    group, functional = meshes.data.get_group().group_name, torch.ops._c10d_functional
    started: dict[str, Callable[[], Tensor]] = {
        "all_gather": lambda: functional.all_gather_into_tensor(part, ranks, group),
        "reduce_scatter": lambda: functional.reduce_scatter_tensor(full, "avg", ranks, group),
        "all_reduce": lambda: functional.all_reduce(full, "avg", group),
    }
    nbytes = full.numel() * full.element_size()
    given = {"all_gather": nbytes // ranks, "reduce_scatter": nbytes, "all_reduce": nbytes}
    return {
        "bytes": nbytes,
        "time_s": {kind: _median_s(start) for kind, start in started.items()},
        "sent_bytes": {kind: sent_bytes(kind, given[kind]) for kind in started},
    }


def _median_s(start: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(_BOUND_REPEATS + 1):
        dist.barrier()
        began = time.perf_counter()
        torch.ops._c10d_functional.wait_tensor(start())
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


_KINDS = {"time": _time, "memory": _memory, "bounds": _bounds}

if __name__ == "__main__":
    rank_main(measure)
