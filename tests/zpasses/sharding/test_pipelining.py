"""Stages of torch.distributed.pipelining whose parameters are sharded over data parallelism."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zpasses
from tests.cases import some_quick
from tests.zpasses.parallel_models import assert_near, whole
from zpasses.testing import run_on_ranks

MICRO_BATCHES = 4


def _loss(out, target):
    return (out - target).square().mean()


def _block(hidden):
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 6))


def _train(schedule, explicit=False, stage=3, most=MICRO_BATCHES, tp=1):
    """Trains on 2 pipeline stages x 2 data-parallel ranks x `tp` ranks of tensor parallelism, and
    compares with one process.

    Args:
        explicit: use `coalesce_grad_reduction` in the place of `backwards_per_step`.
        most: micro-batches that the option announces.
    """
    torch.manual_seed(0)
    hidden = 7 if tp == 1 else 8  # torch refuses layers that it cannot cut evenly
    plain = nn.Sequential(*(_block(hidden) for _ in range(4)))
    reference = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2, tp), mesh_dim_names=("pp", "dp", "tp"))
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    several = issubclass(schedule, ScheduleInterleaved1F1B)
    owned = {pp: plain[pp], pp + 2: plain[pp + 2]} if several else {pp: plain[2 * pp : 2 * pp + 2]}
    model = nn.ModuleList(owned.values())
    for block in (each for part in owned.values() for each in part) if tp > 1 else ():
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    zpasses.shard(model, mesh=mesh["dp"])
    options = {"zero_stage": stage, "codegen": "eager"}
    options |= {} if explicit else {"backwards_per_step": most}
    count, place = 4 if several else 2, (torch.device("cpu"), mesh["pp"].get_group())
    stages = []
    for number, part in owned.items():
        compiled = torch.compile(part, backend="zpasses", options=options)
        stages.append(PipelineStage(compiled, number, count, place[0], group=place[1]))
    run = schedule(stages if several else stages[0], MICRO_BATCHES, loss_fn=_loss)
    optim = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.2, momentum=0.9)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, 2, 8, 6, generator=generator)
        optim.zero_grad()
        theirs.zero_grad()
        with zpasses.coalesce_grad_reduction(model) if explicit else contextlib.nullcontext():
            run.step(*([x[dp]] if pp == 0 else []), **({"target": y[dp]} if pp == 1 else {}))
        optim.step()
        _loss(reference(x.flatten(0, 1)), y.flatten(0, 1)).backward()
        theirs.step()
    if several:
        expected = nn.ModuleList([reference[pp], reference[pp + 2]])
    else:
        expected = nn.ModuleList([reference[2 * pp : 2 * pp + 2]])
    ours = {name: whole(param) for name, param in model.named_parameters()}
    assert_near(ours, dict(expected.named_parameters()), 2e-6)


CASES = [
    (Schedule1F1B, {"explicit": True}),  # divides gradients before the window reduces them
    (Schedule1F1B, {}),
    (Schedule1F1B, {"most": MICRO_BATCHES + 1}),  # the optimizer ends the window
    (Schedule1F1B, {"explicit": True, "tp": 2}),
    (Schedule1F1B, {"tp": 2}),
    (ScheduleGPipe, {"explicit": True, "stage": 2}),
    (ScheduleGPipe, {}),
    (ScheduleInterleaved1F1B, {"explicit": True}),
    (ScheduleInterleaved1F1B, {"stage": 2}),
]


@pytest.mark.parametrize(("schedule", "how"), some_quick(CASES, CASES[:1]))
def test_training_equals_one_process(schedule, how):
    run_on_ranks(_train, schedule, **how, ranks=4 * how.get("tp", 1))
