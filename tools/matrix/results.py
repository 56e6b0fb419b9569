"""What pytest reports of one pair, and the table of all pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tabulate import tabulate

from zpasses.tools.matrix.environments import Pair

__all__ = ["Result", "read_results", "table"]


@dataclass(frozen=True)
class Result:
    """What the tests did with one pair."""

    pair: Pair
    passed: int = 0
    failed: tuple[str, ...] = ()
    """Names of tests that failed, or whose fixtures did."""
    skipped: int = 0
    minutes: float = 0.0
    problem: str | None = None
    """Why the tests did not run to their end."""

    @property
    def is_green(self) -> bool:
        return self.passed > 0 and not self.failed and self.problem is None


def read_results(pair: Pair, report: Path, problem: str | None) -> Result:
    """Returns what a JUnit report of pytest says.

    Args:
        report: the file, which is missing if pytest did not reach its end.
        problem: how the process failed, other than by tests that did.
    """
    if not report.exists():
        return Result(pair, problem=problem or "pytest wrote no report")
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    cases = [case for suite in suites for case in suite.iter("testcase")]
    bad = [each for each in cases if {"failure", "error"} & {child.tag for child in each}]
    skipped = [each for each in cases if each.find("skipped") is not None and each not in bad]
    names = (f"{each.get('file') or each.get('classname')}::{each.get('name')}" for each in bad)
    return Result(
        pair,
        passed=len(cases) - len(bad) - len(skipped),
        failed=tuple(dict.fromkeys(names)),
        skipped=len(skipped),
        minutes=sum(float(suite.get("time", 0)) for suite in suites) / 60,
        problem=problem,
    )


def table(results: Sequence[Result]) -> str:
    """Returns a table of the pairs in Markdown, and the names of the failed tests below it."""
    rows = [
        (
            each.pair.torch,
            each.pair.python,
            each.passed,
            len(each.failed),
            each.skipped,
            f"{each.minutes:.0f}",
        )
        for each in results
    ]
    head = ("torch", "Python", "passed", "failed", "skipped", "minutes")
    lines = [tabulate(rows, head, tablefmt="github", disable_numparse=True)]
    for each in results:
        if each.failed or each.problem:
            lines.append(f"\ntorch {each.pair.torch}, Python {each.pair.python}:")
            lines += [f"  {name}" for name in each.failed]
            lines += [f"  {each.problem}"] if each.problem else []
    return "\n".join(lines)
