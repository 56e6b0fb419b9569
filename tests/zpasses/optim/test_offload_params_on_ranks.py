"""Frozen parameters whose shards rest on the host, on real gloo ranks: the bits stay the same."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import zpasses
from tests import frozen_training
from tests.frozen_training import (
    BF16,
    WIDTH,
    Net,
    assert_same,
    blocks,
    measured,
    started,
    train,
)
from tests.on_ranks import needs, on_ranks
from tests.zpasses.backend.cache.test_warm_start import COLD, on_fresh_ranks
from zpasses.cost.memory import device_memory
from zpasses.errors import AgreementError, MemoryBudgetError, ZpassesError
from zpasses.graph.host_copies import RELOAD
from zpasses.graph.queries import calls
from zpasses.optim import parameter_plan
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import world_mesh


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


def compare(offload=None, **options):
    expected, plain, none = trained(**options)
    results, net, reloads = trained({} if offload is None else offload, **options)
    assert_same(results, expected)
    assert_same(*([each.to_local() for each in one.parameters()] for one in (net, plain)))
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
    **frozen_training.CASES,
    "checkpoints": {"net": lambda: Net(checkpoints=True)},
    "some stay": {"offload": {"device_bytes": "3KiB", "host_bytes": "1MiB"}},
    "bfloat16": BF16,
    "columns": {"shard": {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else None}},
    "encoded": {"pipeline": "gather-params{encode=int8,exact_below_kib=0},reduce-grads,schedule"},
    "saved values, too": {"memory_budget": "64KiB", "host_memory": "1MiB", "target": "h100"},
}


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout_s=400)
def test_runs_have_the_bits_of_those_without(name):
    compare(**CASES[name])


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_blocks_have_the_bits_of_those_without():
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
    return started(folder, zpasses.offload_parameters if offloads else lambda net: net)


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
    """Returns the bytes that rest between steps, and the plan."""
    rests, _, net = measured(
        256, lambda net: net[:5].requires_grad_(False), lambda net: offloaded(net, offload)
    )
    return rests, parameter_plan(net)


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_measured_bytes_of_the_device_fall_by_what_the_plan_says():
    rich, _ = held(None)
    for device_bytes, least in (("0B", 640 << 10), ("200KiB", 500 << 10), ("600KiB", 100 << 10)):
        lean, plan = held({"device_bytes": device_bytes})
        assert plan.host_bytes > least
        assert rich - lean == pytest.approx(plan.host_bytes, rel=0.02)


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
