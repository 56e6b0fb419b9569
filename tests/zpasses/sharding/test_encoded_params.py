"""Frozen parameters whose shards rest encoded, in one process."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.utils import parametrize

import zpasses
from tests.cases import some_quick
from tests.zpasses.models import Adapted
from zpasses import OptionError, ShardingError, ZpassesError
from zpasses.graph.aliases import memory_root
from zpasses.graph.encoding import DECODE, Encoding, decode, encode
from zpasses.graph.queries import (
    calls,
    collectives,
    input_nbytes,
    nbytes,
    returned_values,
    value_of,
)
from zpasses.optim import parameter_plan
from zpasses.testing import capture_graphs, fake_world

WIDTH = 200
RECORD = 4 * 4 + 100 + 12
"""Bytes of a row: four scales, two codes per byte, and 12 up to a multiple of 16."""


def encoded(net, mesh, format="nf4", **shard):
    return zpasses.encode_parameters(zpasses.shard(net, mesh=mesh, **shard), format)


def rounded(value, how):
    """What rows decode to."""
    rows, width = value.shape[0], value[0].numel()
    return decode(encode(value, width, rows, how), value.shape, rows, value.dtype, how)


# --- what is encoded ------------------------------------------------------------------------------
def test_the_name_of_a_parameter_says_how_its_rows_rest():
    net = Adapted(1, WIDTH)
    value = net.frozen[0].weight.detach().clone()
    with fake_world(2, 1) as mesh:
        before = sum(param.numel() * 4 for param in zpasses.shard(net, mesh=mesh).parameters()) / 2
        assert zpasses.encode_parameters(net, "nf4") is net
        found = dict(net.named_parameters())
        assert list(found) == ["frozen.0.weight_nf4_64", "frozen.0.bias", "trained.0.weight"]
        param = found["frozen.0.weight_nf4_64"]
        assert (param.dtype, list(param.shape)) == (torch.uint8, [WIDTH, RECORD])
        assert not param.requires_grad
        own = value[100:]
        assert torch.equal(param.to_local().flatten(), encode(own, WIDTH, 100, Encoding("nf4", 64)))
        saved = 100 * (4 * WIDTH - RECORD)
        assert parameter_plan(net).device_bytes == before - saved
        assert list(net.state_dict()) == list(found)
        assert net.frozen[0].get_parameter("weight_nf4_64") is param


def test_decoded_rows_have_the_dtype_that_the_model_computes_in():
    with fake_world(1) as mesh:
        for shard, dtype in (
            ({}, torch.float32),
            ({"param_dtype": torch.bfloat16}, torch.bfloat16),
        ):
            net = encoded(Adapted(1, WIDTH), mesh, "int8", **shard)
            assert net.frozen[0].weight.dtype == dtype
        net = encoded(Adapted(1, WIDTH).bfloat16(), mesh, "int8")
        assert net.frozen[0].weight.dtype == torch.bfloat16


def test_a_tied_parameter_is_encoded_once_and_one_outside_of_the_part_stays():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.second.weight = self.first.weight
            self.requires_grad_(False)

    with fake_world(1) as mesh:
        net = encoded(Tied(), mesh)
        assert net.first.weight_nf4_64 is net.second.weight_nf4_64
        value = (other := Tied()).first.weight.detach().clone()
        zpasses.encode_parameters(zpasses.shard(other, mesh=mesh).first, "nf4")
        assert torch.equal(other.second.weight, value)
        assert torch.equal(other.first.weight, rounded(value, Encoding("nf4", 64)))


def test_stacked_matrices_are_rows_of_several_dimensions():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Parameter(torch.randn(3, 8, 40), requires_grad=False)

    net = Stack()
    value = net.experts.detach().clone()
    with fake_world(1) as mesh:
        assert torch.equal(
            encoded(net, mesh, "mxfp8").experts, rounded(value, Encoding("mxfp8", 32))
        )


def test_calls_after_the_first_encode_what_was_frozen_since():
    with fake_world(2) as mesh:
        net = encoded(Adapted(1, WIDTH), mesh)
        net.trained.requires_grad_(False)
        zpasses.encode_parameters(net, "int8", block=50)
        assert [name for name, param in net.named_parameters() if param.dtype == torch.uint8] == [
            "frozen.0.weight_nf4_64",
            "trained.0.weight_int8_50",
        ]


# --- what is refused ------------------------------------------------------------------------------
def test_what_cannot_be_encoded_is_refused_by_name():
    with pytest.raises(OptionError, match=r"format: got 'int4'; expected one of 'int8'"):
        zpasses.encode_parameters(Adapted(width=WIDTH), "int4")
    for block in (0, "64", True, 1.5):
        with pytest.raises(OptionError, match=r"block: got .*; expected values per scale"):
            zpasses.encode_parameters(Adapted(width=WIDTH), "nf4", block=block)
    with pytest.raises(ZpassesError, match=r"got list; expected a torch\.nn\.Module"):
        zpasses.encode_parameters([Adapted(width=WIDTH)], "nf4")
    with pytest.raises(ZpassesError, match="Adapted has no sharded parameter"):
        zpasses.encode_parameters(Adapted(width=WIDTH), "nf4")
    with fake_world(2) as mesh:
        with pytest.raises(
            ZpassesError, match="of 9 parameters of Adapted, 9 are trained, 0 are enc"
        ):
            encoded(Adapted(width=WIDTH).requires_grad_(True), mesh)
        with torch.device("meta"):
            empty = Adapted(width=WIDTH)
        with pytest.raises(ZpassesError, match=r"'frozen\.0\.weight' is on meta"):
            encoded(empty, mesh)
        columns = {"shard_placement_fn": lambda param: Shard(1) if param.dim() == 2 else None}
        with pytest.raises(ZpassesError, match=r"'frozen\.0\.weight' is cut along dimension 1"):
            encoded(Adapted(width=WIDTH), mesh, **columns)
        away = zpasses.offload_parameters(zpasses.shard(Adapted(width=WIDTH), mesh=mesh))
        with pytest.raises(ZpassesError, match=r"'frozen\.0\.weight' rests on the host"):
            zpasses.encode_parameters(away, "nf4")


def test_pieces_of_tensor_parallelism_are_refused_by_name():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
        with pytest.raises(ZpassesError, match=r"'0\.weight' is a part of tensor or expert"):
            encoded(net, mesh["dp"])


def test_edits_that_codes_cannot_hold_are_refused_by_name():
    with fake_world(1) as mesh:
        net = encoded(Adapted(1, WIDTH), mesh)
        layer = net.frozen[0]
        for value in (nn.Parameter(torch.zeros(WIDTH, WIDTH)), torch.zeros(1)):
            with pytest.raises(ShardingError, match=r"'weight' of a Linear, which rests encoded"):
                layer.weight = value
        with pytest.raises(ShardingError, match=r"from torch\.float32 to torch\.bfloat16: codes"):
            net.to(torch.bfloat16)
        with pytest.raises(ZpassesError, match=r"'frozen\.0\.weight' holds .* cannot be trained"):
            layer.requires_grad_(True)
        with pytest.raises(ShardingError, match="would write to parameter 'weight'"):
            layer.weight.mul_(2)
        with pytest.raises(
            ShardingError, match=r"'weight'.* rests encoded\. Tie parameters before"
        ):
            nn.Linear(1, 1).weight = layer.weight
        with pytest.raises(ValueError, match="does not have a parameter"):
            parametrize.register_parametrization(layer, "weight", nn.Identity())
        with pytest.raises(ShardingError, match=r"has 'frozen\.0\.weight', which rests encoded"):
            net.load_state_dict(Adapted(1, WIDTH).state_dict(), strict=False)
        other = encoded(Adapted(1, WIDTH), mesh, "int8")
        with pytest.raises(RuntimeError, match=r"Missing key.*frozen\.0\.weight_nf4_64"):
            net.load_state_dict(other.state_dict())
        step = torch.compile(_Writes(net), backend="zpasses", options={"agreement": False})
        with pytest.raises(Exception, match=r"writes to parameter .*weight_nf4_64"):
            step()


class _Writes(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self):
        weight = self.net.frozen[0].weight
        weight.mul_(2)
        return weight.sum() + self.net.trained[0].weight.sum()


def test_moves_copies_and_records_of_a_state_dict():
    with fake_world(2) as mesh:
        net, other = encoded(Adapted(width=WIDTH), mesh), encoded(Adapted(width=WIDTH), mesh)
        net.to("cpu")
        other.load_state_dict(net.state_dict())
        copied = copy.deepcopy(net)
        zpasses.pack_shards(net, 1.0)
        for each in (net, other, copied):
            held = each.frozen[1].weight_nf4_64
            assert torch.equal(held.to_local(), net.frozen[1].weight_nf4_64.to_local())
        with torch.no_grad():
            net.frozen[1].weight_nf4_64.zero_()
        assert copied.frozen[1].weight_nf4_64.to_local().any()


# --- graphs ---------------------------------------------------------------------------------------
def captured(pipeline="zero3", format="nf4", **options):
    x, about = (torch.randn(8, WIDTH),), {"pipeline": pipeline, "options": options}
    about["shard"] = lambda net, mesh: encoded(net, mesh, format)
    return capture_graphs(Adapted(width=WIDTH), x, world_size=2, **about)


@pytest.mark.parametrize("pipeline", some_quick(["zero3", "zero2"], ["zero3"]))
def test_gathers_move_records_and_no_decoded_matrix_is_saved(pipeline):
    found = captured(pipeline).after
    moved = [
        input_nbytes(node, each)
        for node, each in collectives(found.forward.graph)
        if "gather" in each.op
    ]
    assert sum(moved) == 3 * (100 * RECORD + 100 * 4 + 100 * WIDTH * 4)
    saved = [memory_root(each) for each in returned_values(found.forward.graph)[1:]]
    assert len(calls(found.forward.graph, DECODE)) == 3
    assert not any(each.target is DECODE for each in saved)
    decoded = calls(found.backward.graph, DECODE)
    assert len(decoded) == 2  # nothing before the first layer has a gradient
    assert all(nbytes(value_of(each.args[0])) == WIDTH * RECORD for each in decoded)
