"""The inspector's page about collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zpasses.dumps.nodes import Node, Source
from zpasses.errors import some_of
from zpasses.inspect.communication import CollectiveRow, Communication, communication
from zpasses.inspect.find import SelectedGraph, snapshot_of, step_title, steps_after
from zpasses.inspect.measured import Measured, MeasuredCollective, MeasuredGraph
from zpasses.inspect.measured_page import joined_data, joined_text, measured_data, measured_parts
from zpasses.inspect.model_sources import parameter_sources, source_text, sources_of
from zpasses.inspect.modules import modules_of, modules_text
from zpasses.inspect.overview_page import prediction_text
from zpasses.inspect.page_parts import (
    about_step,
    failure_parts,
    prediction_of,
    to_json_value,
    unmodelled,
)
from zpasses.inspect.units import bytes_text, count, cut, time_text
from zpasses.inspect.view import Table, Text, View, table_of

_TIMES = ("time", "exposed", "queueing", "measured", "its exposed")
_FIGURES = ("ranks", "bytes", "distance", "compute between", *_TIMES)
_OPTIONAL = ("route", "decision", "queueing", "module", "source", *_TIMES[3:])
"""Columns that are left out if they say nothing of any row."""
_LEAST_TELLING = ("distance", "ranks", "compute between", "kind", "route", "decision")
_YIELDS = (*_LEAST_TELLING, "queueing", "bytes", "source", "module", "group", "parameters")
"""Columns that a narrow terminal has no room for, least telling first."""

_SORT_FIELDS = {
    "exposed": "exposed_us",
    "queueing": "queued_us",
    "time": "time_us",
    "bytes": "nbytes",
    "distance": "distance",
    "compute": "compute_us",
}
SORTS = ("order", *_SORT_FIELDS)
"""What rows may be sorted by: the order of their start, or a figure, largest first."""


@dataclass(frozen=True)
class CollectiveRows:
    """Which collectives a page shows, and what it says of them."""

    sort: str = "order"
    """One of `SORTS`."""
    limit: int = 0
    """Maximum number of rows; 0 for all."""
    exposed: bool = False
    """Only collectives for which compute waits."""
    source: bool = False
    """Show the line of the model that reads the parameters."""
    module: bool = False
    """Show the modules of the parameters."""

    def select(self, rows: Sequence[CollectiveRow]) -> list[CollectiveRow]:
        """The rows to show, without `limit`."""
        found = [row for row in rows if row.exposed_us or not self.exposed]
        key = _SORT_FIELDS.get(self.sort)
        return found if key is None else sorted(found, key=lambda row: -getattr(row, key))


def collectives_view(
    picked: Sequence[SelectedGraph],
    after: str | int | None = None,
    show: CollectiveRows | None = None,
    measured: Measured | None = None,
) -> View:
    """Tables of collectives, with totals; with measured figures beside the predicted ones."""
    show = show or CollectiveRows()
    parts: list[Table | Text | str] = []
    data = []
    for each, step in steps_after(picked, after):
        snapshot = snapshot_of(each, step)
        found = communication(snapshot)
        sources = parameter_sources(each.compile) if show.source else {}
        shown = show.select(found.rows)
        ran = measured.of(each) if measured is not None else None
        rows = [
            _Row(row, snapshot.by_id[row.id], sources, ran) for row in shown[: show.limit or None]
        ]
        prediction = prediction_of(each, step)
        plain = {**found.to_json(), "collectives": [row.to_json(show) for row in rows]}
        plain |= {"prediction": to_json_value(prediction)}
        if ran is not None:
            plain["measured"] = measured_data(ran)
        data.append({**about_step(each, step), **plain})
        left = len(shown) - len(rows)
        parts += unmodelled(each, step) or [
            *failure_parts(step),
            _collectives_table(f"{each.title}, {step_title(step)}", rows, show),
            f"and {left:,} more (--limit 0 shows all)." if left else "",
            _nothing(found, shown),
            _totals(found),
            *([prediction_text(prediction)] if prediction else []),
            *(measured_parts(ran) if ran is not None else []),
        ]
    if measured is None:
        return View("", tuple(parts), data)
    return View("", (*parts, joined_text(measured)), {"graphs": data, **joined_data(measured)})


@dataclass(frozen=True)
class _Row:
    row: CollectiveRow
    node: Node
    of_params: dict[str, Source]
    ran: MeasuredGraph | None

    @property
    def measured(self) -> MeasuredCollective | None:
        return self.ran.collectives.get(self.node.id) if self.ran is not None else None

    @property
    def sources(self) -> tuple[Source, ...]:
        return sources_of(self.node, self.of_params)

    def to_json(self, show: CollectiveRows) -> dict[str, Any]:
        found = asdict(self.row)
        if show.source:
            found["sources"] = [f"{each.file}:{each.line}" for each in self.sources]
        if show.module:
            found["modules"] = list(modules_of(self.node))
        if self.measured is not None:
            found["measured_us"] = self.measured.time_us
            found["measured_exposed_us"] = self.measured.exposed_us
        return found


def _nothing(found: Communication, shown: Sequence[CollectiveRow]) -> str:
    if shown:
        return ""
    hidden = "No collective is exposed: compute waits for none of them."
    return hidden if found.rows else "This graph has no collectives."


def _collectives_table(title: str, rows: Sequence[_Row], show: CollectiveRows) -> Table | str:
    if not rows:
        return title
    cells = [_cells(each, show) for each in rows]
    left_out = {name for name in _OPTIONAL if all(row[name] in ("", "0") for row in cells)}
    return table_of(
        [{name: row[name] for name in row if name not in left_out} for row in cells],
        right=_FIGURES,
        title=title,
        yields=_YIELDS,
        below=("decision", "source", "module", "parameters"),
        whole=("decision",),
    )


def _cells(each: _Row, show: CollectiveRows) -> dict[str, object]:
    """Column -> value."""
    row, ran = each.row, each.measured
    return {
        "node": row.node,
        "kind": cut(row.kind.replace("_into_tensor", "").replace("_tensor", ""), 28),
        "group": row.label or row.group,
        "ranks": row.ranks,
        "parameters": some_of(row.params),
        "module": modules_text(modules_of(each.node)) if show.module else "",
        "source": source_text(each.sources) if show.source else "",
        "bytes": bytes_text(row.nbytes),
        "distance": row.distance,
        "compute between": time_text(row.compute_us),
        "time": time_text(row.time_us),
        "exposed": time_text(row.exposed_us),
        "queueing": time_text(row.queued_us),
        "measured": "" if ran is None else time_text(ran.time_us),
        "its exposed": "" if ran is None else time_text(ran.exposed_us),
        "route": row.route,
        "decision": row.decision,
    }


def _totals(found: Communication) -> str:
    plan = found.schedule
    queued = sum(row.queued_us for row in found.rows)
    behind = f" ({time_text(queued)} of it queueing behind earlier collectives)" if queued else ""
    copies = found.host_copies
    also = f" and {copies:,} host cop{'y' if copies == 1 else 'ies'}" if copies else ""
    return (
        f"{count(plan.launches, 'collective')}{also}, {bytes_text(found.nbytes)} of input. "
        f"Communication {time_text(plan.communication_us)}, "
        f"compute {time_text(plan.compute_us)}; exposed {time_text(plan.exposed_us)}{behind}, "
        f"hidden {plan.hidden:.0%}. Times are estimates for the target."
    )
