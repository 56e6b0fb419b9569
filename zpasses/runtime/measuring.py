"""The part of `zpasses measure` within a training process: it records some steps with a profiler.

The command sets the environment variable `ZPASSES_MEASURE` to a folder with a request. Every rank
writes a trace and a report, and the command then ends the job.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "REQUEST_FILE",
    "MeasureReport",
    "MeasureRequest",
    "read_reports",
    "start_if_requested",
    "trace_name",
]

ENVIRONMENT_VARIABLE = "ZPASSES_MEASURE"
REQUEST_FILE = "request.json"


@dataclass(frozen=True)
class MeasureRequest:
    """What to record."""

    output: str
    """Folder for the traces."""
    warmup: int
    steps: int
    """Optimizer steps before the recording, and within it."""


@dataclass(frozen=True)
class MeasureReport:
    """One rank that has recorded."""

    rank: int
    world: int


def trace_name(rank: int) -> str:
    """Name of a rank's trace in the folder of the dump."""
    return f"trace-rank{rank}.json.gz"


def read_reports(folder: Path) -> list[MeasureReport]:
    """Returns the reports that have been written, by rank."""
    found = [MeasureReport(**json.loads(path.read_text())) for path in folder.glob("rank*.json")]
    return sorted(found, key=lambda each: each.rank)


def start_if_requested() -> None:
    """Count optimizer steps and record some of them, if `zpasses measure` runs this process."""
    folder = os.environ.get(ENVIRONMENT_VARIABLE)
    if folder and folder not in _sessions:
        request = MeasureRequest(**json.loads((Path(folder) / REQUEST_FILE).read_text()))
        _sessions[folder] = _Session(Path(folder), request)


class _Session:
    def __init__(self, folder: Path, request: MeasureRequest) -> None:
        self._folder, self._request = folder, request
        self._steps = 0
        self._optimizer: int | None = None
        self._profile: torch.profiler.profile | None = None
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._optimizer is None:
            self._optimizer = id(optimizer)  # another optimizer of the same step does not count
        if id(optimizer) != self._optimizer:
            return
        self._steps += 1
        if self._steps == self._request.warmup:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self._profile = torch.profiler.profile(profile_memory=True)
            self._profile.start()
        elif self._steps == self._request.warmup + self._request.steps:
            self._finish()

    def _finish(self) -> None:
        assert self._profile is not None
        self._profile.add_metadata_json("zpasses", json.dumps(self._process()))
        self._profile.stop()
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        path = Path(self._request.output) / trace_name(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".zpasses-{path.name}")
        self._profile.export_chrome_trace(str(temporary))
        temporary.replace(path)
        self._profile = None
        report = self._folder / f".rank{rank}"
        report.write_text(json.dumps(asdict(MeasureReport(rank, world))))
        report.replace(self._folder / f"rank{rank}.json")

    def _process(self) -> dict[str, int]:
        unit = 1 if sys.platform == "darwin" else 1024
        found = {
            "steps": self._request.steps,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        }
        if torch.cuda.is_available():
            found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        return found


_sessions: dict[str, _Session] = {}
"""Folder of a request -> its session in this process."""
