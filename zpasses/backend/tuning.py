"""The part of `zpasses tune` within a training process: options to try, and how long a step takes.

Every rank writes a report after enough optimizer steps, and the command then ends the job.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import msgspec
import torch

from zpasses.backend.captured import Capture
from zpasses.backend.step_trials import StepTrials
from zpasses.cost.time.target import Target, current_target
from zpasses.pipeline.events import listen
from zpasses.pipeline.options import Options
from zpasses.probe import TuningRequest, read_reports, requested, write_report
from zpasses.runtime.measuring import call_after_steps, rank_and_world


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
    found = requested(TuningRequest)
    if found is None or captured.share == 0:
        return options
    folder, request = found
    if folder not in _sessions:
        _sessions[folder] = _Session(folder, request)
    return _sessions[folder].options(options)


def step_reports(folder: Path) -> list[StepReport]:
    """Returns the reports that have been written, by rank."""
    return msgspec.convert(read_reports(folder), list[StepReport])


@dataclass
class _Session:
    folder: Path
    request: TuningRequest
    candidates: list[Candidate] = field(default_factory=list)
    target: str = ""
    stage: int = 3
    times: list[float] = field(default_factory=list)
    """When the first optimizer of the program ended a step, in seconds."""
    listening: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Until the process ends."""

    def __post_init__(self) -> None:
        call_after_steps(self._after_step)
        if self.request.budgets and rank_and_world()[0] == 0:
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

    def _after_step(self, number: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        if number == self.request.warmup and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if number == self.request.warmup + self.request.steps:
            self._report()

    def _report(self) -> None:
        timed = self.times[self.request.warmup - 1 :]
        took = [1e6 * (end - start) for start, end in itertools.pairwise(timed)]
        report = StepReport(
            *rank_and_world(),
            self.target,
            self.stage,
            statistics.median(took),
            (min(took), max(took)),
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            tuple(self.candidates),
        )
        write_report(self.folder, **asdict(report))


_sessions: dict[Path, _Session] = {}
"""Folder of a request -> its session in this process."""
