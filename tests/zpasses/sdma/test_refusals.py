"""Tests of the choice of a route, on real gloo ranks with the fake mori: kinds of groups, ranks
that differ, and ranks that fail.
"""

import logging
import os
import re
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests.fake_mori import Settings, installed
from tests.on_ranks import on_ranks
from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.runtime.platform import platform_of
from zpasses.sdma import mori_route
from zpasses.sdma.lifecycle import reset_routes
from zpasses.sdma.refusals import unavailable_reason
from zpasses.sdma.routes import raise_if_capturing
from zpasses.testing import fake_world, run_in_fresh_ranks

sdma = torch.ops.zpasses
wait = torch.ops._c10d_functional.wait_tensor


def gathers_correctly(group):
    """Whether a gather over the group returns exactly its ranks' parts."""
    ranks = dist.get_process_group_ranks(group)
    mine = torch.full((5,), dist.get_rank(), dtype=torch.uint8)
    full = wait(sdma.sdma_all_gather(mine, len(ranks), group.group_name))
    return full.tolist() == [rank for rank in ranks for _ in range(5)]


# --- refusals -------------------------------------------------------------------------------------


REFUSALS = {
    "import": (
        {"fail": "import"},
        r"mori: rank 1: mori cannot be imported \(AttributeError: .*AllgatherSdma.*\); pip install "
        r"amd-mori",
    ),
    "old": (
        {"capturing": False, "version": "1.1"},
        r"mori: rank 1: mori 1.1 makes the CPU wait in every call",
    ),
    "version": ({"version": "1.3"}, r"mori: ranks have different releases of mori: 1.2.4, 1.3"),
    "architecture": (
        {"architecture": "gfx90a"},
        r"mori: rank 1: mori supports gfx942 and gfx950; this device is gfx90a",
    ),
    "memory": (
        {"free_bytes": 5 << 20},
        r"mori: rank 1: mori's buffers take 6 MiB, but 5 MiB are free",
    ),
    "init": ({"fail": "init", "time_limit_s": 1}, r"mori: shmem_init_attr: rank 0: returned -1"),
    "init raises": (
        {"fail": "init_raises", "time_limit_s": 1},
        r"mori: shmem_init_attr: rank \d: ",
    ),
    "handle": (
        {"fail": "handle"},
        r"mori: AllgatherSdma: rank 1: RuntimeError: shmem_malloc: out of memory",
    ),
    "wrong bytes": (
        {"fail": "wrong_bytes"},
        r"mori: trial gather: rank 0: got wrong bytes: \[1, 0\]; expected \[1, 2\]",
    ),
}


@on_ranks(2)
def test_a_refusal_of_one_rank_at_any_stage_is_shared_by_all():
    group, rank = dist.group.WORLD, dist.get_rank()
    for name, (settings, reason) in REFUSALS.items():
        healthy = {"time_limit_s": settings.get("time_limit_s", 20)}
        with installed(Settings(**settings if rank == 1 else healthy)) as fake:
            choice = zpasses.sdma.init(capacity_mib=1, timeout_s=20)
            assert gathers_correctly(group), name
            assert zpasses.sdma.init() is choice
            assert zpasses.sdma.route_choice(group.group_name) is choice
            assert zpasses.sdma.report() == [choice]
            assert len(fake.calls) == (1 if name == "wrong bytes" else 0), name
        assert choice.route == "c10d", name
        assert re.match(reason, choice.reason), (name, choice.reason)
        assert "; symm_mem: " in choice.reason, name
        reasons = [None, None]
        dist.all_gather_object(reasons, choice.reason)
        assert reasons[0] == reasons[1], name


