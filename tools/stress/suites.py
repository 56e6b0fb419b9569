"""The suites, runs of them within a time limit, and the table of their results."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tabulate import tabulate

from zpasses.tools.stress import caches, compared_programs, drawn_graphs, faults
from zpasses.tools.stress.cases import OUTCOMES, CaseResult, StressConfig, Suite

SUITES: Mapping[str, Suite] = {
    "graphs": drawn_graphs.run,
    "faults": faults.run,
    "caches": caches.run,
    "programs": compared_programs.run,
}
"""Name -> suite, in the order in which they run."""


@dataclass
class StressReport:
    """The results of a run."""

    results: list[CaseResult] = field(default_factory=list)
    unfinished: dict[str, int] = field(default_factory=dict)
    """Suite -> seeds that the time limit left out."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Suite -> duration."""

    @property
    def bad(self) -> list[CaseResult]:
        return [each for each in self.results if each.is_bad]


def run_suites(
    suites: Mapping[str, Suite],
    seeds: Mapping[str, Sequence[int]],
    config: StressConfig,
    time_limit_s: float | None = None,
    progress: Callable[[CaseResult], None] = lambda _: None,
) -> StressReport:
    """Run the cases `seeds[suite]` of each suite.

    Args:
        time_limit_s: duration of the whole run. The remaining time is shared equally by the suites
            that are left. A case that has started is not interrupted.
        progress: called after each case.
    """
    report = StressReport()
    end = None if time_limit_s is None else time.monotonic() + time_limit_s
    names = list(seeds)
    for at, name in enumerate(names):
        started = time.monotonic()
        deadline = None if end is None else started + (end - started) / (len(names) - at)
        drawn = _Seeds(seeds[name], deadline)
        try:
            for result in suites[name](drawn, config):
                report.results.append(result)
                progress(result)
        except Exception:
            failed = CaseResult(
                name, "the suite itself", drawn.last, "crash", traceback.format_exc(), 0.0
            )
            report.results.append(failed)
            progress(failed)
        else:
            if drawn.left:
                report.unfinished[name] = drawn.left
        report.seconds[name] = time.monotonic() - started
    return report


class _Seeds(Iterable[int]):
    """Seeds, until a deadline."""

    def __init__(self, seeds: Sequence[int], deadline: float | None) -> None:
        self._seeds, self._deadline = seeds, deadline
        self.left = len(seeds)
        self.last = seeds[0] if seeds else 0

    def __iter__(self) -> Iterator[int]:
        for seed in self._seeds:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                return
            self.left -= 1
            self.last = seed
            yield seed


def summary(report: StressReport) -> str:
    """The table of a run: cases, outcomes and the slowest case of each kind; then the kinds of
    refusals.
    """
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for each in report.results:
        groups.setdefault((each.suite, each.kind), []).append(each)
    rows = []
    for (suite, kind), found in sorted(groups.items(), key=lambda item: item[0]):
        counts = Counter(each.outcome for each in found)
        slowest = max(found, key=lambda each: each.seconds)
        outcomes = [counts[outcome] or "" for outcome in OUTCOMES]
        rows.append(
            (suite, kind, len(found), *outcomes, f"{slowest.seconds:.2f} s ({slowest.seed})")
        )
    headers = ("suite", "kind", "cases", *OUTCOMES, "slowest (seed)")
    lines = [tabulate(rows, headers, disable_numparse=True)] if rows else ["No case ran."]
    for suite, seconds in report.seconds.items():
        ran = len({each.seed for each in report.results if each.suite == suite})
        left = report.unfinished.get(suite, 0)
        lines.append(
            f"{suite}: {ran} seeds in {seconds:.0f} s"
            + (f"; the time limit left out {left}" if left else "")
        )
    reasons: dict[str, list[int]] = {}
    for each in report.results:
        if each.reason:
            reasons.setdefault(f"{each.suite}: {each.reason}", []).append(each.seed)
    for reason, seeds in sorted(reasons.items()):
        shown = ", ".join(map(str, seeds[:10])) + (", ..." if len(seeds) > 10 else "")
        lines.append(f"\n{len(seeds)} refused by {reason}\n  seeds {shown}")
    return "\n".join(lines)
