"""Ranks check, before each run of a compiled graph that communicates, that they run the same one.

`zpasses.ranks.run_order` votes only where a rank comes to another graph than the history predicts.
Inside a `coalesce_grad_reduction` block, the ranks vote before every graph, because the others
would wait in the next gather for a rank that left the block with an exception.

Collectives of a checked graph give up after the time limit of the votes. The error then names the
ranks that did not take part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.graph.dialect import set_eager_guard
from zpasses.ranks import heartbeat
from zpasses.ranks.agree import exchange
from zpasses.ranks.failures import pass_on_failure, reported_failure
from zpasses.ranks.notes import check_conflicts
from zpasses.ranks.run_order import (
    ALIKE,
    ANOMALY,
    RunEvent,
    check_run_event,
    forget_events,
    looks_for_nan,
)
from zpasses.ranks.vote import (
    GROUP_TIMEOUT,
    WINDOW_TIMEOUT,
    TimeLimit,
    current_timeout_s,
    has_other_ranks,
    rejoin_after_failure,
    vote_timeout,
    waits_longer,
)
from zpasses.runtime.codegen import boxed
from zpasses.runtime.edits import log_of
from zpasses.runtime.param_conversion import CallParams, current_call

# Group name -> timeouts of its open windows, in seconds; None where a window has none of its own.
# State is per process, because windows belong to parameters and several graphs may read one.
_window_timeouts: dict[str, list[float | None]] = {}

# Group name -> time limit of the votes of the last graph that ran on it, in seconds.
_vote_timeouts: dict[str, float] = {}

# Names of groups on which only graphs have run whose runs are not checked.
_unchecked_groups: set[str] = set()


@contextlib.contextmanager
def voting_before_each_graph(groups: Sequence[str], timeout_s: float | None) -> Iterator[None]:
    """Inside, the ranks vote before each graph that communicates over these groups.

    A vote cannot see a rank that fails inside a graph. Collectives that start inside therefore give
    up after `timeout_s`.

    Args:
        timeout_s: seconds to wait for the other ranks; None takes the limit of the graph that runs.
    """
    asked = _with_others(groups)
    for group in asked:
        _window_timeouts.setdefault(group, []).append(timeout_s)
    try:
        with compat.limited_timeouts(asked, timeout_of(asked, timeout_s)):
            yield
    finally:
        for group in asked:
            _window_timeouts[group].remove(timeout_s)
            if not _window_timeouts[group]:
                del _window_timeouts[group]


def timeout_of(groups: Sequence[str], timeout_s: float | None = None) -> float:
    """Returns `timeout_s`. If it is None: the longest limit of the graphs that ran on the groups,
    or the limit of the compile before any graph ran, in seconds.
    """
    if timeout_s is not None:
        return timeout_s
    known = [_vote_timeouts[group] for group in groups if group in _vote_timeouts]
    return max(known, default=current_timeout_s())


def in_window(groups: Sequence[str]) -> bool:
    """Whether a window is open over one of these groups."""
    return any(group in _window_timeouts for group in groups)


def with_run_check(
    code: Callable[[list[Any]], Any],
    events: Mapping[str, RunEvent],
    graph_name: str,
    timeout_s: float,
    *,
    every_run: bool,
    report: Callable[[AgreementError], None] = lambda error: None,
) -> Callable[[list[Any]], Any]:
    """The code of a graph, with a check before each run.

    Args:
        code: the code, which takes one list of inputs.
        events: process group -> the event that a run of the graph is.
        timeout_s: seconds to wait for the other ranks.
        every_run: check every run. False checks only inside windows.
        report: called with the error of a check. It tells the ranks of other groups.

    Raises:
        AgreementError: when the code is called and another rank failed, comes to another graph, or
            does not come in time.
    """
    if not events:
        return code
    name = f"graph {graph_name}"

    def check_groups(asked: Sequence[str], call: CallParams | None) -> float:
        """Returns the longest time limit of the run."""
        longest = timeout_s
        for group in asked:
            event = events[group] if call is None else _with_params(events[group], call)
            _vote_timeouts[group] = timeout_s
            edits = log_of(group)
            if every_run:
                _unchecked_groups.discard(group)
            if group in _window_timeouts:
                asked_for = [each for each in _window_timeouts[group] if each is not None]
                limit = TimeLimit(max(asked_for), WINDOW_TIMEOUT) if asked_for else timeout_s
                longest = max(longest, limit)
                check_run_event(group, event, limit, edits=edits, always_vote=True)
            elif every_run:
                check_run_event(group, event, timeout_s, edits=edits)
        return longest

    def run(args: list[Any]) -> Any:
        asked = _with_others(events)
        if not asked:
            return code(args)
        call = current_call()
        try:
            longest = check_groups(asked, call)
        except AgreementError as error:
            report(error)
            raise
        if not every_run:
            rejoin_after_failure(asked)
            with vote_timeout(timeout_s):
                return code(args)
        # Code that runs for the first time may vote, too: about the route of its collectives.
        with limited_collectives(asked, name, longest), vote_timeout(timeout_s):
            values = code(args)
            if looks_for_nan() and compat.in_backward():
                try:
                    _look_for_nan(asked, name, values)
                except AgreementError as error:
                    report(error)
                    raise
            return values

    return boxed(run)


def _look_for_nan(groups: Sequence[str], name: str, values: Sequence[Any]) -> None:
    """Raise AgreementError on all ranks if one of them has a NaN in what a backward returns.

    Autograd would raise on that rank alone, and the others would wait for it.
    """
    floats = [each for each in values if isinstance(each, Tensor) and each.is_floating_point()]
    found = sum(bool(each.isnan().any()) for each in floats)
    said = [f"{found} of {len(values)} on rank {compat.global_rank()}"] if found else []
    for group in groups:  # each tells what those before it have found
        said = exchange(group, f"the look for NaN of {ANOMALY}", said, merge=_of_any)
    if said:
        raise AgreementError(
            f"{ANOMALY}: NaN in gradients that {name} returns: {', '.join(said)}. A rank has its "
            "rows of each gradient, which all ranks add to. Look for NaN in the loss of each rank."
        )


def _of_any(answers: Sequence[list[str]]) -> list[str]:
    return sorted({each for answer in answers for each in answer})[:_MOST_NAMED]


_MOST_NAMED = 8


def _with_others(groups: Iterable[str]) -> list[str]:
    return [group for group in groups if has_other_ranks(group)]


@contextlib.contextmanager
def limited_collectives(groups: Iterable[str], name: str, timeout_s: float) -> Iterator[None]:
    """Inside, collectives of those of these groups that have other ranks give up after `timeout_s`.

    Args:
        name: what runs inside, for the error and the heartbeat.

    Raises:
        AgreementError: if a collective gave up. It names the ranks that did not take part.
    """
    asked = _with_others(groups)
    if not asked:
        yield
        return
    heartbeat.set_activity(f"running {name}")
    ended = f"after {name}"
    with compat.limited_timeouts(asked, timeout_s):
        try:
            yield
        except Exception as error:
            if not compat.is_collective_timeout(error):
                ended += f" ({type(error).__name__}: {str(error)[:300]})"
                raise
            raise _timeout_error(asked, f"running {name}", timeout_s, error) from error
        finally:
            heartbeat.set_activity(ended)


def limited_over(
    mesh: DeviceMesh | None, name: str, timeout_s: float | None = None
) -> contextlib.AbstractContextManager[None]:
    """Context of collectives over a mesh that belong to no graph, as `limited_collectives`.

    Args:
        timeout_s: None takes the limit of the graphs that ran on the groups of the mesh.
    """
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)] if mesh is not None else []
    names = [compat.group_name(group) for group in groups]
    return limited_collectives(names, name, timeout_of(names, timeout_s))


def with_vote_limit(
    code: Callable[[list[Any]], Any], groups: Iterable[str], timeout_s: float
) -> Callable[[list[Any]], Any]:
    """The code of a graph whose runs are not checked. It limits the votes that remain.

    Args:
        groups: the process groups that the graph communicates over.
        timeout_s: seconds to wait for the other ranks, in votes about the route of collectives, and
            at the end of windows that set no limit.
    """
    names = tuple(groups)
    if not names:
        return code

    def run(args: list[Any]) -> Any:
        for group in names:
            if group not in _vote_timeouts:
                _unchecked_groups.add(group)
            _vote_timeouts[group] = timeout_s
        with vote_timeout(timeout_s):
            return code(args)

    return boxed(run)


def check_optimizer_step(params: Mapping[str, Sequence[str]], optimizer: str) -> None:
    """Check that every rank comes to a step of an optimizer of the same parameters.

    Groups on which only graphs have run whose runs are not checked do not take part.

    Args:
        params: process group -> the identities of the optimizer's parameters that are sharded over
            it.
        optimizer: the name of its type.
    """
    check_conflicts()
    groups = sorted(params)
    try:
        for group in groups:
            if group not in _unchecked_groups and has_other_ranks(group):
                _check_eager_event(group, _step_event(optimizer, tuple(params[group])))
                heartbeat.set_activity(f"in {optimizer}.step()")
    except AgreementError as error:
        pass_on_failure(groups, error)
        raise


@functools.lru_cache(maxsize=1 << 12)
def _step_event(optimizer: str, identities: tuple[str, ...]) -> RunEvent:
    event = RunEvent.of(f"{optimizer}.step()")
    stepped = CallParams.of(sorted(identities))
    return event if stepped is None else _with_params(event, stepped)


def checked_eager_collective(
    name: str, value: Tensor, group: str
) -> contextlib.AbstractContextManager[None]:
    """Context of a collective that uncompiled code runs for a sharded parameter, such as a read.

    It is an event of its group, as a run of a graph is. Otherwise a rank that runs code which
    another rank does not run would exchange parts of different tensors with it.

    Args:
        name: of the collective.
        value: its input.

    Raises:
        AgreementError: if another rank comes to another event, or does not come in time.
    """
    if group in _unchecked_groups or not has_other_ranks(group):
        return contextlib.nullcontext()
    event, call = _eager_event(name, value.dtype, tuple(value.shape)), current_call()
    if call is not None:
        event = _with_params(event, call)
    return limited_collectives([group], event.text, _check_eager_event(group, event))


def _check_eager_event(group: str, event: RunEvent) -> float:
    """Returns the time limit: until a graph has run on a group, the group's own."""
    limit = _vote_timeouts.get(group)
    if limit is None:
        own = compat.collective_timeout(compat.process_group(group)).total_seconds()
        limit = TimeLimit(own, GROUP_TIMEOUT)
    check_run_event(group, event, limit, edits=log_of(group))
    return limit


