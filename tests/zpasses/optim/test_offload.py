"""Offloaded states in one process: on CPUs, the host is another allocation."""

import copy
import gc
import io
import logging
import pickle
import warnings
import weakref
from collections import Counter, defaultdict

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import zpasses
from tests.zpasses.optim.offloading import (
    ONE,
    OPTIMIZERS,
    SMALL,
    Large,
    Lion,
    Net,
    assert_bits,
    assert_same_training,
    backward,
    measured,
    optimizer_of,
    train,
)
from zpasses.cost.memory import device_memory
from zpasses.errors import MemoryBudgetError, OptionError, ZpassesError
from zpasses.optim import state_plan


def pair(which="AdamW", **options):
    """(model, offloaded optimizer, equal model, plain optimizer)."""
    model, other = Net(), Net()
    optimizer, plain = optimizer_of(model, which), optimizer_of(other, which)
    return model, zpasses.offload_optimizer(optimizer, **(options or SMALL)), other, plain


# --- bits -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("options", [SMALL, {"bucket_bytes": "1B"}, {"bucket_bytes": "1GiB"}])
def test_every_optimizer_has_the_bits_of_its_states_on_the_device(which, options):
    model, optimizer, other, plain = pair(which, **options)
    for number in range(5):
        train(model, optimizer, [number])
        train(other, plain, [number])
        assert_same_training(model, optimizer, other, plain)


def test_states_that_exist_move_to_the_host():
    model, other = Net(), Net()
    optimizer, plain = optimizer_of(model, "AdamW"), optimizer_of(other, "AdamW")
    train(model, optimizer, range(3))
    train(other, plain, range(3))
    zpasses.offload_optimizer(optimizer, **SMALL)
    assert_same_training(model, optimizer, other, plain)
    train(model, optimizer, range(3, 6))
    train(other, plain, range(3, 6))
    assert_same_training(model, optimizer, other, plain)


def test_a_parameter_without_gradient_gets_no_state():
    model, optimizer, _, _ = pair()
    train(model, optimizer, [0])
    assert model.never not in optimizer.state
    assert model.sometimes not in optimizer.state
    train(model, optimizer, [1])
    assert model.sometimes in optimizer.state


def test_parameter_groups_that_are_added_are_offloaded_too():
    model, optimizer, other, plain = pair()
    before = state_plan(optimizer)
    for net, each in ((model, optimizer), (other, plain)):
        train(net, each, range(2))
        net.added = nn.Parameter(torch.ones(32, 32))
        each.add_param_group({"params": [net.added], "lr": 0.5})
        for number in range(2, 5):
            net.added.sum().backward()
            train(net, each, [number])
    assert_same_training(model, optimizer, other, plain)
    assert state_plan(optimizer).host_bytes == before.host_bytes + 2 * 32 * 32 * 4


def test_a_setting_that_adds_states_later_is_followed():
    model, optimizer, other, plain = pair("SGD", bucket_bytes="1KiB")
    assert state_plan(optimizer).host_bytes == 0
    for net, each in ((model, optimizer), (other, plain)):
        train(net, each, range(2))
        for group in each.param_groups:
            group["momentum"] = 0.9
        train(net, each, range(2, 5))
    assert_same_training(model, optimizer, other, plain)
    assert state_plan(optimizer).host_bytes > 0


def test_a_closure_runs_once_and_its_loss_is_returned():
    model, optimizer, other, plain = pair()
    calls = Counter()

    def closure(net):
        calls[net] += 1
        net.zero_grad()
        loss = net(torch.ones(4, 8), 1).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        mine, theirs = optimizer.step(lambda: closure(model)), plain.step(lambda: closure(other))
        assert torch.equal(mine, theirs)
    assert torch.equal(
        optimizer.step(closure=lambda: closure(model)), plain.step(lambda: closure(other))
    )
    assert calls[model] == calls[other] == 4
    assert_same_training(model, optimizer, other, plain)
    assert optimizer.step() is None


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_compiled_step_has_the_same_bits():
    model, optimizer, other, plain = pair("AdamW foreach")
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(3):
        backward(model, number)
        step()
        optimizer.zero_grad()
        train(other, plain, [number])
    assert_same_training(model, optimizer, other, plain)


