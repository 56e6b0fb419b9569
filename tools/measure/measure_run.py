"""Runs a training program with a dump and a profiler on every rank, for a few steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zpasses.errors import ZpassesError
from zpasses.probe import MeasureRequest, all_reported, read_reports
from zpasses.runtime.measuring import trace_name
from zpasses.tools.new_folder import check_new
from zpasses.tools.programs import run_probed


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
        MeasureError: if the program fails, writes no dump or ends before enough optimizer steps.
        FolderError: if the folder is not empty.
    """
    output = run.output.absolute()
    check_new(output)
    with tempfile.TemporaryDirectory(prefix="zpasses-measure-") as name:
        folder = Path(name)
        request = MeasureRequest(str(output), run.warmup, run.steps)
        progress(f"runs {run.warmup} optimizer steps, and records {run.steps} more")
        dump = {"ZPASSES_DUMP": str(output), "ZPASSES_DUMP_RANKS": "all"}
        failure, tail = run_probed(run.command, request, folder, run.timeout_s, dump)
        ended = f"ended before {run.warmup + run.steps} optimizer steps of compiled graphs"
        if not all_reported(folder):
            raise MeasureError(f"The program {failure or ended}. The end of its output:\n{tail}")
        ranks = [each["rank"] for each in read_reports(folder)]
    return [output / trace_name(rank) for rank in ranks]