@pytest.mark.slow(quick="tests/zpasses/sdma/test_refusals.py")
@on_ranks(2)
def test_other_refusals_have_a_reason():
    reset_routes()
    first, world = dist.get_rank() == 0, dist.group.WORLD

    def refused(said, group=None, **how):
        reason = zpasses.sdma.init(group, **how).reason
        assert reason.startswith(said), reason

    with installed(Settings(fail="unique_id" if first else "")):
        error = "shmem_get_unique_id: rank 0"
        refused(f"mori: {error}: RuntimeError: bootstrap: no interface", capacity_mib=1)
        clone = dist.new_group()
        refused(f"mori: rank 0: mori failed to start earlier ({error}", clone)
    with installed(Settings(fail="" if first else "init_hangs", time_limit_s=6)):
        said = "mori: shmem_init_attr: rank 0: no result within 4 s"
        refused(said, capacity_mib=1, timeout_s=4)
        assert gathers_correctly(world)
    with installed(Settings(device_id="0")):
        refused("mori: ranks of the group share a device")
    with installed(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MORI_ENABLE_SDMA", "0")
        refused("mori: rank 0: MORI_ENABLE_SDMA=0; mori uses SDMA engines only if it is 1")
    choice = zpasses.sdma.init()
    assert choice.route == "c10d"
    assert choice.reason == "cpu has no copy engines for collectives"
    assert gathers_correctly(world)


# --- groups ---------------------------------------------------------------------------------------
@on_ranks(4)
def test_every_kind_of_group_gathers_from_its_own_ranks():
    rank = dist.get_rank()
    node = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    high = dist.new_group([2, 3])
    groups = {
        "world": dist.group.WORLD,
        "clone": dist.new_group(),
        "shard": node["shard"].get_group(),
        "strided": [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2],
        "without 0": high if rank >= 2 else None,
    }
    # mori connects only one set of ranks per process, so further groups are refused.
    connected = (
        r"mori: mori already connects ranks \[.*\] in the process of rank \d, and a "
        r"process can connect only one set"
    )
    for taken, refused in (
        (("world", "clone"), ("shard",)),
        (("shard",), ("strided",)),
        (("strided",), ("world",)),
        (("without 0",), ()),
    ):
        with installed():
            for name in (*taken, *refused):
                if groups[name] is not None:
                    choice = zpasses.sdma.init(groups[name], capacity_mib=1)
                    assert gathers_correctly(groups[name]), name
                    assert choice.route == ("mori" if name in taken else "c10d"), (taken, name)
                    assert name in taken or re.match(connected, choice.reason), choice.reason


def test_groups_too_large_or_of_several_nodes_are_refused(monkeypatch):
    monkeypatch.setattr("zpasses.compat.group_ranks", lambda group: list(range(2)))
    answer = {"refusal": None, "node": "a", "device": "0"}
    for other, said in (
        ({"device": "1"}, None),
        ({"node": "b"}, "the group spans 2 nodes"),
        ({}, "ranks of the group share a device"),
    ):
        assert unavailable_reason("0", [answer, {**answer, **other}]) == said
    with fake_world(16), installed():
        refusal = mori_route.local_obstacle("0", platform_of("cpu"), 1)
        assert refusal == "mori gathers from at most 8 ranks; the group has 16"


# --- lifecycle ------------------------------------------------------------------------------------


def _forked_is_disabled():
    """Whether a process that forks now has no route."""
    child = os.fork()
    if child == 0:
        clean = zpasses.sdma.report() == [] and mori_route._state is None
        os._exit(0 if clean and "forked" in mori_route._disabled_reason else 1)
    return os.waitpid(child, 0)[1] == 0


@on_ranks(2)
def test_routes_start_once_and_shut_down_together():
    with installed() as fake:
        # Lazily, from several threads at once.
        results, world = [], dist.group.WORLD

        def start():
            results.append(zpasses.sdma.init(capacity_mib=1).route)

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == ["mori"] * 4
        assert _forked_is_disabled()
        before = len(fake.calls)
        assert zpasses.sdma.shutdown() is None
        assert gathers_correctly(world)
        assert zpasses.sdma.route_choice(world.group_name).reason == "sdma was shut down"
        assert len(fake.calls) == before
        assert zpasses.sdma.shutdown() is None


def late_and_dying_ranks():

    rank, store = dist.get_rank(), compat.default_store()
    with installed():
        zpasses.sdma.init(capacity_mib=1)
        if rank == 1:
            store.wait(["rank 0 has left"])
        shutdown_error = zpasses.sdma.shutdown(timeout_s=1)
        store.set("rank 0 has left", "")
    with installed(Settings(fail="exit" if rank == 1 else "", time_limit_s=2)):
        try:
            zpasses.sdma.init(capacity_mib=1, timeout_s=3)
        except AgreementError as error:
            return shutdown_error, str(error)
    return shutdown_error, "no error"


@pytest.mark.slow(quick="test_an_exchange_gives_up_after_the_time_limit")
@pytest.mark.processes
def test_a_missing_rank_raises_within_the_time_limit():
    """One rank leaves late, and then one dies in init."""
    first, second = run_in_fresh_ranks(late_and_dying_ranks, timeout_s=60)
    assert first.ok, first
    shutdown_error, lost = first.result
    assert "did not reach sdma: leaving mori within 1 s" in shutdown_error
    assert lost.startswith("rank 1 of group")
    assert second.exit_code == 255


@on_ranks(2)
def test_the_choice_is_logged_once_on_the_first_rank():
    messages, handler, logger = [], logging.Handler(), logging.getLogger("zpasses")
    handler.emit = lambda record: messages.append((record.levelname, record.getMessage()))
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        with installed(Settings(architecture="gfx90a")):
            for _ in range(2):
                zpasses.sdma.init(dist.group.WORLD)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    ((level, text),) = messages
    assert level == ("DEBUG" if dist.get_rank() else "WARNING")
    said = r"sdma: group '.*' on cpu gathers by c10d: mori: rank 0: mori supports"
    assert dist.get_rank() or re.match(said, text)


def test_wrong_settings_raise_with_the_expected_values():
    with pytest.raises(
        ValueError, match=r"got capacity_mib=0, timeout_s=300; expected both to be greater than 0"
    ):
        zpasses.sdma.init(capacity_mib=0)
    with pytest.raises(RuntimeError, match="there is no process group yet"):
        zpasses.sdma.init()


def test_capture_of_a_cuda_graph_is_refused(monkeypatch):

    raise_if_capturing(torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        raise_if_capturing(torch.device("cuda"))
