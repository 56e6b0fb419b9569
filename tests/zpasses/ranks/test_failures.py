"""A rank that fails to compile tells the other ranks, which raise its cause within a second."""

import contextlib
import itertools
import time
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from zpasses.dumps import runs
from zpasses.errors import AgreementError
from zpasses.passes.schedule import Schedule
from zpasses.pipeline.events import observe_graphs
from zpasses.ranks import heartbeat
from zpasses.ranks.failures import is_reported
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh

pytestmark = pytest.mark.processes

LIMIT_S = 300.0
"""Much longer than what the tests allow, so no error here comes from the limit."""

AT_ONCE_S = 60.0
"""A second, and what a busy machine adds."""


def compiled(width, **options):
    model = zpasses.shard(nn.Linear(4, width), mesh=world_mesh())
    options = {"codegen": "eager", "agreement_timeout_s": LIMIT_S, **options}
    return model, torch.compile(model, backend="zpasses", options=options)


def batch():
    return torch.ones(2, 4)


# --- what fails ----------------------------------------------------------------------------------
failed_at: list[float] = []
"""`time.time()` of the failure of this process."""


def wait_for_the_other_rank():
    """Return when the other rank waits for this one in a vote."""
    deadline = time.monotonic() + LIMIT_S / 2
    while "waiting for other ranks" not in heartbeat.describe([1 - dist.get_rank()]):
        assert time.monotonic() < deadline, heartbeat.describe([1 - dist.get_rank()])
        time.sleep(0.05)
    failed_at.append(time.time())


def fail(*_args, **_kwargs):
    wait_for_the_other_rank()
    raise ValueError("told to fail")


def fail_to_create_a_folder(root, rank, world, create=runs.create_rank_folder):
    wait_for_the_other_rank()
    return create(__file__, rank, world)


FAULTS = {
    "pass": lambda: mock.patch.object(Schedule, "rewrite", fail),
    "observer": lambda: observe_graphs(fail),
    "dump": lambda: mock.patch.object(runs, "create_rank_folder", fail_to_create_a_folder),
    "target": lambda: mock.patch("zpasses.backend.compiler.current_target", fail),
    # Code generation of a graph calls these functions.
    "eager": lambda: mock.patch("zpasses.runtime.codegen.reinplaceable_all_reduces", fail),
    "inductor": lambda: mock.patch("torch._inductor.compile_fx.compile_fx_inner", fail),
}


# --- when it fails -------------------------------------------------------------------------------
def in_forward(model, step, fault):
    with fault:
        step(batch())


def in_a_forward_without_gradients(model, step, fault):
    with fault, torch.no_grad():
        step(batch())


def in_backward(model, step, fault):
    loss = step(batch()).sum()
    with fault:
        loss.backward()


def in_a_late_variant_of_forward(model, step, fault):
    """The variant whose parameters are still gathered. It communicates nothing, so the other rank
    hears of the failure in the next graph.
    """
    step(batch())
    with fault:
        loss = step(batch()).sum()
    loss.backward()


def in_a_late_variant_of_backward(model, step, fault):
    """The variant that defers its reductions."""
    step(batch()).sum().backward()
    with zpasses.coalesce_grad_reduction(model):
        loss = step(batch()).sum()
        with fault:
            loss.backward()


def in_the_last_backward_of_a_window(model, step, fault):
    """The variant that reduces gradients that earlier backwards deferred."""
    with zpasses.coalesce_grad_reduction(model, backwards=2):
        step(batch()).sum().backward()
        loss = step(batch()).sum()
        with fault:
            loss.backward()


def at_the_end_of_a_window(model, step, fault):
    """The graph that reduces what is pending."""
    with contextlib.ExitStack() as stack, zpasses.coalesce_grad_reduction(model):
        step(batch()).sum().backward()
        stack.enter_context(fault)


# --- what the ranks see --------------------------------------------------------------------------
@dataclass(frozen=True)
class Seen:
    """What one rank sees."""

    error: str
    failed_at: float | None
    """When this rank failed, as `time.time()`; None if another rank failed."""
    raised_at: float
    """When the exception reached the program."""
    next_gradient: torch.Tensor
    """Of a graph that all ranks compile afterwards."""


def _seen(when, fault, failing, width, options):
    failed_at.clear()
    model, step = compiled(width, **options)
    mine = FAULTS[fault]() if dist.get_rank() == failing else contextlib.nullcontext()
    error, raised_at = "", 0.0
    try:
        when(model, step, mine)
    except Exception as caught:
        error, raised_at = f"{type(caught).__name__}: {caught}", time.time()
    # A rank that goes on at once would meet the others in the vote that they are in.
    dist.barrier()
    model, step = compiled(width + 1)
    (step(batch()).sum() * (1 + dist.get_rank())).backward()
    grad = model._parameters["weight"].grad.full_tensor()
    return Seen(error, next(iter(failed_at), None), raised_at, grad)


widths = itertools.count(100, 2)
"""Each test has shapes of its own: ranks do not vote again on collectives that they agreed on."""


inductor, SLOW = pytest.mark.inductor, pytest.mark.slow(quick="in_forward-inductor-1")


