"""The suite "dump": the cost of a dump in a cold compile of the GPT.

Each compile runs in a new process with empty caches, as rank 0 of a fake process group of two
ranks.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import zpasses
from zpasses.testing import fake_world
from zpasses.tools.bench.launch import run_ranks
from zpasses.tools.bench.model import ModelSize, batches, build_model

__all__ = ["DumpConfig", "DumpReport", "DumpResult", "run_dump"]

_WORKER = "zpasses.tools.bench.dumping"


@dataclass(frozen=True)
class DumpConfig:
    """What to compile, and how often."""

    size: ModelSize
    stage: int = 3
    codegen: str = "inductor"
    rounds: int = 3
    """Alternating compiles with and without a dump."""
    timeout_s: float = 600.0


@dataclass
class DumpResult:
    """Compiles with a dump, or without one."""

    dumped: bool
    rounds_s: list[float] = field(default_factory=list)
    """Seconds of the first step of each round, minus those of a step without compilation."""
    dump_bytes: int = 0
    """Size of all files of one dump."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)


@dataclass
class DumpReport:
    config: DumpConfig
    results: list[DumpResult]
    ratio: float = 0.0
    """Median over rounds of the time with a dump relative to the time without."""


def run_dump(config: DumpConfig) -> DumpReport:
    """Compile with and without a dump.

    Raises:
        RankError: if a process fails or exceeds the time limit.
    """
    plain, dumped = DumpResult(False), DumpResult(True)
    for _ in range(config.rounds):
        for result in (plain, dumped):
            with tempfile.TemporaryDirectory(prefix="zpasses-bench-") as folder:
                job = {
                    **asdict(config),
                    "dump": str(Path(folder, "dump")) if result.dumped else None,
                }
                env = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "cache"))}
                (took_s,) = run_ranks(_WORKER, job, ranks=1, timeout_s=config.timeout_s, env=env)
                result.rounds_s.append(took_s)
                result.dump_bytes = sum(
                    file.stat().st_size
                    for file in Path(folder, "dump").rglob("*")
                    if file.is_file()
                )
    ratio = statistics.median(
        with_s / without_s
        for with_s, without_s in zip(dumped.rounds_s, plain.rounds_s, strict=True)
    )
    return DumpReport(config, [plain, dumped], ratio)


# --- in the measured process ----------------------------------------------------------------------
def measure(job: dict[str, Any]) -> float:
    """Seconds of the first step minus those of the third."""
    size = ModelSize(**job["size"])
    options = {
        "zero_stage": job["stage"],
        "codegen": job["codegen"],
        **({"dump": job["dump"]} if job["dump"] else {}),
    }
    with fake_world(2) as mesh:
        model = zpasses.shard(build_model(size), mesh=mesh)
        step = torch.compile(model, backend="zpasses", options=options, fullgraph=True)
        seconds = []
        for batch in batches(size, 3, 0):
            started = time.perf_counter()
            step(*batch).backward()
            seconds.append(time.perf_counter() - started)
    return seconds[0] - seconds[-1]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
