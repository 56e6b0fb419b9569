"""Ranks of a hybrid mesh that disagree or fail: every rank gets an error, within the limit."""

import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from zpasses import compat
from zpasses.passes import AverageReplicas
from zpasses.testing import run_in_fresh_ranks

pytestmark = pytest.mark.processes

LIMIT_S = 4.0
NAMES = ("replicate", "shard")
MOST_S = 3 * LIMIT_S + 6
"""Two groups may wait one after the other, and a loaded machine adds to it."""


def hybrid_mesh(names=NAMES):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def model_on(mesh, width=5, **options):
    torch.manual_seed(0)
    model = zpasses.shard(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)), mesh=mesh)
    options = {"codegen": "eager", "agreement_timeout_s": LIMIT_S, **options}
    return model, torch.compile(model, backend="zpasses", options=options)


def batch():
    return torch.ones(2, 4) * (dist.get_rank() + 1)


def train(step, steps=2):
    optim = torch.optim.SGD(step.parameters(), lr=0.1)
    for _ in range(steps):
        step(batch()).sum().backward()
        optim.step()


def another_width():
    """The second replica has another model."""
    _, step = model_on(hybrid_mesh(), width=5 + 2 * (dist.get_rank() // 2))
    train(step)


def a_rank_that_dies():
    _, step = model_on(hybrid_mesh())
    train(step)
    if dist.get_rank() == 2:
        os._exit(3)
    train(step)


def a_rank_that_leaves_out_a_step():
    _, step = model_on(hybrid_mesh())
    train(step, 2 if dist.get_rank() == 1 else 3)
    if dist.get_rank() == 1:
        raise ValueError("told to stop")


def a_replica_that_fails_in_a_window():
    model, step = model_on(hybrid_mesh())
    train(step)
    with zpasses.coalesce_grad_reduction(model, timeout_s=LIMIT_S):
        step(batch()).sum().backward()
        if dist.get_rank() >= 2:
            raise ValueError("told to fail")
        step(batch()).sum().backward()


def a_rank_that_fails_to_compile():
    if dist.get_rank() == 2:
        AverageReplicas.rewrite = _fail
    _, step = model_on(hybrid_mesh())
    train(step)


def _fail(*_):
    raise ValueError("told to fail")


def other_names():
    """Ranks 2 and 3 take the shards for the replicas."""
    names = NAMES if dist.get_rank() < 2 else NAMES[::-1]
    mesh = hybrid_mesh(names)
    _, step = model_on(mesh["shard"])
    for _ in range(100):  # the first ranks that shard cannot know yet
        train(step)
        time.sleep(0.1)


def consecutive(size):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    backend = mesh.get_group()._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=LIMIT_S))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    zpasses.shard(model, mesh=mesh, reshard_after_forward=size)
    options = {"codegen": "eager", "agreement_timeout_s": LIMIT_S, "zero_stage": 3}
    return torch.compile(model, backend="zpasses", options=options)


def other_numbers_to_gather_from():
    train(consecutive(2 if dist.get_rank() < 3 else 3))


def one_gathers_from_all():
    train(consecutive(2 if dist.get_rank() != 1 else None))


def one_never_shards():
    if dist.get_rank() != 1:
        train(consecutive(2))


def a_rank_that_dies_between_forward_and_backward():
    step = consecutive(2)
    train(step)
    loss = step(batch()).sum()
    if dist.get_rank() == 1:
        os._exit(3)
    loss.backward()
    train(step)


FAULTS = {
    other_numbers_to_gather_from: "AAAAAA",
    one_gathers_from_all: "AAAA",
    one_never_shards: "A-AA",
    a_rank_that_dies_between_forward_and_backward: "A-AA",
    another_width: "AAAA",
    other_names: "AAAA",
    a_rank_that_dies: "AA-A",
    a_rank_that_leaves_out_a_step: "AVAA",
    a_replica_that_fails_in_a_window: "AAVV",
    a_rank_that_fails_to_compile: "AAPA",
}
"""Fault -> first letter of the error on each rank; "-" for none."""


def timed(fault):
    started = time.monotonic()
    try:
        fault()
    except Exception as error:
        kind = type(compat.inner_exception(error) or error).__name__
        return time.monotonic() - started, f"{kind}: {error}"
    return time.monotonic() - started, ""


SAID = {
    other_numbers_to_gather_from: r"rank 0 called shard\(reshard_after_forward=2\), but rank 3 "
    r"called shard\(reshard_after_forward=3\)",
    one_gathers_from_all: "reshard_after_forward",
    one_never_shards: r"rank 1 of group '0' did not reach shard\(",
    a_rank_that_dies_between_forward_and_backward: "rank 1",
    another_width: "ranks would run different collectives on group",
    other_names: r"is dimension (shard of a mesh of shard=2 x replicate=2, but for rank [01] it is "
    "dimension replicate|replicate of a mesh of replicate=2 x shard=2, but for rank [23])",
    a_rank_that_dies: "mesh dimension 'shard', ranks 2, 3",
    a_rank_that_leaves_out_a_step: "mesh dimension '(shard', ranks 0, 1|replicate', ranks 1, 3)",
    a_replica_that_fails_in_a_window: "rank 2 left a window with ValueError: told to fail; it "
    r"ended a vote of group '\d+' \(mesh dimension 'replicate', ranks 0, 2\)",
    a_rank_that_fails_to_compile: "rank 2 failed while compiling graph 0/0.*mesh dimension 'shard'",
}
"""What the last rank is told."""


QUICK = (other_names, other_numbers_to_gather_from, a_replica_that_fails_in_a_window)
other_fault = pytest.mark.slow(quick="the other faults")


@pytest.mark.parametrize(
    "fault",
    [each if each in QUICK else pytest.param(each, marks=other_fault) for each in FAULTS],
    ids=lambda fault: fault.__name__,
)
def test_every_rank_gets_an_error_in_time(fault):
    outcomes = run_in_fresh_ranks(timed, fault, ranks=len(FAULTS[fault]), timeout_s=100)
    results = [outcome.result for outcome in outcomes]
    letters = ["-" if each is None else each[1][:1] or "-" for each in results]
    assert "".join(letters) == FAULTS[fault], results
    assert max(each[0] for each in results if each is not None) < MOST_S, results
    told = results[0] if fault is a_replica_that_fails_in_a_window else results[3]
    assert re.search(SAID[fault], told[1]), told
