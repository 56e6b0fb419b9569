"""Runs a training program once for each plan, for a few steps, and finds the fastest that fits.

The first run keeps the program's options, and plans the memory budgets that the later runs try. The
backend in the program times the steps: see `zpasses.backend.tuning`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from zpasses.backend.tuning import StepReport, step_reports
from zpasses.errors import OptionError, ZpassesError
from zpasses.option_values import parse_budget
from zpasses.probe import TuningRequest, all_reported
from zpasses.tools.programs import run_probed
from zpasses.tools.tune.table import TriedPlan, Tuned

_BUDGETS_PER_PLAN = 3
"""Budgets to plan for each that is tried."""

_NOTABLY = 0.98
"""A plan replaces the program's options if its steps take at most this share of theirs."""


class TuneError(ZpassesError):
    """Tuning is impossible: the program fails, or does not train with zpasses."""


@dataclass(frozen=True)
class TuneRequest:
    """What to tune, and how long."""

    command: tuple[str, ...]
    """A Python file with its arguments, or any command, such as one of torchrun."""
    plans: int = 4
    """Number of memory budgets to try, besides the program's own options and its stage with a
    planned schedule."""
    warmup: int = 3
    steps: int = 10
    memory: str | None = None
    """The largest peak, such as "60GiB"; None takes the fastest plan that runs."""
    timeout_s: float = 1800.0
    """Time limit of one run."""


def run_tune(request: TuneRequest, progress: Callable[[str], object]) -> Tuned:
    """Run the program with several plans, and choose the fastest.

    Args:
        request: what to tune.
        progress: called with a line before and after each run.

    Raises:
        TuneError: if the program fails with its own options, or trains nothing with zpasses.
        OptionError: if `memory` is no size.
    """
    return _Tuner(request, progress).run()


class _Tuner:
    def __init__(self, request: TuneRequest, progress: Callable[[str], object]) -> None:
        self._request, self._progress = request, progress
        self._limit: int | None = None
        if request.memory is not None:
            self._limit = parse_budget(request.memory, "--memory").most_bytes
            if self._limit is None:
                raise OptionError(
                    f"--memory: got {request.memory!r}; expected a size such as '60GiB'."
                )

    def run(self) -> Tuned:
        with tempfile.TemporaryDirectory(prefix="zpasses-tune-") as folder:
            self._folder = Path(folder)
            given = TriedPlan("as given", None)
            failure, tail, reports = self._execute(given, _BUDGETS_PER_PLAN * self._request.plans)
            if failure is not None:
                raise TuneError(f"The program {failure}. The end of its output:\n{tail}")
            first = reports[0]
            plans = [_judged(given, reports)]
            self._progress(self._outcome(plans[0]))
            for plan in self._candidates(first):
                failure, tail, reports = self._execute(plan, 0)
                plans.append(_judged(plan, reports, failure))
                self._progress(self._outcome(plans[-1]))
        chosen, reason = self._choose(plans)
        return Tuned(tuple(plans), chosen, reason, first.stage, first.world, first.target)

    def _candidates(self, first: StepReport) -> list[TriedPlan]:
        """Returns the plans to try: the stage with fixed buckets, and the best budgets."""
        fixed = {"pipeline": f"zero{max(first.stage, 2)}-one-ahead"}
        fitting = [
            each
            for each in first.candidates
            if self._limit is None or each.peak_bytes <= self._limit
        ]
        best = sorted(fitting, key=lambda each: (each.total_us, each.peak_bytes))
        return [
            TriedPlan("one ahead", fixed),
            *(
                TriedPlan("budget", {"memory_budget": each.budget}, each.total_us, each.peak_bytes)
                for each in best[: self._request.plans]
            ),
        ]

    def _execute(self, plan: TriedPlan, budgets: int) -> tuple[str | None, str, list[StepReport]]:
        """Runs the program with a plan.

        Returns what went wrong, the end of its output, and the reports of all ranks.
        """
        request = self._request
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        asked = TuningRequest(plan.options, request.warmup, request.steps, budgets)
        self._progress(f"{plan.name}: {_options_text(plan)}")
        failure, tail = run_probed(request.command, asked, folder, request.timeout_s)
        reports = step_reports(folder)
        if all_reported(folder):
            return None, tail, reports
        if failure is None:
            failure = (
                f"ended before {request.warmup + request.steps} optimizer steps of graphs that "
                "zpasses compiles, on a model that `zpasses.shard` sharded"
            )
        return failure, tail, reports

    def _fits(self, plan: TriedPlan) -> bool:
        peak = plan.peak_bytes if plan.peak_bytes is not None else plan.predicted_peak_bytes
        return self._limit is None or peak is None or peak <= self._limit

    def _choose(self, plans: list[TriedPlan]) -> tuple[TriedPlan, str]:
        ran = [each for each in plans if each.step_us is not None and self._fits(each)]
        if not ran:
            raise TuneError(f"No plan that runs fits --memory {self._request.memory}.")
        given = plans[0]
        fastest = min(ran, key=lambda each: each.step_us or 0.0)
        if given not in ran:
            return fastest, f"it is the fastest within {self._request.memory}"
        assert fastest.step_us is not None
        assert given.step_us is not None
        if fastest is given:
            return given, "no other plan is faster than the options of the program"
        if fastest.step_us > _NOTABLY * given.step_us:
            return given, f"no other plan is at least {1 - _NOTABLY:.0%} faster"
        return fastest, f"its step takes {fastest.step_us / given.step_us:.2f}x that as given"

    def _outcome(self, plan: TriedPlan) -> str:
        if plan.step_us is None:
            return f"  {plan.failure}"
        return f"  {plan.step_us / 1e3:.1f} ms per step"


def _options_text(plan: TriedPlan) -> str:
    if plan.options is None:
        return "the options of the program"
    return ", ".join(f"{name}={value!r}" for name, value in plan.options.items())


def _judged(plan: TriedPlan, reports: list[StepReport], failure: str | None = None) -> TriedPlan:
    """Returns the plan with what the slowest rank measured."""
    if failure is not None:
        return replace(plan, failure=failure)
    slowest = max(reports, key=lambda each: each.step_us)
    peaks = [each.peak_bytes for each in reports if each.peak_bytes is not None]
    return replace(
        plan,
        step_us=slowest.step_us,
        spread_us=slowest.spread_us,
        peak_bytes=max(peaks, default=None),
    )
