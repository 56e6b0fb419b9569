"""Tests of the choice of a route, on real gloo ranks with the fake mori: kinds of groups, ranks
that differ, and ranks that fail.
"""

import logging
import re

import pytest
import torch

from tests.fake_mori import Settings, installed
from zpasses.testing import run_in_fresh_ranks, run_on_ranks

sdma = torch.ops.zpasses
wait = torch.ops._c10d_functional.wait_tensor


def gathers_correctly(group):
    """Whether a gather over the group returns exactly its ranks' parts."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    mine = torch.full((5,), dist.get_rank(), dtype=torch.uint8)
    full = wait(sdma.sdma_all_gather(mine, len(ranks), group.group_name))
    return full.tolist() == [rank for rank in ranks for _ in range(5)]


# --- refusals -------------------------------------------------------------------------------------
def choice_where_rank_1_is(**settings):
    import torch.distributed as dist

    import zpasses

    other = Settings(time_limit_s=settings.get("time_limit_s", 20))
    with installed(Settings(**settings) if dist.get_rank() == 1 else other) as fake:
        choice = zpasses.sdma.init(capacity_mib=1, timeout_s=20)
        assert gathers_correctly(dist.group.WORLD)
        assert zpasses.sdma.init() is choice
        assert zpasses.sdma.route_choice(dist.group.WORLD.group_name) is choice
        assert zpasses.sdma.report() == [choice]
        return choice.route, choice.reason, len(fake.calls)


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


def all_refusals():
    return {name: choice_where_rank_1_is(**settings) for name, (settings, _) in REFUSALS.items()}


@pytest.mark.processes
def test_a_refusal_of_one_rank_at_any_stage_is_shared_by_all():
    first, second = run_on_ranks(all_refusals)
    for name, (_, reason) in REFUSALS.items():
        assert first[name][:2] == second[name][:2], name
        assert first[name][0] == "c10d"
        assert re.match(reason, first[name][1]), (name, first[name][1])
        assert "; symm_mem: " in first[name][1]
        assert first[name][2] == (1 if name == "wrong bytes" else 0), name


def choice_where_rank_0_makes_no_id():
    import torch.distributed as dist

    import zpasses

    with installed(Settings(fail="unique_id" if dist.get_rank() == 0 else "")):
        first = zpasses.sdma.init(capacity_mib=1)
        clone = dist.new_group()
        return first.reason, zpasses.sdma.init(clone).reason


def choice_where_rank_1_hangs():
    import torch.distributed as dist

    import zpasses

    with installed(Settings(fail="init_hangs" if dist.get_rank() == 1 else "", time_limit_s=6)):
        return zpasses.sdma.init(capacity_mib=1, timeout_s=4).reason, gathers_correctly(
            dist.group.WORLD
        )


def choice_of_ranks_that_share_a_device():
    import zpasses

    with installed(Settings(device_id="0")):
        return zpasses.sdma.init().reason


def choice_without_a_fake():
    import torch.distributed as dist

    import zpasses

    choice = zpasses.sdma.init()
    return choice.route, choice.reason, gathers_correctly(dist.group.WORLD)


def choice_where_the_user_disables_sdma():
    import os

    import zpasses

    with installed():
        os.environ["MORI_ENABLE_SDMA"] = "0"
        return zpasses.sdma.init().reason


def other_refusals():
    from zpasses.sdma.lifecycle import reset_routes

    reset_routes()
    return (
        *choice_where_rank_0_makes_no_id(),
        choice_where_rank_1_hangs(),
        choice_of_ranks_that_share_a_device(),
        choice_where_the_user_disables_sdma(),
        choice_without_a_fake(),
    )


@pytest.mark.slow(quick="tests/zpasses/sdma/test_refusals.py")
@pytest.mark.processes
def test_other_refusals_have_a_reason():
    for first, second, hung, shared, user, without in run_on_ranks(other_refusals):
        assert first.startswith(
            "mori: shmem_get_unique_id: rank 0: RuntimeError: bootstrap: no interface"
        )
        assert second.startswith(
            "mori: rank 0: mori failed to start earlier (shmem_get_unique_id: rank 0"
        )
        assert hung[0].startswith("mori: shmem_init_attr: rank 0: no result within 4 s")
        assert hung[1]
        assert shared.startswith("mori: ranks of the group share a device")
        assert user.startswith(
            "mori: rank 0: MORI_ENABLE_SDMA=0; mori uses SDMA engines only if it is 1"
        )
        assert without == ("c10d", "cpu has no copy engines for collectives", True)


# --- groups ---------------------------------------------------------------------------------------
def kinds_of_groups():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import zpasses

    rank, found = dist.get_rank(), {}
    node = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strided = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    high = dist.new_group([2, 3])
    cases = {
        "world": dist.group.WORLD,
        "clone": dist.new_group(),
        "shard": node["shard"].get_group(),
        "strided": strided,
        "without 0": high if rank >= 2 else None,
    }
    orders = [
        ("world", "clone", "shard"),
        ("shard", "strided"),
        ("strided", "world"),
        ("without 0",),
    ]
    for order in orders:
        with installed() as fake:
            for name in order:
                if cases[name] is not None:
                    choice = zpasses.sdma.init(cases[name], capacity_mib=1)
                    right = gathers_correctly(cases[name])
                    found[order, name] = choice.route, choice.reason, right
            found[order] = bool(fake.calls)
    return found


@pytest.mark.processes
def test_every_kind_of_group_gathers_from_its_own_ranks():
    for rank, found in enumerate(run_on_ranks(kinds_of_groups, ranks=4)):
        assert all(value[2] for value in found.values() if isinstance(value, tuple))
        routes = {
            (key[0][0], key[1]): value[0]
            for key, value in found.items()
            if isinstance(value, tuple)
        }
        assert routes["world", "world"] == routes["world", "clone"] == "mori"
        assert routes["shard", "shard"] == "mori"
        assert routes["strided", "strided"] == "mori"
        assert routes.get(("without 0", "without 0")) == ("mori" if rank >= 2 else None)
        # mori connects only one set of ranks per process, so further groups are refused.
        for order, other in (
            (("world", "clone", "shard"), "shard"),
            (("shard", "strided"), "strided"),
            (("strided", "world"), "world"),
        ):
            route, reason, _ = found[order, other]
            assert route == "c10d"
            assert re.match(
                r"mori: mori already connects ranks \[.*\] in the process of rank \d, and a "
                r"process can connect only one set",
                reason,
            ), reason


def test_groups_too_large_or_of_several_nodes_are_refused(monkeypatch):
    from zpasses.sdma import mori_route
    from zpasses.testing import fake_world

    monkeypatch.setattr("zpasses.compat.group_ranks", lambda group: list(range(2)))
    answer = {"refusal": None, "node": "a", "device": "0", "version": "1", "connected_ranks": None}
    assert mori_route.unavailable_reason("0", [answer, {**answer, "device": "1"}]) is None
    assert (
        mori_route.unavailable_reason("0", [answer, {**answer, "device": "1", "node": "b"}])
        == "the group spans 2 nodes"
    )
    with fake_world(16), installed():
        from zpasses.sdma.platform import platform_of

        assert (
            mori_route.probe("0", platform_of("cpu"), 1)["refusal"]
            == "mori gathers from at most 8 ranks; the group has 16"
        )


# --- lifecycle ------------------------------------------------------------------------------------
def lifecycle():
    import os
    import threading

    import torch.distributed as dist

    import zpasses

    with installed() as fake:
        # Lazily, from several threads at once.
        results, group = [], dist.group.WORLD.group_name
        threads = [
            threading.Thread(target=lambda: results.append(zpasses.sdma.init(capacity_mib=1).route))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        child = os.fork()
        if child == 0:
            from zpasses.sdma import mori_route

            os._exit(
                0
                if zpasses.sdma.report() == []
                and mori_route._state is None
                and "forked" in mori_route._disabled_reason
                else 1
            )
        forked = os.waitpid(child, 0)[1]
        before = len(fake.calls)
        first_shutdown = zpasses.sdma.shutdown()
        after = (
            gathers_correctly(dist.group.WORLD),
            zpasses.sdma.route_choice(group).reason,
            len(fake.calls) - before,
        )
        again = zpasses.sdma.shutdown()
    return results, forked, first_shutdown, after, again


@pytest.mark.processes
def test_routes_start_once_and_shut_down_together():
    for results, forked, first_shutdown, after, again in run_on_ranks(lifecycle):
        assert results == ["mori"] * 4
        assert forked == 0
        assert (first_shutdown, again) == (None, None)
        assert after == (True, "sdma was shut down", 0)


def late_and_dying_ranks():
    import torch.distributed as dist

    import zpasses
    from zpasses import compat
    from zpasses.errors import AgreementError

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


def logged():
    import torch.distributed as dist

    import zpasses

    messages = []

    class Keep(logging.Handler):
        def emit(self, record):
            messages.append((record.levelname, record.getMessage()))

    logger, handler = logging.getLogger("zpasses"), Keep()
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
    return messages


@pytest.mark.processes
def test_the_choice_is_logged_once_on_the_first_rank():
    first, second = run_on_ranks(logged)
    assert [level for level, _ in first] == ["WARNING"]
    assert [level for level, _ in second] == ["DEBUG"]
    assert re.match(
        r"sdma: group '.*' on cpu gathers by c10d: mori: rank 0: mori supports",
        first[0][1],
    )


def test_wrong_settings_raise_with_the_expected_values():
    import zpasses

    with pytest.raises(
        ValueError, match=r"got capacity_mib=0, timeout_s=300; expected both to be greater than 0"
    ):
        zpasses.sdma.init(capacity_mib=0)
    with pytest.raises(RuntimeError, match="there is no process group yet"):
        zpasses.sdma.init()


def test_capture_of_a_cuda_graph_is_refused(monkeypatch):
    from zpasses.sdma.routes import raise_if_capturing

    raise_if_capturing(torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        raise_if_capturing(torch.device("cuda"))
