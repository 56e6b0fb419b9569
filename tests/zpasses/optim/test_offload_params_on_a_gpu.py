"""Tests that need a GPU: frozen shards in locked host memory."""

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
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


def tuned(mesh, *, offloads):
    torch.manual_seed(0)
    base = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).requires_grad_(False)
    net = nn.Sequential(base, nn.Linear(512, 512)).cuda()
    zpasses.shard(net, mesh=mesh)
    before = torch.cuda.memory_allocated()
    if offloads:
        zpasses.offload_parameters(net)
        assert before - torch.cuda.memory_allocated() == parameter_plan(net).host_bytes
        assert net[0][0].get_parameter("weight").to_local().is_pinned()
    return net


def trained(mesh, *, offloads, compiled=True):
    torch.compiler.reset()
    net = tuned(mesh, offloads=offloads)
    step = torch.compile(net, backend="zpasses", options={"zero_stage": 3}) if compiled else net
    optimizer = torch.optim.AdamW(net[1].parameters())
    for seed in range(3):
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)).cuda()
        step(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.cpu() for value in zpasses.full_state_dict(net).values()]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_gpu_trains_with_the_same_bits(mesh, compiled):
    runs = [trained(mesh, offloads=each, compiled=compiled) for each in (False, True)]
    for mine, theirs in zip(*runs, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="torch before 2.13 does not tell subclasses of DTensor about writes",
)
def test_a_write_waits_until_the_device_has_read_the_shard(mesh):
    net = tuned(mesh, offloads=True)
    step = torch.compile(net, backend="zpasses", options={"zero_stage": 3})
    x = torch.ones(64, 512, device="cuda")
    with torch.no_grad():
        expected = step(x).clone()
        torch.cuda._sleep(1 << 28)
        found = step(x)
        for param in net[0].parameters():
            param.zero_()
        assert torch.equal(found, expected)
        assert not torch.equal(step(x), expected)
