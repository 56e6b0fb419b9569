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
from torch.distributed.tensor import Shard

import zpasses
from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.passes import AverageReplicas
from zpasses.ranks import group_texts, vote
from zpasses.testing import run_in_fresh_ranks

pytestmark = pytest.mark.processes

LIMIT_S = 4.0
NAMES = ("replicate", "shard")
MOST_S = 3 * LIMIT_S + 120
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


def a_rank_that_nobody_collects_for():
    """Nobody collects the ballots, so waiting longer for a result is of no use."""
    vote._RESULT_SLACK_S = 400.0
    if dist.get_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        group_texts.call_dimension(mesh.get_group().group_name, "data")
        vote.store_barrier(mesh.get_group().group_name, "a test", timeout_s=1.0)


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


def another_order():
    """`shard` refuses the mesh of rank 1, which comes first."""
    mesh = hybrid_mesh(NAMES if dist.get_rank() != 1 else NAMES[::-1])
    if dist.get_rank() != 1:
        time.sleep(1.0)
    _, step = model_on(mesh)
    train(step)


def other_shapes():
    shape = (2, 2) if dist.get_rank() < 3 else (4, 1)
    zpasses.init_device_mesh("cpu", shape, mesh_dim_names=NAMES, timeout_s=LIMIT_S)


def one_makes_no_mesh():
    if dist.get_rank() != 2:
        zpasses.init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, timeout_s=LIMIT_S)


def other_arguments(**options):
    torch.manual_seed(0)
    model = zpasses.shard(nn.Sequential(nn.Linear(4, 4)), mesh=hybrid_mesh(), **options)
    options = {"codegen": "eager", "agreement_timeout_s": LIMIT_S}
    step = torch.compile(model, backend="zpasses", options=options)
    for _ in range(100):  # the first rank of a group that shards cannot know yet
        train(step)
        time.sleep(0.1)


def other_divide_factors():
    other_arguments(grad_divide_factor=3 if dist.get_rank() == 3 else 4)


def other_dimensions_to_cut():
    dim = 1 if dist.get_rank() == 1 else 0
    other_arguments(shard_placement_fn=lambda param: Shard(dim) if param.dim() == 2 else None)


def other_start_values():
    """One shard of one replica differs."""
    model, step = model_on(hybrid_mesh())
    if dist.get_rank() == 3:
        with torch.no_grad():
            dict(model.named_parameters())["1.weight"].to_local()[0, 0] += 1
    train(step)


class Scaled(nn.Linear):
    def __init__(self, scale):
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        return super().forward(x) * self.scale


