"""Sharding over one dimension of a device mesh, on top of tensor parallelism over another one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import zpasses
from tests.zpasses.parallel_models import (
    Words,
    assert_near,
    mesh_2d,
    parallelized,
    sgd,
    token_batches,
    train_unsharded,
    whole,
    word_loss,
)
from zpasses.testing import run_on_ranks

STEPS = 10


def _train(stage, sequence, loss_cut, windows=1, clip=None):
    """Trains on a mesh of 2 x 2, and compares with the unsharded model."""
    torch.manual_seed(0)
    plain, mesh = Words(), mesh_2d()
    batches = token_batches(STEPS, 2 * windows)
    expected = train_unsharded(plain, batches, clip=clip)
    model = parallelized(copy.deepcopy(plain), mesh["tp"], sequence=sequence, loss=loss_cut)
    zpasses.shard(model, mesh=mesh["dp"])
    run = model
    if stage:
        options = {"zero_stage": stage, "codegen": "eager"}
        run = torch.compile(
            model,
            backend="zpasses",
            options=options | ({"backwards_per_step": windows} if windows > 1 else {}),
            fullgraph=True,
        )
    optim, losses, row = sgd(model), [], mesh["dp"].get_local_rank()
    for step in batches:
        optim.zero_grad()
        for part in step.unflatten(0, (windows, 2))[:, row]:
            if loss_cut:
                with loss_parallel():
                    loss = word_loss(run(part), part)
                    (loss / windows).backward()
                loss = loss.full_tensor()
            else:
                loss = word_loss(run(part), part)
                (loss / windows).backward()
            losses.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
    own = torch.tensor(expected[0]).unflatten(1, (windows, 2))[:, :, row].flatten()
    torch.testing.assert_close(torch.tensor(losses), own, rtol=2e-6, atol=0)
    assert_near({n: whole(p.grad) for n, p in model.named_parameters()}, expected[1], 1e-5)
    assert_near({n: whole(p) for n, p in model.named_parameters()}, expected[2])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_the_unsharded_model(stage):
    run_on_ranks(_train, stage, True, False, ranks=4)


def test_without_sequence_parallelism():
    run_on_ranks(_train, 3, False, False, ranks=4)


def test_loss_parallel():
    run_on_ranks(_train, 3, True, True, ranks=4)


@pytest.mark.parametrize("stage", [2, 3])
def test_windows(stage):
    run_on_ranks(_train, stage, True, False, windows=2, ranks=4)


def test_clipping():
    run_on_ranks(_train, 3, True, False, clip=0.1, ranks=4)
