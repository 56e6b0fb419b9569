"""Plans of one training step for every shape of hybrid sharding: `zpasses plan --mesh auto`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

from zpasses.cost.time.target import Target, current_target
from zpasses.tools.capture.meshes import AutoMesh
from zpasses.tools.plan.shape_table import ShapePoint, ShapeTable, shape_point
from zpasses.tools.plan.step_plans import PlanRequest, plan_step

__all__ = ["plan_shapes"]

_POINTS = 4
"""About how many plans of each shape to choose from, if no budget is given."""


def plan_shapes(
    request: PlanRequest, auto: AutoMesh, progress: Callable[[ShapePoint], object]
) -> ShapeTable:
    """Captures and plans a step for every shape of hybrid sharding.

    Args:
        request: what to plan, without a mesh.
        auto: the dimensions that all shapes share.
        progress: called with each shape that was planned.

    Raises:
        OptionError: if the ranks cannot be divided, and as `plan_step`.
        CaptureError, ShardingError: as `plan_step`.
    """
    target = Target.parse(request.target) if request.target else current_target()
    points = []
    for shape in auto.shapes(request.world):
        gc.collect()  # the graphs of the shape before
        found = plan_step(replace(request, mesh=shape, points=_POINTS))
        point = shape_point(str(shape), found, target.memory_bytes)
        progress(point)
        points.append(point)
    return ShapeTable(
        request.function,
        request.world,
        target.name,
        request.target,
        request.backwards_per_step,
        request.memory,
        target.memory_bytes,
        tuple(points),
    )
