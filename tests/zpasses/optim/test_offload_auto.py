"""`offload_optimizer(device_bytes="auto")`: the states stay that fit beside the training step."""

import copy
import logging
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.optim.offloading import (
    ONE,
    Large,
    Net,
    assert_bits,
    assert_same_training,
    measured,
    optimizer_of,
    train,
)
from zpasses.cost.memory import device_memory
from zpasses.errors import AgreementError, MemoryBudgetError, ZpassesError
from zpasses.optim import offload_budget, state_plan
from zpasses.runtime import free_memory
from zpasses.testing import run_in_fresh_ranks, world_mesh


class Memory:
    """What a device has free, and what compiled graphs plan to take, in place of what there is."""

    def __init__(self, patch, free, peak=0):
        self.free, self.code = free, (lambda: None)
        peaks = weakref.WeakKeyDictionary({self.code: peak})
        patch.setattr(free_memory, "_peaks", peaks)
        patch.setattr(device_memory, "free_bytes", self.free_bytes)
        patch.setattr(offload_budget, "available_host_bytes", lambda: 1 << 30)  # of the host
        patch.setenv("LOCAL_WORLD_SIZE", "1")

    def free_bytes(self, device):
        return self.free

    def compile(self, peak):
        free_memory.note_planned_peak(self.code, peak)


def auto(**options):
    return {"device_bytes": "auto", **options}


@pytest.mark.parametrize(
    ("beside", "bucket", "stays", "flies"),
    [
        (12, "128KiB", 12, 0),  # all, without buckets
        (11.9, "128KiB", 9, 2),
        (5, "256KiB", 1, 4),
        (5, "128KiB", 3, 2),
        (2, "128KiB", 0, 2),
    ],
)
def test_the_device_holds_what_fits_beside_the_peak_and_the_buckets(
    beside, bucket, stays, flies, monkeypatch
):
    peak = 6 * ONE
    Memory(monkeypatch, int((peak + beside * ONE) / 0.9) + 64, peak)
    _, plain = measured(None)
    optimizer, found = measured(auto(bucket_bytes=bucket))
    plan = state_plan(optimizer)
    assert (plan.device_bytes, plan.in_flight_bytes) == (stays * ONE, flies * ONE)
    assert plan.host_bytes == (12 - stays) * ONE
    for (rest, above), (all_rest, _) in zip(found[1:], plain[1:], strict=True):
        assert all_rest - rest == pytest.approx(plan.host_bytes, rel=0.02, abs=1024)
        assert above == pytest.approx(plan.in_flight_bytes, rel=0.02, abs=1024)
        assert plan.device_bytes + above + peak <= 1.02 * (peak + beside * ONE)


def test_what_was_taken_at_a_time_counts_where_torch_counts_it(monkeypatch):
    Memory(monkeypatch, int(12 * ONE / 0.9) + 64)
    monkeypatch.setattr(device_memory, "fallen_bytes", lambda device: 7 * ONE)
    optimizer, _ = measured(auto(bucket_bytes="128KiB"), steps=1)
    assert state_plan(optimizer).device_bytes == 3 * ONE


def test_if_not_even_the_buckets_fit_all_states_go_and_a_warning_says_so(monkeypatch, caplog):
    Memory(monkeypatch, 10 * ONE, peak=10 * ONE)
    with caplog.at_level(logging.WARNING, logger="zpasses"):
        optimizer, _ = measured(auto(bucket_bytes="256KiB"))
    assert state_plan(optimizer).device_bytes == 0
    (text,) = caplog.messages
    assert "Beside forward and backward, 128 KiB are missing" in text
    assert "take 512 KiB. Give a smaller bucket_bytes than 256 KiB" in text


