"""Small joint graphs for tests of passes: every parameter is multiplied with an input of its own
shape, so that any shape will do and all numbers stay small integers."""

from dataclasses import dataclass

import expecttest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from zpasses.graph.ops import rows_per_rank
from zpasses.testing import (
    assert_equal_bits,
    copy_graph,
    fake_world,
    random_inputs,
    simulate,
    trace_joint,
)

WORLDS = (1, 2, 3, 4, 7)

few = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
"""Tracing costs tens of milliseconds a rank."""


@dataclass(frozen=True)
class Param:
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    frozen: bool = False
    reads: int = 1
    group: str = "0"

    def shard(self, rank, world_size):
        if not self.shape:
            return torch.zeros((), dtype=self.dtype, requires_grad=not self.frozen)
        block = rows_per_rank(self.shape[0], world_size)
        rows = max(0, min(block, self.shape[0] - rank * block))
        return torch.zeros((rows, *self.shape[1:]), dtype=self.dtype, requires_grad=not self.frozen)

    def read(self, shard):
        rows = self.shape[0] if self.shape else 0
        return torch.ops.zpasses.unshard(
            shard, rows, self.param_dtype, self.reduce_dtype, self.group
        )


def joint(params, rank, world_size, *, interleaved=False):
    """Joint graph of one rank. Inputs: for each parameter its shard, then an input of the full
    shape; reads of one parameter follow each other, or are interleaved with those of the others."""
    inputs, shards = [], {}
    for i, param in enumerate(params):
        shards[2 * i] = f"p{i}"
        inputs += [
            param.shard(rank, world_size),
            torch.zeros(
                param.shape, dtype=param.param_dtype or param.dtype, requires_grad=param.frozen
            ),
        ]

    def fn(*values):
        order = [(i, turn) for i, param in enumerate(params) for turn in range(param.reads)]
        if interleaved:
            order.sort(key=lambda pair: pair[1])
        outputs = []
        for i, turn in order:
            output = params[i].read(values[2 * i]) * values[2 * i + 1]
            outputs.append(output * (turn + 1) if turn else output)
        return tuple(outputs)

    return trace_joint(fn, inputs, shards)


def before_and_after(world_size, params, *passes, interleaved=False):
    """Graphs of all ranks before and after passes, each rewritten as that rank."""
    before, after = [], []
    for rank in range(world_size):
        with fake_world(world_size, rank):
            before.append(joint(params, rank, world_size, interleaved=interleaved))
            after.append(rewritten(before[-1], *passes))
    return before, after


def rewritten(gm, *passes):
    copied = copy_graph(gm)
    for each in passes:
        each(copied.graph)
    copied.recompile()
    return copied


def assert_same_on_all_ranks(world_size, params, *passes, interleaved=False):
    before, after = before_and_after(world_size, params, *passes, interleaved=interleaved)
    return assert_equal_bits(before, after, random_inputs(before))


def expect_listing(actual, expected):
    """Compare with an inline listing; EXPECTTEST_ACCEPT=1 rewrites it."""
    expecttest.assert_expected_inline(actual + "\n", expected, skip=1)


def param_lists(max_size=4, **fixed):
    """Draws lists of parameters of odd shapes: scalars, no rows, fewer rows than ranks, up to three
    dimensions."""
    shape = st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 9)),
        st.tuples(st.integers(0, 9), st.integers(0, 3)),
        st.tuples(st.integers(1, 5), st.just(2), st.just(2)),
    )
    options = {
        "param_dtype": st.sampled_from([None, torch.bfloat16, torch.float64]),
        "reduce_dtype": st.sampled_from([None, torch.float32, torch.float64]),
        "frozen": st.booleans(),
        "reads": st.integers(1, 3),
        **{name: st.just(value) for name, value in fixed.items()},
    }
    return st.lists(st.builds(Param, shape, **options), min_size=1, max_size=max_size)


def saved_for_backward(capture):
    """Nodes of a forward graph that backward is given."""
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
    """Run forward and backward graphs of all ranks on inputs of the joint graph; outputs as the
    joint graph returns them."""
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
    """The partitioned, rewritten graphs compute what the unlowered joint graphs do, bit for bit."""
    reference = [each.before.joint for each in captures]
    inputs = random_inputs(reference, seed=seed)
    expected = simulate(reference, inputs)
    actual, forward, backward = simulate_step(captures, inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        for got, wanted in zip(ours, theirs.outputs, strict=True):
            assert (got is None) == (wanted is None)
            assert got is None or torch.equal(got, wanted)
    return forward, backward
