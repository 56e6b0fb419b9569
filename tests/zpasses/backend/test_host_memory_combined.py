"""Values on the host together with everything else that a step may use: the same bits.

Each case trains with and without what rests on the host: activations (`host_memory`), and in most
the states of the optimizer. `tools/stress/drawn_programs.py` draws more combinations.
"""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.frozen_training import assert_same
from tests.on_ranks import on_ranks
from tests.zpasses.backend.values_on_host import TARGET, WIDTH, Block, copies, steps_of
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.pipeline.events import observe_graphs

SIDES = ("forward", "backward")
ENCODED = "{gather-params.encode=int8,gather-params.exact_below_kib=0,reduce-grads.encode=fp8}"


@dataclass
class Case:
    """A combination."""

    options: dict = field(default_factory=dict)
    mesh: tuple[int, ...] = (2,)
    share: float = 0.7
    """The memory budget, as a part of the peak without one."""
    states: bool = True
    """Whether the states of the optimizer rest on the host."""
    params: bool = False
    """Whether parameters and their gradients do, too."""
    lora: bool = False
    checkpoints: bool = False
    parts: bool = False
    """Whether each half is compiled by itself: within one block, nothing is idle at the peak."""
    lengths: tuple[int, ...] = (1024,)
    """Rows of the batches, which change if there are several."""
    codegen: str = "eager"


CASES = {
    "stage 1": Case({"zero_stage": 1}),
    "stage 2, a window, checkpoints": Case(
        {"zero_stage": 2, "backwards_per_step": 2}, checkpoints=True, states=False, share=0.85
    ),
    "stage 2, replicas, a window of shards": Case(
        {"zero_stage": 2, "backwards_per_step": 2, "grad_accum": "shards"}, mesh=(2, 1)
    ),
    "stage 3, a mesh, LoRA, a window": Case(
        {"zero_stage": 3, "backwards_per_step": 2}, mesh=(1, 2), lora=True, codegen="inductor"
    ),
    "stage 3, parameters": Case({"zero_stage": 3}, params=True, codegen="inductor"),
    "stage 3, parameters, LoRA, a window": Case(
        {"zero_stage": 3, "backwards_per_step": 2}, params=True, lora=True
    ),
    "stage 3, LoRA, checkpoints": Case({"zero_stage": 3}, lora=True, checkpoints=True, share=0.85),
    "stage 3, blocks": Case({"zero_stage": 3}, parts=True, share=0.85),
    "stage 3, lengths, replicas": Case({"zero_stage": 3}, mesh=(2, 1), lengths=(1024, 512, 768)),
    "stage 3, encoded, a window": Case({"pipeline": f"zero3{ENCODED}", "backwards_per_step": 2}),
    "stage 3, lengths, checkpoints, LoRA": Case(
        {"zero_stage": 3},
        lengths=(1024, 512),
        checkpoints=True,
        lora=True,
        share=0.8,
        codegen="inductor",
    ),
}


class Half(nn.Sequential):
    def forward(self, x):  # Dynamo does not capture that of torch
        for block in self:
            x = block(x)
        return x


class Stack(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.checkpoints = case.checkpoints
        blocks = [Block(WIDTH, 4 if case.lora else 0) for _ in range(4)]
        halves = (Half(*blocks[:2]), Half(*blocks[2:]))
        self.blocks = nn.ModuleList(halves if case.parts else blocks)
        for name, param in self.named_parameters():
            param.requires_grad_(not case.lora or ".a." in name or ".b." in name)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x.square().mean()


def trained(case, budget=None):
    """Trains. Returns losses, gradients and parameters, all graphs by kind, and the bytes on the
    host between each forward and its backward.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Stack(case)
    mesh = init_device_mesh(
        "cpu", case.mesh, mesh_dim_names=("replicate", "shard")[-len(case.mesh) :]
    )
    zpasses.shard(net, mesh=mesh)
    options = {"target": TARGET, "codegen": case.codegen, "cache": False, **case.options}
    if budget is not None:
        options |= {"memory_budget": f"{budget}B", "host_memory": "1GiB"}
    if case.params and budget is not None:
        zpasses.offload_parameters(net, trained=True)
    if case.parts:
        for block in net.blocks:
            block.compile(backend="zpasses", options=options)
    else:
        net.compile(backend="zpasses", fullgraph=True, options=options)
    optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], 0.01)
    if case.states and budget is not None:
        zpasses.offload_optimizer(optimizer)
    graphs = []
    with observe_graphs(lambda log: graphs.append((log.kind, log.graph))):
        results, held = steps_of(net, optimizer, case)
    return results, graphs, held


@pytest.mark.slow(quick="test_measured_bytes_of_the_device_fall_by_what_the_plan_says")
@pytest.mark.inductor
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout_s=600)
def test_all_that_rests_on_the_host_leaves_the_bits_as_they_are(name):
    case = CASES[name]
    expected, graphs, held = trained(case)
    assert not any(held)
    with use_fusion(case.codegen == "inductor"):
        peak = max(liveness(graph).peak_bytes for kind, graph in graphs if kind in SIDES)
    results, graphs, held = trained(case, int(case.share * peak))
    assert all(held)
    assert any(copies(graph) for kind, graph in graphs if kind == "forward")
    assert_same(results, expected)
