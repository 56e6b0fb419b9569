"""Small joint graphs for tests of passes: every parameter is multiplied with an input of its own shape, so that any shape will do and
all numbers stay small integers."""

from dataclasses import dataclass

import expecttest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from zpasses.ops import rows_per_rank
from zpasses.testing import assert_equal_bits, copy_graph, fake_world, random_inputs, trace_joint

WORLDS = (1, 2, 3, 4, 7)

few = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        return torch.ops.zpasses.unshard(shard, rows, self.param_dtype, self.reduce_dtype, self.group)


def joint(params, rank, world_size, *, interleaved=False):
    """Joint graph of one rank. Inputs: for each parameter its shard, then an input of the full shape; reads of one parameter follow
    each other, or are interleaved with those of the others."""
    inputs, shards = [], {}
    for i, param in enumerate(params):
        shards[2 * i] = f"p{i}"
        inputs += [param.shard(rank, world_size), torch.zeros(param.shape, dtype=param.param_dtype or param.dtype, requires_grad=param.frozen)]

    def fn(*values):
        order = [(i, turn) for i, param in enumerate(params) for turn in range(param.reads)]
        if interleaved:
            order.sort(key=lambda pair: pair[1])
        outputs = []
        for i, turn in order:
            outputs.append(params[i].read(values[2 * i]) * values[2 * i + 1] * (turn + 1))
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
    expecttest.assert_expected_inline(f"\n{actual}\n", expected, skip=1)


def param_lists(max_size=4, **fixed):
    """Draws lists of parameters of odd shapes: scalars, no rows, fewer rows than ranks, up to three dimensions."""
    shape = st.one_of(
        st.just(()), st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 9), st.integers(0, 3)), st.tuples(st.integers(1, 5), st.just(2), st.just(2))
    )
    options = {
        "param_dtype": st.sampled_from([None, torch.bfloat16, torch.float64]),
        "reduce_dtype": st.sampled_from([None, torch.float32, torch.float64]),
        "frozen": st.booleans(),
        "reads": st.integers(1, 3),
        **{name: st.just(value) for name, value in fixed.items()},
    }
    return st.lists(st.builds(Param, shape, **options), min_size=1, max_size=max_size)
