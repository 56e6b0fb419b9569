"""Frozen parameters whose shards rest encoded, on real gloo ranks: the bits are those of the same
model with the decoded values.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests import frozen_training
from tests.cases import some_quick
from tests.frozen_training import (
    BF16,
    KEEPS_NOTHING,
    WIDTH,
    assert_same,
    measured,
    started,
    train,
)
from tests.on_ranks import needs, on_ranks
from tests.zpasses.backend.cache.starts import COLD, on_fresh_ranks
from zpasses.graph.encoding import ENCODED_DTYPES, Encoding, decode, encode
from zpasses.optim import parameter_plan
from zpasses.testing import world_mesh


class Net(frozen_training.Net):
    def __init__(self, layers=3, checkpoints=False):
        super().__init__(layers, checkpoints)
        self.short = nn.Parameter(torch.randn(1, WIDTH), requires_grad=False)  # an empty shard

    def forward(self, x):
        return super().forward(x) + self.short


def rounded(net, how):
    """The model with the values to which frozen matrices decode."""
    for param in net.parameters():
        if not param.requires_grad and param.dim() > 1 and param.dtype in ENCODED_DTYPES:
            (rows, width), dtype = param.shape, param.dtype
            param.data = decode(encode(param, width, rows, how), param.shape, rows, dtype, how)
    return net


def trained(format=None, *, expected=None, net=Net, after=None, **options):
    """Trains. Returns what `train` does.

    Args:
        format: how the frozen matrices rest; None leaves exact values, those of `expected`.
        after: called with the model after that.
    """

    def before(made):
        if format is None:
            rounded(made, Encoding.of(expected, None))

    def rest(made):
        if format is not None:
            zpasses.encode_parameters(made, format)
        if after is not None:
            after(made)

    return train(net, before, rest, **options)


def compare(format="nf4", **options):
    expected, _ = trained(expected=format, **options)
    results, net = trained(format, **options)
    assert sum(each.dtype == torch.uint8 for each in net.parameters()) > 1
    assert_same(results, expected)


QUICK = "test_generated_code_has_the_same_bits"


@pytest.mark.inductor
@pytest.mark.parametrize("format", some_quick(["nf4", "int8", "mxfp8", "fp4"], ["nf4"]))
@on_ranks(2, timeout_s=400)
def test_generated_code_has_the_same_bits(format):
    compare(format, steps=2, net=lambda: Net(1), codegen="inductor", cache=False)


CASES = {
    **frozen_training.CASES,
    **{each: {"format": each} for each in ("int8", "fp8", "mxfp8", "fp4")},
    "checkpoints": {"net": lambda: Net(checkpoints=True)},
    "bfloat16": {**BF16, "net": lambda: Net().bfloat16()},
    "on the host": {"after": lambda net: zpasses.offload_parameters(net)},
}


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout_s=400)
def test_runs_have_the_bits_of_decoded_values(name):
    compare(**CASES[name])


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
    return started(folder, lambda net: zpasses.encode_parameters(net, format))


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

    def after(net):
        if format is not None:
            zpasses.encode_parameters(net, format)

    rests, _, net = measured(
        512, lambda net: net[1:].requires_grad_(False), after, pipeline=KEEPS_NOTHING
    )
    return rests, parameter_plan(net).device_bytes


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
