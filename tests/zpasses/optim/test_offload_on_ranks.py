"""Offloaded states of sharded parameters, on real gloo ranks."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.zpasses.optim.offloading import (
    ONE,
    OPTIMIZERS,
    SMALL,
    Net,
    assert_bits,
    backward,
    measured,
    optimizer_of,
    train,
)
from zpasses.cost.memory import device_memory
from zpasses.errors import AgreementError, MemoryBudgetError, ZpassesError
from zpasses.host import host_pool
from zpasses.optim import offload, state_plan
from zpasses.testing import world_mesh

SHARDED = [each for each in OPTIMIZERS if each not in ("Muon", "Adafactor", "SGD fused")]
HYBRID = {"mesh_dim_names": ("replicate", "shard")}


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def rows(optimizer):
    """What this rank holds: parameters and their states, with the placements of each."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            found.append({key: local(value) for key, value in state.items()})
            found.append([getattr(each, "placements", None) for each in state.values()])
            found.append(local(param.detach()))
    return found


def assert_same_rows(optimizer, plain):
    assert_bits(rows(optimizer), rows(plain))


def pair(which="AdamW", mesh=None, options=SMALL):
    nets = [zpasses.shard(Net(), mesh=mesh or world_mesh()) for _ in range(2)]
    optimizer, plain = (optimizer_of(net, which) for net in nets)
    return nets[0], zpasses.offload_optimizer(optimizer, **options), nets[1], plain


@pytest.mark.parametrize("which", some_quick(SHARDED, ["AdamW", "Muon of zpasses"]))
@on_ranks(2)
def test_every_optimizer_has_the_bits_of_its_states_on_the_device(which):
    for options in (SMALL, {"bucket_bytes": "1B"}):
        model, optimizer, other, plain = pair(which, options=options)
        for number in range(4):
            train(model, optimizer, [number])
            train(other, plain, [number])
            assert_same_rows(optimizer, plain)


@on_ranks(3)
def test_uneven_rows_have_the_same_buckets_on_all_ranks():
    model, optimizer, other, plain = pair()
    train(model, optimizer, range(3))
    train(other, plain, range(3))
    assert_same_rows(optimizer, plain)
    plans = [None] * 3
    dist.all_gather_object(plans, state_plan(optimizer))
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].host_bytes > 0
    assert plans[0].resident


@pytest.mark.slow(quick="test_uneven_rows_have_the_same_buckets_on_all_ranks")
@on_ranks(4)
def test_replicas_of_shards():
    mesh = init_device_mesh("cpu", (2, 2), **HYBRID)
    model, optimizer, other, plain = pair("AdamW foreach", mesh)
    train(model, optimizer, range(3))
    train(other, plain, range(3))
    assert_same_rows(optimizer, plain)


@on_ranks(2)
def test_the_device_holds_what_the_plan_says():
    def prepare(model):
        return zpasses.shard(model, mesh=world_mesh())

    _, plain = measured(None, prepare=prepare)
    for options, stays, flies in (
        ({"bucket_bytes": "128KiB"}, 0, 4),
        ({"bucket_bytes": "128KiB", "device_bytes": "320KiB"}, 5, 4),
        ({"device_bytes": "768KiB"}, 12, 0),
        ({}, 0, 12),
    ):
        optimizer, found = measured(options, prepare=prepare)
        plan, half = state_plan(optimizer), ONE // 2
        assert (plan.device_bytes, plan.in_flight_bytes) == (stays * half, flies * half)
        for (rest, peak), (all_rest, usual) in zip(found[1:], plain[1:], strict=True):
            assert all_rest - rest == pytest.approx(plan.host_bytes, rel=0.02, abs=1024)
            assert peak - usual == pytest.approx(plan.in_flight_bytes, rel=0.02, abs=1024)


