"""What the cost model predicts for a graph: its duration, what a schedule could achieve, and what
no schedule can.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zpasses.cost.memory.liveness import liveness
from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.schedule_planner import plan_schedule
from zpasses.cost.plan.schedule_problem import ScheduleProblem
from zpasses.cost.time.fused_kernels import FusedKernels
from zpasses.cost.time.step_time import Timeline
from zpasses.cost.time.target import Target
from zpasses.graph.queries import collective_of

_GIB = float(1 << 30)


@dataclass(frozen=True)
class Prediction:
    """Durations and memory of one graph on a target, as modelled."""

    total_us: float
    """Duration of the graph as it is, in microseconds: what is achieved."""
    exposed_us: float
    """Time in which no kernel runs because a collective is awaited."""
    possible_us: float
    """Duration with the plan that the pass `schedule` makes within `limit_bytes`."""
    bound_us: float
    """Duration that no schedule of the graph's collectives can beat, whatever its memory."""
    peak_bytes: int
    """Peak memory of the graph as it is, without what its caller holds."""
    limit_bytes: int
    """The largest peak that the plan of `possible_us` may reach."""
    collectives: int
    """Number of launches."""

    def __str__(self) -> str:
        return (
            f"achieved {self.total_us / 1e3:.2f} ms, possible within {self.limit_bytes / _GIB:.3f} "
            f"GiB {self.possible_us / 1e3:.2f} ms, bound {self.bound_us / 1e3:.2f} ms"
        )


def predict(
    graph: fx.Graph, target: Target, problem: ScheduleProblem, limit_bytes: int, *, planned: bool
) -> Prediction:
    """Returns the prediction for a graph.

    Args:
        graph: the graph after its passes.
        target: hardware that it runs on.
        problem: the graph before the passes that merge and move its collectives.
        limit_bytes: memory of the plan to compare with.
        planned: whether the graph follows a plan within this limit already, so that what is
            achieved is what is possible. If not, a plan is made, which takes up to 10 s.
    """
    kernels = FusedKernels()
    time = Timeline(graph, target, kernels=kernels).run()
    peak = liveness(graph, kernels=kernels).peak_bytes
    possible = time.total_us
    if not planned:
        possible = plan_schedule(problem, limit_bytes).cost.total_us
        if peak <= limit_bytes:
            possible = min(possible, time.total_us)
    return Prediction(
        time.total_us,
        time.exposed_us,
        possible,
        schedule_bound_us(problem),
        peak,
        limit_bytes,
        sum(collective_of(node) is not None for node in graph.nodes),
    )