def test_nothing_moves_and_no_host_memory_is_taken_before_the_first_step(monkeypatch):
    Memory(monkeypatch, 1 << 30)
    optimizer = torch.optim.AdamW(Large().parameters())
    zpasses.offload_optimizer(optimizer, **auto())
    assert not hasattr(optimizer._zpasses_offload, "arena")
    with pytest.raises(ZpassesError, match="the first step decides"):
        state_plan(optimizer)


def test_states_that_exist_or_are_loaded_count_as_free_and_move_in_the_next_step(monkeypatch):
    models = [Net(), Net()]
    optimizer, plain = (optimizer_of(model, "AdamW") for model in models)
    for model, each in zip(models, (optimizer, plain), strict=True):
        train(model, each, range(2))
    values = [value for entries in plain.state.values() for value in entries.values()]
    held = sum(value.nbytes for value in values if value.dim())
    memory = Memory(monkeypatch, 1 << 20)
    zpasses.offload_optimizer(optimizer, **auto(host_bytes="1MiB", bucket_bytes="64B"))
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    memory.free = 0
    train(models[0], optimizer, [2])
    plan = state_plan(optimizer)
    assert 0 < plan.device_bytes < 0.9 * (held + 64 * len(values))  # which are aligned
    assert plan.host_bytes > 0
    train(models[1], plain, [2])
    assert_same_training(models[0], optimizer, models[1], plain)


def test_a_larger_graph_is_a_warning_and_a_second_call_decides_again(monkeypatch, caplog):
    models = [Net(), Net()]
    optimizer, plain = (optimizer_of(model, "AdamW") for model in models)
    memory = Memory(monkeypatch, 20000, peak=1000)
    zpasses.offload_optimizer(optimizer, **auto(bucket_bytes="64B"))
    with caplog.at_level(logging.WARNING, logger="zpasses"):
        train(models[0], optimizer, [0])
        before = state_plan(optimizer)
        memory.free -= before.device_bytes
        memory.compile(int(0.9 * 20000) - before.device_bytes - before.in_flight_bytes)
        train(models[0], optimizer, [1])
        assert caplog.messages == []
        memory.compile(16000)
        train(models[0], optimizer, [2, 3])
        (text,) = caplog.messages
    assert "plans to take 15.62 KiB above what rests" in text
    assert "Call zpasses.offload_optimizer(optimizer, device_bytes='auto') again" in text
    zpasses.offload_optimizer(optimizer, **auto(bucket_bytes="64B"))
    assert state_plan(optimizer) == before
    train(models[0], optimizer, [4])
    after = state_plan(optimizer)
    assert after.device_bytes + after.in_flight_bytes <= 0.9 * 20000 - 16000
    assert after.device_bytes < before.device_bytes
    train(models[1], plain, range(5))
    assert_same_training(models[0], optimizer, models[1], plain)


