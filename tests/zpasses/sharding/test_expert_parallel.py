"""Modules that are sharded over different meshes: experts, and the layers around them."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.parallel_models import (
    MixtureModel,
    assert_trains_as,
    expert_parallel,
    mesh_2d,
    token_batches,
    whole,
)
from zpasses.testing import run_on_ranks

STEPS = 4


def _sharded(plain, mesh, *, dtensors=True, along=None):
    model = expert_parallel(copy.deepcopy(plain), mesh["ep"], dtensors=dtensors)
    for layer in model.layers:
        zpasses.shard(
            layer.experts,
            mesh=mesh["edp"],
            grad_divide_factor=mesh.size(),
            shard_placement_fn=None if along is None else lambda _: Shard(along),
        )
    return zpasses.shard(model, mesh=mesh["edp", "ep"]._flatten("dp"))


CASES = {
    "stage 3": {},
    "stage 1": {"stage": 1},
    "window, stage 0": {"stage": 0, "windows": 2},
    "window, stage 2": {"stage": 2, "windows": 2},
    "dimension 1, window, clipping": {"along": 1, "windows": 2, "clip": 0.1},
    "dimension 1, stage 2": {"along": 1, "stage": 2},
    "dimension 2, stage 0": {"along": 2, "stage": 0},
    "dimension 2": {"along": 2},
}


def test_experts_as_plain_parameters():
    run_on_ranks(_train, dtensors=False, windows=2, ranks=4)


@pytest.mark.slow(quick="test_experts_as_plain_parameters")
@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_unsharded_model(case):
    run_on_ranks(_train, **CASES[case], ranks=4)


def _train(stage=3, dtensors=True, along=None, windows=1, clip=None):
    torch.manual_seed(0)
    plain, mesh = MixtureModel(layers=1), mesh_2d(names=("edp", "ep"))
    model = _sharded(plain, mesh, dtensors=dtensors, along=along)

    def collect(value):
        full = whole(value)
        if isinstance(value, DTensor) and value.device_mesh == mesh["edp"]:  # of a part
            parts = [torch.empty_like(full) for _ in range(mesh["ep"].size())]
            dist.all_gather(parts, full.contiguous(), group=mesh["ep"].get_group())
            full = torch.cat(parts)
        return full

    options = {"zero_stage": stage, "backwards_per_step": windows} if stage else None
    how = {"clip_grad_norm_": zpasses.clip_grad_norm_, "collect": collect}
    batches = token_batches(STEPS, 4 * windows)
    given = (plain, model, batches, dist.get_rank(), options)
    assert_trains_as(*given, windows=windows, clip=clip, **how)


@pytest.mark.slow(quick="test_experts_as_plain_parameters")
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(8)
def test_replicas_of_experts(stage):
    torch.manual_seed(0)
    plain = MixtureModel()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "edp", "ep"))
    model = expert_parallel(copy.deepcopy(plain), mesh["ep"])
    for layer in model.layers:
        zpasses.shard(layer.experts, mesh=mesh["replicate", "edp"], grad_divide_factor=8)
    zpasses.shard(model, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "dp")))
    batches = token_batches(STEPS, 8)
    assert_trains_as(plain, model, batches, dist.get_rank(), {"zero_stage": stage})
