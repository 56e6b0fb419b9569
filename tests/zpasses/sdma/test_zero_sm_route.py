"""Tests of the route by NCCL's zero-SM gathers, on gloo ranks with a fake that has its limits. The
route has not run on a device.
"""

import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import zpasses
from tests.fake_zero_sm import Settings, installed
from tests.on_ranks import on_ranks
from zpasses import compat
from zpasses.runtime.platform import Platform
from zpasses.sdma import zero_sm_route
from zpasses.sdma.lifecycle import available_routes, route_of
from zpasses.testing import fake_world

sdma = torch.ops.zpasses
wait = torch.ops._c10d_functional.wait_tensor
CPU = torch.device("cpu")
TRIALS = 1
"""Gathers of the start."""


def gathered(each=0, rows=4):
    """The result of a gather in which each rank sends other numbers, not yet awaited."""
    size, name = dist.get_world_size(), dist.group.WORLD.group_name
    mine = torch.arange(rows, dtype=torch.float32) + 100 * dist.get_rank() + 1000 * each
    return sdma.sdma_all_gather(mine, size, name)


def expected(each=0, rows=4):
    ranks = range(dist.get_world_size())
    return torch.cat([torch.arange(rows) + 100.0 * rank + 1000 * each for rank in ranks])


REFUSALS = {
    "torch": ({"obstacle": "torch 2.9 cannot"}, "rank 1: torch 2.9 cannot"),
    "connect": ({"fail": "connect"}, "process group: rank 1: RuntimeError: ncclCommInitRank"),
    "allocate": ({"fail": "allocate"}, "registered memory: rank 1: RuntimeError: ncclMemAlloc"),
    "wrong bytes": ({"fail": "wrong_bytes"}, r"trial gather: rank 0: got wrong bytes: \[0, 2\]"),
}


@on_ranks(2)
def test_what_one_rank_lacks_is_the_reason_of_all():
    group, rank = dist.group.WORLD, dist.get_rank()
    for name, (settings, reason) in REFUSALS.items():
        with installed(Settings(**settings) if rank == 1 else Settings()):
            choice = zpasses.sdma.init(capacity_mib=1, timeout_s=20)
            assert torch.equal(wait(gathered()), expected()), name
        assert choice.route == "c10d", name
        said = choice.reason.partition("; nccl_zero: ")[2]
        assert re.match(reason, said), (name, choice.reason)
        reasons = [None, None]
        dist.all_gather_object(reasons, choice.reason)
        assert reasons[0] == reasons[1], name
        assert zpasses.sdma.route_choice(group.group_name) is None, "forgotten"


@on_ranks(2)
def test_tensors_of_every_kind_are_gathered_into_registered_memory():
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    with installed() as fake:
        choice = zpasses.sdma.init(capacity_mib=8)
        assert str(choice).endswith("on cpu gathers by nccl_zero: " + choice.reason)
        assert choice.reason.startswith("mori: rank 0: mori supports gfx942")
        assert list(available_routes(group, CPU)) == ["c10d", "nccl_zero"]
        route = route_of(group, CPU)
        for make in (
            lambda each: torch.arange(6.0).reshape(3, 2) + each,
            lambda each: torch.full((3, 4), each, dtype=torch.int64).t(),
            lambda each: torch.tensor(float(each)),
            lambda each: torch.empty(0, 3),
            lambda each: torch.full((5,), each, dtype=torch.bool),
        ):
            parts = [make(each) for each in range(size)]
            whole = torch.cat([part.reshape(-1, *part.shape[1:]) for part in parts])
            calls = len(fake.calls)
            full, other = sdma.sdma_all_gather_coalesced([parts[rank]] * 2, size, group)
            assert torch.equal(wait(full), whole)
            assert torch.equal(wait(other), whole)
            out = torch.empty_like(whole)
            assert route.all_gather_out(parts[rank], size, group, out) is out
            assert torch.equal(wait(out), whole)
            assert len(fake.calls) - calls == (3 if whole.numel() else 0)
        grads = torch.arange(4.0) * (rank + 1)
        total = wait(sdma.sdma_reduce_scatter(grads, "sum", size, group))
        assert torch.equal(total, (torch.arange(4.0) * 3)[2 * rank : 2 * rank + 2])
        memory = fake.registered
        assert memory
        assert zpasses.sdma.shutdown() is None
        assert not fake.registered
        assert torch.equal(wait(gathered()), expected())


