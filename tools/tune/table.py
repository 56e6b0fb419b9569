"""The plans that `zpasses tune` tried, as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zpasses.inspect.units import bytes_text, time_text
from zpasses.inspect.view import Text, View, table


@dataclass(frozen=True)
class TriedPlan:
    """One plan, and what a run with it showed."""

    name: str
    options: Mapping[str, str] | None
    """The options that it sets; None for those of the program."""
    predicted_us: float | None = None
    """Duration of forward and backward by the cost model; None if it was not asked."""
    predicted_peak_bytes: int | None = None
    """Their peak above what rests between steps, likewise."""
    step_us: float | None = None
    """Median duration of a step on the slowest rank; None if the run failed."""
    spread_us: tuple[float, float] | None = None
    peak_bytes: int | None = None
    """Most memory that the allocator of a device held, on any rank; None on CPUs."""
    failure: str | None = None


@dataclass(frozen=True)
class Tuned:
    """All plans that were tried, and the fastest."""

    plans: tuple[TriedPlan, ...]
    chosen: TriedPlan
    reason: str
    stage: int
    world: int
    target: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "plans": [{**asdict(each), "chosen": each is self.chosen} for each in self.plans],
            "reason": self.reason,
            "stage": self.stage,
            "world": self.world,
            "target": self.target,
        }


_COLUMNS = ("plan", "options", "step", "min", "max", "/ as given", "peak", "predicted", "its peak")


def tune_view(found: Tuned) -> View:
    """The plans as a page."""
    rows = [_row(each, found) for each in found.plans]
    yields, options = ("options", "min", "max", "its peak"), ("options",)
    plans = table(_COLUMNS, rows, right=_COLUMNS[2:], yields=yields, below=options)
    chosen = Text((f"Chosen: {found.chosen.name}; {found.reason}.", _advice(found)))
    title = f"stage {found.stage}, {found.world} ranks, target {found.target}"
    return View(title, (plans, chosen, Text(_MEANINGS)), found.to_json())


_MEANINGS = (
    "step, min, max: from one optimizer step to the next, on the slowest rank. peak: of the "
    "device's allocator.",
    "predicted, its peak: forward and backward, and memory above what rests between steps, by the "
    "cost model.",
)


def _advice(found: Tuned) -> str:
    if found.chosen is found.plans[0]:
        return "Keep the options of the program."
    chosen = dict(found.chosen.options or {})
    instead = ", in place of zero_stage" if "pipeline" in chosen else ""
    return f"Add to the options of the program{instead}: {json.dumps(chosen)}"


def _row(plan: TriedPlan, found: Tuned) -> tuple[str, ...]:
    given, peak = found.plans[0].step_us or 0.0, plan.predicted_peak_bytes
    options = ", ".join(f"{name}={value}" for name, value in (plan.options or {}).items())
    step, spread = plan.step_us, plan.spread_us
    return (
        f"{plan.name}{' chosen' if plan is found.chosen else ''}",
        options,
        plan.failure or "failed" if step is None else time_text(step),
        "" if spread is None else time_text(spread[0]),
        "" if spread is None else time_text(spread[1]),
        "" if step is None or not given else f"{step / given:.2f}",
        "" if plan.peak_bytes is None else bytes_text(plan.peak_bytes),
        "" if plan.predicted_us is None else time_text(plan.predicted_us),
        "" if peak is None else bytes_text(peak),
    )
