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
from operator import attrgetter

from zpasses.backend.step_trials import StepTrials
from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.kept_params import (
    KeptParam,
    StepProblem,
    fitting_params,
    keepable_params,
)
from zpasses.cost.plan.leaving_values import rank_leaving
from zpasses.cost.plan.offloaded_values import SavedValue, saved_values
from zpasses.cost.plan.plan_improvement import improve_plan
from zpasses.cost.plan.schedule_evaluation import Evaluation, Plan, evaluate
from zpasses.cost.plan.schedule_problem import ScheduleProblem, problem_of
from zpasses.cost.plan.simple_plans import single_plan, varied_plans
from zpasses.cost.time.target import Target, current_target, use_target
from zpasses.graph.host_copies import offloadable_values
from zpasses.inspect.units import bytes_text
from zpasses.option_values import parse_budget
from zpasses.tools.capture.captured_step import CaptureError
from zpasses.tools.plan.equal_layers import EqualPartitions
from zpasses.tools.plan.plan_request import PlanRequest
from zpasses.tools.plan.plan_table import GraphFigures, PlanPoint, PlanTable, worth_showing
from zpasses.tools.plan.relaxation import LeastTimes
from zpasses.tools.plan.repeated_layers import (
    FEWEST_LAYERS,
    RepeatedLayers,
    with_values_on_host,
)
from zpasses.tools.plan.sweep import sweep

_CHANGES = 100
"""How many changes of the best simple plan to draw, for each graph and limit."""
_LIKELY, _GAIN = 4, 0.01
"""How many ways, which a few plans estimate, to plan with all of them; and by which share of its
duration one must be able to beat the others."""


_least_us = attrgetter("least_us")


def _rank(evaluated: Evaluation, limit_bytes: int) -> tuple[int, float]:
    """Returns the bytes above a limit, and the duration; lower is better."""
    return max(0, evaluated.peak_bytes - limit_bytes), evaluated.cost.total_us


def _best(plans: Sequence[Evaluation], limit_bytes: int) -> Evaluation:
    """Returns the fastest plan within a limit, or that which exceeds it least.

    Args:
        plans: in ascending order of `least_us`.
        limit_bytes: the limit.
    """
    best: Evaluation | None = None
    for each in plans:
        if best is not None and each.least_us >= best.cost.total_us:
            break
        if each.peak_bytes <= limit_bytes and (
            best is None or each.cost.total_us < best.cost.total_us
        ):
            best = each
    if best is not None:
        return best
    least = min(each.peak_bytes for each in plans)
    return min(
        (each for each in plans if each.peak_bytes == least), key=lambda each: each.cost.total_us
    )