def other_scalars():
    """Every rank holds the whole of a 0-dimensional parameter."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    torch.manual_seed(0)
    model = zpasses.shard(Scaled(1.0 + dist.get_rank()), mesh=mesh)
    options = {"codegen": "eager", "agreement_timeout_s": LIMIT_S}
    train(torch.compile(model, backend="zpasses", options=options))


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
    other_shapes: "AAAA",
    one_makes_no_mesh: "AA-A",
    other_divide_factors: "AAAA",
    other_dimensions_to_cut: "AAAA",
    other_start_values: "AAAA",
    other_scalars: "AA",
    other_names: "AAAA",
    another_order: "ASAA",
    a_rank_that_nobody_collects_for: "-A",
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
    other_numbers_to_gather_from: r"group '0' \(mesh dimension 'data', ranks 0, 1, 2, 3, 4, 5\)"
    "(?=.*reshard_after_forward=2)(?=.*reshard_after_forward=3)",
    one_gathers_from_all: r"group '0' \(mesh dimension 'data', ranks 0, 1, 2, 3\)"
    "(?=.*reshard_after_forward=2)(?=.*reshard_after_forward=None)",
    one_never_shards: r"rank 1 of group '0' \(mesh dimension 'data'.* did not reach shard\(",
    a_rank_that_dies_between_forward_and_backward: "rank 1",
    another_width: r"group '\d' \(mesh dimension 'replicate', ranks \d, \d\) have different "
    r"models: the shard of parameter 0.weight has the shape \[\d, 4\] on rank [01], but \[\d, 4\] ",
    other_shapes: r"rank 0 calls init_device_mesh\('cpu', \(2, 2\).*"
    r"rank 3 init_device_mesh\('cpu', \(4, 1\).* Dimension 0 is "
    "'replicate' of size 2 with ranks 0, 2 in its group for rank 0, but "
    "'replicate' of size 4 with ranks 0, 1, 2, 3 in its group for rank 3",
    one_makes_no_mesh: r"rank 2 of group '0' did not reach init_device_mesh\('cpu', \(2, 2\), "
    r"mesh_dim_names=\('replicate', 'shard'\)\)",
    other_divide_factors: r"shard differently over group '\d' \(mesh dimension '\w+', ranks \d, 3\)"
    r"(?=.*rank 3 has grad_divide_factor=3)(?=.*rank \d has grad_divide_factor=4)",
    other_dimensions_to_cut: r"ranks shard differently over group '\d' \(mesh dimension '\w+', "
    r"ranks \d, \d\).*rank 1 has shard_placement_fn=\{'0.weight': 'Shard\(1\)'\}",
    other_start_values: r"group '\d' \(mesh dimension 'replicate', ranks 1, 3\) start with "
    "different values of parameter 1.weight",
    other_scalars: r"group '0' \(mesh dimension 'data', ranks 0, 1\) start with different "
    "values of parameter scale",
    a_rank_that_nobody_collects_for: r"rank 0 of group '0' \(mesh dimension 'data', ranks 0, 1\)",
    other_names: r"the process group '\d' of ranks \d, \d is "
    "(?=.*dimension shard of a mesh of shard=2 x replicate=2)"
    "(?=.*dimension replicate of a mesh of replicate=2 x shard=2)",
    another_order: r"the process group '\d' of ranks \d, \d is "
    "(?=.*dimension shard of a mesh of (shard=2 x replicate|replicate=2 x shard)=2)"
    "(?=.*dimension replicate of a mesh of (shard=2 x replicate|replicate=2 x shard)=2)",
    a_rank_that_dies: "mesh dimension '(shard', ranks 2, 3|replicate', ranks [02], 2)",
    a_rank_that_leaves_out_a_step: "mesh dimension '(shard', ranks 0, 1|replicate', ranks 1, 3)",
    a_replica_that_fails_in_a_window: "rank [23] left a window with ValueError: told to fail; it "
    r"ended a vote of group '\d+' \(mesh dimension 'replicate', ranks (0, 2|1, 3)\)",
    a_rank_that_fails_to_compile: "rank 2 failed while compiling graph 0/0.*"
    "mesh dimension '(shard|replicate)'",
}
"""What every rank with an AgreementError is told."""


QUICK = (
    other_shapes,
    other_names,
    a_replica_that_fails_in_a_window,
)
other_fault = pytest.mark.slow(quick="the other faults")


@pytest.mark.parametrize(
    "fault",
    [each if each in QUICK else pytest.param(each, marks=other_fault) for each in FAULTS],
    ids=lambda fault: fault.__name__,
)
@pytest.mark.slow(quick="test_options_that_differ_are_named")
def test_every_rank_gets_an_error_in_time(fault):
    outcomes = run_in_fresh_ranks(timed, fault, ranks=len(FAULTS[fault]), timeout_s=100)
    results = [outcome.result for outcome in outcomes]
    letters = ["-" if each is None else each[1][:1] or "-" for each in results]
    assert "".join(letters) == FAULTS[fault], results
    assert max(each[0] for each in results if each is not None) < MOST_S, results
    for letter, result in zip(letters, results, strict=True):
        assert letter != "A" or re.search(SAID[fault], result[1], re.DOTALL), results


def starts_over_and_evaluates():
    """One rank shards with another argument; its program catches the error, and all ranks start
    over. Then one replica alone evaluates before the first step.
    """
    given = 2 if dist.get_rank() == 2 else None
    failed = False
    try:
        zpasses.shard(nn.Linear(4, 4), mesh=hybrid_mesh(), grad_divide_factor=given)
    except AgreementError:
        failed = True
    dist.barrier()
    _, step = model_on(hybrid_mesh())
    if dist.get_rank() < 2:
        with torch.no_grad():
            step(batch())
    dist.barrier()
    train(step)
    return failed


@pytest.mark.slow(quick="test_options_that_differ_are_named")
def test_ranks_that_start_over_are_told_nothing_more():
    outcomes = run_in_fresh_ranks(starts_over_and_evaluates, ranks=4, timeout_s=100)
    assert all(each.ok for each in outcomes), outcomes
    assert any(each.result for each in outcomes)


def equal_divisors():
    given = 4.0 if dist.get_rank() == 3 else None
    zpasses.shard(nn.Linear(4, 4), mesh=hybrid_mesh(), grad_divide_factor=given)


@pytest.mark.slow(quick="test_options_that_differ_are_named")
def test_divisors_are_compared_by_what_they_do():
    assert all(each.ok for each in run_in_fresh_ranks(equal_divisors, ranks=4, timeout_s=100))
