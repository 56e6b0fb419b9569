"""Tests that need a GPU: what rests in locked host memory, and is copied by streams."""

import copy
import gc

import pytest
import torch
from packaging.version import Version
from torch import nn

import zpasses
from tests.zpasses.optim.offloading import OPTIMIZERS, SMALL, Net, assert_bits, optimizer_of
from zpasses.optim import parameter_plan, state_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LONG = 1 << 26
"""Cycles that keep a stream busy for tens of milliseconds."""


def _train(model, optimizer, numbers, *, delay=False):
    for number in numbers:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).cuda()
        model(x, number).square().sum().backward()
        if delay:  # the streams of copies would overtake the current one
            torch.cuda._sleep(LONG)
        optimizer.step()
        optimizer.zero_grad()


def _states(optimizer):
    return [
        {key: value.cpu() for key, value in optimizer.state.get(param, {}).items()}
        for group in optimizer.param_groups
        for param in group["params"]
    ]


@pytest.mark.parametrize("which", [each for each in OPTIMIZERS if each != "AdamW tensor lr"])
def test_every_optimizer_has_the_bits_of_its_states_on_the_device(which):
    model, other = Net().cuda(), Net().cuda()
    optimizer, plain = optimizer_of(model, which), optimizer_of(other, which)
    zpasses.offload_optimizer(optimizer, **SMALL)
    _train(model, optimizer, range(4), delay=True)
    _train(other, plain, range(4))
    assert_bits(dict(model.state_dict()), dict(other.state_dict()))
    assert_bits(_states(optimizer), _states(plain))


def test_states_rest_in_locked_host_memory_and_copies_are_on_the_device():
    model = Net().cuda()
    optimizer = zpasses.offload_optimizer(optimizer_of(model, "AdamW"))
    _train(model, optimizer, range(2))
    value = optimizer.state[model.layers[0].weight]["exp_avg"]
    assert value.device.type == "cpu"
    assert value.is_pinned()
    copied = copy.deepcopy(optimizer)
    (found,) = {v.device.type for e in copied.state.values() for v in e.values() if v.dim()}
    assert found == "cuda"


def test_a_loaded_state_does_not_pass_through_the_device():
    params = [nn.Parameter(torch.ones(1 << 22, device="cuda"))]
    optimizer = torch.optim.AdamW(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    saved = {**optimizer.state_dict(), "state": {0: {}}}
    saved["state"][0] = {key: value.cpu() for key, value in optimizer.state[params[0]].items()}
    del optimizer
    fresh = zpasses.offload_optimizer(torch.optim.AdamW(params))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fresh.load_state_dict(saved)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


@pytest.mark.parametrize("device_bytes", ["0B", "96MiB"])
def test_the_device_holds_what_stays_and_two_buckets_in_a_step(device_bytes):
    gc.collect()
    others = torch.cuda.memory_allocated()
    params = [nn.Parameter(torch.ones(1024, 4096, device="cuda")) for _ in range(12)]  # 16 MiB each
    optimizer = torch.optim.AdamW(params, fused=True)
    zpasses.offload_optimizer(optimizer, bucket_bytes="64MiB", device_bytes=device_bytes)
    plan = state_plan(optimizer)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == pytest.approx(plan.in_flight_bytes, rel=0.02)
    rest = before - others - sum(2 * param.nbytes for param in params)
    assert rest == pytest.approx(plan.device_bytes, rel=0.02, abs=1 << 20)


def test_the_host_does_not_wait_for_the_last_copies():
    params = [nn.Parameter(torch.ones(1 << 24, device="cuda")) for _ in range(4)]
    optimizer = zpasses.offload_optimizer(torch.optim.AdamW(params), bucket_bytes="1B")
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    torch.cuda._sleep(20 * LONG)
    optimizer.step()
    assert not torch.cuda.current_stream().query()
    assert optimizer.state.on_the_way is not None
    optimizer.state_dict()
    assert optimizer.state.on_the_way is None


# --- parameters -----------------------------------------------------------------------------------
def network(mesh, *, frozen, offloads):
    """A sharded base and its head. If the base is frozen, it is what rests on the host; otherwise
    everything does, and the gradients.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    base = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).requires_grad_(not frozen)
    net = zpasses.shard(nn.Sequential(base, nn.Linear(512, 512)).cuda(), mesh=mesh)
    before = torch.cuda.memory_allocated()
    if offloads:
        zpasses.offload_parameters(net, trained=not frozen)
        assert before - torch.cuda.memory_allocated() == parameter_plan(net).host_bytes
        assert base[0].get_parameter("weight").to_local().is_pinned()
    return net


def trained(mesh, *, frozen, offloads, compiled=True, states=False):
    """Returns the norms of all gradients of some steps, and the parameters after them."""
    net = network(mesh, frozen=frozen, offloads=offloads)
    step = torch.compile(net, backend="zpasses", options={"zero_stage": 3}) if compiled else net
    optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad])
    if states:
        zpasses.offload_optimizer(optimizer, bucket_bytes="1MiB")
    norms = []
    for seed in range(3):
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)).cuda()
        step(x).square().mean().backward()
        if offloads and not frozen:
            grad = net[0][0].get_parameter("weight").grad.to_local()
            assert grad.device.type == "cpu"
            assert grad.is_pinned()
        norms.append(zpasses.clip_grad_norm_(net.parameters(), 0.1).cpu())
        optimizer.step()
        optimizer.zero_grad()
    return norms, [value.cpu() for value in zpasses.full_state_dict(net).values()]


@pytest.mark.parametrize("compiled", [True, False])
def test_frozen_shards_on_the_host_leave_the_bits_as_they_are(one_gpu, compiled):
    how = {"frozen": True, "compiled": compiled}
    plain, ours = (trained(one_gpu, offloads=each, **how) for each in (False, True))
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    "how", [{"states": True}, {"states": True, "compiled": False}, {"states": False}]
)
def test_trained_shards_on_the_host_train_as_without(one_gpu, how):
    # The norm of gradients on the host is rounded there, and the factor that clips them.
    plain, ours = (trained(one_gpu, frozen=False, offloads=each, **how) for each in (False, True))
    torch.testing.assert_close(ours, plain)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="torch before 2.13 does not tell subclasses of DTensor about writes",
)
def test_a_write_waits_until_the_device_has_read_the_shard(one_gpu):
    net = network(one_gpu, frozen=True, offloads=True)
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
