"""Writes a plan of the pass `schedule` into a graph, or into a copy of it that is only judged."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from zpasses.cost.memory.collective_moves import SchedulableCollective, equal_liveness
from zpasses.cost.plan.schedule_evaluation import Action, Cost, Plan
from zpasses.cost.plan.schedule_problem import ScheduleProblem
from zpasses.cost.time.fused_kernels import FusedKernels
from zpasses.cost.time.step_time import Timeline
from zpasses.cost.time.target import Target
from zpasses.graph.dialect import AVERAGE_GRAD
from zpasses.passes.writers.bucket_writer import LaunchNodes, merge_collectives
from zpasses.sdma.engine_gathers import gather_by_engine


def write_plan(
    graph: fx.Graph, problem: ScheduleProblem, plan: Plan, origin: str
) -> list[LaunchNodes]:
    """Merges and moves collectives, and returns the nodes of each launch.

    Args:
        graph: the graph to edit.
        problem: what was read of it.
        plan: has indices of kept nodes as slots.
        origin: name of the pass, for tags.
    """
    launches = _merged_launches(graph, problem, plan.launches, origin)
    for number, route in sorted(plan.routes):
        gather_by_engine(launches[number].collective, route)
    _place_launches(problem.nodes, launches, plan.actions)
    return launches


def _merged_launches(
    graph: fx.Graph, problem: ScheduleProblem, launches: Iterable[Sequence[int]], origin: str
) -> list[LaunchNodes]:
    """Merges collectives, given by their job numbers, and returns the nodes of each launch."""
    found, number = [], 0
    for members in launches:
        items = [problem.items[each] for each in members]
        if len(items) == 1:
            found.append(LaunchNodes.of(items[0]))
            continue
        mode = problem.jobs[members[0]].key.mode
        assert mode != "single"
        found.append(merge_collectives(graph, items, mode, number, origin))
        number += 1
    return found


def _place_launches(
    kept: Sequence[fx.Node], launches: Sequence[LaunchNodes], actions: Iterable[Action]
) -> None:
    """Moves starts and waits to their places among the nodes that stay in order."""
    for action in actions:
        launch = launches[action.launch]
        for node in launch.start if action.kind == "start" else launch.wait:
            kept[action.slot].prepend(node)


def copied(problem: ScheduleProblem) -> tuple[fx.Graph, ScheduleProblem]:
    """Returns a copy of the graph, which shares metadata values, and the problem with its nodes."""
    old = problem.nodes[-1]
    # The module holds the subgraphs that the graph calls.
    graph, new = fx.Graph(old.graph.owning_module), dict[fx.Node, fx.Node]()
    new[old] = graph.output(graph.graph_copy(old.graph, new))
    new[old].meta = copy.copy(old.meta)

    def item_of(each: SchedulableCollective) -> SchedulableCollective:
        return replace(
            each,
            started=new[each.started],
            wait=new[each.wait],
            inputs=tuple(new[node] for node in each.inputs),
            results=tuple(new[node] for node in each.results),
        )

    nodes = tuple(new[node] for node in problem.nodes)
    return graph, replace(problem, nodes=nodes, items=tuple(map(item_of, problem.items)))


def exact_cost(graph: fx.Graph, problem: ScheduleProblem, target: Target) -> Cost:
    """Returns the duration and the peak of a graph into which a plan was written, without averages
    that a later pass starts. The peak counts what all ranks have (`equal_liveness`).
    """
    left_out, kernels = {AVERAGE_GRAD}, FusedKernels()
    regrouped = problem.regrouped
    line = Timeline(graph, target, regrouped=regrouped, left_out=left_out, kernels=kernels)
    time = line.run()
    return Cost(time.total_us, time.exposed_us, equal_liveness(graph, kernels).peak_bytes)
