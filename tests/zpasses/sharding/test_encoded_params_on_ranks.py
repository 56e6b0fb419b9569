"""Frozen parameters whose shards rest encoded, on real gloo ranks: the bits are those of the same
model with the decoded values.
"""

import copy
import gc
import logging
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.on_ranks import needs, on_ranks
from tests.zpasses.backend.cache.test_warm_start import COLD, Messages, on_fresh_ranks, words
from tests.zpasses.cost.memory.test_liveness import allocated
from zpasses.graph.encoding import ENCODED_DTYPES, Encoding, decode, encode
from zpasses.optim import parameter_plan
from zpasses.pipeline import events
from zpasses.testing import world_mesh

WIDTH = 33
"""Uneven: the last rank holds fewer rows, and no block is full."""


class Net(nn.Module):
    """Frozen layers, one of them read twice, each with a small trained part."""

    def __init__(self, layers=3, checkpoints=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.head.weight.requires_grad_(False)
        self.short = nn.Parameter(torch.randn(1, WIDTH), requires_grad=False)  # an empty shard
        self.checkpoints = checkpoints

    def forward(self, x):
        x = self.tied(x) + self.short
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


def rounded(net, how):
    """The model with the values to which frozen matrices decode."""
    for param in net.parameters():
        if not param.requires_grad and param.dim() > 1 and param.dtype in ENCODED_DTYPES:
            (rows, width), dtype = param.shape, param.dtype
            param.data = decode(encode(param, width, rows, how), param.shape, rows, dtype, how)
    return net


def trained(
    format=None,
    *,
    expected=None,
    mesh=None,
    steps=3,
    net=None,
    compiled=torch.compile,
    backwards=1,
    shard=None,
    dtype=torch.float32,
    after=lambda net: net,
    **options,
):
    """Trains. Returns losses, gradients and parameters, and the model.

    Args:
        format: how the frozen matrices rest; None leaves exact values, those of `expected`.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net() if net is None else net()
    if format is None:
        rounded(net, Encoding.of(expected, None))
    zpasses.shard(net, mesh=mesh or world_mesh(), **(shard or {}))
    if format is not None:
        zpasses.encode_parameters(net, format)
    after(net)
    stage = {} if "pipeline" in options else {"zero_stage": 3}
    options = {"codegen": "eager", "backwards_per_step": backwards, **stage, **options}
    step = compiled(net, backend="zpasses", options=options) if compiled else net
    optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad])
    torch.manual_seed(dist.get_rank())
    results = []
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
    return results + [each.detach().to_local().clone() for each in trains], net


def compare(format="nf4", **options):
    expected, _ = trained(expected=format, **options)
    results, net = trained(format, **options)
    assert sum(each.dtype == torch.uint8 for each in net.parameters()) > 1
    for mine, other in zip(results, expected, strict=True):
        assert torch.equal(mine, other)


QUICK = "test_generated_code_has_the_same_bits"


@pytest.mark.inductor
@on_ranks(2, timeout_s=400)
def test_generated_code_has_the_same_bits():
    compare(steps=2, net=lambda: Net(1), codegen="inductor", cache=False)


CASES = {
    "int8": {"format": "int8"},
    "fp8": {"format": "fp8"},
    "mxfp8": {"format": "mxfp8"},
    "fp4": {"format": "fp4"},
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
    "bfloat16": {
        "shard": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        "net": lambda: Net().bfloat16(),
        "dtype": torch.bfloat16,
    },
    "packed": {"shard": {"pack_mb": 1.0}},
    "on the host": {"after": lambda net: zpasses.offload_parameters(net)},
    "budget": {"memory_budget": "20%"},
    "verified": {"verify": "simulate"},
}


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout_s=400)
def test_runs_have_the_bits_of_decoded_values(name):
    compare(**CASES[name])


@pytest.mark.slow(quick=QUICK)
@pytest.mark.inductor
@pytest.mark.parametrize("format", ["int8", "mxfp8", "fp4"])
@on_ranks(2, timeout_s=400)
def test_generated_code_of_other_formats_has_the_same_bits(format):
    compare(format, codegen="inductor", cache=False)


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_blocks_have_the_bits_of_decoded_values():
    def blocks(net, backend, options):
        options.pop("backwards_per_step")
        zpasses.compile_blocks(net, "layers.*", **options)
        return net

    compare(compiled=blocks)


@pytest.mark.slow(quick=QUICK)
@on_ranks(4, timeout_s=400)
def test_replicas_and_parts_of_a_mesh_have_the_same_bits():
    names = {"mesh_dim_names": ("replicate", "shard")}
    compare(mesh=init_device_mesh("cpu", (2, 2), **names))
    compare(shard={"reshard_after_forward": 2})
    compare("int8", mesh=init_device_mesh("cpu", (2, 2), **names), zero_stage=2)


@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_copies_of_an_encoded_model_compute_the_same():
    _, net = trained("nf4", steps=1)
    copied, x = copy.deepcopy(net), torch.ones(4, WIDTH)
    step = torch.compile(copied, backend="zpasses", options={"codegen": "eager"})
    assert torch.equal(step(x), net(x))
    step(x).sum().backward()
    with torch.no_grad():
        copied.layers[0].frozen.weight_nf4_64.zero_()  # an edit, on every rank
    assert torch.equal(step(x), copied(x))
    assert not torch.equal(step(x), net(x))


@needs("peft")
@pytest.mark.slow(quick=QUICK)
@on_ranks(2, timeout_s=400)
def test_adapters_on_an_encoded_base_have_the_same_bits_and_are_not_merged():
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    def adapted():
        config = LoraConfig(target_modules=["frozen"], r=4, init_lora_weights=False)
        return inject_adapter_in_model(config, Net())

    compare(net=adapted)
    _, net = trained("nf4", net=adapted, steps=1)
    with pytest.raises(zpasses.ShardingError, match=r"merge into parameter 'weight'.*nf4/64"):
        net.layers[0].frozen.merge()
    whole = get_peft_model(Net(1), LoraConfig(target_modules=["frozen"], r=4))
    zpasses.encode_parameters(zpasses.shard(whole, mesh=world_mesh()), "nf4")
    with pytest.raises(zpasses.ShardingError, match=r"merge into parameter 'weight'.*nf4/64"):
        whole.merge_and_unload()
    assert whole.unload() is not None


@on_ranks(2)
def test_ranks_that_encode_differently_are_an_error_of_both():
    net = zpasses.shard(Net(1), mesh=world_mesh())
    step = torch.compile(net, backend="zpasses", options={"codegen": "eager"})

    def differ():
        zpasses.encode_parameters(net, ("int8", "fp8")[dist.get_rank()])
        step(torch.ones(2, WIDTH))

    # One rank raises it in the call, and the other one when it compiles.
    with pytest.raises(Exception, match=r"encode_parameters for it.* format=(int8|fp8)/128"):
        differ()


def _started(folder, format):
    """A program that starts: one step. Returns what it computed, and what the cache did."""
    os.environ["ZPASSES_CACHE_DIR"] = str(folder)
    events._listeners.clear()  # that of all tests keeps graphs out of the cache
    messages, log = Messages(), logging.getLogger("zpasses")
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    torch.manual_seed(0)
    net = zpasses.encode_parameters(zpasses.shard(Net(1), mesh=world_mesh()), format)
    step = torch.compile(net, backend="zpasses", options={"zero_stage": 3})
    loss = step(torch.ones(4, WIDTH)).square().mean()
    loss.backward()
    grads = [each.grad.to_local().tolist() for each in net.parameters() if each.requires_grad]
    return [loss.item(), *grads], words(messages.said)


@pytest.mark.inductor
@pytest.mark.processes
@pytest.mark.slow(quick=QUICK)
def test_a_warm_start_tells_formats_apart(tmp_path):
    runs = [on_fresh_ranks(_started, tmp_path, each) for each in ("int8", "fp8", "fp8", "int8")]
    said = [[said for _, said in run] for run in runs]
    assert said == [[COLD] * 2, [COLD] * 2, [["hit"]] * 2, [["hit"]] * 2]
    found = [[found for found, _ in run] for run in runs]
    assert found[0] == found[3]
    assert found[1] == found[2] != found[0]


# --- memory ---------------------------------------------------------------------------------------
def held(format):
    """Returns the bytes that rest between steps, and those of the shards."""
    torch._dynamo.reset()
    gc.collect()
    observed = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with observed as profiler:
        net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        net[1:].requires_grad_(False)
        zpasses.shard(net, mesh=world_mesh())
        if format is not None:
            zpasses.encode_parameters(net, format)
        keeps = (
            "merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing},schedule"
        )
        options = {"pipeline": keeps, "codegen": "eager"}
        step = torch.compile(net, backend="zpasses", options=options)
        x = torch.randn(8, 512)
        for _ in range(2):
            step(x).sum().backward()
            net.zero_grad()
        gc.collect()
        with record_function("measured"):
            step(x).sum().backward()
    return allocated(profiler, "measured")[0], parameter_plan(net).device_bytes


@pytest.mark.slow(quick="test_gathers_move_records_and_no_decoded_matrix_is_saved")
@on_ranks(2, timeout_s=400)
def test_measured_bytes_are_those_of_records():
    exact, held_exact = held(None)
    for format, record in (("nf4", 512 // 2 + 8 * 4), ("int8", 512 + 4 * 4)):
        resting, planned = held(format)
        saved = 5 * 256 * (4 * 512 - record)
        assert held_exact - planned == saved
        assert exact - resting == pytest.approx(saved, rel=0.02)


# --- checkpoints ----------------------------------------------------------------------------------
def _checkpoint_of(folder):
    torch.manual_seed(5 if dist.get_world_size() == 2 else 6)
    net = zpasses.encode_parameters(zpasses.shard(Net(), mesh=world_mesh()), "nf4")
    state = {"model": net.state_dict()}
    if dist.get_world_size() == 2:
        dcp.save(state, checkpoint_id=f"{folder}/dcp")
        zpasses.save_safetensors(net, f"{folder}/safe")
    else:
        dcp.load(state, checkpoint_id=f"{folder}/dcp")
        net.load_state_dict(state["model"])
        again = zpasses.encode_parameters(zpasses.shard(Net(), mesh=world_mesh()), "nf4")
        zpasses.load_safetensors(again, f"{folder}/safe")
        mine, other = zpasses.full_state_dict(net), zpasses.full_state_dict(again)
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    full = zpasses.full_state_dict(net)
    return net(torch.ones(2, WIDTH)).tolist(), {name: each.tolist() for name, each in full.items()}


@pytest.mark.slow(quick="test_moves_copies_and_records_of_a_state_dict")
@pytest.mark.processes
def test_checkpoints_hold_records_for_any_number_of_ranks(tmp_path):
    from zpasses.testing import run_on_ranks

    saved = run_on_ranks(_checkpoint_of, tmp_path, ranks=2)
    loaded = run_on_ranks(_checkpoint_of, tmp_path, ranks=3)
    assert "layers.0.frozen.weight_nf4_64" in saved[0][1]
    assert saved[0] == loaded[0] == loaded[2]
