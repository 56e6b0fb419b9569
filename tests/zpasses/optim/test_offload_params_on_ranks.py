"""Parameters whose shards rest on the host, on real gloo ranks: the bits stay the same."""

import contextlib
import functools
import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import zpasses
from tests import frozen_training
from tests.cases import some_quick
from tests.frozen_training import (
    BF16,
    WIDTH,
    Net,
    assert_same,
    measured,
    started,
    train,
)
from tests.on_ranks import on_ranks
from tests.zpasses.backend.cache.starts import COLD, on_fresh_ranks
from zpasses.cost.memory import device_memory
from zpasses.errors import AgreementError, MemoryBudgetError, ZpassesError
from zpasses.graph.host_copies import RELOAD
from zpasses.graph.queries import calls
from zpasses.host.locked_memory import LockedMemory
from zpasses.host.saved_arenas import gradients
from zpasses.optim import parameter_plan, state_plan
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import run_in_fresh_ranks, world_mesh


def partly_frozen(**options):
    """A model with trained and frozen layers, one trained matrix of which is read twice."""
    made = Net(**options)
    made.head.requires_grad_(True)
    made.layers[-1].requires_grad_(True)
    made.layers[-1].scale.requires_grad_(True)
    return made


KINDS = {"frozen": (Net, {}), "trained": (partly_frozen, {"trained": True})}
"""What rests on the host: frozen shards, or also trained ones and their gradients."""


def trained(offload=None, *, net=Net, **options):
    """Trains. Returns what `train` does, and the number of reloads by graph."""
    reloads = {}
    observed = observe_graphs(
        lambda log: reloads.setdefault(log.kind, len(calls(log.graph, RELOAD)))
    )
    with observed:
        found = train(net, after=lambda made: offloaded(made, offload), **options)
    return *found, reloads


def offloaded(net, offload):
    return net if offload is None else zpasses.offload_parameters(net, **offload)


def compare(kind="frozen", *, offload=None, net=None, **options):
    model, given = KINDS[kind]
    expected, plain, none = trained(net=net or model, **options)
    results, net, reloads = trained({**given, **(offload or {})}, net=net or model, **options)
    assert_same(results, expected)
    assert_same(*([each.to_local() for each in one.parameters()] for one in (net, plain)))
    assert not any(none.values())
    assert parameter_plan(net).host_bytes > 0
    return reloads


QUICK = "test_generated_code_has_the_same_bits"


@pytest.mark.inductor
@pytest.mark.parametrize("kind", some_quick(KINDS, ["trained"]))
@on_ranks(2, timeout_s=400)
def test_generated_code_has_the_same_bits(kind):
    one = functools.partial(KINDS[kind][0], layers=1)
    reloads = compare(kind, steps=2, net=one, codegen="inductor", cache=False)
    assert reloads["forward"] >= 2


CASES = {
    **frozen_training.CASES,
    "checkpoints": {},
    "some stay": {"offload": {"device_bytes": "3KiB", "host_bytes": "1MiB"}},
    "bfloat16": BF16,
    "columns": {"shard": {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else None}},
    "encoded": {"pipeline": "gather-params{encode=int8,exact_below_kib=0},reduce-grads,schedule"},
}


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout_s=400)
def test_runs_have_the_bits_of_those_without(name, kind):
    net = functools.partial(KINDS[kind][0], checkpoints=name == "checkpoints")
    compare(kind, net=net, **CASES[name])


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4, timeout_s=400)
def test_replicas_and_parts_of_a_mesh_have_the_same_bits(kind):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for how in (
        {},
        {"backwards": 2},
        {"backwards": 2, "grad_accum": "shards"},
        {"pipeline": "gather-params,reduce-grads"},
        {"compiled": None},
    ):
        compare(kind, mesh=mesh, **how)
    compare(kind, shard={"reshard_after_forward": 2})


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_code_that_was_compiled_before_is_compiled_again():
    net = zpasses.shard(Net(1), mesh=world_mesh())
    step = torch.compile(net, backend="zpasses", options={"zero_stage": 3, "codegen": "eager"})
    x, reloads = torch.ones(4, WIDTH), []
    with observe_graphs(
        lambda log: reloads.append(len(calls(log.graph, RELOAD))) if log.kind == "forward" else None
    ):
        before = step(x)
        zpasses.offload_parameters(net)
        after = step(x)
        assert torch.equal(before, after)
        after.sum().backward()
    assert reloads == [0, 3]
    net.layers[0].get_parameter("frozen.weight").mul_(2)  # an edit, on every rank
    assert torch.equal(step(x), net(x))
    assert not torch.equal(step(x), before)


def _started(folder, offloads):
    return started(folder, zpasses.offload_parameters if offloads else lambda net: net)


