"""The page of `zpasses plan --html`: time over memory, as one file without network and script."""

from __future__ import annotations

import importlib.util
import io
from importlib.resources import files
from typing import Any

from zpasses.inspect.escape import one_line
from zpasses.tools.cli.common import CommandError
from zpasses.tools.plan.plan_table import PlanPoint, PlanTable
from zpasses.tools.plan.plan_view import plan_view

_MEMORY_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
_TIME_UNITS = (("s", 1e6), ("ms", 1e3), ("us", 1.0))
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, which a browser can find
    "svg.hashsalt": "zpasses",  # equal plans give equal files
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "grid.color": "#e2e3e6",
    "axes.axisbelow": True,
}


def check_matplotlib(what: str = "--html") -> None:
    """Raise CommandError if matplotlib is not installed, with which `what` draws."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError(
            f'{what} draws with matplotlib, which is not installed: pip install "zpasses[plot]"'
        )


def plan_page(found: PlanTable) -> str:
    """Returns the page.

    Raises:
        CommandError: if matplotlib is not installed.
    """
    check_matplotlib()
    import matplotlib
    from jinja2 import Environment, select_autoescape

    drawn = io.StringIO()
    with matplotlib.rc_context(STYLE):
        plan_figure(found).savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    source = (files("zpasses.tools.plan") / "page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=select_autoescape(default=True)).from_string(source)
    view = plan_view(found)
    return template.render(
        title=one_line(view.title), picture=svg[svg.index("<svg") :], details=view._repr_html_()
    )


def plan_figure(found: PlanTable) -> Any:
    """Returns a matplotlib Figure of the plans and the stages: time over memory.

    A plan is possible with its memory and with more, so the lines are steps.
    """
    from matplotlib.figure import Figure

    points = [*found.plans, *found.stages]
    most = max(each.peak_bytes for each in points)
    memory_unit, per_byte = next(u for u in _MEMORY_UNITS if most >= u[1] or u[1] == 1)
    longest = max(each.total_us for each in points)
    time_unit, per_us = next(u for u in _TIME_UNITS if longest >= u[1] or u[1] == 1.0)

    def at(*plans: PlanPoint) -> tuple[list[float], list[float]]:
        return [p.peak_bytes / per_byte for p in plans], [p.total_us / per_us for p in plans]

    figure = Figure(figsize=(9.6, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*at(*found.plans), "o", color="C0", label="plan for a budget")
    for number, xy in enumerate(zip(*at(*found.plans), strict=True), 1):
        axes.annotate(str(number), xy, (5, 5), textcoords="offset points")
    if found.chosen is not None:
        axes.plot(*at(found.chosen), "o", color="C2", markersize=9, label="chosen plan")
    if found.resting.optimizer is not None:
        where = [at(each)[0][0] for each in found.plans]
        whole = [each.with_optimizer_us / per_us for each in found.plans]
        axes.plot(where, whole, "x", color="C3", label="with the optimizer")
    # Rings, because a stage may be equal to a plan.
    ring: dict[str, Any] = {"color": "C1", "fillstyle": "none", "markersize": 12}
    for stage, marker in zip(found.stages, "sDv", strict=False):
        axes.plot(*at(stage), marker, **ring, label=f"{stage.name}, no budget")
    axes.margins(0.08)
    low, high = axes.get_xlim()
    budget = None if found.memory_bytes is None else found.memory_bytes / per_byte
    if budget is not None:
        far, margin = budget > high + (high - low), 0.02 * (high - low)
        label = f"budget {found.memory}{', beyond the axis' if far else ''}"
        axes.axvline(budget, color="C3", zorder=1, label=label)
        low, high = min(low, budget - margin), high if far else max(high, budget + margin)
    right = [*at(*found.plans)[0], high]
    times = [each.total_us / per_us for each in found.plans]
    bounds = [each.bound_us / per_us for each in found.plans]
    line: dict[str, Any] = {"where": "post", "linewidth": 1}
    axes.step(right, [*times, times[-1]], "-", color="C0", **line)
    axes.step(right, [*bounds, bounds[-1]], "--", color="C7", **line, label="bound of each plan")
    if all(each.least_us is not None for each in found.plans):
        least = [(each.least_us or 0.0) / per_us for each in found.plans]
        axes.step(right, [*least, least[-1]], ":", color="C7", **line, label="least of each budget")
    axes.set_xlim(low, high)
    axes.set_xlabel(f"peak memory above what rests between steps, {memory_unit}")
    axes.set_ylabel(f"time of a step, {time_unit}")
    axes.grid()
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure
