"""Small joint graphs and checks for tests of passes.

Every parameter is multiplied with an input of its own shape, so that any shape works and all values
stay small integers.
"""

import expecttest
import pytest
import torch
from hypothesis import HealthCheck, settings

from zpasses.testing import (
    assert_equal_bits,
    copy_graph,
    fake_world,
    random_inputs,
    simulate,
)
from zpasses.testing.drawing import Param, joint
from zpasses.testing.strategies import param_lists

__all__ = [
    "WORLD_SIZES",
    "Param",
    "assert_passes_preserve_results",
    "assert_step_equals_reference",
    "before_and_after",
    "drawn_examples",
    "expect_listing",
    "few_examples",
    "for_each_world_size",
    "joint",
    "param_lists",
    "rewritten",
    "saved_for_backward",
    "simulate_step",
]

WORLD_SIZES = (1, 2, 3, 4, 7)

for_each_world_size = pytest.mark.parametrize(
    "world_size",
    [
        each
        if each in (1, 3, 4)  # no communication, an odd number, and ranks without rows
        else pytest.param(each, marks=pytest.mark.slow(quick="the other world sizes"))
        for each in WORLD_SIZES
    ],
)


def drawn_examples(count):
    """Number of examples of a property test: `count`, or half of it in `make test`."""
    return count * settings().max_examples // 100


few_examples = settings(
    max_examples=drawn_examples(8),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
"""Tracing takes tens of milliseconds per rank, so property tests draw few examples."""


def before_and_after(world_size, params, *passes, interleaved=False):
    """Returns the graphs of all ranks before and after passes, each rewritten as its rank."""
    before, after = [], []
    for rank in range(world_size):
        with fake_world(world_size, rank):
            before.append(joint(params, rank, world_size, interleaved=interleaved))
            after.append(rewritten(before[-1], *passes))
    return before, after


def rewritten(gm, *passes):
    """Returns a copy of the graph that the passes rewrote."""
    copied = copy_graph(gm)
    for each in passes:
        each(copied.graph)
    copied.recompile()
    return copied


def assert_passes_preserve_results(world_size, params, *passes, interleaved=False):
    """Checks that passes keep the results of all ranks bit for bit, on random inputs."""
    before, after = before_and_after(world_size, params, *passes, interleaved=interleaved)
    return assert_equal_bits(before, after, random_inputs(before))


def expect_listing(actual, expected):
    """Compares with an inline listing. EXPECTTEST_ACCEPT=1 rewrites the listing."""
    expecttest.assert_expected_inline(actual + "\n", expected, skip=1)


def saved_for_backward(capture):
    """Returns the nodes of a forward graph that are saved for backward."""
    returned = capture.after.forward.graph.output_node().args[0]
    return list(returned[_number_of_outputs(capture.before.joint) :])


def _number_of_outputs(joint_graph):
    primals = [
        node
        for node in joint_graph.graph.nodes
        if node.op == "placeholder" and "tangents" not in node.name
    ]
    return len(joint_graph.graph.output_node().args[0]) - len(primals)


def simulate_step(captures, inputs):
    """Runs the forward and backward graphs of all ranks on inputs of the joint graph.

    Returns:
        Per rank the outputs in the order of the joint graph, then the forward and backward runs.
    """
    user = _number_of_outputs(captures[0].before.joint)
    tangents = sum(
        "tangents" in node.name
        for node in captures[0].before.joint.graph.nodes
        if node.op == "placeholder"
    )
    forward = simulate(
        [each.after.forward for each in captures],
        [values[: len(values) - tangents] for values in inputs],
    )
    given = [
        [*run.outputs[user:], *values[len(values) - tangents :]]
        for run, values in zip(forward, inputs, strict=True)
    ]
    backward = simulate([each.after.backward for each in captures], given)
    return (
        [(*f.outputs[:user], *b.outputs) for f, b in zip(forward, backward, strict=True)],
        forward,
        backward,
    )


def assert_step_equals_reference(captures, seed=0):
    """Checks that partitioned, rewritten graphs equal the unlowered joint graphs bit for bit."""
    reference = [each.before.joint for each in captures]
    inputs = random_inputs(reference, seed=seed)
    expected = simulate(reference, inputs)
    actual, forward, backward = simulate_step(captures, inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        for got, wanted in zip(ours, theirs.outputs, strict=True):
            assert (got is None) == (wanted is None)
            assert got is None or torch.equal(got, wanted)
    return forward, backward
