"""Peaks that the memory model plans for convolutional models, beside what generated code allocates:
layouts, what oneDNN takes, and what Inductor copies, which graphs do not show.
"""

import pytest
import torch

from tests.zpasses.cost.memory.allocations import measured_step, planned_peaks, write_no_kernels
from tests.zpasses.cost.memory.convolutional import CONVOLUTIONAL

PLANS = {"lean": (3, "0%"), "rich": (3, "20%"), "stage 2": (2, "40%")}
SLOW = pytest.mark.slow(quick="test_copies_in_another_layout_are_planned")
QUICK = {
    ("plain", "lean"),
    ("pooled", "stage 2"),
    ("bottleneck", "lean"),
    ("bottleneck", "stage 2"),
    ("down-and-up", "stage 2"),
    ("inverted", "rich"),
    ("dense", "lean"),
    ("volume", "stage 2"),
    ("shuffled", "lean"),
}
CASES = [
    pytest.param(name, plan, marks=() if (name, plan) in QUICK else SLOW)
    for name in CONVOLUTIONAL
    for plan in PLANS
]


def planned_and_measured(name, plan):
    """(planned, measured) bytes of forward and of backward."""
    stage, budget = PLANS[plan]
    graphs, forward, backward = measured_step(
        None,
        make=CONVOLUTIONAL[name],
        cache=False,
        memory_budget=budget,
        agreement=False,
        zero_stage=stage,
        inductor={"fx_graph_cache": False},
    )
    ahead, back = planned_peaks(graphs)
    return (ahead, forward), (back, backward)


@pytest.mark.inductor
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_copies_in_another_layout_are_planned(name, plan, monkeypatch):
    """Inductor makes of some gradients only the part that a convolution reads."""
    write_no_kernels(monkeypatch)
    for planned, measured in planned_and_measured(name, plan):
        assert 0.975 < measured / planned < 1.003


@pytest.mark.inductor
def test_several_threads_scatter_by_an_operator(monkeypatch):
    """It reads copies of the indices of max pooling, and of the gradient."""
    write_no_kernels(monkeypatch)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _, (planned, measured) = planned_and_measured("pooled", "lean")
    finally:
        torch.set_num_threads(before)
    assert 0.99 < measured / planned < 1.003
