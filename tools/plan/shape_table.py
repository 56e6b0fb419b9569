"""The table of meshes of hybrid sharding for one training step. This file loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zpasses.inspect.units import bytes_text, time_text
from zpasses.inspect.view import Text, View, table, text_of
from zpasses.tools.plan.plan_table import NOTABLY, PlanPoint, PlanTable, StepTable

_MOMENTS = 2
"""State tensors of AdamW per parameter, in the parameter's dtype."""


@dataclass(frozen=True)
class ShapePoint:
    """One mesh, and the plan of the step on it."""

    mesh: str
    """As the option `--mesh` takes it."""
    plan: PlanPoint | None
    """The plan of the budget, or the fastest that fits in a device, or the leanest. None if none
    fits the budget."""
    missing: str | None
    """Why none fits."""
    shard_bytes: int
    """Bytes of this rank's shards of all parameters."""

    @property
    def total_bytes(self) -> int:
        """Peak of the step, with the shards and the state of AdamW, which rest between steps."""
        peak = self.plan.peak_bytes if self.plan is not None else 0
        return peak + (1 + _MOMENTS) * self.shard_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "mesh": self.mesh,
            "plan": None if self.plan is None else self.plan.to_json(),
            "missing": self.missing,
            "shard_bytes": self.shard_bytes,
            "total_bytes": self.total_bytes if self.plan is not None else None,
        }


def shape_point(mesh: str, found: PlanTable, device_bytes: int) -> ShapePoint:
    """The plan of a mesh: that of the budget, else the fastest that fits in a device.

    If none fits in a device, it is the leanest.
    """
    shards = found.resting.shard_bytes
    points = [ShapePoint(mesh, plan, None, shards) for plan in found.plans]
    if found.memory is not None or not points:
        return ShapePoint(mesh, found.chosen, found.missing, shards)
    fitting = [each for each in points if each.total_bytes <= device_bytes]
    if fitting:
        return min(fitting, key=_time)
    return min(points, key=lambda each: each.total_bytes)


@dataclass(frozen=True)
class ShapeTable(StepTable):
    """All meshes, from one replica to the smallest shard groups."""

    memory: str | None
    """Budget of each plan; None takes the fastest plan of each mesh that fits in a device."""
    device_bytes: int
    """Memory of a device of the target."""
    points: tuple[ShapePoint, ...]

    @property
    def chosen(self) -> ShapePoint | None:
        """The fastest mesh that fits in a device, with the least memory among equally fast ones."""
        fitting = [
            each
            for each in self.points
            if each.plan is not None and each.total_bytes <= self.device_bytes
        ]
        if not fitting:
            return None
        best = min(_time(each) for each in fitting)
        return min(
            (each for each in fitting if _time(each) * NOTABLY <= best),
            key=lambda each: each.total_bytes,
        )

    @property
    def reason(self) -> str:
        """Why the chosen mesh is chosen, or why there is none."""
        chosen = self.chosen
        if chosen is None:
            missing = [each.missing for each in self.points if each.missing]
            return (
                missing[0]
                if len(missing) == len(self.points)
                else _TOO_LARGE.format(self.target, bytes_text(self.device_bytes))
            )
        faster = [
            each
            for each in self.points
            if each.plan is not None and _time(each) < NOTABLY * _time(chosen)
        ]
        why = f"It is the fastest that fits in the {bytes_text(self.device_bytes)} of a device."
        if not faster:
            return why
        first = min(faster, key=_time)
        return (
            f"{why} {first.mesh} takes {time_text(_time(first))}, and needs "
            f"{bytes_text(first.total_bytes)}."
        )

    @property
    def options(self) -> dict[str, Any] | None:
        """The options of the backend that reproduce the chosen plan."""
        plan = self.chosen.plan if self.chosen is not None else None
        return None if plan is None else self.options_of(plan)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **super().to_json(),
            "memory": self.memory,
            "device_bytes": self.device_bytes,
            "shapes": [{**each.to_json(), "chosen": each is self.chosen} for each in self.points],
            "options": self.options,
            "reason": self.reason,
        }


_TOO_LARGE = (
    "No mesh fits in a device of {}, which has {}. Give a budget with --memory, more ranks, or "
    "ranks of tensor parallelism, e.g. --mesh auto,tp=8."
)


def _time(point: ShapePoint) -> float:
    assert point.plan is not None
    return point.plan.total_us


# --- text -----------------------------------------------------------------------------------------
_COLUMNS = ("mesh", "step", "exposed", "bound", "peak", "shards", "with AdamW", "collectives", "")


def shape_view(found: ShapeTable) -> View:
    """The table as a page."""
    rows = [_row(each, found) for each in found.points]
    shown = table(
        _COLUMNS,
        rows,
        right=_COLUMNS[1:-1],
        yields=("collectives", "bound", "shards", ""),
        below=("",),
        whole=("",),
    )
    result: list[str | Text] = [text_of(f"None is chosen. {found.reason}")]
    if found.chosen is not None:
        assert found.chosen.plan is not None
        options = found.call_of(found.chosen.plan)
        result = [f"Chosen: {found.chosen.mesh}. {found.reason}", Text((options,))]
    return found.view(shown, result, _LEGEND)


_LEGEND = (
    "shards: this rank's part of all parameters. with AdamW: peak, shards and the two moments of "
    "each.",
)


def _row(point: ShapePoint, found: ShapeTable) -> tuple[str, ...]:
    shards = bytes_text(point.shard_bytes)
    plan = point.plan
    if plan is None:
        return (point.mesh, "", "", "", "", shards, "", "", "no plan fits the budget")
    mark = "chosen" if point is found.chosen else ""
    return (
        point.mesh,
        time_text(plan.total_us),
        time_text(plan.exposed_us),
        time_text(plan.bound_us),
        bytes_text(plan.peak_bytes),
        shards,
        bytes_text(point.total_bytes),
        str(plan.collectives),
        mark if point.total_bytes <= found.device_bytes else "does not fit a device",
    )
