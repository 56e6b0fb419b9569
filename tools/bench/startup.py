"""How long `zpasses` takes to start, beside an interpreter that does nothing and one that imports
torch."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from zpasses.tools.bench.launch import RankError

__all__ = ["StartupConfig", "StartupReport", "StartupResult", "run_startup"]


@dataclass(frozen=True)
class StartupConfig:
    """What to start, and how often."""

    rounds: int = 11
    """Starts of each, interleaved; the first is not counted."""
    dump: str | None = None
    """A dump to list and to look at the memory of; none: only commands that read nothing."""
    timeout_s: float = 600


@dataclass
class StartupResult:
    """Wall time of one command, from start to end."""

    command: str
    rounds_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)


@dataclass
class StartupReport:
    config: StartupConfig
    results: list[StartupResult]


def run_startup(config: StartupConfig) -> StartupReport:
    """Start each command so many times.

    Raises:
        RankError: when one ends with an error or takes too long.
    """
    commands: dict[str, Sequence[str]] = {
        "python": ["-c", "pass"],
        "zpasses --help": ["-m", "zpasses", "--help"],
    }
    if config.dump is not None:
        for name in ("list", "memory"):
            commands[f"zpasses {name} DUMP"] = ["-m", "zpasses", name, config.dump]
    commands["import torch"] = ["-c", "import torch"]
    results = {name: StartupResult(name) for name in commands}
    for number in range(config.rounds + 1):
        for name, arguments in commands.items():
            started = time.perf_counter()
            try:
                done = subprocess.run(
                    [sys.executable, *arguments],
                    capture_output=True,
                    text=True,
                    timeout=config.timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise RankError(f"{name} took longer than {config.timeout_s} s") from error
            if done.returncode:
                raise RankError(
                    f"{name} ended with status {done.returncode}: {done.stderr.strip()}"
                )
            if number:
                results[name].rounds_s.append(time.perf_counter() - started)
    return StartupReport(config, list(results.values()))
