"""Figures of graphs and of plans, for tests of `zpasses plan`."""

from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.step_time import step_time
from zpasses.cost.time.target import Target
from zpasses.graph.queries import collective_of
from zpasses.testing import fake_world
from zpasses.tools.plan.plan_table import GraphFigures, PlanPoint, PlanTable

WORLD = 4


def figures(graph):
    with fake_world(WORLD):
        time = step_time([graph], Target.parse("h100"))
        return {
            "total_us": time.total_us,
            "exposed_us": time.exposed_us,
            "peak_bytes": liveness(graph).peak_bytes,
            "collectives": sum(collective_of(node) is not None for node in graph.nodes),
        }


def point_of(peak, total, name="plan", share=0.9):
    figures = GraphFigures(total / 2, total / 8, share * total / 2, peak, 3)
    graphs = {"forward": figures, "backward": figures}
    return PlanPoint(name, f"{peak}B" if name == "plan" else None, peak, graphs, 0, 0, 1.0)


def table_of(points, stages, memory=None, function="train.py:step"):
    plans = tuple(point_of(*each) for each in points)
    return PlanTable(
        function,
        8,
        "h100",
        "h100",
        1,
        plans,
        tuple(point_of(*each, name) for each, name in zip(stages, ("zero2", "zero3"), strict=True)),
        None if memory is None else f"{memory}B",
        memory,
        plans[-1],
        None,
        1.0,
    )
