"""One group gathers by several routes at once, as plans name them: on two gloo ranks with fakes of
mori and of NCCL's zero-SM gathers.
"""

import contextlib
import itertools
import json
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from tests import fake_mori, fake_zero_sm
from tests.on_ranks import on_ranks
from zpasses.cost.time.route_figures import CALIBRATION_VARIABLE, FORMAT
from zpasses.sdma import mori_route
from zpasses.sdma.lifecycle import route_of
from zpasses.testing import fake_world, run_on_ranks, world_mesh

sdma = torch.ops.zpasses
wait = torch.ops._c10d_functional.wait_tensor
CPU = torch.device("cpu")


@contextlib.contextmanager
def both_installed(**mori):
    """Yields the bytes of the calls of mori, and of those of NCCL."""
    on_amd = fake_zero_sm.Settings(architecture="gfx942")
    with (
        mock.patch.dict(os.environ, NCCL_CUMEM_ENABLE="1"),
        fake_mori.installed(fake_mori.Settings(**mori)) as first,
        fake_zero_sm.installed(on_amd) as second,
    ):
        yield first.calls, second.calls


def part(rows):
    return torch.arange(rows, dtype=torch.float32) + 100 * dist.get_rank()


def whole(rows):
    return torch.cat([torch.arange(rows) + 100.0 * rank for rank in range(2)])


@on_ranks(2)
def test_each_gather_takes_the_route_that_it_names():
    name = dist.group.WORLD.group_name
    with both_installed() as (by_mori, by_nccl):
        for route in ("mori", "nccl_zero"):
            route_of(name, CPU, route)
        counts = [len(by_mori), len(by_nccl)]
        started = [
            sdma.sdma_all_gather(part(4), 2, name, route="mori"),
            sdma.sdma_all_gather(part(5), 2, name, route="nccl_zero"),
            *sdma.sdma_all_gather_coalesced([part(6)], 2, name, route="nccl_zero"),
            sdma.sdma_all_gather_out(part(7), 2, name, out=torch.empty(14), route="mori"),
            sdma.sdma_all_gather(part(8), 2, name),
        ]
        for full, rows in zip(started, range(4, 9), strict=True):
            assert torch.equal(wait(full), whole(rows)), rows
        assert [len(by_mori), len(by_nccl)] == [counts[0] + 3, counts[1] + 2]
        chosen = [zpasses.sdma.route_choice(name, each) for each in ("mori", "nccl_zero", "")]
        assert [each.route for each in chosen] == ["mori", "nccl_zero", "mori"]
        assert route_of(name, CPU, "mori") is route_of(name, CPU), "mori starts once"
        assert [each.route for each in zpasses.sdma.report()] == ["mori", "nccl_zero"]
        assert zpasses.sdma.shutdown() is None
        assert {each.route for each in zpasses.sdma.report()} == {"c10d"}
        last = [sdma.sdma_all_gather(part(4), 2, name, route=each) for each in ("mori", "")]
        assert all(torch.equal(wait(full), whole(4)) for full in last)
        assert [len(by_mori), len(by_nccl)] == [counts[0] + 3, counts[1] + 2]


@on_ranks(2)
def test_a_group_that_cannot_take_the_named_route_takes_another():
    name = dist.group.WORLD.group_name
    with both_installed(fail="import" if dist.get_rank() else "") as (by_mori, by_nccl):
        full = wait(sdma.sdma_all_gather(part(4), 2, name, route="mori"))
        choice = zpasses.sdma.route_choice(name, "mori")
        assert torch.equal(full, whole(4))
        assert choice.route == "nccl_zero"
        assert choice.reason.startswith("mori: rank 1: mori cannot be imported")
        assert (len(by_mori), len(by_nccl)) == (0, 2), "with the trial"


@on_ranks(2)
def test_what_changed_since_another_route_started_counts():
    """Such as another group that has connected other ranks by mori."""
    name = dist.group.WORLD.group_name
    with both_installed() as (by_mori, _):
        assert route_of(name, CPU, "nccl_zero").name == "nccl_zero"
        if dist.get_rank():
            mori_route.disable("mori is of other ranks")
        assert route_of(name, CPU, "mori").name == "nccl_zero"
        reason = zpasses.sdma.route_choice(name, "mori").reason
        assert reason == "mori: rank 1: mori is of other ranks"
        assert [each.reason for each in zpasses.sdma.report()] == ["", reason]
        assert by_mori == []


def test_a_route_that_does_not_exist_is_refused():
    with (
        fake_world(2),
        pytest.raises(ValueError, match=r"got route='rdma'; expected one of mori, "),
    ):
        sdma.sdma_all_gather(torch.ones(2), 2, dist.group.WORLD.group_name, route="rdma")


FIGURES = {
    "c10d": {"latency_us": 1.0, "gb_s": 0.012, "compute_slowdown": 1.3},
    "mori": {"latency_us": 1000.0, "gb_s": 0.03, "compute_slowdown": 1.0},
    "nccl_zero": {"latency_us": 1.0, "gb_s": 0.018, "compute_slowdown": 1.0},
}
"""With these, mori is faster for 16 KiB, and NCCL for 4 KiB."""


def trained(schedule):
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = (32, 128, 32, 32)
    layers = (nn.Linear(*each, bias=False) for each in itertools.pairwise(sizes))
    model = nn.Sequential(*layers)
    zpasses.shard(model, mesh=world_mesh())
    pipeline = f"gather-params,reduce-grads,reshard-after-forward{{keep=nothing}},{schedule}"
    options = {"pipeline": pipeline, "target": "mi300x,launch_us=0.01,hop_us=0.01"}
    step = torch.compile(model, backend="zpasses", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        torch.manual_seed(10 * number + dist.get_rank())
        step(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.to_local().detach().clone() for param in model.parameters()]


def by_several_routes(path):
    """Returns whether planned routes train like functional gathers, and the calls of each route."""
    plain = trained("schedule{plan=one-ahead,cap_mb=0,copy_engines=off}")
    machine = {"architecture": "gfx942", "versions": {"torch": torch.__version__}}
    calibration = {"format": FORMAT, "machines": {"one": machine | {"routes": FIGURES}}}
    with open(path + str(dist.get_rank()), "w") as file:
        json.dump(calibration, file)
    with (
        mock.patch.dict(os.environ, {CALIBRATION_VARIABLE: file.name}),
        both_installed() as (by_mori, by_nccl),
    ):
        planned = trained("schedule{plan=one-ahead,cap_mb=0}")
    same = all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    return same, len(by_mori), len(by_nccl)


@pytest.mark.processes
@pytest.mark.inductor
def test_a_step_whose_launches_take_two_routes_equals_one_without_engines(tmp_path):
    first, second = run_on_ranks(by_several_routes, str(tmp_path / "figures"), timeout_s=200)
    assert first == second
    same, by_mori, by_nccl = first
    assert same
    trials, steps = (2, 1), 2
    assert by_mori >= trials[0] + 2 * steps, "two large gathers in each forward"
    assert by_nccl >= trials[1] + steps