@on_ranks(2)
def test_ranks_that_free_outputs_at_different_times_stay_in_step():
    """The first rank keeps results, as of a loss that it logs later."""
    with installed() as fake:
        zpasses.sdma.init(capacity_mib=8)
        kept = []
        for each in range(12):
            full = wait(gathered(each))
            assert torch.equal(full, expected(each))
            if dist.get_rank() == 0 and each % 3 == 0 and len(kept) < 3:
                kept.append((each, full))
        for each, full in kept:
            assert torch.equal(full, expected(each)), "overwritten"
        # Without what is kept, one would be enough; there is one to lend for each that is lent.
        assert len(fake.calls) == 12 + TRIALS
        assert 4 <= len(fake.registered) <= 8


@on_ranks(2)
def test_without_room_gathers_are_functional_collectives_on_all_ranks():
    with installed() as fake:
        zpasses.sdma.init(capacity_mib=1)  # 2 * 2 * 1 MiB: two buffers
        kept = [wait(gathered(each)) for each in range(4)]
        assert len(fake.registered) == 2
        assert len(fake.calls) == 2 + TRIALS
        del kept[0]
        again = wait(gathered(9))
        assert len(fake.calls) == 3 + TRIALS
        too_large = wait(gathered(3, rows=1 << 20))
        assert len(fake.calls) == 3 + TRIALS
        for each, full in zip((1, 2, 3, 9), [*kept, again], strict=True):
            assert torch.equal(full, expected(each))
        assert torch.equal(too_large, expected(3, rows=1 << 20))


@on_ranks(2)
def test_a_failure_to_register_later_leaves_the_buffers_that_there_are():
    with installed() as fake:
        zpasses.sdma.init(capacity_mib=8)
        if dist.get_rank() == 1:
            fake.fail = "allocate"
        kept = [wait(gathered(each)) for each in range(3)]
        assert len(fake.registered) == 1
        assert len(fake.calls) == 1 + TRIALS
        for each, full in enumerate(kept):
            assert torch.equal(full, expected(each))


@on_ranks(2)
def test_inputs_and_outputs_live_until_the_wait():
    size, group = dist.get_world_size(), dist.group.WORLD.group_name
    with installed(Settings(latency_s=0.1)):
        zpasses.sdma.init(capacity_mib=8)
        for out in (None, torch.empty(1 << 17)):
            source = torch.full((1 << 16,), float(dist.get_rank() + 1))
            freed = compat.storage_freed_check(source)
            if out is None:
                full = sdma.sdma_all_gather(source, size, group)
            else:
                full = sdma.sdma_all_gather_out(source, size, group, out=out)
            del source
            others = [torch.full((1 << 16,), -1.0) for _ in range(4)]  # would take its memory
            assert not freed()
            result = wait(full)
            assert freed()
            assert torch.equal(result[:: 1 << 16], torch.tensor([1.0, 2.0]))
            del others


@on_ranks(2)
def test_gathers_of_the_route_give_up_when_those_of_the_group_do():
    world = dist.group.WORLD.group_name
    made = f"{world}.zero_sm-test"
    compat.make_group(world, made, [0, 1], "zero", timedelta(seconds=100))
    zero = compat.process_group(made)
    with compat.limited_timeouts([world], 3.0):
        assert compat.collective_timeout(zero) == timedelta(seconds=3)
    assert compat.collective_timeout(zero) > timedelta(seconds=3)


