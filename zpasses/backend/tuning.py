"""The part of `zpasses tune` within a training process: options to try, and how long a step takes.

The command sets the environment variable `ZPASSES_TUNE` to a folder with a request. Every rank
writes a report there after enough optimizer steps, and the command then ends the job.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from zpasses.backend.capture import Capture
from zpasses.backend.step_trials import StepTrials
from zpasses.cost.target import Target, current_target
from zpasses.pipeline.events import listen
from zpasses.pipeline.options import Options

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "REQUEST_FILE",
    "Candidate",
    "StepReport",
    "TuningRequest",
    "read_reports",
    "with_tried_options",
]

ENVIRONMENT_VARIABLE = "ZPASSES_TUNE"
REQUEST_FILE = "request.json"


@dataclass(frozen=True)
class TuningRequest:
    """What one run of the program tries."""

    options: Mapping[str, str] | None
    """Texts of options that replace the program's choice of passes and memory; None keeps it."""
    warmup: int
    steps: int
    """Optimizer steps that are not timed, and then those that are."""
    budgets: int
    """Number of memory budgets to plan, so that the next runs can try them."""


@dataclass(frozen=True)
class Candidate:
    """A memory budget, and what the cost model expects of it."""

    budget: str
    total_us: float
    peak_bytes: int


@dataclass(frozen=True)
class StepReport:
    """What one rank saw in one run."""

    rank: int
    world: int
    target: str
    stage: int
    step_us: float
    """Median duration of a step, from one optimizer step to the next."""
    spread_us: tuple[float, float]
    """Shortest and longest step."""
    peak_bytes: int | None
    """Most memory that the device's allocator held during the timed steps; None on a CPU."""
    candidates: tuple[Candidate, ...] = ()


def with_tried_options(options: Options, captured: Capture) -> Options:
    """Returns the options that `zpasses tune` tries in this run; outside of it, those given."""
    folder = os.environ.get(ENVIRONMENT_VARIABLE)
    if not folder or captured.share == 0:
        return options
    session = _sessions.setdefault(folder, None) or _open(folder)
    return session.options(options)


def read_reports(folder: Path) -> list[StepReport]:
    """Returns the reports that have been written, by rank."""
    found = []
    for path in folder.glob("rank*.json"):
        content = json.loads(path.read_text())
        content["candidates"] = tuple(Candidate(**each) for each in content["candidates"])
        content["spread_us"] = tuple(content["spread_us"])
        found.append(StepReport(**content))
    return sorted(found, key=lambda each: each.rank)


def _open(folder: str) -> _Session:
    request = TuningRequest(**json.loads((Path(folder) / REQUEST_FILE).read_text()))
    session = _sessions[folder] = _Session(Path(folder), request)
    return session


@dataclass
class _Session:
    folder: Path
    request: TuningRequest
    candidates: list[Candidate] = field(default_factory=list)
    target: str = ""
    stage: int = 3
    times: list[float] = field(default_factory=list)
    """When the first optimizer of the program ended a step, in seconds."""
    optimizer: int | None = None
    listening: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Until the process ends."""

    def __post_init__(self) -> None:
        register_optimizer_step_post_hook(self._after_step)
        if self.request.budgets and _rank() == 0:
            self.listening.enter_context(listen(StepTrials, self._plan))

    def options(self, options: Options) -> Options:
        target = Target.parse(options.target) if options.target else current_target()
        self.target, self.stage = str(target), options.zero_stage or 3
        tried = self.request.options
        if tried is None:
            return options
        given = {each.name: getattr(options, each.name) for each in fields(options)}
        replaced = ("pipeline", "memory_budget", *(["zero_stage"] if "pipeline" in tried else []))
        return Options.parse({**given, **dict.fromkeys(replaced), **tried})

    def _plan(self, trials: StepTrials) -> None:
        """Notes what the cost model expects of budgets from the leanest plan to the fastest."""
        if self.candidates:
            return
        least, most = trials.trial(1.0).step.peak_bytes(), trials.most_bytes()
        known = set()
        for number in range(self.request.budgets):
            limit = least + (most - least) * number // max(1, self.request.budgets - 1)
            unit, size = ("MiB", 1 << 20) if limit > 64 << 20 else ("KiB", 1 << 10)
            rounded = -(-limit // size)
            plan = trials.fastest(rounded * size)
            key = plan.choice, plan.total_us
            if plan.fits and key not in known:
                known.add(key)
                self.candidates.append(
                    Candidate(f"{rounded}{unit}", plan.total_us, plan.peak_bytes)
                )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self.optimizer is None:
            self.optimizer = id(optimizer)
        if id(optimizer) != self.optimizer:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        if len(self.times) == self.request.warmup and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if len(self.times) == self.request.warmup + self.request.steps:
            self._report()

    def _report(self) -> None:
        timed = self.times[self.request.warmup - 1 :]
        took = [1e6 * (end - start) for start, end in itertools.pairwise(timed)]
        report = StepReport(
            _rank(),
            dist.get_world_size() if dist.is_initialized() else 1,
            self.target,
            self.stage,
            statistics.median(took),
            (min(took), max(took)),
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            tuple(self.candidates),
        )
        temporary = self.folder / f".rank{report.rank}"
        temporary.write_text(json.dumps(asdict(report)))
        temporary.replace(self.folder / f"rank{report.rank}.json")


_sessions: dict[str, _Session | None] = {}
"""Folder of a request -> its session in this process."""


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
