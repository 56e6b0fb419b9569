from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zpasses import compat
from zpasses.cost.time.clock import Channel
from zpasses.cost.time.step_time import collective_timing, groups_of_model, step_time
from zpasses.cost.time.target import Target
from zpasses.graph.queries import collective_of, collectives
from zpasses.graph.tags import Tag, add_tag
from zpasses.sdma.ops import SDMA_ALL_GATHER
from zpasses.testing import fake_world

FUNCTIONAL = torch.ops._c10d_functional
GATHER = FUNCTIONAL.all_gather_into_tensor.default
TARGET = Target.parse(
    "mi300x,launch_us=4,hop_us=1,link_gb_s=100,memory_gb_s=1000000,tflops=1,kernel_us=0.001"
)
"""On eight ranks, RCCL has a latency of 4 + 7 us and a bandwidth of 75 GB/s; mori 49.5 us and 87
GB/s.
"""
PART = 1_000_000


def traced(fn, *shapes):
    """Returns the graph of a function of byte tensors (sizes) and float tensors (pairs)."""
    mode = compat.FakeTensorMode()
    with mode:
        inputs = [
            torch.empty(each, dtype=torch.uint8 if isinstance(each, int) else torch.float32)
            for each in shapes
        ]
    return compat.trace_aten(fn, inputs).graph


def graph_of(gather, products, wait_first=False):
    """Returns a graph with a gather of 8 MB, matmuls of 2e9 operations (2 ms) each, and the wait,
    which comes before the matmuls or after them.
    """

    def fn(shard, x):
        started = gather(shard, 8, "0")
        if wait_first:
            full = FUNCTIONAL.wait_tensor(started)
        for _ in range(products):
            x = torch.mm(x, x)
        return (full if wait_first else FUNCTIONAL.wait_tensor(started)), x

    return traced(fn, PART, (1000, 1000))


def times(*args, **kwargs):
    with fake_world(8):
        return step_time([graph_of(*args, **kwargs)], TARGET)


RCCL = 11 + 7 * PART / 75e3
SLOWED = 2.14  # RCCL's gathers beside compute
MORI = 49.5 + 7 * PART / 87e3 + 0.001 + 2 * 9 * PART / 1e9


def test_a_gather_without_overlap_is_waited_for():
    for gather, took in ((GATHER, RCCL), (SDMA_ALL_GATHER, MORI)):
        found = times(gather, 1, wait_first=True)
        assert found.exposed_us == pytest.approx(took)
        assert found.total_us == pytest.approx(took + 2000)
        assert found.slowed_us == pytest.approx(0, abs=1e-6)


def test_rccl_slows_kernels_beside_it_and_a_copy_engine_does_not():
    by_rccl, by_engine = times(GATHER, 1), times(SDMA_ALL_GATHER, 1)
    assert (by_rccl.exposed_us, by_engine.exposed_us) == (0, 0)
    assert by_rccl.total_us == pytest.approx(2000 + SLOWED * RCCL * (1 - 1 / 1.22))
    assert by_engine.total_us == pytest.approx(2000)
    assert by_rccl.slowed_us == pytest.approx(SLOWED * RCCL * (1 - 1 / 1.22))
    assert by_rccl.collective_us == pytest.approx(RCCL)


@pytest.mark.parametrize(("gather", "realised"), [(GATHER, 0.21), (SDMA_ALL_GATHER, 0.72)])
def test_overlap_of_equal_lengths_gains_what_the_literature_says(gather, realised):
    """The gain is relative to the time that a perfect overlap would save."""
    took = RCCL if gather is GATHER else MORI
    target = replace(TARGET, tflops=2e9 / took / 1e6)
    with fake_world(8):
        found = step_time([graph_of(gather, 1)], target)
    assert found.compute_us == pytest.approx(took)
    assert found.total_us == pytest.approx(2 * took / (1 + realised), rel=3e-3)
    assert found.exposed_us > 0


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

    with fake_world(8):
        found = step_time([traced(fn, PART, PART)], TARGET)
    assert found.exposed_us == pytest.approx(RCCL + took)


