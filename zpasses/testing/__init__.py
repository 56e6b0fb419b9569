"""Tools to test graphs and passes in one process, for any number of ranks.

A test of a pass:

    for rank in range(4):
        with fake_world(4, rank) as mesh:
            graphs.append(capture_graphs(model, (x,)).before.joint)  # the reference
            rewritten.append(copy_graph(graphs[-1]))
            MyPass()(rewritten[-1].graph)  # verified by the runner
    assert_equal_bits(graphs, rewritten, random_inputs(graphs))  # real collectives on real tensors

Or with the fixtures of the pytest plugin `zpasses.testing.plugin`, which every project that has
zpasses installed can use. `run_on_ranks` runs a function on real gloo ranks.

`listing(graph)` prints a graph as short text for inline expectations. `trace_joint` makes a joint
graph of a plain function in milliseconds. `simulate` raises if real ranks would hang, race or
disagree. `record_streams` runs graphs on simulated asynchronous devices, in any order.

Public names are imported on first use, because pytest loads the plugin in every project, and an
import of torch takes seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zpasses.graph.printer import listing
    from zpasses.graph.queries import copy_graph
    from zpasses.simulate.equality import random_inputs
    from zpasses.simulate.semantics import SEMANTICS, Semantics
    from zpasses.simulate.simulator import RankRun, SimulationError, simulate
    from zpasses.testing.assertions import assert_deterministic, assert_equal_bits
    from zpasses.testing.graphs import JointRecipe, ParamSpec, joint_graph
    from zpasses.testing.ranks import (
        Outcome,
        RanksError,
        run_in_fresh_ranks,
        run_on_ranks,
    )
    from zpasses.testing.simulated_device import SimulatedDevice
    from zpasses.testing.step_graphs import (
        StepCapture,
        StepGraphs,
        capture_graphs,
        capture_ranks,
        trace_joint,
    )
    from zpasses.testing.steps import (
        PipelineRun,
        StepRun,
        assert_step_equals_reference,
        run_pipeline,
        simulate_step,
    )
    from zpasses.testing.stream_graphs import record_streams
    from zpasses.testing.stream_schedule import StreamSchedule
    from zpasses.testing.worlds import fake_world, world_mesh

__all__ = [
    "SEMANTICS",
    "JointRecipe",
    "Outcome",
    "ParamSpec",
    "PipelineRun",
    "RankRun",
    "RanksError",
    "Semantics",
    "SimulatedDevice",
    "SimulationError",
    "StepCapture",
    "StepGraphs",
    "StepRun",
    "StreamSchedule",
    "assert_deterministic",
    "assert_equal_bits",
    "assert_step_equals_reference",
    "capture_graphs",
    "capture_ranks",
    "copy_graph",
    "fake_world",
    "joint_graph",
    "listing",
    "random_inputs",
    "record_streams",
    "run_in_fresh_ranks",
    "run_on_ranks",
    "run_pipeline",
    "simulate",
    "simulate_step",
    "trace_joint",
    "world_mesh",
]

_HOMES = {
    "JointRecipe": "zpasses.testing.graphs",
    "Outcome": "zpasses.testing.ranks",
    "ParamSpec": "zpasses.testing.graphs",
    "PipelineRun": "zpasses.testing.steps",
    "RankRun": "zpasses.simulate.simulator",
    "RanksError": "zpasses.testing.ranks",
    "SEMANTICS": "zpasses.simulate.semantics",
    "Semantics": "zpasses.simulate.semantics",
    "SimulatedDevice": "zpasses.testing.simulated_device",
    "SimulationError": "zpasses.simulate.simulator",
    "StepCapture": "zpasses.testing.step_graphs",
    "StepGraphs": "zpasses.testing.step_graphs",
    "StepRun": "zpasses.testing.steps",
    "StreamSchedule": "zpasses.testing.stream_schedule",
    "assert_deterministic": "zpasses.testing.assertions",
    "assert_equal_bits": "zpasses.testing.assertions",
    "assert_step_equals_reference": "zpasses.testing.steps",
    "capture_graphs": "zpasses.testing.step_graphs",
    "capture_ranks": "zpasses.testing.step_graphs",
    "copy_graph": "zpasses.graph.queries",
    "fake_world": "zpasses.testing.worlds",
    "joint_graph": "zpasses.testing.graphs",
    "listing": "zpasses.graph.printer",
    "random_inputs": "zpasses.simulate.equality",
    "record_streams": "zpasses.testing.stream_graphs",
    "run_in_fresh_ranks": "zpasses.testing.ranks",
    "run_on_ranks": "zpasses.testing.ranks",
    "run_pipeline": "zpasses.testing.steps",
    "simulate": "zpasses.simulate.simulator",
    "simulate_step": "zpasses.testing.steps",
    "trace_joint": "zpasses.testing.step_graphs",
    "world_mesh": "zpasses.testing.worlds",
}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
