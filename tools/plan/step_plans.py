"""Plans of one training step: what the backend makes of it under several memory budgets.

The step is captured once. Within its compile, the trial partitions of its joint graph are planned
for limits from the least that a plan fits to where more memory gains nothing. Each plan's graphs
are then made by the backend's own functions and passes, so its figures are those of a compile with
that budget.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.backend.partition_choice import too_little_memory
from zpasses.backend.partition_plan import Graphs, StepPlan
from zpasses.backend.step_trials import StepTrials, full_params
from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.kept_params import KeptParam
from zpasses.cost.time.route_figures import engine_routes
from zpasses.cost.time.target import Target, use_target
from zpasses.errors import OptionError
from zpasses.graph.cached_params import param_slots
from zpasses.graph.tags import tagged
from zpasses.option_values import parse_size
from zpasses.passes.defer_reduction import DeferReduction
from zpasses.passes.pipelines import ZERO2, ZERO3
from zpasses.passes.schedule import Schedule
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.events import Events, listen, run_reported_passes
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Pipeline
from zpasses.pipeline.predictor import Predictor
from zpasses.pipeline.runner import run_passes
from zpasses.runtime.forward_variants import ForwardVariant, build_forward_variant
from zpasses.testing.step_graphs import GraphProbe
from zpasses.tools.capture.captured_step import CaptureError, run_capture
from zpasses.tools.capture.mesh_shapes import AutoMesh
from zpasses.tools.plan.block_plans import plan_blocks
from zpasses.tools.plan.equal_layers import EqualPartitions
from zpasses.tools.plan.layer_plans import LayerTable
from zpasses.tools.plan.plan_request import PlanRequest
from zpasses.tools.plan.plan_table import GraphFigures, PlanPoint, PlanTable, worth_showing
from zpasses.tools.plan.relaxation import LeastTimes
from zpasses.tools.plan.resting_bytes import RestingBytes
from zpasses.tools.plan.shape_table import ShapePoint, ShapeTable, shape_point
from zpasses.tools.plan.sweep import sweep


def plan_step(
    request: PlanRequest,
    progress: Callable[[PlanPoint], object] = lambda point: None,
    partitions: EqualPartitions | None = None,
    device_bytes: int | None = None,
) -> PlanTable:
    """Capture a step, and make its plans.

    Args:
        request: what to plan.
        progress: called with each plan that was made.
        partitions: of the same step on other meshes, if its layers are repeated.
        device_bytes: memory of a device. A plan is made for what the rest leaves of it, too.

    Raises:
        CaptureError: if the function or the model fails, the step is not one graph and has no
            blocks, or its layers are not equal and some are to be repeated.
        OptionError: for an unknown target or a budget that is no size.
        MemoryBudgetError: for more memory of the host than the target has.
    """
    if request.compile_blocks is not None:
        return plan_blocks(request, progress)
    request.check()
    target = request.parsed_target()
    host_bytes = request.host_bytes(target)
    probe = GraphProbe(Level.JOINT)
    tables: list[PlanTable] = []
    resting: list[RestingBytes] = []
    steps = 0

    def observe(trials: StepTrials) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            trials.host_bytes = host_bytes
            trials.chunks_loss = request.chunks_loss
            also = resting[0].limits(request, device_bytes)
            planner = (
                _Planner(request, target, trials, probe.seen[-1], also, progress)
                if request.repeat is None
                else LayerTable(
                    request, target, trials, also, progress, partitions or EqualPartitions()
                )
            )
            tables.append(planner.run())

    capture = request.capture(
        lambda model: resting.append(RestingBytes.of(model, request)),
        # With deferred reductions, because the compile warns of windows without them.
        pipeline=Pipeline((probe, *_captured(request.passes), DeferReduction())),
        backwards_per_step=request.backwards_per_step,
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
    return resting[0].in_table(tables[0], request, target)


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
        OptionError: if the ranks cannot be divided, for parameters on the host, and as `plan_step`.
        CaptureError, ShardingError: as `plan_step`.
    """
    request.check()
    if request.offload_parameters is not None and request.optimizer is None:
        raise OptionError(
            "--offload-parameters goes together with --mesh auto only beside --optimizer: without "
            "it, all shards and the states of AdamW count as on the device. Add the optimizer, "
            "such as --optimizer adamw."
        )
    target, given = request.parsed_target(), request.device_memory
    device_bytes = parse_size(given, "--device-memory") if given else target.memory_bytes
    points, partitions, repeated = [], EqualPartitions(), None
    room, count = None, _SHAPE_POINTS
    if request.repeat is not None:  # its plans take longer than its capture
        room, count = device_bytes, 1 if request.memory is None else 0
    for shape in auto.shapes(request.world):
        gc.collect()  # the graphs of the shape before
        one = replace(request, mesh=shape, points=count, stages=False)
        found = plan_step(one, partitions=partitions, device_bytes=room)
        repeated = found.repeated
        point = shape_point(str(shape), found, device_bytes)
        progress(point)
        points.append(point)
    return ShapeTable(
        **request.about(target),
        memory=request.memory,
        device_bytes=device_bytes,
        points=tuple(points),
        optimizer=request.optimizer,
        repeated=repeated,
    )


