from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from zpasses import compat
from zpasses.cost.step_time import step_time
from zpasses.cost.target import Target
from zpasses.sdma.ops import SDMA_ALL_GATHER
from zpasses.testing import fake_world

FUNCTIONAL = torch.ops._c10d_functional
GATHER = FUNCTIONAL.all_gather_into_tensor.default
TARGET = Target.parse(
    "mi300x,launch_us=4,hop_us=1,link_gb_s=100,memory_gb_s=1000000,tflops=1,kernel_us=0.001"
)
"""On eight ranks, RCCL has a latency of 4 + 7 us and a bandwidth of 75 GB/s; mori 49.5 us and 81
GB/s.
"""
PART = 1_000_000


def graph_of(gather, products, wait_first=False):
    """Returns a graph with a gather of 8 MB, matmuls of 2e9 operations (2 ms) each, and the wait.

    The wait comes before the matmuls or after them.
    """

    def fn(shard, x):
        started = gather(shard, 8, "0")
        if wait_first:
            full = FUNCTIONAL.wait_tensor(started)
        for _ in range(products):
            x = torch.mm(x, x)
        return (full if wait_first else FUNCTIONAL.wait_tensor(started)), x

    mode = compat.FakeTensorMode()
    with mode:
        inputs = [torch.empty(PART, dtype=torch.uint8), torch.empty(1000, 1000)]
    return compat.trace_aten(fn, inputs).graph


def times(*args, **kwargs):
    with fake_world(8):
        return step_time([graph_of(*args, **kwargs)], TARGET)


RCCL = 11 + 7 * PART / 75e3
SLOWED = 1.22 / (2.22 - 2 / 1.315)  # RCCL's gathers beside compute
MORI = 49.5 + 7 * PART / 81e3 + 0.001 + 2 * 9 * PART / 1e9


def test_a_gather_without_overlap_is_waited_for():
    for gather, took in ((GATHER, RCCL), (SDMA_ALL_GATHER, MORI)):
        found = times(gather, 1, wait_first=True)
        assert found.waited_us == pytest.approx(took)
        assert found.total_us == pytest.approx(took + 2000)
        assert found.slowed_us == pytest.approx(0, abs=1e-6)


def test_rccl_slows_kernels_beside_it_and_a_copy_engine_does_not():
    by_rccl, by_engine = times(GATHER, 1), times(SDMA_ALL_GATHER, 1)
    assert (by_rccl.waited_us, by_engine.waited_us) == (0, 0)
    assert by_rccl.total_us == pytest.approx(2000 + SLOWED * RCCL * (1 - 1 / 1.22))
    assert by_engine.total_us == pytest.approx(2000)
    assert by_rccl.slowed_us == pytest.approx(SLOWED * RCCL * (1 - 1 / 1.22))
    assert by_rccl.ring_collective_us == pytest.approx(RCCL)


@pytest.mark.parametrize(("gather", "realised"), [(GATHER, 0.315), (SDMA_ALL_GATHER, 0.72)])
def test_overlap_of_equal_lengths_gains_what_the_literature_says(gather, realised):
    """The gain is relative to the time that a perfect overlap would save."""
    took = RCCL if gather is GATHER else MORI
    target = replace(TARGET, tflops=2e9 / took / 1e6)
    with fake_world(8):
        found = step_time([graph_of(gather, 1)], target)
    assert found.compute_us == pytest.approx(took)
    assert found.total_us == pytest.approx(2 * took / (1 + realised))
    assert found.waited_us > 0


def test_graphs_run_one_after_another():
    with fake_world(8):
        graphs = [graph_of(GATHER, 1), graph_of(SDMA_ALL_GATHER, 2)]
        both, each = step_time(graphs, TARGET), [step_time([graph], TARGET) for graph in graphs]
    assert both.total_us == pytest.approx(sum(one.total_us for one in each))
    assert both.compute_us == pytest.approx(6000)


@pytest.mark.parametrize(("other", "took"), [(GATHER, RCCL), (SDMA_ALL_GATHER, MORI)])
def test_collectives_of_all_routes_share_the_links(other, took):
    def fn(a, b):
        started = [GATHER(a, 8, "0"), other(b, 8, "0")]
        return [FUNCTIONAL.wait_tensor(each) for each in started]

    mode = compat.FakeTensorMode()
    with fake_world(8):
        with mode:
            inputs = [torch.empty(PART, dtype=torch.uint8) for _ in range(2)]
        assert step_time([compat.trace_aten(fn, inputs).graph], TARGET).waited_us == pytest.approx(
            RCCL + took
        )


@pytest.mark.parametrize(("ranks_per_node", "beside"), [(8, False), (4, True)])
def test_groups_share_links_only_at_the_same_level(ranks_per_node, beside):
    """One group has all eight ranks, the other has four.

    Either all are on one node, or the first group spans two nodes and the second is within one.
    """
    target = replace(TARGET, ranks_per_node=ranks_per_node)
    mode = compat.FakeTensorMode()
    with fake_world(8):
        part = dist.new_group([0, 1, 2, 3]).group_name

        def times_of(*groups):
            def fn(*shards):
                started = [
                    GATHER(shard, ranks, group)
                    for shard, (ranks, group) in zip(shards, groups, strict=True)
                ]
                return [FUNCTIONAL.wait_tensor(each) for each in started]

            with mode:
                inputs = [torch.empty(PART, dtype=torch.uint8) for _ in groups]
            return step_time([compat.trace_aten(fn, inputs).graph], target).waited_us

        separately = times_of((8, "0")), times_of((4, part))
        both = times_of((8, "0"), (4, part))
    assert both == pytest.approx(max(separately) if beside else sum(separately))