# --- what is missing ------------------------------------------------------------------------------
def test_unmet_conditions_are_reported(monkeypatch):
    platform = Platform()
    monkeypatch.setattr(Platform, "architecture", lambda self: "sm90")
    for variable in zero_sm_route._SETTINGS:
        monkeypatch.delenv(variable, raising=False)
    with fake_world(2):

        def obstacle():
            return zero_sm_route.local_obstacle("0", platform, 1)

        assert obstacle() == "zero-SM gathers need a group of backend nccl; this one is fake"
        monkeypatch.setattr("zpasses.compat.group_backend", lambda group: "cpu:gloo,cuda:nccl")
        monkeypatch.setattr("zpasses.compat.zero_sm_obstacle", lambda: "no NCCL")
        assert obstacle() == "no NCCL"
        monkeypatch.setattr("zpasses.compat.zero_sm_obstacle", lambda: None)
        assert obstacle() is None
        monkeypatch.setenv("NCCL_CTA_POLICY", "1")
        assert obstacle() == "NCCL_CTA_POLICY=1; NCCL takes engines only if it is 2"
        monkeypatch.setenv("NCCL_CTA_POLICY", "2")
        monkeypatch.setattr(Platform, "architecture", lambda self: "gfx942")
        assert "NCCL_CUMEM_ENABLE=1 is set" in obstacle()
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
        assert obstacle() is None


@pytest.mark.parametrize(
    ("nccl", "version", "hip", "said"),
    [
        (None, (2, 30, 7), None, "cannot make process groups with NCCL's zero-CTA policy"),
        (("register_mem_pool",), (2, 30, 7), None, "cannot make process groups"),
        (
            ("register_mem_pool", "NCCL_CTA_POLICY_ZERO"),
            (2, 28, 9),
            None,
            "NCCL 2.28.9 gathers by engines only from registered memory; 2.29 from any",
        ),
        (("register_mem_pool", "NCCL_CTA_POLICY_ZERO"), (2, 29, 7), None, None),
        (
            ("register_mem_pool", "NCCL_CTA_POLICY_ZERO"),
            (2, 30, 4),
            "7.2.1",
            "RCCL of ROCm 7.2.1 does not gather by engines; that of 7.12 does",
        ),
        (("register_mem_pool", "NCCL_CTA_POLICY_ZERO"), (2, 30, 4), "7.12.0", None),
    ],
)
def test_what_torch_lacks_has_a_name(monkeypatch, nccl, version, hip, said):
    backend = None if nccl is None else SimpleNamespace(**dict.fromkeys(nccl, 2))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", backend, raising=False)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: version)
    monkeypatch.setattr("torch.version.hip", hip)
    found = compat.zero_sm_obstacle()
    assert found is None if said is None else said in found


def test_the_process_group_is_made_with_the_zero_policy(monkeypatch):
    """A build of torch without NCCL has none to make."""
    given = []

    class Options:
        def __init__(self):
            self.config = SimpleNamespace(cta_policy=0)

    nccl = SimpleNamespace(Options=Options, NCCL_CTA_POLICY_ZERO=2)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    with fake_world(2):
        helper = compat.c10d._c10d._new_process_group_helper

        def made(size, rank, ranks, backend, store, name, options, **how):
            given.append((ranks, str(backend), name, options.config.cta_policy, options._timeout))
            return helper(size, rank, ranks, compat.c10d._c10d.Backend("fake"), store, name, **how)

        monkeypatch.setattr(compat.c10d._c10d, "_new_process_group_helper", made)
        limit = timedelta(seconds=7)
        compat.make_group("0", "0.zero_sm-0", [0, 1], "gathers", limit, zero_sm=True)
        assert given == [([0, 1], "nccl", "0.zero_sm-0", 2, limit)]
        assert compat.group_ranks("0.zero_sm-0") == [0, 1]