class _Planner:
    def __init__(
        self,
        request: PlanRequest,
        target: Target,
        trials: StepTrials,
        joint: fx.GraphModule,
        also: Sequence[int],
        progress: Callable[[PlanPoint], object],
    ) -> None:
        self._request, self._target, self._trials, self._joint = request, target, trials, joint
        self._also, self._progress = also, progress
        self._graphs: dict[Any, Graphs] = {}
        self._made: dict[str, PlanPoint] = {}

    def run(self) -> PlanTable:
        started, memory = time.perf_counter(), self._request.memory
        with use_target(self._target):
            stages = (*self._zero2(), *self._zero3()) if self._request.stages else ()
            least, most = self._trials.least_bytes(), self._trials.most_bytes()
            sweep(self._point, least, most, self._request.points, self._also)
            chosen, missing = self._chosen()
            limit = self._trials.limit_bytes(memory) if memory is not None else None
            shown = worth_showing(self._made.values(), chosen)
            plans = list(map(LeastTimes(self._trials).of, shown))
        if chosen is not None:
            chosen = plans[shown.index(chosen)]
        return PlanTable(
            **self._request.about(self._target),
            plans=tuple(plans),
            stages=stages,
            memory=memory,
            memory_bytes=limit,
            chosen=chosen if chosen is not None or missing is not None else plans[-1],
            missing=missing,
            seconds=time.perf_counter() - started,
            host_memory=self._request.host_memory,
        )

    def _chosen(self) -> tuple[PlanPoint | None, str | None]:
        """Returns the plan of the budget that was asked for, or why there is none."""
        budget = self._request.memory
        if budget is None:
            return None, None
        plan = self._trials.fastest(self._trials.limit_bytes(budget))
        if not plan.fits:
            return None, too_little_memory(budget, plan, self._trials)
        return self._point(budget), None

    # --- plans ------------------------------------------------------------------------------------
    def _point(self, budget: str) -> PlanPoint:
        """Returns the plan that the backend makes with this budget."""
        if budget not in self._made:
            limit = self._trials.limit_bytes(budget)
            plan = self._trials.fastest(limit)
            pipeline = self._request.passes.with_memory_budget(f"{limit}B")
            point = PlanPoint(
                "plan",
                budget,
                limit,
                graphs={},
                kept_bytes=_bytes(*plan.kept, *plan.cached),
                cached_bytes=_bytes(*plan.cached),
                activations=plan.saved_share,
                host_bytes=plan.host_bytes,
                chunks=plan.trial.chunks,
            )
            self._made[budget] = self._judged(point, pipeline, self._graphs_of(plan))
        return self._made[budget]

    def _zero3(self) -> list[PlanPoint]:
        """Returns stage 3, or the pipeline, without a budget."""
        plan = self._trials.fitting(self._trials.rise)
        pipeline, budget = self._request.passes, plan.memory_budget
        name = "zero3" if pipeline is ZERO3 else "pipeline"
        pipeline = pipeline if budget is None else pipeline.with_memory_budget(budget)
        stage = PlanPoint(name, None, None, {}, _bytes(*plan.kept), 0, 1.0)
        return self._with_and_without_engines(stage, pipeline, self._graphs_of(plan))

    def _zero2(self) -> list[PlanPoint]:
        """Returns stage 2 without a budget, if the joint graph has not been rewritten for a
        pipeline.
        """
        if self._request.passes is not ZERO3:
            return []
        run_passes(self._joint.graph, ZERO2.at(Level.JOINT), verify="off")
        self._joint.recompile()
        recomputes = Options(zero_stage=2).recomputes_elementwise()
        kept = sum(size for *_, size in full_params(self._joint))
        graphs = self._trials.other(self._joint, recomputes, caches=True)
        stage = PlanPoint("zero2", None, None, {}, kept, kept, 1.0)
        return self._with_and_without_engines(stage, ZERO2, graphs)

    def _with_and_without_engines(
        self, stage: PlanPoint, pipeline: Pipeline, graphs: Graphs
    ) -> list[PlanPoint]:
        """Returns a stage; before it the same without copy engines, if its plan may use them."""
        found = []
        if pipeline.uses_engines and engine_routes(self._target):
            first = replace(stage, name=f"{stage.name}, no copy engines")
            copies = compat.clone_graph_module(graphs[0]), compat.clone_graph_module(graphs[1])
            found.append(self._judged(first, _without_engines(pipeline), copies))
        return [*found, self._judged(stage, pipeline, graphs)]

    def _graphs_of(self, plan: StepPlan) -> Graphs:
        """Returns the graphs of a plan as copies, which are rewritten."""
        if plan.choice not in self._graphs:
            self._graphs[plan.choice] = self._trials.graphs(plan.choice)
        forward, backward = self._graphs[plan.choice]
        return compat.clone_graph_module(forward), compat.clone_graph_module(backward)

    def _judged(self, point: PlanPoint, pipeline: Pipeline, graphs: Graphs) -> PlanPoint:
        """Runs the passes after partitioning. Returns the plan with the figures of its graphs, by
        the cost model.
        """
        predictors = {}
        for gm, level in zip(graphs, (Level.FORWARD, Level.BACKWARD), strict=True):
            predictors[level] = Predictor(self._target)
            events, passes = Events((predictors[level],)), pipeline.at(level)
            run_reported_passes(events, "step", "partitioned", gm.graph, passes, verify="off")
        figures = {
            "forward": self._forward_figures(graphs[0], predictors[Level.FORWARD]),
            "backward": self._figures(graphs[1], predictors[Level.BACKWARD]),
        }
        point = replace(point, graphs=figures, routes=tuple(_routes(graphs)))
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
        return replace(found, bound_us=schedule_bound_us(problem.without(gone)))

    def _figures(self, gm: fx.GraphModule, predictor: Predictor) -> GraphFigures:
        found = predictor.predicted(gm.graph, scheduled=True)
        if found is None:
            raise CaptureError(
                f"{self._request.function}: a graph has no collectives of parameters, so there is "
                "nothing to plan."
            )
        return GraphFigures(
            found.total_us, found.exposed_us, found.bound_us, found.peak_bytes, found.collectives
        )


