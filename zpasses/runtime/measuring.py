"""The part of `zpasses measure` within a training process: it records some steps with a profiler.

Every rank writes a trace and a report, and the command then ends the job.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from zpasses.probe import MeasureRequest, requested, write_report


def rank_and_world() -> tuple[int, int]:
    """Returns the rank of this process, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def call_after_steps(listener: Callable[[int], None]) -> None:
    """Call a function with the number of each optimizer step, from 1 on, after the step. Steps of
    another optimizer than the first that steps do not count.
    """
    first, numbers = list[int](), itertools.count(1)

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not first:
            first.append(id(optimizer))
        if id(optimizer) == first[0]:
            listener(next(numbers))

    register_optimizer_step_post_hook(stepped)


def trace_name(rank: int) -> str:
    """Name of a rank's trace in the folder of the dump."""
    return f"trace-rank{rank}.json.gz"


def start_if_requested() -> None:
    """Count optimizer steps and record some of them, if `zpasses measure` runs this process."""
    found = requested(MeasureRequest)
    if found is not None and found[0] not in _sessions:
        _sessions[found[0]] = _Session(*found)


class _Session:
    def __init__(self, folder: Path, request: MeasureRequest) -> None:
        self._folder, self._request = folder, request
        self._profile: torch.profiler.profile | None = None
        call_after_steps(self._after_step)

    def _after_step(self, number: int) -> None:
        if number == self._request.warmup:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self._profile = torch.profiler.profile(profile_memory=True)
            self._profile.start()
        elif number == self._request.warmup + self._request.steps:
            self._finish()

    def _finish(self) -> None:
        assert self._profile is not None
        self._profile.add_metadata_json("zpasses", json.dumps(self._process()))
        self._profile.stop()
        rank, world = rank_and_world()
        path = Path(self._request.output) / trace_name(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".zpasses-{path.name}")
        self._profile.export_chrome_trace(str(temporary))
        temporary.replace(path)
        self._profile = None
        write_report(self._folder, rank, world)

    def _process(self) -> dict[str, int]:
        unit = 1 if sys.platform == "darwin" else 1024
        found = {
            "steps": self._request.steps,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        }
        if torch.cuda.is_available():
            found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        return found


_sessions: dict[Path, _Session] = {}
"""Folder of a request -> its session in this process."""
