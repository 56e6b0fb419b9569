"""A rank that is dead, stopped or asleep makes the other ranks raise within the limit, by name."""

import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from tests.zpasses.ranks.outcomes import LIMIT_S, compiled, in_time, outcome_of
from zpasses.ranks import heartbeat
from zpasses.runtime.flush import GraphLowering
from zpasses.testing import run_in_fresh_ranks

pytestmark = pytest.mark.processes


def _killed_before_compiling(pipeline):
    heartbeat.start()
    time.sleep(1.5)  # so that the other rank has seen a heartbeat
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step = compiled(nn.Linear(4, 4), pipeline=pipeline)
    return outcome_of(lambda: step(torch.ones(2, 4)).sum().backward())


@pytest.mark.slow(quick="test_a_rank_that_stops_between_forward_and_backward_is_named")
@pytest.mark.parametrize(
    "pipeline", ["zero3", pytest.param("zero3,sdma", marks=pytest.mark.slow(quick="zero3"))]
)
def test_votes_of_passes_wait_no_longer_than_the_limit(pipeline):
    survivor, _ = run_in_fresh_ranks(_killed_before_compiling, pipeline, timeout_s=90)
    error = in_time(survivor)
    assert "rank 1" in error
    assert "dead or stopped" in error
    assert "options={'agreement_timeout_s': ...}" in error


def _stopped_in_the_optimizer():
    model = nn.Linear(4, 4)
    step = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        step(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    for _ in range(20):
        train()
    if dist.get_rank() == 1:
        optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    train()
    return outcome_of(train)


@pytest.mark.slow(quick="test_a_rank_that_stops_between_forward_and_backward_is_named")
def test_a_stopped_rank_is_named_with_where_it_was_last_seen():
    survivor, _ = run_in_fresh_ranks(_stopped_in_the_optimizer, timeout_s=90, answers=1)
    error = in_time(survivor)
    assert "Rank 1 is dead or stopped: it was in SGD.step()" in error


def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_beyond_the_limit():
    time.sleep(LIMIT_S + 6)


def _pauses_between_forward_and_backward(pause, steps_before):
    step = compiled(nn.Linear(4, 4))
    for _ in range(steps_before):
        step(torch.ones(2, 4)).sum().backward()
    loss = step(torch.ones(2, 4)).sum()
    if dist.get_rank() == 1:
        pause()
    return outcome_of(loss.backward)


FIRST = pytest.param(0, marks=pytest.mark.slow(quick="steady"), id="first")
"""No rank has compiled the backward."""

STEADY = pytest.param(20, id="steady")
"""All ranks predict the backward, so they meet in its collective instead of a vote."""


@pytest.mark.parametrize("steps_before", [FIRST, STEADY])
def test_a_rank_that_stops_between_forward_and_backward_is_named(steps_before):
    survivor, _ = run_in_fresh_ranks(
        _pauses_between_forward_and_backward, stop, steps_before, timeout_s=90, answers=1
    )
    error = in_time(survivor, LIMIT_S - 1)
    assert "Rank 1 is dead or stopped: it was after graph 0/0 forward" in error


@pytest.mark.slow(quick="test_a_rank_that_stops_between_forward_and_backward_is_named")
@pytest.mark.parametrize("steps_before", [FIRST, STEADY])
def test_a_rank_that_sleeps_between_forward_and_backward_is_named(steps_before):
    survivor, sleeper = run_in_fresh_ranks(
        _pauses_between_forward_and_backward, sleep_beyond_the_limit, steps_before, timeout_s=90
    )
    error = in_time(survivor, LIMIT_S - 1)
    assert "Rank 1 is alive; it has been after graph 0/0 forward for" in error
    assert in_time(sleeper).startswith("AgreementError: rank 1 ")  # after it woke up


def _stops_in_the_reduction_of_a_window():
    model = nn.Linear(4, 4)
    step = compiled(model)

    def train():
        with zpasses.coalesce_grad_reduction(model):
            step(torch.ones(2, 4)).sum().backward()

    train()  # compiles the reduction
    if dist.get_rank() == 1:
        mock.patch.object(GraphLowering, "code", side_effect=stop).start()
    return outcome_of(train)


@pytest.mark.slow(quick="test_a_rank_that_stops_between_forward_and_backward_is_named")
def test_a_rank_that_stops_in_the_reduction_of_a_window_is_named():
    survivor, _ = run_in_fresh_ranks(_stops_in_the_reduction_of_a_window, timeout_s=90, answers=1)
    error = in_time(survivor, LIMIT_S - 1)
    assert "rank 0 waited in a collective while running the reduction of a window" in error
    assert "Rank 1 is dead or stopped" in error
    assert "coalesce_grad_reduction(..., timeout_s=...)" in error
