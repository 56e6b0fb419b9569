"""Tools to test graphs and passes in one process, for any number of ranks.

A test of a pass:

    for rank in range(4):
        with fake_world(4, rank) as mesh:
            graphs.append(capture_graphs(model, (x,)).before.joint)  # the reference
            rewritten.append(copy_graph(graphs[-1]))
            MyPass()(rewritten[-1].graph)  # verified by the runner
    assert_equal_bits(graphs, rewritten, random_inputs(graphs))  # real collectives on real tensors

`listing(graph)` prints a graph as short text for inline expectations. `trace_joint` makes a joint
graph of a plain function in milliseconds. `simulate` raises if real ranks would hang, race or
disagree.
"""

from zpasses.graph.printer import listing
from zpasses.testing.capture import (
    StepCapture,
    StepGraphs,
    capture_graphs,
    capture_ranks,
    copy_graph,
    trace_joint,
)
from zpasses.testing.compare import assert_deterministic, assert_equal_bits, random_inputs
from zpasses.testing.semantics import SEMANTICS, Semantics
from zpasses.testing.simulate import RankRun, SimulationError, simulate
from zpasses.testing.worlds import fake_world

__all__ = [
    "SEMANTICS",
    "RankRun",
    "Semantics",
    "SimulationError",
    "StepCapture",
    "StepGraphs",
    "assert_deterministic",
    "assert_equal_bits",
    "capture_graphs",
    "capture_ranks",
    "copy_graph",
    "fake_world",
    "listing",
    "random_inputs",
    "simulate",
    "trace_joint",
]