# --- memory ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "stays", "flies"),
    [
        ({"bucket_bytes": "256KiB"}, 0, 4),
        ({"bucket_bytes": "1B"}, 0, 2),
        ({"bucket_bytes": "128KiB", "device_bytes": "640KiB"}, 5, 2),
        ({"bucket_bytes": "512KiB", "device_bytes": "1MiB"}, 8, 4),
        ({"device_bytes": "1536KiB"}, 12, 0),
        ({}, 0, 12),
    ],
)
def test_the_device_holds_what_stays_and_two_buckets_in_a_step(options, stays, flies):
    _, plain = measured(None)
    optimizer, found = measured(options)
    plan = state_plan(optimizer)
    assert (plan.device_bytes, plan.in_flight_bytes) == (stays * ONE, flies * ONE)
    assert plan.host_bytes == (12 - stays) * ONE
    gradients = 12 * 64 * 256 * 4
    for (rest, peak), (all_rest, _) in zip(found[1:], plain[1:], strict=True):
        assert all_rest - rest == pytest.approx(plan.host_bytes, rel=0.02, abs=1024)
        assert rest == pytest.approx(gradients + plan.device_bytes, rel=0.02, abs=1024)
        assert peak == pytest.approx(plan.in_flight_bytes, rel=0.02, abs=1024)
    bucket = max((len(each) for each in plan.buckets), default=0) * ONE
    most = plan.device_bytes + plan.in_flight_bytes + bucket
    assert found[0][1] <= 1.02 * most + 1024  # it makes the states


class Arenas:
    """The host memory that optimizers take."""

    def __init__(self, patch, fails_at=None):
        from zpasses.optim import offload

        self.sizes, self.live, self.most, self.fails_at = [], {}, 0, fails_at
        arenas = self

        class Arena(offload.HostArena):
            def __init__(self, nbytes, device):
                if len(arenas.sizes) == arenas.fails_at:
                    raise MemoryBudgetError("the system does not give it")
                super().__init__(nbytes, device)
                arenas.sizes.append(nbytes)
                arenas.live[weakref.ref(self._memory)] = nbytes
                arenas.most = max(arenas.most, arenas.mapped())

        patch.setattr(offload, "HostArena", Arena)

    def mapped(self):
        return sum(nbytes for memory, nbytes in self.live.items() if memory() is not None)


def test_host_memory_is_mapped_by_buckets_and_of_the_exact_size(monkeypatch):
    arenas = Arenas(monkeypatch)
    optimizer, _ = measured({"device_bytes": "128KiB", "bucket_bytes": "256KiB"})
    assert arenas.sizes == [*[2 * ONE] * 5, ONE]
    assert sum(arenas.sizes) == state_plan(optimizer).host_bytes


def test_host_memory_goes_when_the_optimizer_does(monkeypatch):
    arenas = Arenas(monkeypatch)
    optimizer, _ = measured({})
    value = optimizer.state_dict()["state"][0]["exp_avg"]
    collects = gc.isenabled()
    gc.disable()
    try:
        del optimizer
        assert arenas.mapped()  # a value of a state dict keeps it
        del value
        assert not arenas.mapped()
    finally:
        if collects:
            gc.enable()


# --- host memory is a budget ----------------------------------------------------------------------
def with_free_host(monkeypatch, nbytes):
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: nbytes)


def test_a_host_budget_that_is_too_small_is_refused_with_three_figures(monkeypatch):
    with_free_host(monkeypatch, 8 << 20)
    optimizer = torch.optim.AdamW(Large().parameters())
    with pytest.raises(MemoryBudgetError) as error:
        zpasses.offload_optimizer(optimizer, host_bytes="1MiB")
    for text in ("need 1.5 MiB", "host_bytes=1 MiB", "Available: 8 MiB"):
        assert text in str(error.value)
    assert str(error.value).endswith(
        "Raise host_bytes, let more states stay (device_bytes), or use more ranks."
    )
    with pytest.raises(ZpassesError, match="not offloaded"):
        state_plan(optimizer)
    zpasses.offload_optimizer(optimizer, host_bytes="1536KiB")


def test_less_host_memory_suffices_when_more_stays_on_the_device(monkeypatch):
    with_free_host(monkeypatch, 8 << 20)
    optimizer = torch.optim.AdamW(Large().parameters())
    zpasses.offload_optimizer(optimizer, host_bytes="1MiB", device_bytes="512KiB")
    assert state_plan(optimizer).host_bytes == 1 << 20