@functools.lru_cache(maxsize=1 << 12)
def _eager_event(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> RunEvent:
    kind = "gradient" if name.startswith("reduce") else "parameter"
    described = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return RunEvent.of(f"{name} of a {kind}, {described}, in code that is not compiled")


set_eager_guard(checked_eager_collective)


@functools.lru_cache(maxsize=1 << 14)
def _with_params(event: RunEvent, call: CallParams) -> RunEvent:
    """The event of a run with these parameters: modules of one class share graphs."""
    return RunEvent.of(f"{event.text} with {call.text}", (event.digest, call.digest))


def _timeout_error(
    groups: Sequence[str],
    activity: str,
    timeout_s: float,
    error: BaseException,
) -> AgreementError:
    me = compat.global_rank()
    others = sorted({rank for group in groups for rank in compat.group_ranks(group)} - {me})
    for group in groups:
        forget_events(group)
    reasons = [reason for group in groups if (reason := reported_failure(group))]
    found = AgreementError(
        f"rank {me} waited in a collective while {activity}, for {timeout_s:g} s or until the "
        f"other end closed ({type(error).__name__}: {str(error)[:200]}). "
        f"{' '.join(f'{reason}.' for reason in reasons) or heartbeat.describe(others[:8])} "
        f"{ALIKE} Look at the logs of these ranks; {waits_longer(timeout_s)}"
    )
    found._zpasses_reported = False  # type: ignore[attr-defined]  # no vote told the other ranks
    return found
