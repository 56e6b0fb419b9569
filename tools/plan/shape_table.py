"""The table of meshes of hybrid sharding for one training step. This file loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zpasses.inspect.units import bytes_text, time_text
from zpasses.inspect.view import Text, View, table, text_of
from zpasses.tools.plan.plan_table import NOTABLY, PlanPoint, PlanTable, StepTable
from zpasses.tools.plan.plan_view import COLLECTIVES, DEVICE, PEAK, TIMES, Column, legend_of

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
    """Bytes of this rank's shards on the device."""

    @property
    def total_bytes(self) -> int:
        """What the device holds with the optimizer; with the shards and the state of AdamW, if none
        is given.
        """
        if self.plan is not None and self.plan.device is not None:
            return self.plan.device.total_bytes
        peak = self.plan.peak_bytes if self.plan is not None else 0
        return peak + (1 + _MOMENTS) * self.shard_bytes

    def fits(self, device_bytes: int) -> bool:
        """Whether the plan fits a device, and its host what rests there."""
        return self.plan is not None and self.plan.fits_device and self.total_bytes <= device_bytes

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
    fitting = [each for each in points if each.fits(device_bytes)]
    if fitting:
        return min(fitting, key=_time)
    return min(points, key=lambda each: each.total_bytes)


@dataclass(frozen=True)
class ShapeTable(StepTable):
    """All meshes, from one replica to the smallest shard groups."""

    memory: str | None
    """Budget of each plan; None takes the fastest plan of each mesh that fits in a device."""
    device_bytes: int
    """Memory of a device: that of the target, or what was given."""
    points: tuple[ShapePoint, ...]
    optimizer: str | None = None
    """The optimizer whose states were asked for; None counts two moments of each parameter."""

    @property
    def chosen(self) -> ShapePoint | None:
        """The fastest mesh that fits in a device, with the least memory among equally fast ones."""
        fitting = [each for each in self.points if each.fits(self.device_bytes)]
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
            **self._optimizer_json(),
            "reason": self.reason,
        }

    def _optimizer_json(self) -> dict[str, Any]:
        if self.optimizer is None:
            return {}
        plan = self.chosen.plan if self.chosen is not None else None
        call = None if plan is None else plan.offload_call
        return {
            "optimizer": self.optimizer,
            "offload_optimizer": call,
            "step_in_backward": self.early_call,
        }


_TOO_LARGE = (
    "No mesh fits in the {1} of a device of {0}. Give a budget with --memory, more ranks, or "
    "ranks of tensor parallelism, e.g. --mesh auto,tp=8."
)


def _time(point: ShapePoint) -> float:
    assert point.plan is not None
    return point.plan.with_optimizer_us


# --- text -----------------------------------------------------------------------------------------
def shape_view(found: ShapeTable) -> View:
    """The table as a page."""
    columns = _columns(found)
    names = [each.name for each in columns]
    shown = table(
        names,
        [[each.cell(point) for each in columns] for point in found.points],
        right=names[1:-1],
        yields=("collectives", "bound", "shards", ""),
        below=("",),
        whole=("",),
    )
    result: list[str | Text] = [text_of(f"None is chosen. {found.reason}")]
    if found.chosen is not None:
        plan = found.chosen.plan
        assert plan is not None
        result = [f"Chosen: {found.chosen.mesh}. {found.reason}", found.calls_of(plan)]
    return found.view(shown, result, legend_of(columns))


def _columns(found: ShapeTable) -> list[Column[ShapePoint]]:
    chosen = found.chosen

    def mark(point: ShapePoint) -> str:
        if point.plan is None:
            return "no plan fits the budget"
        if not point.fits(found.device_bytes):
            return "does not fit a device"
        return "chosen" if point is chosen else ""

    with_adamw: Column[ShapePoint] = Column(
        "with AdamW",
        lambda point: "" if point.plan is None else bytes_text(point.total_bytes),
        "peak, shards and the two moments of each.",
    )
    return [
        Column("mesh", lambda point: point.mesh),
        *map(_of_plan, (*TIMES, PEAK)),
        Column(
            "shards",
            lambda point: bytes_text(point.shard_bytes),
            "this rank's part of the parameters on the device.",
        ),
        *((with_adamw,) if found.optimizer is None else map(_of_plan, DEVICE)),
        _of_plan(COLLECTIVES),
        Column("", mark),
    ]


def _of_plan(column: Column[PlanPoint]) -> Column[ShapePoint]:
    return Column(
        column.name,
        lambda point: "" if point.plan is None else column.cell(point.plan),
        column.legend,
    )
