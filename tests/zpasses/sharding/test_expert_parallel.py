"""Modules that are sharded over different meshes: experts, and the layers around them."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import zpasses
from tests.zpasses.parallel_models import (
    MixtureModel,
    assert_near,
    expert_parallel,
    mesh_2d,
    sgd,
    token_batches,
    train_unsharded,
    whole,
    word_loss,
)
from zpasses.testing import run_on_ranks

STEPS = 10


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


def _experts_of_all(values, mesh, dtensors):
    """Whole parameters or gradients, by name."""
    found = {}
    for name, value in values.items():
        full = whole(value)
        if "experts" in name and not dtensors:
            parts = [torch.empty_like(full) for _ in range(mesh["ep"].size())]
            torch.distributed.all_gather(parts, full.contiguous(), group=mesh["ep"].get_group())
            full = torch.cat(parts)
        found[name] = full
    return found


def _train(stage, dtensors=True, along=None, windows=1, clip=None):
    torch.manual_seed(0)
    plain, mesh = MixtureModel(), mesh_2d(names=("edp", "ep"))
    batches = token_batches(STEPS, 4 * windows)
    expected = train_unsharded(plain, batches, clip=clip)
    model = _sharded(plain, mesh, dtensors=dtensors, along=along)
    run = model
    if stage:
        options = {"zero_stage": stage, "codegen": "eager"}
        run = torch.compile(
            model,
            backend="zpasses",
            options=options | ({"backwards_per_step": windows} if windows > 1 else {}),
            fullgraph=True,
        )
    optim, losses, rank = sgd(model), [], torch.distributed.get_rank()
    for step in batches:
        optim.zero_grad()
        for part in step.unflatten(0, (windows, 4))[:, rank]:
            loss = word_loss(run(part), part)
            (loss / windows).backward()
            losses.append(loss.item())
        if clip is not None:
            zpasses.clip_grad_norm_(model.parameters(), clip)
        optim.step()
    own = torch.tensor(expected[0]).unflatten(1, (windows, 4))[:, :, rank].flatten()
    torch.testing.assert_close(torch.tensor(losses), own, rtol=2e-6, atol=0)
    params = dict(model.named_parameters())
    grads = {name: param.grad for name, param in params.items()}
    assert_near(_experts_of_all(grads, mesh, dtensors), expected[1], 1e-5)
    assert_near(_experts_of_all(params, mesh, dtensors), expected[2])


@pytest.mark.slow(quick="test_experts_as_plain_parameters")
def test_training_equals_the_unsharded_model():
    run_on_ranks(_train, 3, ranks=4)


@pytest.mark.slow(quick="test_experts_as_plain_parameters")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_all_stages(stage):
    run_on_ranks(_train, stage, ranks=4)


@pytest.mark.slow(quick="test_experts_as_plain_parameters")
def test_experts_cut_along_another_dimension_with_windows_and_clipping():
    run_on_ranks(_train, 3, along=1, windows=2, clip=0.1, ranks=4)


@pytest.mark.slow(quick="test_experts_as_plain_parameters")
@pytest.mark.parametrize(("stage", "along"), [(0, 2), (2, 1), (3, 2)])
def test_experts_cut_along_all_dimensions(stage, along):
    run_on_ranks(_train, stage, along=along, ranks=4)


def test_experts_as_plain_parameters():
    run_on_ranks(_train, 3, False, 2, ranks=4)


@pytest.mark.slow(quick="test_experts_as_plain_parameters")
@pytest.mark.parametrize("stage", [0, 2])
def test_windows(stage):
    run_on_ranks(_train, stage, windows=2, ranks=4)


def _train_replicas(stage):
    """Two replicas of the model, of four ranks each."""
    torch.manual_seed(0)
    plain, rank = MixtureModel(), torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "edp", "ep"))
    batches = token_batches(STEPS, 8)
    losses, _, params = train_unsharded(plain, batches)
    model = expert_parallel(copy.deepcopy(plain), mesh["ep"])
    for layer in model.layers:
        zpasses.shard(layer.experts, mesh=mesh["replicate", "edp"], grad_divide_factor=8)
    rest = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "dp"))
    zpasses.shard(model, mesh=rest)
    options = {"zero_stage": stage, "codegen": "eager"}
    run = torch.compile(model, backend="zpasses", options=options, fullgraph=True)
    optim, own = sgd(model), []
    for step in batches:
        optim.zero_grad()
        loss = word_loss(run(step[rank]), step[rank])
        loss.backward()
        own.append(loss.item())
        optim.step()
    torch.testing.assert_close(own, [each[rank] for each in losses], rtol=2e-6, atol=0)
    assert_near({name: whole(param) for name, param in model.named_parameters()}, params)


@pytest.mark.slow(quick="test_experts_as_plain_parameters")
@pytest.mark.parametrize("stage", [2, 3])
def test_replicas_of_experts(stage):
    run_on_ranks(_train_replicas, stage, ranks=8)
