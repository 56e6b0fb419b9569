"""The suite "compile": how long a training program takes until its first step is done, with cold
and with warm compile caches.

Each start is made of new processes. A cold start finds empty caches, and the warm starts find what
the last cold one wrote.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zpasses import compat
from zpasses.tools.bench.launch import rank_main, run_ranks
from zpasses.tools.bench.model import ModelSize, batches, build_model
from zpasses.tools.bench.peers import check_peers, peer_of
from zpasses.tools.bench.report import MIB, report_text

_WORKER = "zpasses.tools.bench.compiling"


@dataclass(frozen=True)
class CompileConfig:
    """What to start, and how often."""

    size: ModelSize = field(default_factory=ModelSize)
    peers: tuple[str, ...] = (
        *("compute-all", "ddp", "fsdp2-compiled", "simple-fsdp"),
        *("zpasses-2", "zpasses-3", "zpasses-3-blocks"),
    )
    """What to start; ratios compare with the first."""
    layers: tuple[int, ...] = (6, 24)
    """Numbers of layers."""
    ranks: int = 2
    """Processes, one thread each."""
    rounds: int = 3
    """Warm starts of every peer, interleaved, after the cold starts."""
    cold_rounds: int = 1
    """Cold starts of every peer, interleaved."""
    timeout_s: float = 600.0
    """Time limit of one start, in seconds."""

    def __post_init__(self) -> None:
        check_peers(self.peers)


@dataclass
class CompileResult:
    """Starts of one peer with one number of layers. Seconds are those of the slowest rank."""

    peer: str
    layers: int
    cold_s: list[float] = field(default_factory=list)
    """From the first call of the model to the end of the first step."""
    warm_s: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    """Warm starts from the start of the processes to the end of the first step: with imports, and
    with the parts of compilers that some peers load earlier."""
    step_s: list[float] = field(default_factory=list)
    """The third step of every start, which compiles nothing."""
    graphs: int = 0
    """Graphs that Dynamo captured."""
    generated: int = 0
    """Graphs that Inductor generated code for in the cold start, on one rank."""
    generated_warm: int = 0
    """The same in a warm start."""
    cache_bytes: int = 0
    """Size of all caches of all ranks after the cold start."""


@dataclass
class CompileReport:
    config: CompileConfig
    results: list[CompileResult]
    skipped: dict[str, str]
    """Peer -> why it cannot run here."""


def run_compile(config: CompileConfig) -> CompileReport:
    """Start every peer with every number of layers.

    Raises:
        RankError: if a rank fails or exceeds the time limit.
    """
    skipped = {name: reason for name in config.peers if (reason := peer_of(name).missing())}
    names = [name for name in config.peers if name not in skipped]
    results: list[CompileResult] = []
    for layers in config.layers:
        found = {name: CompileResult(name, layers) for name in names}
        with contextlib.ExitStack() as stack:
            for _ in range(config.cold_rounds):
                stack.close()  # deletes the caches of the round before
                folder = tempfile.TemporaryDirectory(prefix="zpasses-bench-caches-")
                caches = stack.enter_context(folder)
                for name in names:
                    _add_cold_start(config, found[name], caches)
            for _ in range(config.rounds):
                for name in names:
                    _add_warm_start(config, found[name], caches)
        results += found.values()
    return CompileReport(config, results, skipped)


def _add_cold_start(config: CompileConfig, result: CompileResult, caches: str) -> None:
    ranks = _start(config, result.peer, result.layers, caches)
    result.cold_s.append(max(each["first_s"] for each in ranks))
    result.step_s.append(max(each["step_s"] for each in ranks))
    result.graphs, result.generated = ranks[0]["graphs"], ranks[0]["generated"]
    files = Path(caches, result.peer).rglob("*")
    result.cache_bytes = sum(each.stat().st_size for each in files if each.is_file())


def _add_warm_start(config: CompileConfig, result: CompileResult, caches: str) -> None:
    ranks = _start(config, result.peer, result.layers, caches)
    result.warm_s.append(max(each["first_s"] for each in ranks))
    result.start_s.append(max(each["start_s"] for each in ranks))
    result.step_s.append(max(each["step_s"] for each in ranks))
    result.generated_warm = ranks[0]["generated"]


def _start(config: CompileConfig, peer: str, layers: int, caches: str) -> Sequence[dict[str, Any]]:
    size = {**vars(config.size), "layers": layers}
    return run_ranks(
        _WORKER,
        {"peer": peer, "size": size, "started": time.time()},
        ranks=peer_of(peer).ranks or config.ranks,
        timeout_s=config.timeout_s,
        env={"TORCHINDUCTOR_CACHE_DIR": str(Path(caches, peer))},
    )


def compile_table(report: CompileReport) -> str:
    """One line per peer and number of layers. Ratios compare medians with the first peer's."""
    first = {each.layers: each for each in reversed(report.results)}
    rows = []
    for each in report.results:
        row: dict[str, Any] = {"layers": each.layers, "peer": each.peer}
        for name in ("cold", "warm", "start"):
            times, others = (getattr(one, f"{name}_s") for one in (each, first[each.layers]))
            median = statistics.median(times)
            row[f"{name} s, median"] = median
            row |= {f"{name} least s": min(times), f"{name} most s": max(times)}
            row[f"{name}, ratio"] = f"{median / statistics.median(others):.2f}x"
        row |= {"step s": f"{statistics.median(each.step_s):.2f}", "graphs": each.graphs}
        row |= {"generated": each.generated, "again": each.generated_warm}
        rows.append({**row, "caches MiB": each.cache_bytes / MIB})
    return report_text(report, rows)


# --- in the measured process ----------------------------------------------------------------------
def measure(task: dict[str, Any]) -> dict[str, Any]:
    """One rank of a start."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    size = ModelSize(**task["size"])
    trainer = peer_of(task["peer"]).build(build_model(size), mesh)
    times = []
    for batch in batches(size, 3, dist.get_rank()):
        dist.barrier()
        started = time.perf_counter()
        trainer.backward(*batch)
        trainer.update()
        times.append(time.perf_counter() - started)
        if len(times) == 1:
            start_s = time.time() - task["started"]
    counts = compat.compile_counts()
    found = {"start_s": start_s, "first_s": times[0], "step_s": times[-1]}
    return {**found, "graphs": counts["captured"], "generated": counts["generated"]}


if __name__ == "__main__":
    rank_main(measure)