class _Graph:
    """Forward or backward, and what is known of it whatever the limit."""

    def __init__(self, problem: ScheduleProblem) -> None:
        self.problem = problem

    @cached_property
    def bound_us(self) -> float:
        """What no schedule can beat."""
        return schedule_bound_us(self.problem)

    @cached_property
    def plans(self) -> list[Evaluation]:
        """Plans that need no search."""
        known = {each.plan: each for each in self.few_plans}
        plans = varied_plans(self.problem)
        return sorted((known.get(each) or self._evaluation(each) for each in plans), key=_least_us)

    @cached_property
    def few_plans(self) -> list[Evaluation]:
        """A few of them, for estimates."""
        return sorted(map(self._evaluation, varied_plans(self.problem, few=True)), key=_least_us)

    def _evaluation(self, plan: Plan) -> Evaluation:
        return Evaluation(self.problem, plan, averages=True)

    def rank(self, limit_bytes: int, *, few: bool = False) -> tuple[int, float]:
        """Returns the bytes above a limit and the duration of the best of these plans."""
        return _rank(_best(self.few_plans if few else self.plans, limit_bytes), limit_bytes)

    def figures(self, limit_bytes: int) -> GraphFigures:
        """Returns the figures of the fastest of some plans within a limit, after changes of it."""

        def rank(plan: Plan) -> tuple[int, float]:
            return _rank(self._evaluation(plan), limit_bytes)

        found = _best(self.plans, limit_bytes)
        for better in improve_plan(self.problem, found.plan, rank, _CHANGES, limit_bytes)[-1:]:
            found = self._evaluation(better)
        # `schedule` moves the copies of gradients last, so no choice is made for them.
        cost = evaluate(self.problem, found.plan, averages=True, copies=True)
        launches = found.plan.launches
        collectives = sum(
            self.problem.jobs[launch[0]].key.compatibility not in ("offload", "reload")
            for launch in launches
        )
        return GraphFigures(
            cost.total_us,
            cost.exposed_us,
            self.bound_us,
            cost.peak_bytes,
            collectives + cost.averages,
        )


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
        """Forward and backward."""
        return _Graph(self.step.forward), _Graph(self.step.backward)

    def rank(self, limit_bytes: int, *, few: bool = False) -> tuple[int, float]:
        """Returns the bytes above a limit and the duration of the best plan without a search."""
        forward, backward = (each.rank(limit_bytes, few=few) for each in self.graphs)
        return max(forward[0], backward[0]), forward[1] + backward[1]

    def least_rank(self, limit_bytes: int) -> tuple[int, float]:
        """Returns what no such plan can beat."""
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
        best = sys.maxsize, 0.0
        estimates: dict[_Way, tuple[int, float]] = {}
        for way in self._ways:
            if not best[0] and way.bound_us >= best[1]:
                break  # nor are its values faster on the host
            candidates = way, *self._offloading(way, limit_bytes)
            for each in sorted(candidates, key=lambda one: one.least_rank(limit_bytes)):
                if each.least_rank(limit_bytes) >= best:
                    break
                estimates[each] = each.rank(limit_bytes, few=True)
                best = min(best, estimates[each])
        ranks: dict[_Way, tuple[int, float]] = {}
        best = sys.maxsize, 0.0
        for way in sorted(estimates, key=estimates.__getitem__):
            excess, least_us = way.least_rank(limit_bytes)
            if len(ranks) < _LIKELY and (excess, least_us * (1 + _GAIN)) < best:
                ranks[way] = way.rank(limit_bytes)
                best = min(best, ranks[way])
        fastest = min(ranks, key=ranks.__getitem__)
        kept = fitting_params(fastest.step, fastest.params, limit_bytes)
        keeping = replace(fastest, step=fastest.step.keeping(kept))
        ways = [(fastest, 0), (keeping, sum(each.nbytes for each in kept))][: 1 + bool(kept)]
        likely = min(way.rank(limit_bytes) for way, _ in ways)
        points = [
            _point(budget, limit_bytes, way, nbytes)
            for way, nbytes in ways
            if way.rank(limit_bytes) <= (likely[0], likely[1] * (1 + _GAIN))
        ]
        return min(points, key=lambda each: (max(limit_bytes, each.peak_bytes), each.total_us))

    def _offloading(self, way: _Way, limit_bytes: int) -> Iterator[_Way]:
        """Yields ways with values on the host: as few as make it fit, all that are idle at a peak
        above the limit, and some in between.
        """
        host_bytes = self._trials.host_bytes
        found = rank_leaving(way.step, way.rich, way.values, {}, limit_bytes, host_bytes)
        ranked = [each.value for each in found.ranked]
        fewest, most = found.fewest, len(ranked)

        def first(count: int) -> _Way:
            key = way, tuple(each.name for each in ranked[:count])
            if key not in self._on_host:
                self._on_host[key] = way.with_on_host(ranked[:count])
            return self._on_host[key]

        def fits(count: int) -> bool:
            return first(count).step.peak_bytes(single_plan) <= limit_bytes

        if not most:
            return
        if fewest and first(fewest).step.peak_bytes() > limit_bytes and fits(most):
            # A limit so low that nothing may be in flight beside what is awaited.
            fewest = bisect_left(range(most), True, key=fits)
        some = [fewest + (most - fewest) // part for part in (16, 4)]
        for count in sorted({fewest, *some, most} - {0}):
            yield first(count)


def _saved_bytes(step: StepProblem) -> int:
    return int(step.forward.live_bytes[-1])


def _fits(point: PlanPoint) -> bool:
    return point.peak_bytes <= (point.limit_bytes or 0)


def _point(budget: str, limit: int, way: _Way, kept_bytes: int) -> PlanPoint:
    forward, backward = (each.figures(limit) for each in way.graphs)
    return PlanPoint(
        "plan",
        budget,
        limit,
        {"forward": forward, "backward": backward},
        kept_bytes,
        0,
        way.activations,
        host_bytes=way.on_host,
    )