class _Unscheduled(Schedule):
    """Tells the trials what the pass can do, as in a training run. The captured graph, which does
    not run, stays as it is.
    """

    def rewrite(self, graph: fx.Graph) -> int:
        return 0


def _captured(pipeline: Pipeline) -> Iterator[Pass]:
    """Yields the passes that rewrite the joint graph, and one that schedules nothing. Each plan
    chooses its chunks of the loss by itself.
    """
    for each in pipeline:
        if each.level is Level.JOINT and not each.facts.chunks_loss:
            yield each
        elif isinstance(each, Schedule):
            yield _Unscheduled(**vars(each))


def _routes(graphs: Graphs) -> Iterator[str]:
    """Yields the reason for the route of each launch of gathers that has one."""
    for side, gm in zip(("forward", "backward"), graphs, strict=True):
        for _, tag in tagged(gm.graph, "gather"):
            if tag.note:
                more = f" and {len(tag.params) - 1} more" if len(tag.params) > 1 else ""
                yield f"{side}, {tag.params[0]}{more}: {tag.note}"


def _without_engines(pipeline: Pipeline) -> Pipeline:
    passes = (
        replace(each, copy_engines="off") if isinstance(each, Schedule) else each
        for each in pipeline
    )
    return Pipeline(tuple(passes))


def _bytes(*kept: KeptParam) -> int:
    return sum(each.nbytes for each in kept)
