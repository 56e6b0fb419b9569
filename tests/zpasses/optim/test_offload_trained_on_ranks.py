"""Trained parameters whose shards rest on the host, on real gloo ranks: the bits stay the same."""

import functools
import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zpasses
from tests.frozen_training import WIDTH, Net, assert_same, blocks, measured
from tests.on_ranks import on_ranks
from tests.zpasses.optim.test_offload_params_on_ranks import CASES, QUICK, compare
from zpasses.optim import parameter_plan, state_plan
from zpasses.sdma.saved_arenas import gradients
from zpasses.testing import world_mesh


def net(**options):
    """A model with trained and frozen layers, one trained matrix of which is read twice."""
    made = Net(**options)
    made.head.requires_grad_(True)
    made.layers[-1].requires_grad_(True)
    made.layers[-1].scale.requires_grad_(True)
    return made


TRAINED = {"trained": True}


@pytest.mark.inductor
@on_ranks(2, timeout_s=400)
def test_generated_code_has_the_same_bits():
    one = functools.partial(net, layers=1)
    reloads = compare(TRAINED, steps=2, net=one, codegen="inductor", cache=False)
    assert reloads["forward"] >= 2


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout_s=400)
def test_runs_have_the_bits_of_those_without(name):
    options = {"net": net, **CASES[name]}
    compare({**TRAINED, **options.pop("offload", {})}, **options)


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_blocks_have_the_bits_of_those_without():
    reloads = compare(TRAINED, net=net, compiled=blocks)
    assert reloads["forward"] > 0


@pytest.mark.slow(quick=QUICK)
@on_ranks(4, timeout_s=400)
def test_replicas_and_parts_of_a_mesh_have_the_same_bits():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    compare(TRAINED, net=net, mesh=mesh)
    compare(TRAINED, net=net, mesh=mesh, backwards=2)
    compare(TRAINED, net=net, mesh=mesh, backwards=2, grad_accum="shards")
    compare(TRAINED, net=net, mesh=mesh, pipeline="gather-params,reduce-grads")
    compare(TRAINED, net=net, mesh=mesh, compiled=None)
    compare(TRAINED, net=net, shard={"reshard_after_forward": 2})


def handled(optimizer, *, offloads, states=False, compiled=True):
    """Returns what a program computes that does to its gradients what programs do.

    Args:
        states: whether those of the optimizer are offloaded, too.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zpasses.shard(net(), mesh=world_mesh(), grad_divide_factor=3.0)
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


# --- memory and checkpoints -----------------------------------------------------------------------
def held(offload):
    """Returns the bytes that rest between backward and step, what a backward takes above them, and
    the plan.
    """

    def after(net):
        if offload is not None:
            zpasses.offload_parameters(net, trained=True, **offload)

    *found, net = measured(256, lambda net: net[0].requires_grad_(False), after, zeroes=False)
    live, plan = gradients.live, parameter_plan(net)
    net.zero_grad()
    return *found, plan, live


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_measured_bytes_of_the_device_fall_by_what_the_plan_says():
    rich, peak, _, live = held(None)
    assert live == 0
    for device_bytes, least in (("0B", 640 << 10), ("200KiB", 500 << 10), ("600KiB", 100 << 10)):
        lean, lean_peak, plan, live = held({"device_bytes": device_bytes})
        assert plan.host_bytes > least
        assert live == plan.grad_bytes
        assert rich - lean == pytest.approx(plan.host_bytes + plan.grad_bytes, rel=0.02)
        assert lean + lean_peak < rich + peak
    gc.collect()
    assert gradients.live == 0


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_checkpoints_are_those_of_a_model_without(tmp_path):
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)

    def made(offloads):
        torch.manual_seed(0)
        model = zpasses.shard(net(), mesh=world_mesh())
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
