"""Plans of one training step: what the backend makes of it under several memory budgets.

The step is captured once. Within its compile, the trial partitions of its joint graph are planned
for limits from the least that a plan fits to where more memory gains nothing. Each plan's graphs
are then made by the backend's own functions and passes, so its figures are those of a compile with
that budget.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.backend.partition import too_little_memory
from zpasses.backend.step_trials import (
    Graphs,
    StepPlan,
    StepTrials,
    full_params,
)
from zpasses.cost.plan.bound import schedule_bound
from zpasses.cost.plan.kept_params import KeptParam
from zpasses.cost.time.route_figures import planned_route
from zpasses.cost.time.target import Target, current_target, use_target
from zpasses.errors import MemoryBudgetError, OptionError
from zpasses.graph.queries import nbytes, value_of
from zpasses.graph.tags import tagged
from zpasses.option_values import format_size, parse_budget, parse_size
from zpasses.passes.defer_reduction import DeferReduction
from zpasses.passes.pipelines import ZERO2, ZERO3
from zpasses.passes.schedule import Schedule
from zpasses.pipeline.events import Events, listen, run_reported_passes
from zpasses.pipeline.options import Options
from zpasses.pipeline.passes import Level
from zpasses.pipeline.pipeline import Pipeline
from zpasses.pipeline.predictor import Predictor
from zpasses.pipeline.runner import run_passes
from zpasses.runtime.forward_variants import (
    ForwardVariant,
    build_forward_variant,
    param_slots,
)
from zpasses.testing.step_graphs import GraphProbe
from zpasses.tools.capture.captured_step import CaptureError, CaptureRequest, run_capture
from zpasses.tools.capture.mesh_shapes import AutoMesh, MeshShape
from zpasses.tools.plan.plan_table import GraphFigures, PlanPoint, PlanTable, not_dominated
from zpasses.tools.plan.shape_table import ShapePoint, ShapeTable, shape_point


@dataclass(frozen=True)
class PlanRequest:
    """Which step to plan, and for which ranks and hardware."""

    function: str
    """`MODULE:FUNCTION` or `FILE.py:FUNCTION`, as for `zpasses capture`."""
    world: int = 8
    target: str | None = None
    """None plans for this machine."""
    memory: str | None = None
    """Budget whose plan is chosen, such as "70GiB"; None chooses the fastest plan."""
    points: int = 8
    """About how many plans to make."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    shard: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `zpasses.shard`: param_dtype, reduce_dtype, reshard_after_forward."""
    backwards_per_step: int = 1
    """Forwards, each with its backward, from one optimizer step to the next."""
    mesh: MeshShape | None = None
    """Device mesh of the ranks. None is one dimension, over which the model is sharded."""
    host_memory: str | None = None
    """What a plan may take of the host on each rank, such as "40GiB"; None is nothing."""


def plan_step(
    request: PlanRequest, progress: Callable[[PlanPoint], object] = lambda point: None
) -> PlanTable:
    """Capture a step, and make its plans.

    Args:
        request: what to plan.
        progress: called with each plan that was made.

    Raises:
        CaptureError: if the function or the model fails, or the step is not one graph.
        OptionError: for an unknown target or a budget that is no size.
        MemoryBudgetError: for more memory of the host than the target has.
    """
    _check(request)
    target = Target.parse(request.target) if request.target else current_target()
    host_bytes = _host_bytes(request, target)
    probe = GraphProbe(Level.JOINT)
    tables: list[PlanTable] = []
    steps = 0

    def observe(trials: StepTrials) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            trials.host_bytes = host_bytes
            tables.append(_Planner(request, target, trials, probe.seen[-1], progress).run())

    joint = tuple(each for each in ZERO3 if each.level is Level.JOINT)
    options = {
        # With deferred reductions, because the compile warns of windows without them.
        "pipeline": Pipeline((probe, *joint, DeferReduction())),
        "target": request.target,
        "backwards_per_step": request.backwards_per_step,
    }
    capture = CaptureRequest(
        request.function,
        None,
        request.world,
        arguments=request.arguments,
        shard=request.shard,
        options={key: value for key, value in options.items() if value is not None},
        mesh=request.mesh,
    )
    with listen(StepTrials, observe):
        run_capture(capture)
    if steps != 1:
        raise CaptureError(
            f"{request.function}: the step was compiled as {steps} graphs with sharded parameters; "
            "expected one. torch.compile(model, fullgraph=True) says what breaks the graph."
            if steps
            else f"{request.function}: the step gathers no sharded parameters in forward and "
            "backward, so there is nothing to plan."
        )
    return tables[0]


