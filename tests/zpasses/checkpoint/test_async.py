"""Asynchronous distributed checkpoints of sharded models and their optimizers."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zpasses
from tests.zpasses.models import assert_same_values, integers
from zpasses.testing import run_on_ranks, world_mesh

pytestmark = pytest.mark.processes

STEPS = 4


def _training(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    zpasses.shard(model, mesh=world_mesh())
    options = {"zero_stage": stage, "codegen": "eager"}
    run = torch.compile(model, backend="zpasses", options=options)
    return model, run, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(run, optimizer, seed):
    loss = run(integers(2, 4, seed=seed)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _trains_and_saves(folder, stage):
    """The next steps run while the checkpoint is written, and must not show in it."""
    model, run, optimizer = _training(stage)
    _step(run, optimizer, 0)
    # Gloo has no collectives that may run beside others, so the checkpoint has a group of its own.
    group = dist.new_group(backend="gloo")
    state = zpasses.training_state(model, optimizer)
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    for seed in range(1, STEPS):
        _step(run, optimizer, seed)
    saving.result()
    return zpasses.full_state_dict(model)


def _resumes(folder, stage):
    model, run, optimizer = _training(stage)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    zpasses.load_training_state(folder, model, optimizer)
    for seed in range(1, STEPS):
        _step(run, optimizer, seed)
    return zpasses.full_state_dict(model)


@pytest.mark.slow(quick="test_a_few_programs_go_on_as_without_a_checkpoint")
@pytest.mark.parametrize("stage", [2, 3])
def test_training_resumes_from_an_asynchronous_checkpoint(stage, tmp_path):
    expected = run_on_ranks(_trains_and_saves, str(tmp_path), stage)[0]
    for state in run_on_ranks(_resumes, str(tmp_path), stage):
        assert_same_values(state, expected)
    for state in run_on_ranks(_resumes, str(tmp_path), stage, ranks=3):
        torch.testing.assert_close(state, expected)  # another order of summation
