"""A rank whose process ends by an exception or an interrupt, or that destroys its process group,
tells the others, which raise.
"""

import _thread
import multiprocessing.util
import os
import re
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.zpasses.ranks.outcomes import compiled, outcome_of
from zpasses.errors import AgreementError
from zpasses.pipeline.events import observe_graphs
from zpasses.ranks import heartbeat
from zpasses.ranks.vote import _Attempt, store_barrier
from zpasses.testing import run_in_fresh_ranks, run_on_ranks

pytestmark = pytest.mark.processes

LIMIT_S = 300.0
AT_ONCE_S = 60.0
"""A second, and what a busy machine adds."""

GROUP = "0"


def heed_interrupts():
    """Programs that a shell starts in the background ignore them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt():
    """What Ctrl-C does to a process of multiprocessing."""
    heed_interrupts()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    finally:
        multiprocessing.util._exit_function()
        os._exit(1)


def leave():
    dist.destroy_process_group()
    time.sleep(2)  # the process goes on


def _ends_before_backward(end):
    step = compiled(nn.Linear(4, 4), agreement_timeout_s=LIMIT_S)
    loss = step(torch.ones(2, 4)).sum()
    return end() if dist.get_rank() == 1 else outcome_of(loss.backward)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (interrupt, "has ended by KeyboardInterrupt; it was after graph 0/0"),
        (leave, r"has ended its part of the job \(destroy_process_group\)"),
    ],
)
def test_a_rank_that_ends_ends_the_vote_of_the_other(end, said):
    survivor, _ = run_in_fresh_ranks(_ends_before_backward, end, timeout_s=LIMIT_S)
    seconds, error = survivor.result
    assert seconds < AT_ONCE_S
    assert re.search(f"AgreementError: rank 1 {said}", error)


def _interrupt_is_caught():
    step = compiled(nn.Linear(4, 4), agreement_timeout_s=LIMIT_S)

    def interrupted(graph):
        raise KeyboardInterrupt

    if dist.get_rank() == 1:
        with observe_graphs(interrupted), pytest.raises(KeyboardInterrupt):
            step(torch.ones(2, 4))
        return None
    return outcome_of(lambda: step(torch.ones(2, 4)))


def test_an_interrupt_of_a_compile_that_the_program_catches_is_told():
    seconds, error = run_on_ranks(_interrupt_is_caught)[0]
    assert seconds < AT_ONCE_S
    assert "rank 1 failed while compiling graph 0/0: KeyboardInterrupt" in error


def _interrupted_in_a_vote():
    if dist.get_rank() == 0:
        heed_interrupts()
        threading.Timer(1.0, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            store_barrier(GROUP, "a barrier", LIMIT_S)
        return None
    time.sleep(3)
    return outcome_of(lambda: store_barrier(GROUP, "a barrier", LIMIT_S))


def test_an_interrupt_in_a_vote_ends_it_for_ranks_that_come_later():
    seconds, error = run_on_ranks(_interrupted_in_a_vote)[1]
    assert seconds < AT_ONCE_S
    assert "rank 0 left the vote to reach a barrier by KeyboardInterrupt" in error


def _store_is_gone():
    gone = dist.DistNetworkError("Broken pipe")
    error = pytest.raises(AgreementError, match="the process that runs it has ended: rank 0")
    with mock.patch.object(_Attempt, "_wait", side_effect=gone), error:
        store_barrier(GROUP, "a barrier", 1.0)
    with mock.patch.object(heartbeat, "_last_beat", side_effect=gone):
        assert "Broken pipe" in heartbeat.describe([0])


def test_errors_say_that_the_process_of_the_store_has_ended():
    run_in_fresh_ranks(_store_is_gone)
