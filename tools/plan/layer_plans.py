"""Plans of a step with many equal layers, of which a few are captured.

The captured step is partitioned in several ways, each of which saves the same in every layer. The
step with all layers is made of copies of one of them (`zpasses.tools.plan.repeated_layers`), and
planned by the cost model.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zpasses.backend.step_trials import StepTrials
from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.kept_params import (
    KeptParam,
    StepProblem,
    fitting_params,
    keepable_params,
)
from zpasses.cost.plan.offloaded_values import (
    SavedValue,
    fewest_that_fit,
    saved_values,
    worthwhile,
)
from zpasses.cost.plan.plan_improvement import improve_plan
from zpasses.cost.plan.schedule_evaluation import Cost, Plan, evaluate
from zpasses.cost.plan.schedule_problem import ScheduleProblem, problem_of
from zpasses.cost.plan.simple_plans import single_plan, varied_plans
from zpasses.cost.time.target import Target, current_target, use_target
from zpasses.graph.host_copies import offloadable_values
from zpasses.inspect.units import bytes_text
from zpasses.option_values import parse_budget
from zpasses.tools.capture.captured_step import CaptureError
from zpasses.tools.plan.equal_layers import EqualPartitions
from zpasses.tools.plan.plan_request import PlanRequest
from zpasses.tools.plan.plan_table import (
    GraphFigures,
    PlanPoint,
    PlanTable,
    worth_showing,
)
from zpasses.tools.plan.relaxation import LeastTimes
from zpasses.tools.plan.repeated_layers import (
    FEWEST_LAYERS,
    RepeatedLayers,
    with_values_on_host,
)
from zpasses.tools.plan.sweep import sweep

_CHANGES = 100
"""How many changes of the best simple plan to draw, for each graph and limit."""


class _Graph:
    """Forward or backward, and what is known of it whatever the limit."""

    def __init__(self, problem: ScheduleProblem) -> None:
        self.problem = problem

    @cached_property
    def bound_us(self) -> float:
        """What no schedule can beat."""
        return schedule_bound_us(self.problem)

    @cached_property
    def plans(self) -> list[tuple[Cost, Plan]]:
        """Plans that need no search, with what they cost."""
        return [(self._cost(plan), plan) for plan in varied_plans(self.problem)]

    @cached_property
    def few_plans(self) -> list[tuple[Cost, Plan]]:
        """A few of them, for estimates."""
        return [(self._cost(plan), plan) for plan in varied_plans(self.problem, few=True)]

    def _cost(self, plan: Plan) -> Cost:
        return evaluate(self.problem, plan, averages=True)

    def figures(self, limit_bytes: int, *, estimate: bool = False) -> GraphFigures:
        """Returns the figures of the fastest of some plans within a limit, after changes unless it
        is an estimate.
        """

        def rank(cost: Cost) -> tuple[int, float]:
            return max(0, cost.peak_bytes - limit_bytes), cost.total_us

        plans = self.few_plans if estimate else self.plans
        cost, plan = min(plans, key=lambda each: rank(each[0]))
        changes = 0 if estimate else _CHANGES
        better = improve_plan(
            self.problem, plan, lambda each: rank(self._cost(each)), changes, limit_bytes
        )
        if better:
            cost, plan = self._cost(better[-1]), better[-1]
        collectives = sum(
            self.problem.jobs[launch[0]].key.compatibility not in ("offload", "reload")
            for launch in plan.launches
        )
        launches = collectives + cost.averages
        return GraphFigures(cost.total_us, cost.waited_us, self.bound_us, cost.peak_bytes, launches)


@dataclass(frozen=True, eq=False)
class _Way:
    """The step with all layers, as one partition and choice of values on the host make it."""

    activations: float
    step: StepProblem
    params: Sequence[KeptParam]
    values: Sequence[SavedValue]
    """What may rest on the host."""
    on_host: int = 0
    """Bytes of those that do."""

    @cached_property
    def rich(self) -> StepProblem:
        """The step that keeps all parameters."""
        return self.step.keeping(self.params)

    @cached_property
    def bound_us(self) -> float:
        """What no plan that keeps parameters can beat."""
        return self.rich.mean_us(schedule_bound_us)

    @cached_property
    def graphs(self) -> tuple[_Graph, _Graph]:
        """Forward and backward, which keep no parameters."""
        return _Graph(self.step.forward), _Graph(self.step.backward)

    def least_rank(self, limit_bytes: int) -> tuple[int, float]:
        """Returns what no plan that keeps no parameters can beat, as in `_rank`."""
        live = max(int(each.problem.live_bytes.max()) for each in self.graphs)
        return max(0, live - limit_bytes), sum(each.bound_us for each in self.graphs)

    def with_on_host(self, values: Sequence[SavedValue]) -> _Way:
        step, params = with_values_on_host(self.step, values, self.params)
        return _Way(self.activations, step, params, (), sum(each.nbytes for each in values))


class LayerTable:
    """Makes the table of plans of a step with many layers.

    Args:
        request: what to plan.
        target: the hardware.
        trials: of the joint graph of the captured step.
        also: limits that are planned for in any case.
        progress: called with each plan that was made.
        partitions: of the same step on other meshes.
    """

    def __init__(
        self,
        request: PlanRequest,
        target: Target,
        trials: StepTrials,
        also: Sequence[int],
        progress: Callable[[PlanPoint], object],
        partitions: EqualPartitions,
    ) -> None:
        self._request, self._target, self._trials = request, target, trials
        self._also, self._progress, self._partitions = also, progress, partitions
        self._made: dict[str, PlanPoint] = {}

    def run(self) -> PlanTable:
        started, request = time.perf_counter(), self._request
        memory, chosen, missing, limit = request.memory, None, None, None
        layers: int = request.arguments[request.repeat or ""]
        with use_target(self._target):
            planner = LayerPlanner(self._trials, layers, self._partitions)

            def point(budget: str) -> PlanPoint:
                if budget not in self._made:
                    self._made[budget] = planner.fastest(budget)
                    self._progress(self._made[budget])
                return self._made[budget]

            if request.points:
                least = planner.least_bytes()
                sweep(point, least, planner.most_bytes(least), request.points, self._also)
            if memory is not None:
                found = point(memory)
                limit = found.limit_bytes
                chosen = found if _fits(found) else None
                if chosen is None:
                    missing = (
                        f"memory_budget={memory!r}: the leanest plan needs "
                        f"{bytes_text(found.peak_bytes)} above what rests between steps. Raise the "
                        "budget, give --host-memory, take a smaller batch, or train on more ranks."
                    )
            shown = worth_showing((each for each in self._made.values() if _fits(each)), chosen)
            plans = [planner.least.of(each) for each in shown]
        if chosen is not None:
            chosen = plans[shown.index(chosen)]
        return PlanTable(
            **request.about(self._target),
            plans=tuple(plans),
            stages=(),
            memory=memory,
            memory_bytes=limit,
            chosen=plans[-1] if memory is None and plans else chosen,
            missing=missing,
            seconds=time.perf_counter() - started,
            host_memory=request.host_memory,
            repeated=FEWEST_LAYERS,
        )


class LayerPlanner:
    """Plans of the step with all layers.

    Args:
        trials: of the joint graph of the captured step. Use it with its target and process groups.
        layers: that the model has.
        partitions: of the same step on other meshes.
    """

    def __init__(self, trials: StepTrials, layers: int, partitions: EqualPartitions) -> None:
        self._trials = trials
        self.least = LeastTimes(trials, layers - FEWEST_LAYERS)
        found = []
        for graphs in partitions.of(trials):
            forward, backward = (each.graph for each in graphs)
            target = current_target()
            problems = problem_of(forward, target), problem_of(backward, target)
            few = StepProblem(*problems, trials.repetition)
            movable = offloadable_values(forward, backward, trials.user_outputs)
            values = saved_values(few, movable) if trials.host_bytes else []
            try:
                repeated = RepeatedLayers.of(few)
                found.append(repeated.extended(layers, keepable_params(few), values))
            except ValueError:
                continue  # backward recomputes across the borders of layers
        if not found:
            raise CaptureError(
                f"the step has no {FEWEST_LAYERS} equal layers that run one after another, with "
                'parameters such as "layers.0.mlp.weight"; plan all layers of it'
            )
        most = max(_saved_bytes(step) for step, _, _ in found)
        self._ways = [
            _Way(_saved_bytes(step) / most, step, params, values) for step, params, values in found
        ]
        self._ways.sort(key=lambda way: way.bound_us)
        self._on_host: dict[tuple[_Way, tuple[str, ...]], _Way] = {}

    def least_bytes(self) -> int:
        """Returns the least limit that a plan fits."""
        ways = [*self._ways, *(each for way in self._ways for each in self._offloading(way, 0))]
        return min(each.step.peak_bytes(single_plan) for each in ways)

    def most_bytes(self, least_bytes: int) -> int:
        """Returns a limit above which no plan gains anything, or the memory of the device."""
        rich = max(way.rich.peak_bytes() for way in self._ways) * 2
        return max(least_bytes, min(rich, current_target().memory_bytes))

    def limit_bytes(self, budget: str) -> int:
        """Returns the largest peak that the option `memory_budget` allows."""
        parsed = parse_budget(budget, "--memory")
        if parsed.most_bytes is not None:
            return parsed.most_bytes
        return parsed.limit_bytes(self._ways[0].step.peak_bytes())

    def fastest(self, budget: str) -> PlanPoint:
        """Returns the fastest plan within a budget, or that which exceeds it least."""
        limit_bytes = self.limit_bytes(budget)
        best: PlanPoint | None = None
        best_way, record = self._ways[0], (sys.maxsize, 0.0)
        for way in self._ways:
            if best is not None and _fits(best) and way.bound_us >= best.total_us:
                break  # nor are its values faster on the host
            candidates = way, *self._offloading(way, limit_bytes)
            for each in sorted(candidates, key=lambda one: one.least_rank(limit_bytes)):
                if best is not None and each.least_rank(limit_bytes) >= _rank(best):
                    break
                estimate = _rank(_point(budget, limit_bytes, each, (), estimate=True))
                if estimate >= record:  # changes gain about as much everywhere, and take long
                    continue
                record, point = estimate, _point(budget, limit_bytes, each, ())
                if best is None or _rank(point) < _rank(best):
                    best, best_way = point, each
        assert best is not None
        kept = fitting_params(best_way.step, best_way.params, limit_bytes)
        return min(best, _point(budget, limit_bytes, best_way, kept), key=_rank)

    def _offloading(self, way: _Way, limit_bytes: int) -> Iterator[_Way]:
        """Yields ways with values on the host: as few as make it fit, all that are idle at a peak
        above the limit, and some in between.
        """
        ranked = worthwhile(way.rich, way.values, limit_bytes, self._trials.host_bytes)
        fewest, most = fewest_that_fit(way.step, ranked, limit_bytes), len(ranked)

        def first(count: int) -> _Way:
            key = way, tuple(each.name for each in ranked[:count])
            if key not in self._on_host:
                self._on_host[key] = way.with_on_host(ranked[:count])
            return self._on_host[key]

        def fits(count: int) -> bool:
            return first(count).step.peak_bytes(single_plan) <= limit_bytes

        if fewest == most:  # a limit so low that nothing may be in flight beside what is awaited
            fewest = bisect_left(range(most), True, key=fits)
        for count in sorted({fewest, (3 * fewest + most) // 4, most} - {0}):
            yield first(count)


def _saved_bytes(step: StepProblem) -> int:
    return int(step.forward.live_bytes[-1])


def _fits(point: PlanPoint) -> bool:
    return point.peak_bytes <= (point.limit_bytes or 0)


def _rank(point: PlanPoint) -> tuple[int, float]:
    return max(0, point.peak_bytes - (point.limit_bytes or 0)), point.total_us


def _point(
    budget: str, limit: int, way: _Way, kept: Sequence[KeptParam], *, estimate: bool = False
) -> PlanPoint:
    if kept:
        way = replace(way, step=way.step.keeping(kept))
    forward, backward = (each.figures(limit, estimate=estimate) for each in way.graphs)
    return PlanPoint(
        "plan",
        budget,
        limit,
        {"forward": forward, "backward": backward},
        sum(each.nbytes for each in kept),
        0,
        way.activations,
        host_bytes=way.on_host,
    )
