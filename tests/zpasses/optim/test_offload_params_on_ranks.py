"""Frozen parameters whose shards rest on the host, on real gloo ranks: the bits stay the same."""

import gc
import logging
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.on_ranks import needs, on_ranks
from tests.zpasses.backend.cache.test_warm_start import COLD, Messages, on_fresh_ranks, words
from tests.zpasses.cost.memory.test_liveness import allocated
from zpasses.cost.memory import device_memory
from zpasses.errors import AgreementError, MemoryBudgetError, ZpassesError
from zpasses.graph.host_copies import RELOAD
from zpasses.graph.queries import calls
from zpasses.optim import parameter_plan
from zpasses.pipeline import events
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import world_mesh

WIDTH = 33
"""Uneven: the last rank holds fewer rows."""


class Net(nn.Module):
    """Frozen layers, one of them read twice, each with a small trained part."""

    def __init__(self, layers=3, checkpoints=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.head.weight.requires_grad_(False)
        self.checkpoints = checkpoints

    def forward(self, x):
        x = self.tied(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.scale * torch.tanh(self.frozen(x)) + self.trained(x)


def trained(
    offload=None,
    *,
    mesh=None,
    steps=3,
    net=None,
    compiled=torch.compile,
    backwards=1,
    shard=None,
    dtype=torch.float32,
    **options,
):
    """Trains. Returns losses, gradients and parameters, the reloads by graph, and the model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net() if net is None else net()
    zpasses.shard(net, mesh=mesh or world_mesh(), **(shard or {}))
    if offload is not None:
        zpasses.offload_parameters(net, **offload)
    stage = {} if "pipeline" in options else {"zero_stage": 3}
    options = {"codegen": "eager", "backwards_per_step": backwards, **stage, **options}
    step = compiled(net, backend="zpasses", options=options) if compiled else net
    optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad])
    torch.manual_seed(dist.get_rank())
    results, reloads = [], {}
    observed = observe_graphs(
        lambda log: reloads.setdefault(log.kind, len(calls(log.graph, RELOAD)))
    )
    with observed:
        for _ in range(steps):
            for _ in range(backwards):
                loss = step(torch.randn(16, WIDTH).to(dtype)).square().mean()
                loss.backward()
                results.append(loss.detach())
            trains = [each for each in net.parameters() if each.requires_grad]
            results += [each.grad.to_local().clone() for each in trains]
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        x = torch.ones(2, WIDTH, dtype=dtype)
        results += [step(x), net(x)]
    results += [each.detach().to_local().clone() for each in net.parameters()]
    return results, reloads, net


def assert_same(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)


def compare(offload=None, **options):
    expected, none, _ = trained(**options)
    results, reloads, net = trained({} if offload is None else offload, **options)
    assert_same(results, expected)
    assert not any(none.values())
    assert parameter_plan(net).host_bytes > 0
    return reloads


QUICK = "test_generated_code_has_the_same_bits"


@pytest.mark.inductor
@on_ranks(2, timeout_s=400)
def test_generated_code_has_the_same_bits():
    reloads = compare(steps=2, net=lambda: Net(1), codegen="inductor", cache=False)
    assert reloads["forward"] >= 2


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_generated_code_of_all_layers_has_the_same_bits():
    reloads = compare(codegen="inductor", cache=False)
    assert reloads["forward"] == 7  # the tied one once
    assert reloads["backward"] >= 1


CASES = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3, nothing kept": {
        "pipeline": "merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing},"
        "schedule"
    },
    "lowered only": {"pipeline": "gather-params,reduce-grads"},
    "unlowered": {"pipeline": ""},
    "uncompiled": {"compiled": None},
    "windows": {"backwards": 2},
    "windows of stage 1": {"backwards": 2, "zero_stage": 1},
    "checkpoints": {"net": lambda: Net(checkpoints=True)},
    "some stay": {"offload": {"device_bytes": "3KiB", "host_bytes": "1MiB"}},
    "bfloat16": {
        "shard": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        "dtype": torch.bfloat16,
    },
    "columns": {"shard": {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else None}},
    "packed": {"shard": {"pack_mb": 1.0}},
    "encoded": {"pipeline": "gather-params{encode=int8,exact_below_kib=0},reduce-grads,schedule"},
    "budget": {"memory_budget": "20%"},
    "saved values, too": {"memory_budget": "64KiB", "host_memory": "1MiB", "target": "h100"},
    "verified": {"verify": "simulate"},
}


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout_s=400)
def test_runs_have_the_bits_of_those_without(name):
    compare(**CASES[name])


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_blocks_have_the_bits_of_those_without():
    def blocks(net, backend, options):
        options.pop("backwards_per_step")
        zpasses.compile_blocks(net, "layers.*", **options)
        return net

    reloads = compare(compiled=blocks)
    assert reloads["forward"] > 0


@pytest.mark.slow(quick=QUICK)
@on_ranks(4, timeout_s=400)
def test_replicas_and_parts_of_a_mesh_have_the_same_bits():
    names = {"mesh_dim_names": ("replicate", "shard")}
    compare(mesh=init_device_mesh("cpu", (2, 2), **names))
    compare(shard={"reshard_after_forward": 2})


@needs("peft")
@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_adapters_on_a_frozen_base_have_the_same_bits():
    from peft import LoraConfig, inject_adapter_in_model

    def adapted():
        return inject_adapter_in_model(LoraConfig(target_modules=["frozen"], r=4), Net())

    compare(net=adapted)


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
    """A program that starts: one step. Returns what it computed, and what the cache did."""
    os.environ["ZPASSES_CACHE_DIR"] = str(folder)
    events._listeners.clear()  # that of all tests keeps graphs out of the cache
    messages, log = Messages(), logging.getLogger("zpasses")
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    torch.manual_seed(0)
    net = zpasses.shard(Net(1), mesh=world_mesh())
    if offloads:
        zpasses.offload_parameters(net)
    step = torch.compile(net, backend="zpasses", options={"zero_stage": 3})
    loss = step(torch.ones(4, WIDTH)).square().mean()
    loss.backward()
    grads = [each.grad.to_local().tolist() for each in net.parameters() if each.requires_grad]
    return [loss.item(), *grads], words(messages.said)


@pytest.mark.inductor
@pytest.mark.processes
@pytest.mark.slow(quick=QUICK)
def test_a_warm_start_tells_shards_on_the_host_from_others(tmp_path):
    runs = [on_fresh_ranks(_started, tmp_path, offloads) for offloads in (False, True, True)]
    assert [[said for _, said in run] for run in runs] == [[COLD] * 2, [COLD] * 2, [["hit"]] * 2]
    for run in runs:
        assert [found for found, _ in run] == [found for found, _ in runs[0]]


# --- memory ---------------------------------------------------------------------------------------
def held(offload):
    """Returns the bytes that rest between steps, what a step takes above them, and the plan."""
    torch._dynamo.reset()
    gc.collect()
    observed = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with observed as profiler:
        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
        net[:5].requires_grad_(False)
        zpasses.shard(net, mesh=world_mesh())
        if offload is not None:
            zpasses.offload_parameters(net, **offload)
        options = {"zero_stage": 3, "codegen": "eager"}
        step = torch.compile(net, backend="zpasses", options=options)
        x = torch.randn(8, 256)
        for _ in range(2):
            step(x).sum().backward()
            net.zero_grad()
        gc.collect()
        with record_function("measured"):
            step(x).sum().backward()
    return *allocated(profiler, "measured"), parameter_plan(net)


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_measured_bytes_of_the_device_fall_by_what_the_plan_says():
    rich, *_ = held(None)
    for device_bytes, least in (("0B", 640 << 10), ("200KiB", 500 << 10), ("600KiB", 100 << 10)):
        lean, _, plan = held({"device_bytes": device_bytes})
        assert plan.host_bytes > least
        assert rich - lean == pytest.approx(plan.host_bytes, rel=0.02)


@on_ranks(2)
def test_all_ranks_refuse_what_one_cannot_offload():
    net = zpasses.shard(Net(1), mesh=world_mesh())
    first = dist.get_rank() == 0
    with pytest.raises(ZpassesError, match="ranks differ in the type"):
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


# --- checkpoints ----------------------------------------------------------------------------------
@pytest.mark.slow(quick="test_moves_copies_and_state_dicts_keep_the_shards_on_the_host")
@on_ranks(2, timeout_s=400)
def test_checkpoints_are_those_of_a_model_without(tmp_path):
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    _, _, net = trained({}, steps=1)
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
