"""Plans of a step whose blocks are compiled one by one: one for each number of graphs ahead for
which the runtime may start gathers, and leaner ones with values on the host.

The step runs on fake tensors, and the backend sends the sequence of its graphs when it plans them,
so the plans are made from what a training run plans from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

from zpasses.backend.block_steps import BlockStep
from zpasses.cost.plan.prefetch import (
    MOST_AHEAD,
    GraphRun,
    StepCost,
    plan_prefetch,
    plan_routes,
    step_bound_us,
    step_cost,
)
from zpasses.inspect.units import bytes_text
from zpasses.pipeline.events import listen
from zpasses.tools.capture.captured_step import CaptureError, CaptureReport, run_capture
from zpasses.tools.plan.plan_request import PlanRequest
from zpasses.tools.plan.plan_table import (
    GraphFigures,
    PlanPoint,
    PlanTable,
    budget_text,
    worth_showing,
)
from zpasses.tools.plan.resting_bytes import RestingBytes


def plan_blocks(request: PlanRequest, progress: Callable[[PlanPoint], object]) -> PlanTable:
    """As `plan_step`, of a request with `compile_blocks`.

    Raises:
        CaptureError: if the function or the model fails, or no block gathers parameters.
        OptionError: if no module matches the names of blocks, and as `plan_step`.
        MemoryBudgetError: as `plan_step`.
    """
    request.check()
    started, memory, target = time.perf_counter(), request.memory, request.parsed_target()
    host_bytes = request.host_bytes(target)
    steps, report, resting = _captured(request)
    step = replace(steps[_stage_of(request)], host_bytes=host_bytes)

    def add(point: PlanPoint) -> PlanPoint:
        progress(point)
        return point

    made: dict[Hashable, PlanPoint] = {}
    for peak_bytes in _peaks(step):
        budget = budget_text(peak_bytes)
        limit = step.limit_bytes(budget)
        cost = step.planned(limit)
        key = cost.ahead, tuple(cost.routes.items()), cost.host_bytes
        if key not in made:
            made[key] = add(_point("plan", budget, limit, step.runs, cost))
    chosen, limit_bytes, missing = None, None, None
    if memory is not None:
        limit_bytes = step.limit_bytes(memory)
        cost = step.planned(limit_bytes)
        if cost.peak_bytes <= limit_bytes:
            chosen = _point("plan", memory, limit_bytes, step.runs, cost)
        else:
            missing = step.too_little_memory(memory, limit_bytes)
    gathered = sum(run.gathered_bytes for run in step.runs if not run.is_backward)
    uncompiled = {
        name: size for name, size in report.uncompiled.items() if size > _NOTABLE * gathered
    }
    plans = worth_showing(made.values(), chosen)
    stages: list[PlanPoint] = []
    if request.stages and request.pipeline is not None:
        stages = [*map(add, _stage("pipeline", step.runs))]
    elif 2 in steps:
        whole = steps[2].runs
        kept = sum(run.gathered_bytes for run in whole if not run.is_backward)
        stages = [*map(add, (*_stage("zero2", whole, kept), *_stage("zero3", step.runs)))]
    table = PlanTable(
        **request.about(target),
        plans=tuple(plans),
        stages=tuple(stages),
        memory=memory,
        memory_bytes=limit_bytes,
        chosen=chosen if memory is not None else plans[-1],
        missing=missing,
        seconds=time.perf_counter() - started,
        uncompiled=uncompiled,
        host_memory=request.host_memory,
    )
    return resting.in_table(table, request, target)


_LEANER = 4
"""Number of plans with values on the host to make."""


def _peaks(step: BlockStep) -> list[int]:
    """Peaks to plan for: without values on the host for each number of graphs ahead, on compute
    units and with the best routes, and from the least one without to the least one with them.
    """
    peaks = {
        cost.peak_bytes
        for ahead in range(MOST_AHEAD + 1)
        for cost in (step_cost(step.runs, ahead), plan_routes(step.runs, ahead, None, ()))
    }
    least = step.planned(0).peak_bytes
    between = min(peaks) - least
    return sorted(peaks | {least + between * at // _LEANER for at in range(_LEANER)})


_NOTABLE = 0.001
"""Size of a module, as a share of all blocks, from which on it is named."""


def _captured(
    request: PlanRequest,
) -> tuple[dict[int | None, BlockStep], CaptureReport, RestingBytes]:
    """Returns for each stage the graphs of a step that comes after others, and what rests.

    The second step is planned anew if it runs other graphs than the first one, such as those that
    find parameters cached.
    """
    seen: dict[int | None, BlockStep] = {}
    resting: list[RestingBytes] = []
    capture = replace(
        request.capture(
            lambda model: resting.append(RestingBytes.of(model, request)),
            **({"zero_stage": 3} if request.pipeline is None else {"pipeline": request.pipeline}),
        ),
        steps=2,
        more_options=[{"zero_stage": 2}] if request.stages and request.pipeline is None else [],
    )
    with listen(BlockStep, lambda step: seen.__setitem__(step.zero_stage, step)):
        report = run_capture(capture)
    if _stage_of(request) not in seen:
        raise CaptureError(
            f"{request.function}: the blocks {request.compile_blocks!r} gather no sharded "
            "parameters in forward and backward, so there is nothing to plan. Name modules with "
            "trained parameters with --compile-blocks."
        )
    return seen, report, resting[0]


def _stage_of(request: PlanRequest) -> int | None:
    return 3 if request.pipeline is None else None


def _stage(name: str, runs: Sequence[GraphRun], kept_bytes: int = 0) -> Iterator[PlanPoint]:
    """Yields a stage without a budget; before it the same without copy engines, if its plan may use
    them.
    """
    if any(run.engines for run in runs):
        without = [replace(run, engines=()) for run in runs]
        yield from _stage(f"{name}, no copy engines", without, kept_bytes)
    yield _point(name, None, None, runs, plan_prefetch(runs, None), kept_bytes)


def _point(
    name: str,
    budget: str | None,
    limit: int | None,
    runs: Sequence[GraphRun],
    cost: StepCost,
    kept_bytes: int = 0,
) -> PlanPoint:
    figures = GraphFigures(
        cost.total_us,
        cost.exposed_us,
        step_bound_us(runs),
        cost.peak_bytes,
        sum(run.collectives for run in runs),
    )
    return PlanPoint(
        name,
        budget,
        limit,
        {"step": figures},
        kept_bytes,
        kept_bytes,
        1.0,
        cost.ahead,
        cost.host_bytes,
        routes=tuple(_routes(runs, cost)),
    )


def _routes(runs: Sequence[GraphRun], cost: StepCost) -> Iterator[str]:
    """Yields for each graph whose gathers copy engines could run which route they take, and what
    the step gains by it in all equal graphs.
    """

    def total_us(run: GraphRun, route: str) -> float:
        """Of the step, if all graphs that are equal to this one take a route."""
        alike = [each.number for each in runs if each.kind == run.kind]
        routes = {key: value for key, value in cost.routes.items() if key not in alike}
        routes |= dict.fromkeys(alike if route else (), route)
        return step_cost(runs, cost.ahead, cost.moved, routes).total_us

    reasons: dict[Hashable, str] = {}
    for run in runs:
        if not run.engines:
            continue
        if run.kind not in reasons:
            own, without, texts = cost.routes.get(run.number), total_us(run, ""), list[str]()
            for route, timing, _ in run.engines:
                gain, taken = without - total_us(run, route), route == own
                effect = "gain" if gain >= 0 else "lose"
                texts.append(
                    f"{'by' if taken else 'not by'} {route}: {bytes_text(run.gathered_bytes)} in "
                    f"{timing.duration_us:.0f} us, {'' if taken else 'would '}{effect}"
                    f"{'s' if taken else ''} {abs(gain):.0f} us in all graphs like it"
                )
            reasons[run.kind] = "; ".join(sorted(texts))  # "by" comes before "not by"
        yield f"{run.name.partition(', sharded in')[0]}: {reasons[run.kind]}"
