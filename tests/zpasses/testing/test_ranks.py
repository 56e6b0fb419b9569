"""Tests of the harness that runs tests on real ranks."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from zpasses.testing import RanksError, run_in_fresh_ranks, run_on_ranks

pytestmark = pytest.mark.processes


def _sum_of_ranks(plus):
    value = torch.tensor([float(dist.get_rank() + plus)])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("expected failure")
    dist.barrier()


def _sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(100)


def _die_on(rank):
    print("last words", flush=True)
    if dist.get_rank() == rank:
        os._exit(7)
    return "alive"


def _environment(name):
    return os.environ.get(name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_returns_its_result(ranks):
    assert run_on_ranks(_sum_of_ranks, 1, ranks=ranks) == [
        (rank, ranks * (ranks + 1) / 2) for rank in range(ranks)
    ]


def test_failing_rank_is_shown_and_waiting_ranks_are_killed():
    started = time.monotonic()
    with pytest.raises(RanksError, match=r"rank 1: failed\n(.*\n)*ValueError: expected failure"):
        run_on_ranks(_fail_on, 1)
    assert time.monotonic() - started < 20
    assert run_on_ranks(_sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)], (
        "the next call gets new processes"
    )


def test_hanging_rank_is_killed_and_its_stack_shown():
    with pytest.raises(RanksError, match=r"rank 1: did not finish\n(.*\n)*.*in _sleep_on"):
        run_on_ranks(_sleep_on, 1, timeout_s=2)


def test_fresh_ranks_report_exit_codes_and_output():
    survivor, dead = run_in_fresh_ranks(_die_on, 1, timeout_s=30)
    assert (survivor.ok, survivor.result, survivor.exit_code is not None) == (True, "alive", True)
    assert (dead.reported, dead.exit_code, dead.output) == (False, 7, "last words\n")


def test_fresh_ranks_get_their_environment():
    assert [
        each.result
        for each in run_in_fresh_ranks(_environment, "SOME_SETTING", env={"SOME_SETTING": "on"})
    ] == ["on", "on"]
    assert run_on_ranks(_environment, "SOME_SETTING") == [None, None]