@pytest.mark.parametrize(("ranks_per_node", "beside"), [(8, False), (4, True)])
def test_groups_share_links_only_at_the_same_level(ranks_per_node, beside):
    """One group has all eight ranks, the other has four.

    Either all are on one node, or the first group spans two nodes and the second is within one.
    """
    target = replace(TARGET, ranks_per_node=ranks_per_node)
    with fake_world(8):
        part = dist.new_group([0, 1, 2, 3]).group_name

        def times_of(*groups):
            def fn(*shards):
                started = [
                    GATHER(shard, ranks, group)
                    for shard, (ranks, group) in zip(shards, groups, strict=True)
                ]
                return [FUNCTIONAL.wait_tensor(each) for each in started]

            return step_time([traced(fn, *[PART] * len(groups))], target).exposed_us

        separately = times_of((8, "0")), times_of((4, part))
        both = times_of((8, "0"), (4, part))
    assert both == pytest.approx(max(separately) if beside else sum(separately))


# --- groups of a mesh -----------------------------------------------------------------------------
H100 = Target.parse(
    "h100,launch_us=10,hop_us=1,network_hop_us=10,link_gb_s=100,network_gb_s=10,tflops=1"
)


def two_group_times(mesh_size, of_model, products=0):
    """Returns the timings of a gather of parameters over "dp" and an all-reduce over "tp", and of
    both at once, on two nodes of eight ranks.

    Args:
        mesh_size: of dp and tp.
        of_model: whether the all-reduce is one of the model, else it is for a parameter.
        products: matmuls of 2 ms between the waits.
    """
    with fake_world(mesh_size[0] * mesh_size[1]):
        mesh = init_device_mesh("cpu", mesh_size, mesh_dim_names=("dp", "tp"))
        dp, tp = (mesh.get_group(name).group_name for name in ("dp", "tp"))

        def fn(shard, x):
            gathered = GATHER(shard, mesh_size[0], dp)
            summed = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_reduce(x, "sum", tp))
            for _ in range(products):
                summed = torch.mm(summed, summed)
            return FUNCTIONAL.wait_tensor(gathered), summed

        graph = traced(fn, 16 * PART // mesh_size[0], (1000, 1000))
        gather, reduce = (node for node, _ in collectives(graph))
        add_tag(gather, Tag("gather", ("w",)))
        if not of_model:
            add_tag(reduce, Tag("reduce", ("v",)))
        assert groups_of_model(graph) == ({tp} if of_model else set())
        parts = [collective_timing(node, collective_of(node), H100) for node in (gather, reduce)]
        return [*parts, step_time([graph], H100).exposed_us]


@pytest.mark.parametrize("of_model", [False, True])
def test_a_group_within_a_node_and_one_across_nodes_use_different_links(of_model):
    # tp has 8 neighbours, and dp ranks 0 and 8, which are on two nodes.
    gather, reduce, both = two_group_times((2, 8), of_model)
    assert (gather.channel.link, reduce.channel.link) == ("network", "node")
    assert gather.duration_us == pytest.approx(10 + 10 + 1 / 2 * 16 * PART / 1e4)
    assert both == pytest.approx(max(gather.duration_us, reduce.duration_us))


def test_groups_of_one_node_share_its_links():
    gather, reduce, both = two_group_times((2, 4), of_model=True)
    assert gather.channel == reduce.channel == Channel("node")
    # Both move their bytes in the time of one after the other. The all-reduce, which is awaited
    # first, gets half of the links instead of queueing behind the gather.
    assert both == pytest.approx(gather.duration_us + reduce.duration_us)


def test_a_collective_of_the_model_does_not_queue_behind_a_gather_of_parameters():
    # A product of 2 ms reads what the all-reduce makes. It hides the rest of the gather.
    queued, beside = (two_group_times((2, 4), of_model, products=1) for of_model in (False, True))
    gather, reduce, waited = queued
    assert waited == pytest.approx(gather.duration_us + reduce.duration_us)
    assert beside[2] == pytest.approx(2 * reduce.duration_us)
