from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graphs import Param, joint, rewritten
from zpasses import compat
from zpasses.cost.time.roofline import (
    collective_on_route_us,
    compute_us,
    copy_engine_launch_us,
    copy_us,
    latency_us,
    nodes_of,
    ring_collective_us,
)
from zpasses.cost.time.route_figures import RouteFigures
from zpasses.cost.time.target import TARGETS, Target
from zpasses.graph.queries import collective_of, is_wait, value_of
from zpasses.passes import GatherParams
from zpasses.testing import fake_world

aten = torch.ops.aten
T = Target.parse(
    "h100,launch_us=10,hop_us=1,network_hop_us=100,link_gb_s=100,network_gb_s=10,memory_gb_s=1000,tflops=1,kernel_us=2"
)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("kind", "ranks", "us"),
    [
        ("all_gather_into_tensor", 8, 10 + 7),
        ("reduce_scatter_tensor", 8, 10 + 7),
        ("all_reduce", 8, 10 + 14),
        ("all_gather_into_tensor", 16, 10 + 14 + 100),
        ("all_reduce", 16, 10 + 28 + 200),
    ],
)
def test_latency_counts_the_hops_of_a_ring(kind, ranks, us):
    assert latency_us(kind, ranks, T) == us


def test_bytes_take_time_on_the_slowest_link():
    moved = 8e6
    for kind, ranks, expected in [
        ("all_gather", 8, 17 + 7 / 8 * moved / 1e5),
        ("all_reduce", 8, 24 + 2 * 7 / 8 * moved / 1e5),
        # Each of the 8 ranks of a node has a network adapter of 10 GB/s.
        ("all_gather", 16, 124 + 15 / 16 * moved / 8e4),
    ]:
        assert ring_collective_us(kind, 8_000_000, ranks, T) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["h100", "mi300x"])
