"""Runs a program repeatedly, with one more pass each time, until it goes wrong. Only the program
imports torch.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zpasses.errors import ZpassesError
from zpasses.probe import BisectTrial
from zpasses.tools.bisect.compare import Journal, first_difference, read_journals
from zpasses.tools.new_folder import FolderError, check_new
from zpasses.tools.programs import run_probed


class BisectError(ZpassesError):
    """Bisection is impossible: the program compiles nothing with zpasses, fails without passes too,
    or is not deterministic.
    """


@dataclass(frozen=True)
class BisectRequest:
    """The program to run, and the criteria for a wrong run."""

    command: tuple[str, ...]
    """A Python file with its arguments, or any command: ("torchrun", "--nproc-per-node", "2",
    "train.py").
    """
    tolerance: float = 1e-3
    """Largest difference of returned values to the run without passes, relative to the norm of each
    tensor.
    """
    calls: int = 32
    """Number of compiled calls to compare on each rank, forwards and backwards counted together."""
    timeout_s: float = 1800.0
    """Time limit of one run. A run that exceeds it is wrong."""
    out: Path | None = None
    """Folder for the log and the dump of every run; None keeps nothing."""


@dataclass(frozen=True)
class TrialOutcome:
    """One run of the program."""

    passes: int | None
    """Number of passes that ran; None is all."""
    failure: str | None
    """The exit status or the timeout that makes the run wrong; None if the program ended normally.
    """
    seconds: float
    journals: Mapping[str, Journal]
    tail: str
    """The last lines of its output."""


@dataclass(frozen=True)
class BisectReport:
    """The result of a bisection."""

    passes: tuple[str, ...]
    """The passes as text, in execution order. If there are several pipelines, each entry has the
    passes of all of them.
    """
    culprit: int | None
    """Index of the first pass after which the run is wrong; None if there is none."""
    reason: str
    """How the run is wrong, or why no pass was found."""
    tail: str = ""
    """The last lines of that run's output, if it failed."""
    runs: int = 0
    """Number of runs."""


def run_bisect(
    request: BisectRequest, on_progress: Callable[[str], None] = lambda _: None
) -> BisectReport:
    """Find the first pass after which a program fails, or returns other values than without passes.

    Args:
        on_progress: receives a line of progress for each run.

    Raises:
        BisectError: if bisection is impossible.
        FolderError: if the folder cannot be used.
    """
    with contextlib.ExitStack() as stack:
        folder = request.out or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="zpasses-bisect-"))
        )
        if request.out is not None:
            _create(request.out)
        return _Bisection(request, folder, on_progress).run()


def _create(folder: Path) -> None:
    check_new(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(
            f"{folder} cannot be created: {error.strerror}; name another folder with -o."
        ) from error


class _Bisection:
    def __init__(
        self, request: BisectRequest, folder: Path, on_progress: Callable[[str], None]
    ) -> None:
        self._request, self._folder, self._on_progress = request, folder, on_progress
        self._runs = 0

    def run(self) -> BisectReport:
        whole = self._try("all passes", None)
        passes = _passes(whole.journals)
        if not whole.journals:
            why = f" It {whole.failure}:\n{whole.tail}" if whole.failure else ""
            raise BisectError(
                f'the program compiled nothing with torch.compile(..., backend="zpasses").{why}'
            )
        reference = self._try("no passes", 0)
        if reference.failure:
            raise BisectError(
                f"the program {reference.failure} without passes too, so no pass is the "
                f"cause:\n{reference.tail}"
            )
        if self._wrong(whole, reference) is None:
            return BisectReport(
                passes, None, "the runs with all passes and without passes agree", runs=self._runs
            )
        again = self._try("no passes, repeated", 0)
        unlike = again.failure or first_difference(
            reference.journals, again.journals, self._request.tolerance
        )
        if unlike:
            raise BisectError(
                f"two runs without passes differ ({unlike}), so runs cannot be compared. "
                "Seed all random numbers "
                "(torch.manual_seed), or set a larger --tolerance."
            )
        for count in range(1, len(passes) + 1):
            outcome = (
                whole if count == len(passes) else self._try(f"and {passes[count - 1]}", count)
            )
            wrong = self._wrong(outcome, reference)
            if wrong:
                return BisectReport(
                    passes, count - 1, wrong, outcome.tail if outcome.failure else "", self._runs
                )
        raise AssertionError("the run with all passes is wrong, but no prefix of the passes is")

    def _wrong(self, outcome: TrialOutcome, reference: TrialOutcome) -> str | None:
        if outcome.failure:
            return f"the program {outcome.failure}"
        return first_difference(reference.journals, outcome.journals, self._request.tolerance)

    def _try(self, what: str, passes: int | None) -> TrialOutcome:
        self._runs += 1
        folder = self._folder / f"{self._runs:02d}-{'all' if passes is None else passes}-passes"
        folder.mkdir()
        self._on_progress(f"run {self._runs}: {what}")
        dump = {} if self._request.out is None else {"ZPASSES_DUMP": str(folder / "dump")}
        started = time.monotonic()
        asked, trial = self._request, BisectTrial(passes, self._request.calls)
        how = (folder, asked.timeout_s, dump)
        failure, tail = run_probed(asked.command, trial, *how, until_reported=False)
        seconds = time.monotonic() - started
        self._on_progress(f"       {failure or 'ended normally'}, {seconds:.0f} s")
        return TrialOutcome(passes, failure, seconds, read_journals(folder), tail)


def _passes(journals: Mapping[str, Journal]) -> tuple[str, ...]:
    found = [each for journal in journals.values() for each in journal.pipelines.values()]
    pipelines = list(dict.fromkeys(found))
    longest = max(map(len, pipelines), default=0)
    return tuple(
        " / ".join(dict.fromkeys(each[at] for each in pipelines if at < len(each)))
        for at in range(longest)
    )
