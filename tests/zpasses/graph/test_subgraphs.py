"""Regions that a model marks itself, which torch compiles as subgraphs."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from tests.cases import some_quick
from zpasses import compat
from zpasses.graph.queries import value_of
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import world_mesh

WIDTH = 8


@torch.compiler.nested_compile_region
def region(x, weight, bias):
    return torch.tanh(nn.functional.linear(x, weight, bias))


class Regions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = region(x, layer.weight, layer.bias)
        return x


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("codegen", some_quick(["eager", "inductor"], ["eager"]))
@pytest.mark.parametrize("stage", [2, 3])
def test_regions_of_a_model_train_like_the_unsharded_model(one_rank, stage, codegen):
    torch.manual_seed(0)
    model = Regions()
    plain = copy.deepcopy(model)
    zpasses.shard(model, mesh=world_mesh())
    options = {"zero_stage": stage, "codegen": codegen, "cache": False}
    step = torch.compile(model, backend="zpasses", options=options)
    forwards = []

    def observe(graph):
        if graph.kind == "forward":
            forwards.append(graph.graph)

    x = torch.randn(4, WIDTH, requires_grad=True)
    with observe_graphs(observe):
        for each in (step, plain):
            each(x).square().sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
    (forward,) = forwards
    assert sum(map(compat.is_subgraph_call, forward.nodes)) == 3
    returned = [node for node in forward.output_node().args[0] if node.op != "placeholder"]
    shapes = [tuple(value_of(node).shape) for node in returned]
    assert shapes.count((WIDTH, WIDTH)) <= (3 if stage == 2 else 1)
