"""Predictions for the graphs of a compile: how far each is from what is possible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import fx

from zpasses.cost.memory.liveness import liveness
from zpasses.cost.plan.prediction import Prediction, predict
from zpasses.cost.plan.schedule_planner import memory_limit
from zpasses.cost.plan.schedule_problem import ScheduleProblem, problem_of
from zpasses.cost.time.target import Target
from zpasses.option_values import MemoryBudget, parse_budget
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.events import LevelStarted, PassRan

T = TypeVar("T")
_log = logging.getLogger("zpasses")


class Predictor:
    """Listener that reads a graph before the first pass that merges or moves its collectives.

    Args:
        target: hardware that the graph runs on.
    """

    def __init__(self, target: Target) -> None:
        self._target, self._ran = target, 0
        self._passes: Sequence[Pass] = ()
        self.schedule_problem: ScheduleProblem | None = None

    def __call__(self, event: object) -> None:
        match event:
            case LevelStarted(graph=graph, passes=passes):
                self._passes, self._ran = passes, 0
                self._read(graph)
            case PassRan(graph=graph):
                self._ran += 1
                self._read(graph)

    def _read(self, graph: fx.Graph) -> None:
        moves = any(each.level is Level.PARTITIONED for each in self._passes[: self._ran])
        if not moves and (
            self._ran == len(self._passes) or self._passes[self._ran].level is Level.PARTITIONED
        ):
            engines = any(each.facts.uses_engines for each in self._passes)
            self.schedule_problem = _guarded(
                lambda: problem_of(graph, self._target, copy_engines=engines)
            )

    def predicted(self, graph: fx.Graph, *, scheduled: bool = False) -> Prediction | None:
        """Returns the prediction for the graph after its passes.

        The limit is that of the pass that plans a schedule, if one ran. Otherwise it is the memory
        that the graph takes anyway, but at least the peak with one gather and one reduction in
        flight.

        Args:
            graph: the graph after its passes.
            scheduled: say that what is achieved is what is possible, without making a plan.

        Returns:
            None if the graph has no collectives of parameters, or if its shapes cannot be modelled.
        """
        problem = self.schedule_problem
        if problem is None or not problem.jobs:
            return None
        return _guarded(lambda: self._predict(graph, problem, scheduled))

    def _predict(self, graph: fx.Graph, problem: ScheduleProblem, scheduled: bool) -> Prediction:
        budgets = [each.facts.plans_within for each in self._passes]
        budget = next((each for each in budgets if each is not None), None)
        if budget is not None:
            limit = memory_limit(problem, parse_budget(budget, "option 'memory_budget'"))
        else:
            limit = max(memory_limit(problem, MemoryBudget()), liveness(graph).peak_bytes)
        planned = scheduled or budget is not None
        return predict(graph, self._target, problem, limit, planned=planned)


def _guarded(compute: Callable[[], T]) -> T | None:
    """Returns None where the model fails: a prediction must not end a compile."""
    try:
        return compute()
    except Exception as error:
        _log.warning("no prediction for a graph: %s: %s", type(error).__name__, error)
        return None
