"""Runs a training program with a dump and a profiler on every rank, for a few steps."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from zpasses.errors import ZpassesError
from zpasses.runtime.measuring import (
    ENVIRONMENT_VARIABLE,
    REQUEST_FILE,
    MeasureRequest,
    read_reports,
    trace_name,
)
from zpasses.tools.programs import program_command, run_limited

__all__ = ["MeasureError", "MeasureRun", "run_measure"]


class MeasureError(ZpassesError):
    """Measuring is impossible: the program fails, or does not train with zpasses."""


@dataclass(frozen=True)
class MeasureRun:
    """What to run, and how long."""

    command: tuple[str, ...]
    """A Python file with its arguments, or any command, such as one of torchrun."""
    output: Path
    """Folder for the dump and the traces."""
    warmup: int = 3
    steps: int = 3
    timeout_s: float = 1800.0


def run_measure(run: MeasureRun, progress: Callable[[str], object]) -> list[Path]:
    """Run the program. Returns the traces, by rank.

    Args:
        run: what to run.
        progress: called with a line before the run.

    Raises:
        MeasureError: if the folder is not empty, or the program fails, writes no dump or ends
            before enough optimizer steps.
    """
    output = run.output.absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise MeasureError(
            f"{run.output} exists and is no empty folder; name a new one with --output, because a "
            "dump holds one run."
        )
    with tempfile.TemporaryDirectory(prefix="zpasses-measure-") as name:
        folder = Path(name)
        request = MeasureRequest(str(output), run.warmup, run.steps)
        (folder / REQUEST_FILE).write_text(json.dumps(asdict(request)))
        progress(f"runs {run.warmup} optimizer steps, and records {run.steps} more")

        def complete() -> bool:
            reports = read_reports(folder)
            return bool(reports) and len(reports) == reports[0].world

        failure, tail = run_limited(
            program_command(run.command),
            {
                **os.environ,
                "ZPASSES_DUMP": str(output),
                "ZPASSES_DUMP_RANKS": "all",
                ENVIRONMENT_VARIABLE: str(folder),
            },
            folder / "log.txt",
            run.timeout_s,
            complete,
        )
        ended = f"ended before {run.warmup + run.steps} optimizer steps of compiled graphs"
        if not complete():
            raise MeasureError(f"The program {failure or ended}. The end of its output:\n{tail}")
        ranks = [each.rank for each in read_reports(folder)]
    return [output / trace_name(rank) for rank in ranks]