def test_a_first_step_that_the_host_cannot_hold_is_refused_before_anything_steps(monkeypatch):
    model = Net()
    optimizer = optimizer_of(model, "AdamW")
    Memory(monkeypatch, 4096)
    zpasses.offload_optimizer(optimizer, **auto(host_bytes="64B"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(MemoryBudgetError, match="host_bytes=64 B"):
        train(model, optimizer, [0])
    assert_bits(dict(model.state_dict()), before)
    zpasses.offload_optimizer(optimizer)
    train(model, optimizer, [0])


def test_a_device_that_cannot_tell_is_refused_at_once(monkeypatch):
    optimizer = optimizer_of(Net(), "AdamW")
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: None)
    with pytest.raises(ZpassesError, match="device_bytes='auto': torch cannot tell"):
        zpasses.offload_optimizer(optimizer, **auto())


# --- ranks ----------------------------------------------------------------------------------------
def trained(model, step, optimizer):
    """Trains a compiled model for four steps. Returns losses, and the rows of this rank."""
    losses = []
    for number in range(4):
        seed = torch.Generator().manual_seed(number + 100 * dist.get_rank())
        loss = step(torch.randn(4, 64, generator=seed)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [param.to_local().detach().clone() for param in model.parameters()]


def assert_the_rank_with_the_least_decides(codegen):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zpasses.shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), mesh=world_mesh())
    before = copy.deepcopy(model.state_dict())
    options = {"zero_stage": 3, "codegen": codegen}
    step = torch.compile(model, backend="zpasses", options=options)
    plain = trained(model, step, torch.optim.AdamW(model.parameters()))
    peak, room = free_memory.planned_peak_bytes(), 80 << 10  # of 130 KiB of states
    assert peak > 16 << 10
    for poorer in (0, 1):
        model.load_state_dict(before)
        optimizer = torch.optim.AdamW(model.parameters())
        zpasses.offload_optimizer(optimizer, **auto(bucket_bytes="16KiB"))
        with pytest.MonkeyPatch.context() as patch:
            memory = Memory(patch, 1 << 30, peak)
            if dist.get_rank() == poorer:
                memory.free = int((peak + room) / 0.9)
            found = trained(model, step, optimizer)
        assert_bits(found, plain)
        plan = state_plan(optimizer)
        assert 0 < plan.device_bytes <= room - plan.in_flight_bytes
        assert plan.host_bytes > 0
        plans = [None, None]
        dist.all_gather_object(plans, plan)
        assert plans[0] == plans[1]


@on_ranks(2)
def test_the_rank_with_the_least_decides_and_results_have_the_same_bits():
    assert_the_rank_with_the_least_decides("eager")


@on_ranks(2)
def test_the_states_of_sharded_parameters_fill_what_is_free():
    peak, half = 3 * ONE, ONE // 2
    with pytest.MonkeyPatch.context() as patch:
        free = (1 << 30, int((peak + 7 * half) / 0.9) + 64)[dist.get_rank()]
        Memory(patch, free, peak)

        def prepare(model):
            return zpasses.shard(model, mesh=world_mesh())

        _, plain = measured(None, prepare=prepare)
        optimizer, found = measured(auto(bucket_bytes="64KiB"), prepare=prepare)
    plan = state_plan(optimizer)
    assert (plan.device_bytes, plan.in_flight_bytes) == (5 * half, 2 * half)
    for (rest, above), (all_rest, usual) in zip(found[1:], plain[1:], strict=True):
        assert all_rest - rest == pytest.approx(plan.host_bytes, rel=0.02, abs=1024)
        assert above - usual == pytest.approx(plan.in_flight_bytes, rel=0.02, abs=1024)


@on_ranks(2)
def test_ranks_that_differ_in_auto_get_one_error_at_the_call():
    optimizer = optimizer_of(zpasses.shard(Net(), mesh=world_mesh()), "AdamW")
    with pytest.raises(ZpassesError, match="device_bytes is auto on one rank and 1 KiB on"):
        zpasses.offload_optimizer(optimizer, device_bytes=("auto", "1KiB")[dist.get_rank()])


def _one_rank_does_not_step():
    model = zpasses.shard(nn.Linear(8, 8), mesh=world_mesh())
    options = {"codegen": "eager", "agreement": False, "agreement_timeout_s": 2.0}
    step = torch.compile(model, backend="zpasses", options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    with mock.patch.object(device_memory, "free_bytes", return_value=1 << 30):
        zpasses.offload_optimizer(optimizer, **auto())
        step(torch.ones(2, 8)).sum().backward()
        if dist.get_rank() == 0:
            with pytest.raises(AgreementError, match=r"the states to offload.* within 2 s"):
                optimizer.step()


@pytest.mark.slow(quick="test_ranks_that_differ_in_auto_get_one_error_at_the_call")
@pytest.mark.processes
def test_a_rank_that_does_not_step_is_an_error_within_the_time_limit_of_the_graphs():
    outcomes = run_in_fresh_ranks(_one_rank_does_not_step, timeout_s=100)
    assert all(each.ok for each in outcomes), "\n".join(map(str, outcomes))