@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 18, 1 << 22, 1 << 26])
def test_replicas_of_a_node_reduce_faster_in_two_collectives(name, replicas, nbytes):
    """docs/design.md, "Two reductions, not one over all ranks"."""
    target = Target.parse(name)
    within = ring_collective_us("reduce_scatter", nbytes, 8, target, 1)
    between = ring_collective_us("all_reduce", nbytes // 8, replicas, target, replicas)
    assert within + between < ring_collective_us("all_reduce", nbytes, 8 * replicas, target)


def test_an_exchange_of_all_ranks_has_one_adapter_per_rank():
    took = {
        nodes: ring_collective_us("all_to_all", 8_000_000, 16, T, nodes) for nodes in (1, 2, 16)
    }
    latency = {nodes: latency_us("all_to_all", 16, T, nodes) for nodes in took}
    assert took[1] == pytest.approx(latency[1] + 15 / 16 * 8e6 / 1e5)
    # A rank sends half of its bytes to the other node, all of them through its own adapter.
    assert took[2] == pytest.approx(latency[2] + 8 / 16 * 8e6 / 1e4)
    assert took[16] == pytest.approx(latency[16] + 15 / 16 * 8e6 / 1e4)
    slow_links = replace(T, link_gb_s=1.0)
    assert ring_collective_us("all_to_all", 8_000_000, 16, slow_links, 2) == pytest.approx(
        latency[2] + 7 / 16 * 8e6 / 1e3
    )


def test_ranks_fill_one_node_after_the_other():
    assert nodes_of(range(8), T) == 1
    assert nodes_of(range(4, 12), T) == 2
    assert nodes_of(range(0, 64, 8), T) == 8
    assert nodes_of([0, 4, 8, 12], T) == 2
    assert nodes_of([3], T) == 1


def test_a_group_with_one_rank_on_each_node_has_one_adapter_and_only_hops_of_the_network():
    assert latency_us("all_gather", 8, T, nodes=8) == 10 + 7 * 100
    assert latency_us("all_reduce", 8, T, nodes=2) == 10 + 2 * (6 + 100)
    strided = ring_collective_us("all_gather", 8_000_000, 8, T, nodes=8)
    assert strided == pytest.approx(710 + 7 / 8 * 8e6 / 1e4)
    assert strided > ring_collective_us("all_gather", 8_000_000, 8, T, nodes=1)
    fast = replace(T, network_gb_s=1000.0)  # links within the nodes are the slowest
    within = latency_us("all_gather", 8, fast, nodes=2) + 7 / 8 * 8e6 / 1e5
    assert ring_collective_us("all_gather", 8_000_000, 8, fast, nodes=2) == pytest.approx(within)
    between = 710 + 7 / 8 * 8e6 / 1e6  # no link within a node is used
    assert ring_collective_us("all_gather", 8_000_000, 8, fast, nodes=8) == pytest.approx(between)


def test_a_part_of_a_node_has_a_part_of_the_links_where_there_is_no_switch():
    amd, nvidia = TARGETS["mi300x"], TARGETS["h100"]
    assert [amd.link_share(ranks) for ranks in (1, 2, 8, 16)] == [1.0, 1 / 7, 1.0, 1.0]
    assert nvidia.link_share(2) == TARGETS["cpu"].link_share(2) == 1.0
    moved = 1 / 2 * 8e6
    took = ring_collective_us("all_gather", 8_000_000, 2, amd)
    assert took == pytest.approx(latency_us("all_gather", 2, amd) + moved / 64e3)
    by_route = collective_on_route_us(ENGINE, "all_gather", 8_000_000, 2, amd)
    copied = copy_us(8_000_000, amd)
    assert by_route == pytest.approx(ENGINE.latency_us + moved / (100e3 / 7) + copied)


def test_collectives_of_one_rank_are_free():
    assert ring_collective_us("all_reduce", MIB, 1, T) == 0


def test_torch_and_c10d_names_of_a_collective_have_the_same_cost():
    names = ("_allreduce_base", "all_reduce_coalesced", "all_reduce", "all_gather")
    base, coalesced, reduce, gather = (ring_collective_us(each, MIB, 4, T) for each in names)
    assert base == coalesced == reduce > gather


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_one_large_collective_is_cheaper_than_two_halves_on_every_target(target):
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        one, two = (ring_collective_us(kind, size, 8, target) for size in (MIB, 2 * MIB))
        assert two < 2 * one
        assert one > latency_us(kind, 8, target)


def test_a_copy_reads_and_writes_each_byte():
    assert copy_us(1_000_000, T) == 2 + 2
    assert copy_us(0, T) == 0


def graph_of(target, *shapes):
    graph = fx.Graph()
    with compat.FakeTensorMode():
        values = [torch.empty(shape) for shape in shapes]
        nodes = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
        for node, value in zip(nodes, values, strict=True):
            node.meta["val"] = value
        call = graph.call_function(target, tuple(nodes))
        call.meta["val"] = target(*values)
    return call


def test_calls_take_the_time_of_compute_or_of_memory_and_at_least_a_kernel():
    mm, add, large = aten.mm.default, aten.add.Tensor, (1000, 1000)
    memory = Target.parse("h100,memory_gb_s=1,tflops=1000,kernel_us=1")
    for target, shapes, device, expected in [
        (mm, (large, large), T, 2e9 / 1e6),
        (mm, (large, (1000, 1)), memory, 4 * (1000 * 1000 + 1000 + 1000) / 1e3),
        (add, (large, large), T, 12e6 / 1e6),
        (add, ((2,), (2,)), T, T.kernel_us),
    ]:
        assert compute_us(graph_of(target, *shapes), device) == pytest.approx(expected)


def test_a_product_copies_the_matrix_that_it_adds_to():
    slow = Target.parse("h100,memory_gb_s=1e9,tflops=1,kernel_us=1")
    shapes = (1000, 1), (1, 1000)
    of_matrix, of_vector = (
        compute_us(graph_of(aten.addmm.default, added, *shapes), slow)
        for added in ((1000, 1000), (1000,))
    )
    assert of_vector == pytest.approx(2.0)
    assert of_matrix == pytest.approx(of_vector + slow.kernel_us + 8e6 / 1e12)


def recorded(function, *shapes):
    """Returns the calls of a function of bf16 tensors and of its backward."""
    with compat.FakeTensorMode():
        given = [torch.empty(each, dtype=torch.bfloat16, requires_grad=True) for each in shapes]

        def step(*values):
            return torch.autograd.grad(function(*values).sum(), values)

        graph = make_fx(step, tracing_mode="fake")(*given).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def test_attention_on_the_cpu_takes_as_long_as_that_of_an_accelerator():
    calls = recorded(F.scaled_dot_product_attention, *[(1, 8, 128, 64)] * 3)
    found = [node for node in calls if "attention" in str(node.target)]
    assert ["backward" in str(node.target) for node in found] == [False, True]
    assert all("for_cpu" in str(node.target) for node in found)
    product = 2 * 8 * 128 * 128 * 64
    for node, products in zip(found, (2, 5), strict=True):
        assert compute_us(node, T) == pytest.approx(products * product / 1e6)


def test_products_of_groups_count_their_operations():
    with compat.FakeTensorMode():
        rows, stacked = torch.empty(96, 32), torch.empty(4, 32, 64)
        groups = compat.flop_formula(aten._grouped_mm.default)
        assert groups(rows, stacked) == 2 * 96 * 32 * 64
        assert groups(rows.t(), torch.empty(96, 64)) == 2 * 96 * 32 * 64
        assert groups(torch.empty(4, 96, 32), stacked) == 4 * 2 * 96 * 32 * 64


def test_wrapped_operators_take_as_long_as_without():
    call = graph_of(aten.mm.default, (1000, 1000), (1000, 1000))
    graph, value = call.graph, value_of(call)
    saving = graph.call_function(run_and_save_rng_state, (aten.mm.default, *call.args))
    saving.meta["val"] = (torch.empty(0), value)
    again = graph.call_function(run_with_rng_state, (saving, aten.mm.default, *call.args))
    again.meta["val"] = value
    assert compute_us(call, T) == compute_us(saving, T) == compute_us(again, T) == 2e9 / 1e6


def test_views_inputs_and_communication_have_no_compute_time():
    assert compute_us(graph_of(aten.t.default, (100, 100)), T) == 0
    with fake_world(2):
        graph = rewritten(joint([Param((4, 2))], 0, 2), GatherParams()).graph
        idle = [
            node
            for node in graph.nodes
            if node.op != "call_function" or is_wait(node) or collective_of(node) is not None
        ]
        assert len(idle) >= 5
        assert [compute_us(node, T) for node in idle] == [0] * len(idle)


def test_dynamic_sizes_count_by_their_hints():
    seen = []

    def backend(gm, inputs):
        seen.extend(node for node in gm.graph.nodes if node.op == "call_function")
        return gm

    torch.compile(lambda a, b: torch.ops.aten.mm.default(a, b), backend=backend, dynamic=True)(
        torch.ones(200, 300), torch.ones(300, 400)
    )
    (product,) = [node for node in seen if node.target is aten.mm.default]
    assert not all(isinstance(size, int) for size in product.meta["example_value"].shape)
    assert compute_us(product, T) == pytest.approx(2 * 200 * 300 * 400 / 1e6)


# --- routes ---------------------------------------------------------------------------------------
ENGINE = RouteFigures(latency_us=20, gb_s=100, compute_slowdown=1.0, copied_full=1.0)


def test_route_time_is_latency_plus_bytes_plus_copies():
    moved = 20 + 7 / 8 * 8e6 / 1e5
    uncopied = replace(ENGINE, copied_full=0.0)
    for engine, copied in [
        (uncopied, 0),
        (ENGINE, copy_us(8_000_000, T)),
        (replace(uncopied, copied_parts=1.0), copy_us(1_000_000, T)),
    ]:
        took = collective_on_route_us(engine, "all_gather", 8_000_000, 8, T)
        assert took == pytest.approx(moved + copied)
    assert collective_on_route_us(ENGINE, "all_gather", MIB, 1, T) == 0


def test_several_tensors_are_packed_and_large_gathers_are_split():
    def launch(*sizes):
        return copy_engine_launch_us(ENGINE, "all_gather", list(sizes), 8, T)

    one = collective_on_route_us(ENGINE, "all_gather", 8 * MIB, 8, T)
    assert launch(8 * MIB) == one
    assert launch(4 * MIB, 4 * MIB) == pytest.approx(one + copy_us(9 * MIB, T))
    large = 8 * 65 * MIB
    split = collective_on_route_us(ENGINE, "all_gather", large, 8, T) + 20
    assert launch(large) == pytest.approx(split)