@pytest.mark.inductor
@pytest.mark.processes
@pytest.mark.slow(quick=QUICK)
def test_a_warm_start_tells_shards_on_the_host_from_others(tmp_path):
    runs = [on_fresh_ranks(_started, tmp_path, offloads) for offloads in (False, True, True)]
    assert [[said for _, said in run] for run in runs] == [[COLD] * 2, [COLD] * 2, [["hit"]] * 2]
    for run in runs:
        assert [found for found, _ in run] == [found for found, _ in runs[0]]


# --- gradients of trained shards ------------------------------------------------------------------
def handled(optimizer, *, offloads, states=False, compiled=True):
    """Returns what a program computes that does to its gradients what programs do.

    Args:
        states: whether those of the optimizer are offloaded, too.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zpasses.shard(partly_frozen(), mesh=world_mesh(), grad_divide_factor=3.0)
    if offloads:
        zpasses.offload_parameters(model, trained=True, device_bytes="1KiB")
        assert parameter_plan(model).device_bytes > 0
    options = {"zero_stage": 3, "codegen": "eager"}
    step = torch.compile(model, backend="zpasses", options=options) if compiled else model
    trains = [each for each in model.parameters() if each.requires_grad]
    made = optimizer(trains)
    if states:
        zpasses.offload_optimizer(made, bucket_bytes="6KiB", device_bytes="2KiB")
        assert state_plan(made).host_bytes > 0
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    results = []
    trains[0].register_hook(lambda grad: None if grad is None else grad * 2)  # in windows
    trains[1].register_post_accumulate_grad_hook(
        lambda param: results.append(param.grad.to_local().clone())
    )
    torch.manual_seed(dist.get_rank())
    for at in range(4):
        for _ in range(2):  # without a window
            scaler.scale(step(torch.randn(16, WIDTH)).square().mean()).backward()
        with zpasses.coalesce_grad_reduction(model):
            for _ in range(2):
                scaler.scale(step(torch.randn(16, WIDTH)).square().mean()).backward()
        scaler.unscale_(made)
        clip = (zpasses.clip_grad_norm_, nn.utils.clip_grad_norm_)[at % 2]
        norm = clip(trains, 0.1)
        results.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        results += [each.grad.to_local().clone() for each in trains]
        scaler.step(made)
        scaler.update()
        made.zero_grad(set_to_none=at % 2 == 0)
    results.append(torch.autograd.grad(step(torch.ones(2, WIDTH)).sum(), trains)[0].to_local())
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    with torch.no_grad():
        results += [average(torch.ones(2, WIDTH)), model(torch.ones(2, WIDTH))]
    return [*results, *zpasses.full_state_dict(model).values()]


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused AdamW": lambda params: torch.optim.AdamW(params, fused=True),
    "foreach AdamW": lambda params: torch.optim.AdamW(params, foreach=True),
    "NAdam": torch.optim.NAdam,
    "Adafactor": zpasses.optim.Adafactor,
    "Muon": lambda params: zpasses.optim.Muon([each for each in params if each.dim() == 2]),
}


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2, timeout_s=400)
def test_what_programs_do_to_gradients_has_the_same_bits(name):
    expected = handled(OPTIMIZERS[name], offloads=False)
    assert_same(handled(OPTIMIZERS[name], offloads=True), expected)
    assert_same(handled(OPTIMIZERS[name], offloads=True, states=True), expected)


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_gradients_of_code_that_is_not_compiled_go_to_the_host_too():
    gradients_before = gradients.live
    expected = handled(torch.optim.AdamW, offloads=False, compiled=False)
    assert_same(handled(torch.optim.AdamW, offloads=True, compiled=False), expected)
    gc.collect()
    assert gradients.live == gradients_before


# --- memory ---------------------------------------------------------------------------------------
def held(kind, offload=None):
    """Returns the bytes that rest between backward and step, what a backward takes above them, and
    the plan.
    """

    def after(net):
        if offload is not None:
            zpasses.offload_parameters(net, **KINDS[kind][1], **offload)

    def freeze(net):
        net[: 5 if kind == "frozen" else 1].requires_grad_(False)

    *found, net = measured(256, freeze, after, zeroes=kind == "frozen")
    plan = parameter_plan(net)
    assert gradients.live == plan.grad_bytes
    net.zero_grad()
    return *found, plan


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, timeout_s=400)
def test_measured_bytes_of_the_device_fall_by_what_the_plan_says(kind):
    rich, peak, _ = held(kind)
    for device_bytes, least in (("0B", 640 << 10), ("200KiB", 500 << 10), ("600KiB", 100 << 10)):
        lean, lean_peak, plan = held(kind, {"device_bytes": device_bytes})
        assert plan.host_bytes > least
        assert rich - lean == pytest.approx(plan.host_bytes + plan.grad_bytes, rel=0.02)
        assert kind == "frozen" or lean + lean_peak < rich + peak
    gc.collect()
    assert gradients.live == 0


@on_ranks(2)
def test_all_ranks_refuse_what_one_cannot_offload():
    net = zpasses.shard(Net(1), mesh=world_mesh())
    first = dist.get_rank() == 0
    with pytest.raises(ZpassesError, match="device_bytes is 1 KiB on one rank and 2 KiB on"):
        zpasses.offload_parameters(net, device_bytes="1KiB" if first else "2KiB")
    free = (1 << 30, 1 << 10)[dist.get_rank()]
    with (
        mock.patch.object(device_memory, "free_bytes", return_value=free),
        pytest.raises(MemoryBudgetError, match=r"offload_parameters: .* host_bytes=None"),
    ):
        zpasses.offload_parameters(net)
    fails = mock.patch("zpasses.optim.offload_params.HostArena", side_effect=RuntimeError("none"))
    if first:
        with fails, pytest.raises(RuntimeError, match="none"):
            zpasses.offload_parameters(net)
    else:  # edits on this rank alone would be an error of later tests
        with mock.patch("zpasses.optim.offload_params._move"):
            zpasses.offload_parameters(net)
        with pytest.raises(AgreementError, match="rank 0 failed while offloading parameters"):
            zpasses.offload_parameters(net)


def _one_rank_gets_no_memory():
    net = zpasses.shard(partly_frozen(layers=1), mesh=world_mesh())
    zpasses.offload_parameters(net, trained=True)
    options = {"zero_stage": 3, "codegen": "eager", "agreement_timeout_s": 8.0}
    loss = torch.compile(net, backend="zpasses", options=options)(torch.ones(2, WIDTH)).sum()
    refused = mock.patch.object(LockedMemory, "of", side_effect=MemoryBudgetError("no memory"))
    fails = dist.get_rank() == 1
    wrong = MemoryBudgetError if fails else AgreementError
    with refused if fails else contextlib.nullcontext(), pytest.raises(wrong, match="no memory"):
        loss.backward()


@pytest.mark.processes
def test_a_rank_that_gets_no_memory_for_gradients_tells_the_others():
    outcomes = run_in_fresh_ranks(_one_rank_gets_no_memory, timeout_s=100)
    assert all(each.ok for each in outcomes), "\n".join(map(str, outcomes))


# --- checkpoints ----------------------------------------------------------------------------------
@pytest.mark.slow(quick="test_moves_copies_and_state_dicts_keep_the_shards_on_the_host")
@on_ranks(2, timeout_s=400)
def test_checkpoints_are_those_of_a_model_without(tmp_path):
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    _, net, _ = trained({}, steps=1)
    torch.manual_seed(5)
    plain, other = (zpasses.shard(Net(), mesh=world_mesh()) for _ in range(2))
    zpasses.offload_parameters(other)
    full = zpasses.full_state_dict(net)
    dcp.save({"model": net.state_dict()}, checkpoint_id=f"{folder[0]}/dcp")
    zpasses.save_safetensors(net, f"{folder[0]}/safe")
    plan = parameter_plan(other)
    for loaded in (plain, other):
        state = {"model": loaded.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder[0]}/dcp")
        loaded.load_state_dict(state["model"])
        again = zpasses.full_state_dict(loaded)
        assert all(torch.equal(again[name], full[name]) for name in full)
        with torch.no_grad():
            for param in loaded.parameters():
                param.zero_()
        zpasses.load_safetensors(loaded, f"{folder[0]}/safe")
        again = zpasses.full_state_dict(loaded)
        assert all(torch.equal(again[name], full[name]) for name in full)
    assert parameter_plan(other) == plan
    assert torch.equal(net(torch.ones(2, WIDTH)), other(torch.ones(2, WIDTH)))


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_training_states_are_those_of_a_run_without(tmp_path):
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)

    def made(offloads):
        torch.manual_seed(0)
        model = zpasses.shard(partly_frozen(), mesh=world_mesh())
        if offloads:
            zpasses.offload_parameters(model, trained=True)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
        return model, zpasses.offload_optimizer(optimizer) if offloads == "all" else optimizer

    def train(model, optimizer):
        for _ in range(2):
            model(torch.ones(4, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = made(offloads=True)
    train(model, optimizer)
    dcp.save(zpasses.training_state(model, optimizer), checkpoint_id=folder[0])
    full = zpasses.full_state_dict(model)
    train(model, optimizer)
    for offloads in (True, "all", False):
        other, its = made(offloads)
        before = parameter_plan(other)
        zpasses.load_training_state(folder[0], other, its)
        again = zpasses.full_state_dict(other)
        assert all(torch.equal(again[name], full[name]) for name in full)
        train(other, its)
        assert_same(
            [each.to_local() for each in other.parameters()],
            [each.to_local() for each in model.parameters()],
        )
        assert parameter_plan(other) == before
