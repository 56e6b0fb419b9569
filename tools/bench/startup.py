"""The suite "startup": wall time of `zpasses`, compared with an interpreter that does nothing and
with `import torch`.
"""

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
    """Timed starts of each command, interleaved. One earlier start is not counted."""
    dump: str | None = None
    """A dump for the commands `list` and `memory`; None times only commands that read no dump."""
    timeout_s: float = 600


@dataclass
class StartupResult:
    """Wall time of one command."""

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
    """Start each command repeatedly.

    Raises:
        RankError: if a command fails or exceeds the time limit.
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