def test_a_budget_beyond_the_share_of_the_rank_is_refused_and_not_clamped(monkeypatch):
    with_free_host(monkeypatch, 8 << 20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    optimizer = torch.optim.AdamW(Large().parameters())
    with pytest.raises(MemoryBudgetError, match=r"host_bytes=4 MiB. Available: 2 MiB") as error:
        zpasses.offload_optimizer(optimizer, host_bytes="4MiB")
    assert "There is room for them: give host_bytes that the machine has" in str(error.value)
    assert "stay (device_bytes)" not in str(error.value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(MemoryBudgetError, match=r"host_bytes=None. Available: 1 MiB") as error:
        zpasses.offload_optimizer(optimizer)
    assert "Let more states stay (device_bytes), or shard" in str(error.value)


def test_added_parameters_that_exceed_the_budget_are_refused_before_anything_steps():
    model, optimizer, other, plain = pair("AdamW", bucket_bytes="1KiB", host_bytes="16KiB")
    train(model, optimizer, range(2))
    train(other, plain, range(2))
    optimizer.add_param_group({"params": [added := nn.Parameter(torch.ones(64, 64))]})
    backward(model, 2)
    added.sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MemoryBudgetError):
        optimizer.step()
    assert_bits(dict(model.state_dict()), dict(before))
    optimizer.param_groups.pop()
    optimizer.step()
    train(other, plain, [2])
    assert_same_training(model, optimizer, other, plain)


# --- what surrounds a step ------------------------------------------------------------------------
def test_hooks_run_once_around_the_whole_step_whenever_they_were_registered():
    model, other = Net(), Net()
    optimizer, plain = optimizer_of(model, "AdamW"), optimizer_of(other, "AdamW")
    seen = []

    def before(each, args, kwargs):
        params = [param for group in each.param_groups for param in group["params"]]
        seen.append(len(params))
        for param in params:
            if param.grad is not None:
                param.grad.mul_(0.5)

    def after(each, args, kwargs):
        seen.append(len(each.state))

    optimizer.register_step_pre_hook(before)
    zpasses.offload_optimizer(optimizer, **SMALL)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    handle = register_optimizer_step_post_hook(after)
    try:
        train(model, optimizer, [1, 2])
    finally:
        handle.remove()
    assert seen == [12, 12, 11, 11] * 2
    for _ in range(2):
        plain.register_step_pre_hook(before)
    train(other, plain, [1, 2])
    assert_same_training(model, optimizer, other, plain)


@pytest.mark.parametrize("first", ["scheduler", "offload"])
def test_schedulers_see_one_step(first):
    model, other = Net(), Net()
    optimizer, plain = optimizer_of(model, "AdamW"), optimizer_of(other, "AdamW")
    schedule = {}
    if first == "scheduler":
        schedule[optimizer] = StepLR(optimizer, 2, 0.1)
    zpasses.offload_optimizer(optimizer, **SMALL)
    schedule.setdefault(optimizer, StepLR(optimizer, 2, 0.1))
    schedule[plain] = StepLR(plain, 2, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(5):
            for net, each in ((model, optimizer), (other, plain)):
                train(net, each, [number])
                schedule[each].step()
    assert_same_training(model, optimizer, other, plain)


@pytest.mark.parametrize("which", ["AdamW", "AdamW fused"])
def test_scaled_gradients_and_clipping(which):
    model, optimizer, other, plain = pair(which)
    for net, each in ((model, optimizer), (other, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(4):
            seed = torch.Generator().manual_seed(number)
            x = torch.randn(4, 8, generator=seed) * (float("inf") if number == 2 else 1)
            scaler.scale(net(x, number).sum()).backward()
            if number == 1:
                scaler.unscale_(each)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(each)
            scaler.update()
            each.zero_grad()
        assert scaler.get_scale() == 4.0
    assert_same_training(model, optimizer, other, plain)


# --- copies of the state --------------------------------------------------------------------------
def test_state_is_loaded_before_and_after_steps_and_from_plain_optimizers():
    model, optimizer, other, plain = pair()
    train(other, plain, range(3))
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))  # before the first step
    assert_same_training(model, optimizer, other, plain)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for net, each in ((model, optimizer), (other, plain)):
        train(net, each, range(3, 5))
        net.load_state_dict(saved[0])
        each.load_state_dict(copy.deepcopy(saved[1]))
        train(net, each, range(5, 7))
    assert_same_training(model, optimizer, other, plain)
    last, fresh = Net(), Net()
    last.load_state_dict(model.state_dict())
    back = optimizer_of(last, "AdamW")
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # into a plain one
    train(last, back, [7])
    train(other, plain, [7])
    assert_same_training(last, back, other, plain)
    assert not any(
        torch.equal(a, b)
        for a, b in zip(fresh.layers[0].weight, last.layers[0].weight, strict=True)
    )


def test_loaded_values_get_the_dtype_of_the_parameter():
    model, optimizer, other, plain = pair()
    train(other, plain, range(2))
    saved = copy.deepcopy(plain.state_dict())
    for entries in saved["state"].values():
        entries["exp_avg"] = entries["exp_avg"].double()
    optimizer.load_state_dict(saved)
    kinds = {v.dtype for entries in optimizer.state.values() for v in entries.values()}
    assert kinds == {torch.float32}
    model.load_state_dict(other.state_dict())
    train(model, optimizer, [2])
    train(other, plain, [2])
    assert_same_training(model, optimizer, other, plain)


def test_hooks_of_load_state_dict_see_and_change_what_is_loaded():
    _, optimizer, other, plain = pair()
    train(other, plain, range(2))
    saved = copy.deepcopy(plain.state_dict())

    def swap(each, loaded):
        state = dict(loaded["state"])
        state[0], state[2] = saved["state"][0], loaded["state"][2]
        return {**loaded, "state": state}

    optimizer.register_load_state_dict_pre_hook(swap)
    optimizer.load_state_dict(saved)
    assert_bits(optimizer.state_dict()["state"], plain.state_dict()["state"])


def test_a_state_that_a_program_replaces_is_brought_to_rest():
    model, optimizer, other, plain = pair()
    for net, each in ((model, optimizer), (other, plain)):
        train(net, each, range(2))
        each.state = defaultdict(dict, each.state)
        each.state[net.layers[0].weight]["exp_avg"] = torch.full_like(net.layers[0].weight, 0.5)
        each.state[net.layers[0].bias]["exp_avg"].fill_(0.25)
        del each.state[net.layers[1].weight]
        train(net, each, range(2, 4))
    assert_same_training(model, optimizer, other, plain)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_the_optimizer_are_plain_optimizers(how):
    model, optimizer, other, plain = pair()
    train(model, optimizer, range(2))
    train(other, plain, range(2))
    if how == "pickle":
        net, copied = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        net, copied = copy.deepcopy((model, optimizer))
    assert type(copied.state) is defaultdict
    train(net, copied, range(2, 4))
    train(other, plain, range(2, 4))
    assert_same_training(net, copied, other, plain)
    train(model, optimizer, range(2, 4))
    assert_same_training(model, optimizer, other, plain)
    with pytest.raises(ZpassesError, match="not offloaded"):
        state_plan(copied)


def test_a_saved_value_is_as_large_as_the_value():
    model, optimizer, _, _ = pair("AdamW", bucket_bytes="1GiB")
    train(model, optimizer, [0])
    written = io.BytesIO()
    torch.save(optimizer.state[model.scale], written)
    assert written.tell() < 4096
    value = optimizer.state[model.layers[0].weight]["exp_avg"]
    assert value.untyped_storage().nbytes() == value.numel() * 4


# --- failures -------------------------------------------------------------------------------------
class Failing(Lion):
    fails_at = None

    @torch.no_grad()
    def step(self, closure=None):
        if any(param is self.fails_at for group in self.param_groups for param in group["params"]):
            super(Lion, self).__getattribute__("state")[self.fails_at]["moment"].fill_(3.0)
            raise KeyboardInterrupt("in the middle")
        Lion.step.__wrapped__(self)


def test_a_step_that_raises_says_how_far_it_came_and_leaves_states_that_can_be_used(caplog):
    model = Net()
    params = [*model.layers.parameters()]
    optimizer = zpasses.offload_optimizer(Failing(params), bucket_bytes="1B")
    train(model, optimizer, range(2))
    optimizer.fails_at = params[2]
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    backward(model, 2)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt, match="in the middle"):
        optimizer.step()
    assert "raised in part 3 of 8" in caplog.text
    assert len(optimizer.param_groups[0]["params"]) == 8
    state = optimizer.state_dict()["state"]
    for at, param in enumerate(params):
        stepped = not torch.equal(state[at]["moment"], before[1][at]["moment"])
        assert stepped == (at <= 2)
        assert torch.equal(param, before[0][at]) == (at >= 2)
    assert torch.equal(state[2]["moment"], torch.full_like(params[2], 3.0))
    # A retry steps from there, as without offloading.
    other = Net()
    others = [*other.layers.parameters()]
    plain = Lion(others)
    for param, value in zip(others, params, strict=True):
        param.data.copy_(value)
        param.grad = value.grad.clone()
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.fails_at = None
    optimizer.step()
    plain.step()
    assert_same_training(model, optimizer, other, plain)


def test_an_optimizer_of_all_parameters_together_is_refused():
    prodigy = pytest.importorskip("prodigyopt").Prodigy
    with pytest.raises(ZpassesError, match="Prodigy steps parameters together"):
        zpasses.offload_optimizer(prodigy(Net().layers.parameters()))


def test_a_second_call_moves_the_states_and_a_refused_one_does_not():
    model, optimizer, other, plain = pair("AdamW", bucket_bytes="1KiB")
    train(model, optimizer, range(2))
    zpasses.offload_optimizer(optimizer, device_bytes="1MiB")
    assert state_plan(optimizer).host_bytes == 0
    train(model, optimizer, [2])
    zpasses.offload_optimizer(optimizer, device_bytes="600B", bucket_bytes="1KiB")
    moved = state_plan(optimizer)
    assert 0 < moved.device_bytes <= 600
    with pytest.raises(MemoryBudgetError, match="host_bytes=1 B"):
        zpasses.offload_optimizer(optimizer, host_bytes="1B")
    assert state_plan(optimizer) == moved
    train(model, optimizer, [3])
    train(other, plain, range(4))
    assert_same_training(model, optimizer, other, plain)


@pytest.mark.parametrize(
    "calls",
    [
        [{"device_bytes": "0B"}, {"device_bytes": "256KiB"}],
        [{"device_bytes": "256KiB"}, {"device_bytes": "0B"}],
        [{"device_bytes": "256KiB"}, {"device_bytes": "256KiB", "bucket_bytes": "192KiB"}],
    ],
)
def test_a_second_call_takes_host_memory_in_place_of_that_of_the_first(calls, monkeypatch):
    arenas, largest = Arenas(monkeypatch), 12 * ONE
    monkeypatch.setattr(device_memory, "free_bytes", lambda _: largest - arenas.mapped())
    optimizer, needed = None, []
    for options in calls:
        options = {"bucket_bytes": "64KiB", **options}
        if optimizer is None:
            optimizer, _ = measured(options)
        else:
            before = copy.deepcopy(optimizer.state_dict())
            zpasses.offload_optimizer(optimizer, **options)
            assert_bits(optimizer.state_dict()["state"], before["state"])
        needed.append(state_plan(optimizer).host_bytes)
        assert arenas.mapped() == needed[-1]
    assert arenas.most <= max(needed) + 2 * 3 * ONE


def test_a_second_call_that_fails_midway_loses_no_state_and_the_next_step_places_them(monkeypatch):
    model, optimizer, other, plain = pair("AdamW", bucket_bytes="1KiB")
    train(model, optimizer, range(2))
    train(other, plain, range(2))
    with monkeypatch.context() as patch:
        Arenas(patch, fails_at=2)
        with pytest.raises(MemoryBudgetError, match="does not give it"):
            zpasses.offload_optimizer(optimizer, device_bytes="600B", bucket_bytes="512B")
        assert_same_training(model, optimizer, other, plain)
        backward(model, 2)
        with pytest.raises(MemoryBudgetError, match="does not give it"):
            optimizer.step()
        optimizer.zero_grad()
    train(model, optimizer, [2])
    train(other, plain, [2])
    assert_same_training(model, optimizer, other, plain)
    assert state_plan(optimizer).device_bytes == 0


def test_wrong_calls_are_refused():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for name in ("device_bytes", "bucket_bytes", "host_bytes"):
        with pytest.raises(OptionError, match=name):
            zpasses.offload_optimizer(optimizer, **{name: "10%"})
    with pytest.raises(OptionError, match="bucket_bytes: got '0B'; expected the bytes"):
        zpasses.offload_optimizer(optimizer, bucket_bytes="0B")
    with pytest.raises(ZpassesError, match=r"expected a torch\.optim\.Optimizer"):
        zpasses.offload_optimizer(model)
    with pytest.raises(ZpassesError, match="differentiable"):
        zpasses.offload_optimizer(torch.optim.AdamW(model.parameters(), differentiable=True))
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(ZpassesError, match="expected one device"):
        zpasses.offload_optimizer(torch.optim.AdamW(mixed))
