"""Inductor's estimates of durations, with the figures of a device that this machine lacks."""

import pytest
import torch

from zpasses import compat
from zpasses.compat.inductor_overlap import inductor_node_ms


def nodes(size):
    with compat.FakeTensorMode():
        matrix = torch.empty(size, size)
    graph = compat.trace_aten(lambda a: (a @ a).relu(), [matrix]).graph
    return list(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) + list(
        graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    )


def test_compute_bound_nodes_follow_the_flops_and_others_the_bandwidth():
    product, pointwise = nodes(4096)
    slow = inductor_node_ms(product, 100.0, 1000.0)
    assert slow == pytest.approx(2 * inductor_node_ms(product, 200.0, 1000.0))
    assert 0.5 < slow / (2 * 4096**3 / 100e12 * 1e3) < 2
    slow = inductor_node_ms(pointwise, 100.0, 1000.0)
    assert slow == pytest.approx(2 * inductor_node_ms(pointwise, 100.0, 2000.0))