# --- compiled training ----------------------------------------------------------------------------
def _train_compiled(model, optimizer, stage, steps):
    step = torch.compile(model, backend="zpasses", options={"zero_stage": stage})
    found = []
    for number in range(steps):
        seed = torch.Generator().manual_seed(number + 100 * dist.get_rank())
        with zpasses.coalesce_grad_reduction(model):
            for _ in range(2):
                loss = step(torch.randn(4, 8, generator=seed)).square().sum()
                loss.backward()
        zpasses.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def _compare_compiled(stage, cls, **arguments):
    results = []
    for options in (None, {"bucket_bytes": "512B", "device_bytes": "300B"}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 31), nn.Linear(31, 3))
        zpasses.shard(model, mesh=world_mesh())
        optimizer = cls(model.parameters(), **arguments)
        if options is not None:
            zpasses.offload_optimizer(optimizer, **options)
            assert state_plan(optimizer).host_bytes > 0
        losses = _train_compiled(model, optimizer, stage, 4)
        results.append((losses, rows(optimizer)))
    assert_bits(*results)


@pytest.mark.inductor
@on_ranks(2)
def test_compiled_stage_3_with_accumulation_has_the_same_bits():
    _compare_compiled(3, torch.optim.AdamW, lr=0.01)


# --- checkpoints ----------------------------------------------------------------------------------
@on_ranks(2)
def test_checkpoints_go_both_ways(tmp_path):
    model, optimizer, other, plain = pair()
    train(model, optimizer, range(2))
    train(other, plain, range(2))
    for name, net, each in (("ours", model, optimizer), ("plain", other, plain)):
        dcp.save(zpasses.training_state(net, each), checkpoint_id=tmp_path / name)
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save(
        zpasses.training_state(model, optimizer),
        checkpoint_id=tmp_path / "async",
        process_group=group,
    )
    train(model, optimizer, range(2, 4))  # changes the host tensors while they are written
    train(other, plain, range(2, 4))
    saving.result()
    assert_same_rows(optimizer, plain)
    for name, offloads in (("ours", False), ("plain", True), ("async", True)):
        net = zpasses.shard(Net(), mesh=world_mesh())
        loaded = optimizer_of(net, "AdamW")
        if offloads:
            zpasses.offload_optimizer(loaded, **SMALL)
        zpasses.load_training_state(tmp_path / name, net, loaded)
        train(net, loaded, range(2, 4))
        assert_same_rows(loaded, plain)


@on_ranks(2)
def test_full_states_of_the_unsharded_optimizer_are_loaded():
    torch.manual_seed(0)
    whole = Net()
    before = torch.optim.AdamW(whole.layers.parameters())
    train(whole, before, range(2))
    model, other = (zpasses.shard(Net(), mesh=world_mesh()) for _ in range(2))
    optimizer, plain = (torch.optim.AdamW(net.layers.parameters()) for net in (model, other))
    zpasses.offload_optimizer(optimizer, **SMALL)
    for net, each in ((other, plain), (model, optimizer)):
        net.load_state_dict(whole.state_dict())
        each.load_state_dict(copy.deepcopy(before.state_dict()))
        train(net, each, range(2, 4))
    assert_same_rows(optimizer, plain)


# --- ranks ----------------------------------------------------------------------------------------
@on_ranks(2)
def test_a_budget_that_one_rank_cannot_keep_is_one_error_on_all_ranks():
    model = zpasses.shard(Net(), mesh=world_mesh())
    optimizer = optimizer_of(model, "AdamW")
    free = 2048 if dist.get_rank() else 1 << 30
    with (
        mock.patch.object(device_memory, "free_bytes", return_value=free),
        mock.patch.object(host_pool, "_pools", []),
        pytest.raises(MemoryBudgetError) as error,
    ):
        zpasses.offload_optimizer(optimizer, host_bytes="1MiB")
    texts = [None, None]
    dist.all_gather_object(texts, str(error.value))
    assert texts[0] == texts[1]
    assert "host_bytes=1 MiB. Available: 1 KiB" in texts[0]  # two ranks share 2 KiB
    train(model, optimizer, [0])  # the ranks go on together


