"""Checkpoints of models on meshes of two dimensions."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.parallel_models import (
    Words,
    assert_near,
    mesh_2d,
    parallelized,
    token_batches,
    whole,
    word_loss,
)

pytestmark = pytest.mark.processes


def _hybrid(model, shard=zpasses.shard, sizes=(2, 2), **options):
    shard(model, mesh=mesh_2d(*sizes, ("replicate", "shard")), **options)
    return model


def _tensor_parallel(model, shard=zpasses.shard, sizes=(2, 2), **options):
    mesh = mesh_2d(*sizes)
    shard(parallelized(model, mesh["tp"]), mesh=mesh["dp"], **options)
    return model


KINDS = {"hybrid": _hybrid, "tensor parallelism": _tensor_parallel}


def _state(model):
    return {name: whole(value) for name, value in model.state_dict().items()}


def _zeroed(model):
    with torch.no_grad():
        for param in model.parameters():
            getattr(param, "to_local", lambda param=param: param)().zero_()
    return model


@pytest.mark.slow(quick="test_checkpoints_load_on_other_meshes")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_checkpoints_go_to_and_from_fsdp2_with_their_optimizer(kind, tmp_path):
    torch.manual_seed(0)
    plain, batches = Words(), token_batches(4, 4)
    column = dist.get_rank() if kind == "hybrid" else dist.get_rank() // 2

    def sharded(shard):
        model = KINDS[kind](copy.deepcopy(plain), shard)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def train(model, optim, batches):
        for step in batches:
            optim.zero_grad()
            word_loss(model(step[column]), step[column]).backward()
            optim.step()

    for first, second in ((fully_shard, zpasses.shard), (zpasses.shard, fully_shard)):
        folder, (model, optim) = tmp_path / first.__name__, sharded(first)
        train(model, optim, batches[:2])
        states = get_state_dict(model, optim)
        dcp.save(dict(zip("mo", states, strict=True)), checkpoint_id=folder)
        train(model, optim, batches[2:])
        other, others = sharded(second)
        _zeroed(other)
        mine = dict(zip("mo", get_state_dict(other, others), strict=True))
        dcp.load(mine, checkpoint_id=folder)
        set_state_dict(other, others, model_state_dict=mine["m"], optim_state_dict=mine["o"])
        train(other, others, batches[2:])
        assert_near(_state(other), _state(model), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_checkpoints_load_on_other_meshes(kind, tmp_path):
    torch.manual_seed(0)
    plain, shard = Words(), KINDS[kind]
    model = shard(copy.deepcopy(plain))
    dcp.save({"m": get_model_state_dict(model)}, checkpoint_id=tmp_path)
    line = init_device_mesh("cpu", (4,))
    for other in (
        *(shard(copy.deepcopy(plain), sizes=each) for each in ((4, 1), (1, 4))),
        zpasses.shard(copy.deepcopy(plain), mesh=line),
        copy.deepcopy(plain),
    ):
        state = {"m": get_model_state_dict(_zeroed(other))}
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(other, state["m"])
        assert_near(_state(other), _state(plain), 0)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_safetensors_files_hold_whole_parameters(kind, tmp_path):
    torch.manual_seed(0)
    plain = Words()
    model = KINDS[kind](copy.deepcopy(plain), pack_mb=1)
    zpasses.save_safetensors(model, tmp_path)
    assert_near(zpasses.full_state_dict(model), plain.state_dict(), 0)
    first = zpasses.full_state_dict(model, rank0_only=True)
    assert bool(first) == (dist.get_rank() == 0)
    zpasses.load_safetensors(_zeroed(model), tmp_path)
    assert_near(_state(model), plain.state_dict(), 0)