_SHAPE_POINTS = 4
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
        found = plan_step(replace(request, mesh=shape, points=_SHAPE_POINTS))
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


def _check(request: PlanRequest) -> None:
    if request.memory is not None:
        where = "--memory"
        if request.memory == "auto":
            raise OptionError(
                f"{where}: got 'auto', which measures the device of a running job; expected a size "
                "such as '70GiB'."
            )
        parse_budget(request.memory, where)
    if request.world < 2:
        raise OptionError(
            f"--world: got {request.world}; expected at least 2 ranks, since one rank has no "
            "collectives to plan."
        )


def _host_bytes(request: PlanRequest, target: Target) -> int:
    if request.host_memory is None:
        return 0
    given = parse_size(request.host_memory, "--host-memory")
    if given > target.host_memory_bytes:
        raise MemoryBudgetError(
            f"--host-memory: got {request.host_memory!r} for each rank, and a node of {target.name}"
            f" has {format_size(target.host_memory_bytes)} for each of its {target.ranks_per_node} "
            "ranks. Give less, or change the figure: "
            f"--target {target.name},host_memory_bytes=..."
        )
    return given


class _Planner:
    def __init__(
        self,
        request: PlanRequest,
        target: Target,
        trials: StepTrials,
        joint: fx.GraphModule,
        progress: Callable[[PlanPoint], object],
    ) -> None:
        self._request, self._target, self._trials, self._joint = request, target, trials, joint
        self._progress = progress
        self._graphs: dict[Any, Graphs] = {}
        self._made: dict[str, PlanPoint] = {}
        self._routes: list[str] = []
        self._shard_bytes = sum(nbytes(value_of(node)) for node, _ in tagged(joint.graph, "shard"))

    def run(self) -> PlanTable:
        started, memory = time.perf_counter(), self._request.memory
        with use_target(self._target):
            stages = (self._zero2(), *self._zero3())
            self._sweep()
            chosen, missing = self._chosen()
            limit = self._trials.limit_bytes(memory) if memory is not None else None
        plans = self._shown(chosen)
        return PlanTable(
            self._request.function,
            self._request.world,
            self._target.name,
            self._request.target,
            self._request.backwards_per_step,
            tuple(plans),
            stages,
            memory,
            limit,
            chosen if chosen is not None or missing is not None else plans[-1],
            missing,
            time.perf_counter() - started,
            self._shard_bytes,
            tuple(self._routes),
            self._request.host_memory,
        )

    def _chosen(self) -> tuple[PlanPoint | None, str | None]:
        """Returns the plan of the budget that was asked for, or why there is none."""
        budget = self._request.memory
        if budget is None:
            return None, None
        plan = self._trials.fastest(self._trials.limit_bytes(budget))
        if not plan.fits:
            return None, too_little_memory(budget, plan)
        return self._point(budget), None

    def _shown(self, chosen: PlanPoint | None) -> list[PlanPoint]:
        """Returns the plans that are worth showing, and the chosen one in any case."""
        others = [each for each in self._made.values() if each is not chosen]
        points = not_dominated(each for each in others if not _same(each, chosen))
        if chosen is not None:
            points = [
                each
                for each in points
                if each.peak_bytes < chosen.peak_bytes or each.total_us < chosen.total_us
            ]
            points.append(chosen)
        return sorted(points, key=lambda each: (each.peak_bytes, -each.total_us))

    # --- limits -----------------------------------------------------------------------------------
    def _sweep(self) -> None:
        """Makes plans from the leanest to the fastest, the more where more is to be gained."""
        most = self._point(_size(self._trials.most_bytes()))
        fastest = self._point(_size(most.peak_bytes))
        leanest = self._point(_size(self._trials.least_bytes()))
        made = [leanest, fastest]
        for _ in range(2 * self._request.points):
            if len(not_dominated(self._made.values())) >= self._request.points:
                break
            gaps = [
                (self._gap(lean, fast, leanest, fastest), lean, fast)
                for lean, fast in itertools.pairwise(made)
            ]
            gap, lean, fast = max(gaps, key=lambda each: each[0], default=(0.0, leanest, leanest))
            if gap <= 0:
                break
            middle = self._point(_size((_limit(lean) + fast.peak_bytes) // 2))
            made.insert(made.index(fast), middle)

    @staticmethod
    def _gap(lean: PlanPoint, fast: PlanPoint, leanest: PlanPoint, fastest: PlanPoint) -> float:
        """Returns how much a plan between two others may tell: time times memory between them."""
        time_share = (lean.total_us - fast.total_us) / fastest.total_us
        between = fast.peak_bytes - _limit(lean)
        memory_share = between / max(1, fastest.peak_bytes - _limit(leanest))
        return time_share * memory_share if min(time_share, memory_share) > _LEAST_GAP else 0.0

    # --- plans ------------------------------------------------------------------------------------
    def _point(self, budget: str) -> PlanPoint:
        """Returns the plan that the backend makes with this budget."""
        if budget not in self._made:
            limit = self._trials.limit_bytes(budget)
            plan = self._trials.fastest(limit)
            pipeline = ZERO3.with_memory_budget(f"{limit}B")
            self._made[budget] = self._judged(
                "plan",
                budget,
                limit,
                pipeline,
                self._graphs_of(plan),
                _bytes(*plan.kept, *plan.cached),
                plan.activations,
                _bytes(*plan.cached),
                plan.host_bytes,
            )
        return self._made[budget]

    def _zero3(self) -> list[PlanPoint]:
        """Returns stage 3 without a budget; before it the same without copy engines, if its plan
        may use them.
        """
        plan = self._trials.fitting()
        kept = _bytes(*plan.kept)
        points, off = [], _without_engines(ZERO3)
        if planned_route(self._target) is not None:
            graphs = self._graphs_of(plan)
            points.append(
                self._judged("zero3, no copy engines", None, None, off, graphs, kept, 1.0)
            )
        graphs = self._graphs_of(plan)
        points.append(self._judged("zero3", None, None, ZERO3, graphs, kept, 1.0))
        for side, gm in zip(("forward", "backward"), graphs, strict=True):
            for _, tag in tagged(gm.graph, "gather"):
                if tag.note:
                    more = f" and {len(tag.params) - 1} more" if len(tag.params) > 1 else ""
                    self._routes.append(f"{side}, {tag.params[0]}{more}: {tag.note}")
        return points

    def _zero2(self) -> PlanPoint:
        run_passes(self._joint.graph, ZERO2.at(Level.JOINT), verify="off")
        self._joint.recompile()
        recomputes = Options(zero_stage=2).recomputes_elementwise()
        kept = sum(size for *_, size in full_params(self._joint))
        graphs = self._trials.other(self._joint, recomputes)
        return self._judged("zero2", None, None, ZERO2, graphs, kept, 1.0, kept)

    def _graphs_of(self, plan: StepPlan) -> Graphs:
        """Returns the graphs of a plan as copies, which are rewritten."""
        if plan.choice not in self._graphs:
            self._graphs[plan.choice] = self._trials.graphs(plan.choice)
        forward, backward = self._graphs[plan.choice]
        return compat.clone_graph_module(forward), compat.clone_graph_module(backward)

    def _judged(
        self,
        name: str,
        budget: str | None,
        limit: int | None,
        pipeline: Pipeline,
        graphs: Graphs,
        kept_bytes: int,
        activations: float,
        cached_bytes: int = 0,
        host_bytes: int = 0,
    ) -> PlanPoint:
        """Runs the passes after partitioning, and measures the graphs by the cost model."""
        predictors = {}
        for gm, level in zip(graphs, (Level.FORWARD, Level.BACKWARD), strict=True):
            predictors[level] = Predictor(self._target)
            events, passes = Events((predictors[level],)), pipeline.at(level)
            run_reported_passes(events, "step", "partitioned", gm.graph, passes, verify="off")
        point = PlanPoint(
            name,
            budget,
            limit,
            self._forward_figures(graphs[0], predictors[Level.FORWARD]),
            self._figures(graphs[1], predictors[Level.BACKWARD]),
            kept_bytes,
            cached_bytes,
            activations,
            host_bytes,
        )
        self._progress(point)
        return point

    def _forward_figures(self, gm: fx.GraphModule, predictor: Predictor) -> GraphFigures:
        """Returns the mean of the forwards of a step, some of which find parameters unchanged."""
        fresh = self._figures(gm, predictor)
        slots = param_slots(gm.graph)
        if not slots:
            return fresh
        repetition = self._trials.repetition
        repeated = 1.0 - 1.0 / repetition.backwards_per_step
        frozen = [number for number, slot in enumerate(slots) if slot.param in repetition.frozen]
        first = self._given(gm, predictor, frozen)
        later = self._given(gm, predictor, range(len(slots))) if repeated else first

        def mean(of: Callable[[GraphFigures], float]) -> float:
            return (1.0 - repeated) * of(first) + repeated * of(later)

        return GraphFigures(
            mean(lambda each: each.total_us),
            mean(lambda each: each.exposed_us),
            mean(lambda each: each.bound_us),
            fresh.peak_bytes,
            round(mean(lambda each: each.collectives)),
        )

    def _given(
        self, gm: fx.GraphModule, predictor: Predictor, slots: Sequence[int]
    ) -> GraphFigures:
        """Returns the figures of a forward that finds the parameters of these slots unchanged."""
        if not slots:
            return self._figures(gm, predictor)
        variant, _ = build_forward_variant(gm, ForwardVariant(frozenset(slots)))
        found = self._figures(variant, predictor)
        problem = predictor.schedule_problem
        assert problem is not None
        names = {slot.param for number, slot in enumerate(param_slots(gm.graph)) if number in slots}
        gone = {
            job.number
            for job in problem.jobs
            if job.is_gather and names.issuperset(problem.items[job.number].tag.params)
        }
        return replace(found, bound_us=schedule_bound(problem.without(gone)).total_us)

    def _figures(self, gm: fx.GraphModule, predictor: Predictor) -> GraphFigures:
        found = predictor.predicted(gm.graph, scheduled=True)
        if found is None:
            raise CaptureError(
                f"{self._request.function}: a graph has no collectives of parameters, so there is "
                "nothing to plan."
            )
        return GraphFigures(
            found.total_us, found.waited_us, found.bound_us, found.peak_bytes, found.collectives
        )


_LEAST_GAP = 0.003
"""Smallest share of time and of memory between two plans for which a third is made."""


def _without_engines(pipeline: Pipeline) -> Pipeline:
    passes = (
        replace(each, copy_engines="off") if isinstance(each, Schedule) else each
        for each in pipeline
    )
    return Pipeline(tuple(passes))


def _bytes(*kept: KeptParam) -> int:
    return sum(each.nbytes for each in kept)


def _limit(point: PlanPoint) -> int:
    return point.limit_bytes or 0


def _same(point: PlanPoint, other: PlanPoint | None) -> bool:
    return other is not None and (point.forward, point.backward) == (other.forward, other.backward)


_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def _size(nbytes: int) -> str:
    """Returns a short text of a size that is at least `nbytes`, as the option `memory_budget` takes
    it.
    """
    unit, scale = next((each for each in _UNITS if nbytes >= each[1]), _UNITS[-1])
    size = nbytes / scale
    decimals = 0 if unit == "B" else 3 if size < 10 else 2 if size < 100 else 1
    factor = 10**decimals
    return f"{math.ceil(size * factor) / factor:g}{unit}" if size < 1e4 else f"{nbytes}B"