@on_ranks(2)
def test_ranks_that_give_other_options_get_one_error():
    model = zpasses.shard(Net(), mesh=world_mesh())
    optimizer = optimizer_of(model, "AdamW")
    with pytest.raises(ZpassesError, match="bucket_bytes is 1 KiB on one rank and 2 KiB on"):
        zpasses.offload_optimizer(optimizer, bucket_bytes=f"{1 + dist.get_rank()}KiB")


@on_ranks(2)
def test_what_fails_on_one_rank_is_an_error_on_all():
    model = zpasses.shard(Net(), mesh=world_mesh())
    optimizer = optimizer_of(model, "AdamW")
    if dist.get_rank() == 1:
        for group in optimizer.param_groups:
            group["betas"] = None
    with pytest.raises(ZpassesError, match="AdamW cannot step a parameter by itself"):
        zpasses.offload_optimizer(optimizer)
    for group in optimizer.param_groups:
        group["betas"] = (0.9, 0.999)
    if dist.get_rank() == 1:
        refused = RuntimeError("the driver does not lock")
        with (
            mock.patch.object(offload, "HostArena", side_effect=refused),
            pytest.raises(RuntimeError, match="does not lock"),
        ):
            zpasses.offload_optimizer(optimizer)
    else:
        zpasses.offload_optimizer(optimizer)
        with pytest.raises(AgreementError, match=r"rank 1 failed while offloading .* not lock"):
            train(model, optimizer, [0])


class Reads(torch.optim.SGD):
    """Reads a value in its step, so it does not step on meta, and may lack memory."""

    lacks_memory = False

    def step(self):
        for param in self.param_groups[0]["params"]:
            param.sum().item()
        if self.lacks_memory:
            raise torch.OutOfMemoryError("Tried to allocate 20 GiB")


@on_ranks(2)
def test_a_rank_without_memory_to_ask_the_optimizer_is_an_error_on_all():
    model = zpasses.shard(Net(), mesh=world_mesh())
    optimizer = Reads(model.parameters(), lr=0.1)
    optimizer.lacks_memory = dist.get_rank() == 1
    with pytest.raises(
        ZpassesError, match=r"Reads runs out of memory while .* \(Tried to allocate"
    ):
        zpasses.offload_optimizer(optimizer)
    optimizer.lacks_memory = False
    zpasses.offload_optimizer(optimizer)


@on_ranks(2)
def test_whatever_fails_on_one_rank_is_an_error_on_all():
    model = zpasses.shard(Net(), mesh=world_mesh())
    optimizer = optimizer_of(model, "AdamW")
    if dist.get_rank() == 1:
        failing = mock.patch.object(offload, "usable_bytes", side_effect=RuntimeError("no device"))
    else:
        failing = mock.patch.object(offload, "usable_bytes", return_value=1 << 30)
    with failing, pytest.raises(ZpassesError, match="offload_optimizer: RuntimeError: no device"):
        zpasses.offload_optimizer(optimizer, device_bytes="auto")


@on_ranks(2)
def test_a_step_is_one_event_and_one_that_raises_on_one_rank_is_an_error_on_all():
    model, optimizer, _, _ = pair()
    train(model, optimizer, range(2))
    backward(model, 2)
    if dist.get_rank() == 0:
        optimizer.param_groups[1]["betas"] = None
    try:
        optimizer.step()
    except TypeError:
        assert dist.get_rank() == 0
        optimizer.param_groups[1]["betas"] = (0.9, 0.999)
    step = torch.compile(model.layers[0], backend="zpasses", options={"codegen": "eager"})
    with pytest.raises(AgreementError, match="after different edits of sharded parameters"):
        step(torch.ones(2, 8))
