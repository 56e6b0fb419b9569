"""Which memory limits to plan for: from the leanest plan to the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from zpasses.tools.plan.plan_table import PlanPoint, budget_text, not_dominated


def sweep(
    point: Callable[[str], PlanPoint],
    least_bytes: int,
    most_bytes: int,
    points: int,
    also: Iterable[int] = (),
) -> None:
    """Makes plans from the leanest to the fastest, the more where more is to be gained.

    Args:
        point: makes the plan of a text of the option `memory_budget`.
        least_bytes: the least limit that a plan fits.
        most_bytes: a limit that is larger than the peak of any plan.
        points: about how many plans to make.
        also: limits that are planned for as well, if a plan fits them.
    """
    most = point(budget_text(most_bytes))
    fastest = point(budget_text(most.peak_bytes))
    leanest = point(budget_text(least_bytes))
    made = [leanest, fastest]
    for _ in range(2 * points):
        if len(not_dominated([most, *made])) >= points:
            break
        gaps = [
            (_gap(lean, fast, leanest, fastest), lean, fast)
            for lean, fast in itertools.pairwise(made)
        ]
        gap, lean, fast = max(gaps, key=lambda each: each[0], default=(0.0, leanest, leanest))
        if gap <= 0:
            break
        middle = point(budget_text((_limit(lean) + fast.peak_bytes) // 2))
        made.insert(made.index(fast), middle)
    for limit in also:
        if least_bytes <= limit <= most_bytes:
            point(budget_text(limit))


_LEAST_GAP = 0.003
"""Smallest share of time and of memory between two plans for which a third is made."""


def _gap(lean: PlanPoint, fast: PlanPoint, leanest: PlanPoint, fastest: PlanPoint) -> float:
    """Returns how much a plan between two others may tell: time times memory between them."""
    time_share = (lean.total_us - fast.total_us) / fastest.total_us
    between = fast.peak_bytes - _limit(lean)
    memory_share = between / max(1, fastest.peak_bytes - _limit(leanest))
    return time_share * memory_share if min(time_share, memory_share) > _LEAST_GAP else 0.0


def _limit(point: PlanPoint) -> int:
    return point.limit_bytes or 0