def slow(*values, quick):
    return pytest.param(*values, marks=pytest.mark.slow(quick=quick))


@pytest.mark.parametrize(
    ("when", "fault", "failing"),
    [
        (in_forward, "observer", 0),
        (in_forward, "dump", 1),
        (in_forward, "target", 0),
        (in_backward, "pass", 1),
        slow(in_a_forward_without_gradients, "eager", 1, quick="in_forward-inductor-1"),
        (in_a_late_variant_of_forward, "eager", 0),
        (in_a_late_variant_of_backward, "eager", 1),
        slow(in_the_last_backward_of_a_window, "eager", 1, quick="in_a_late_variant_of_backward"),
        slow(at_the_end_of_a_window, "eager", 0, quick="in_a_late_variant_of_backward"),
        pytest.param(in_forward, "inductor", 1, marks=inductor),
        pytest.param(in_backward, "inductor", 0, marks=[inductor, SLOW]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_rank_that_fails_to_compile_is_an_error_on_all_within_a_second(
    when, fault, failing, tmp_path
):
    options = {"zero_stage": 2 if when is in_a_late_variant_of_forward else 3}
    if fault == "inductor":
        options["codegen"] = "inductor"
    if fault == "dump":
        options |= {"dump": str(tmp_path), "dump_ranks": "all"}
    width = next(widths)
    seen = run_on_ranks(_seen, when, fault, failing, width, options)
    failed, other = seen[failing], seen[1 - failing]
    cause = f"{__file__} is a file" if fault == "dump" else "told to fail"
    assert cause in failed.error
    assert f"AgreementError: rank {failing} failed while compiling graph" in other.error
    assert cause in other.error
    assert 0 <= other.raised_at - failed.failed_at < AT_ONCE_S
    for each in seen:
        assert torch.equal(each.next_gradient, torch.full((width + 1, 4), 3.0))


def _one_rank_cannot_recompile(limit_s):
    """All ranks predict the graph that rank 0 runs, so rank 0 does not vote."""
    _, step = compiled(4, agreement_timeout_s=limit_s)
    for _ in range(20):
        step(batch()).sum().backward()
    started = time.monotonic()

    def told_to_fail(graph):
        raise ValueError("told to fail")

    try:
        if dist.get_rank() == 1:
            with observe_graphs(told_to_fail):
                step(torch.ones(2, 3, 4))
        else:
            step(batch())
    except Exception as error:
        return time.monotonic() - started, str(error)
    return 0.0, ""


@pytest.mark.slow(quick="test_another_number_of_micro_batches_is_an_error_in_the_first_step")
def test_a_rank_that_waits_in_a_collective_hears_the_cause_at_the_limit():
    results = [each.result for each in run_in_fresh_ranks(_one_rank_cannot_recompile, 5.0)]
    seconds, error = results[0]
    assert 4 < seconds < 5 + AT_ONCE_S
    assert "rank 0 waited in a collective while running graph 0/0 forward" in error
    assert "rank 1 failed while compiling graph 0/1: ValueError: told to fail" in error
    assert "told to fail" in results[1][1]


def _goes_on_after_a_failed_backward():
    """The failed rank is in the next forward when the other rank votes about the backward."""
    _, step = compiled(4)
    losses = [step(batch()).sum()]
    if dist.get_rank() == 1:
        with FAULTS["observer"](), pytest.raises(ValueError, match="told to fail"):
            losses[0].backward()
    try:
        losses[0].backward() if dist.get_rank() == 0 else step(batch())
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.slow(quick="test_votes_meet_again_after_a_failure_that_one_rank_caught")
def test_a_rank_that_meets_another_one_after_its_failure_hears_the_cause():
    waiting, failed = run_in_fresh_ranks(_goes_on_after_a_failed_backward)
    assert "rank 0 is at compiling a graph, but rank 1 at the next graph" in waiting.result
    cause = "Before that, rank 1 failed while compiling graph 0/0: ValueError: told to fail."
    assert cause in waiting.result
    assert "rank 0 is at compiling a graph, but rank 1 at the next graph" in failed.result


# --- what was told before -------------------------------------------------------------------------
def raised(first, second, *, cause):
    try:
        try:
            raise first
        except Exception as caught:
            raise second from (caught if cause else None)
    except Exception as error:
        return error


def test_an_error_is_told_unless_it_wraps_one_that_was_told():
    told = AgreementError("told")
    assert is_reported(raised(told, ValueError("wraps"), cause=True))
    assert is_reported(raised(told, ValueError("wraps"), cause=False))
    again = ValueError("new")
    again.__context__ = told  # of a program that tries again while it handles the first error
    assert not is_reported(again)


def test_a_rank_that_gave_up_a_collective_in_a_window_tells_it(one_rank):
    model = zpasses.shard(nn.Linear(4, 3), mesh=one_rank)
    gave_up = AgreementError("waited in a collective")
    gave_up._zpasses_reported = False
    with (
        mock.patch("zpasses.accumulation.flush") as flush,
        pytest.raises(AgreementError, match="waited"),
        zpasses.coalesce_grad_reduction(model),
    ):
        raise gave_up
    (call,) = flush.mock_calls
    assert call.args[2] == "left a window with AgreementError: waited in a collective"
