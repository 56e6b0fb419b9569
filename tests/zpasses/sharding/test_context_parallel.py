"""Context parallelism: ranks hold parts of each sequence, and gather keys and values."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests.cases import some_quick
from tests.zpasses.parallel_models import assert_near, sgd, whole
from zpasses.testing import run_on_ranks

STEPS, WIDTH, LENGTH = 3, 8, 12


class Attention(nn.Module):
    """Causal attention, over the whole sequence or over the parts that the ranks of `mesh` hold."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mesh = None

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        first = 0
        if self.mesh is not None:
            first = self.mesh.get_local_rank() * x.shape[1]
            k, v = (all_gather_tensor_autograd(each, 1, self.mesh) for each in (k, v))
        places = torch.arange(x.shape[1])[:, None] + first
        mask = places >= torch.arange(k.shape[1])[None]
        scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(~mask, -torch.inf)
        return x + self.out(scores.softmax(-1) @ v)


def _loss(out):
    return (out - 1).square().mean()


def _train(stage, hybrid, windows):
    torch.manual_seed(0)
    plain = nn.Sequential(*(Attention() for _ in range(windows)))
    reference = copy.deepcopy(plain)
    theirs = sgd(reference)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    for layer in plain:
        layer.mesh = mesh["cp"]
    every = mesh["dp", "cp"] if hybrid else init_device_mesh("cpu", (dist.get_world_size(),))
    model = zpasses.shard(plain, mesh=every)
    options = {"zero_stage": stage, "codegen": "eager", "backwards_per_step": windows}
    run = torch.compile(model, backend="zpasses", options=options, fullgraph=True)
    optim, dp, cp = sgd(model), mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(windows, 2, 3, LENGTH, WIDTH, generator=generator)
        for part in x:
            (_loss(run(part[dp].chunk(2, dim=1)[cp])) / windows).backward()
            (_loss(reference(part.flatten(0, 1))) / windows).backward()
        for each in (optim, theirs):
            each.step()
            each.zero_grad()
    ours = {name: whole(param) for name, param in model.named_parameters()}
    assert_near(ours, dict(reference.named_parameters()), 2e-6)


CASES = [(3, True, 1), (2, False, 2), (3, True, 2)]


@pytest.mark.parametrize(("stage", "hybrid", "windows"), some_quick(CASES, CASES[:1]))
def test_training_equals_the_whole_sequence(stage, hybrid, windows):
    run_on_ranks(_train, stage, hybrid, windows, ranks=4)
