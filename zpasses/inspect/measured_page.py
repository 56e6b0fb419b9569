"""What a trace says about a graph, beside the prediction: by module, and in total."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zpasses.dumps.format import Dump
from zpasses.dumps.nodes import Node
from zpasses.errors import some_of
from zpasses.inspect.escape import one_line
from zpasses.inspect.measured import Measured, MeasuredGraph
from zpasses.inspect.modules import module_of, modules_of, template
from zpasses.inspect.units import bytes_text, count, time_text
from zpasses.inspect.view import Table, Text, table

_MODULES = 15
"""Rows of the table of modules."""


@dataclass
class ModuleTimes:
    """Times of the modules of one template, in microseconds: those of the model, and measured.

    Only operators that the trace measures count in both times of compute.
    """

    name: str
    """Path with "*" for the numbers of layers."""
    layers: int = 0
    """Number of modules."""
    compute_us: float = 0.0
    measured_compute_us: float = 0.0
    collectives_us: float = 0.0
    measured_collectives_us: float = 0.0
    exposed_us: float = 0.0
    measured_exposed_us: float = 0.0

    @property
    def times(self) -> tuple[float, ...]:
        """All times, in the order of the fields."""
        return tuple(getattr(self, each.name) for each in fields(self)[2:])

    @property
    def whole_us(self) -> float:
        return self.measured_compute_us + self.measured_exposed_us


def module_times(found: MeasuredGraph) -> list[ModuleTimes]:
    """Figures by module, longest first. A collective of several parameters counts for each of their
    modules, in proportion to the parameters' bytes.
    """
    rows: dict[str, ModuleTimes] = {}
    members: dict[str, set[str]] = defaultdict(set)

    def shares(node: Node) -> list[tuple[ModuleTimes, float]]:
        params = found.graph.compile.info.parameters
        sizes: dict[str, float] = defaultdict(float)
        for name in node.params:
            sizes[module_of(name)] += params[name].nbytes if name in params else 0
        whole = sum(sizes.values())
        if not whole:
            owners = modules_of(node) or ("no module",)
            sizes, whole = dict.fromkeys(owners, 1.0), float(len(owners))
        result = []
        for module, size in sizes.items():
            name = template(module)
            members[name].add(module)
            result.append((rows.setdefault(name, ModuleTimes(name)), size / whole))
        return result

    by_id = found.snapshot.by_id
    for key, time in found.operators.items():
        for row, share in shares(by_id[key]):
            row.compute_us += by_id[key].cost_us * share
            row.measured_compute_us += time * share
    for span in found.plan.collectives:
        measured = found.collectives[span.node.id]
        for row, share in shares(span.node):
            row.collectives_us += span.time_us * share
            row.measured_collectives_us += measured.time_us * share
            row.exposed_us += span.exposed_us * share
            row.measured_exposed_us += measured.exposed_us * share
    for name, row in rows.items():
        row.layers = len(members[name])
        if row.layers == 1:
            row.name = next(iter(members[name]))
    return sorted(rows.values(), key=lambda row: -row.whole_us)


_COLUMNS = ("compute", "measured", "collectives", "measured ", "exposed", "measured  ")


def measured_parts(found: MeasuredGraph) -> list[Table | Text | str]:
    """Modules of a graph, and its totals."""
    rows = module_times(found)
    shown = []
    for row in rows[:_MODULES]:
        name = f"{row.name} ({row.layers} times)" if row.layers > 1 else row.name
        shown.append((name, *map(time_text, row.times)))
    left = len(rows) - len(shown)
    title = f"{found.graph.title} by module: predicted, and measured"
    more = f"and {count(left, 'module')} more with less time (--json has all)." if left else ""
    modules = table(("module", *_COLUMNS), shown, right=_COLUMNS, title=title)
    return [modules, more, Text(tuple(_totals(found)))]


def _totals(found: MeasuredGraph) -> list[str]:
    plan = found.plan
    lines = [
        f"Measured in {count(found.runs, 'run')}, on average: {time_text(found.total_us)}, "
        f"predicted {time_text(plan.total_us)}. Collectives {time_text(found.collectives_us)}, "
        f"predicted {time_text(plan.communication_us)}; exposed {time_text(found.exposed_us)}, "
        f"predicted {time_text(plan.exposed_us)}.",
        f"Compute of nodes {time_text(found.compute_us)}, predicted "
        f"{time_text(found.predicted_compute_us)} for the same nodes and "
        f"{time_text(plan.compute_us)} for all. {time_text(found.unjoined_compute_us)} of a run "
        "belongs to no node: fused kernels, and Python.",
    ]
    if found.rise_bytes is not None:
        lines.append(
            f"Memory rises by {bytes_text(found.rise_bytes)} in a run, predicted "
            f"{bytes_text(found.predicted_rise_bytes)}."
        )
    return lines


def measured_data(found: MeasuredGraph) -> dict[str, Any]:
    """The same as plain values."""
    times = ("total_us", "exposed_us", "unjoined_compute_us", "collectives_us", "compute_us")
    names = ("runs", *times, "rise_bytes", "predicted_rise_bytes")
    figures = {name: getattr(found, name) for name in names}
    return {**figures, "modules": [vars(row) for row in module_times(found)]}


def joined_text(found: Measured) -> Text:
    """How much of the measured time of collectives is that of nodes, and where the rest is."""
    lines = joined_lines(found)
    process = found.trace.process or {}
    if peak := process.get("peak_device_bytes"):
        lines.append(f"Peak of the device's allocator: {bytes_text(peak)}.")
    if peak := process.get("peak_rss_bytes"):
        lines.append(f"Peak of the process's memory: {bytes_text(peak)}.")
    return Text(tuple(lines))


def joined_lines(found: Measured) -> list[str]:
    """How much of the measured time of collectives is that of nodes, in sentences."""
    lines = [
        f"{found.joined_share:.1%} of the measured time of collectives is that of nodes of the "
        f"dump: {time_text(found.joined_us)} of {time_text(found.joined_us + found.unjoined_us)} "
        "in the whole trace."
    ]
    inside = {name: time - found.outside.get(name, 0.0) for name, time in found.unjoined.items()}
    inside = {name: time for name, time in inside.items() if time > 0}
    if inside:
        lines.append(f"In graphs, but not joined: {_named_times(inside)}.")
    if found.outside:
        lines.append(
            f"Outside of graphs, so no node: {_named_times(found.outside)}. Of the collectives in "
            f"graphs, {found.joined_share_of_graphs:.1%} is joined."
        )
    return [
        *lines,
        *(f"{why}: {count(runs, 'run')}." for why, runs in list(found.reasons.items())[:5]),
    ]


def _named_times(times: Mapping[str, float]) -> str:
    return some_of([f"{one_line(name)} {time_text(time)}" for name, time in times.items()], 5)


def joined_data(found: Measured) -> dict[str, Any]:
    """The same as plain values."""
    names = ("joined_us", "unjoined_us", "joined_share", "joined_share_of_graphs")
    parts = {"unjoined": found.unjoined, "outside_of_graphs": found.outside}
    parts |= {"reasons": found.reasons, "process": found.trace.process or {}}
    return {
        "trace_rank": found.trace.rank,
        **{name: getattr(found, name) for name in names},
        **{name: dict(part) for name, part in parts.items()},
    }


def no_runs_text(found: Measured, dump: Dump) -> str:
    """The error about a trace that has no run of a graph of the dump."""
    reasons = "; ".join(list(found.reasons)[:3])
    return (
        f"{found.trace.path} has no run of a graph of {dump.path}"
        f"{f' ({reasons})' if reasons else ''}; expected a trace of the run that wrote the dump, "
        "of graphs that this zpasses compiled. `zpasses measure` writes both."
    )
