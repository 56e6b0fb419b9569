"""Tests that need a GPU: trained shards and gradients in locked memory."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from zpasses.optim import parameter_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def mesh():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def trained(mesh, *, offloads, compiled=True, states=True):
    torch.compiler.reset()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
    zpasses.shard(net, mesh=mesh)
    before = torch.cuda.memory_allocated()
    if offloads:
        zpasses.offload_parameters(net, trained=True)
        assert before - torch.cuda.memory_allocated() == parameter_plan(net).host_bytes
    step = torch.compile(net, backend="zpasses", options={"zero_stage": 3}) if compiled else net
    optimizer = torch.optim.AdamW(net.parameters())
    if states:
        zpasses.offload_optimizer(optimizer, bucket_bytes="1MiB")
    norms = []
    for seed in range(3):
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)).cuda()
        step(x).square().mean().backward()
        if offloads:
            grad = net[0].get_parameter("weight").grad.to_local()
            assert grad.device.type == "cpu"
            assert grad.is_pinned()
        norms.append(zpasses.clip_grad_norm_(net.parameters(), 0.1).cpu())
        optimizer.step()
        optimizer.zero_grad()
    return norms, [value.cpu() for value in zpasses.full_state_dict(net).values()]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_gpu_trains_as_without(mesh, compiled):
    runs = [trained(mesh, offloads=each, compiled=compiled) for each in (False, True)]
    # The norm of gradients on the host is rounded there, and the factor that clips them.
    for mine, theirs in zip(*(run[1] for run in runs), strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(*(run[0] for run in runs), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_optimizer_steps_on_the_host(mesh):
    runs = [trained(mesh, offloads=each, states=False) for each in (False, True)]
    for mine, theirs in zip(*(run[1] for run in runs), strict=True):
        torch.testing.assert_close(mine, theirs)
