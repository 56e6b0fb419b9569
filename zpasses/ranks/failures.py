"""Ranks tell each other why they cannot go on, instead of voting."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch.distributed as dist

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks import heartbeat
from zpasses.ranks.vote import end_key, failure_of, group_state, has_other_ranks, pack, unpack


def report_failure(
    groups: Sequence[str], error: BaseException, doing: str, *, recoverable: bool = True
) -> None:
    """Tell the other ranks of these groups that this rank will not vote.

    Args:
        doing: what failed, for the error: "compiling graph 0/0".
        recoverable: let votes meet again if this rank's program catches the error and continues.
            False makes the vote at hand an error on all ranks in any case.
    """
    reason = f"{type(error).__name__}: {str(error)[:500]}"
    text = f"rank {compat.global_rank()} failed while {doing}: {reason}"
    for name in groups:
        post_failure(name, text, recoverable=recoverable)
    error._zpasses_reported = True  # type: ignore[attr-defined]


def pass_on_failure(groups: Sequence[str], error: AgreementError) -> None:
    """Tell the ranks of all groups of a graph about an error that the ranks of one have found.

    A rank of several groups, such as those of hybrid sharding, fails with the ranks of one. Those
    of the others do not know of it, and would wait for this rank until their time limit.
    """
    others = [name for name in groups if has_other_ranks(name)]
    if len(others) < 2 or hasattr(error, "_zpasses_passed_on"):
        return
    error._zpasses_passed_on = True  # type: ignore[attr-defined]
    for name in others:
        if name != getattr(error, "_zpasses_group", None):
            post_failure(name, str(error))


def is_reported(error: BaseException | None) -> bool:
    """Whether the other ranks know of a failure already."""
    while error is not None:
        if hasattr(error, "_zpasses_reported"):
            return bool(error._zpasses_reported)
        if isinstance(error, AgreementError):
            return True
        # `raise ... from None` wraps, too. Any other context is an error that was being handled,
        # such as that of an earlier call which the program tries again.
        context = error.__context__ if error.__suppress_context__ else None
        error = compat.inner_exception(error) or error.__cause__ or context
    return False


def reported_failure(name: str) -> str | None:
    """Why another rank of the group will not come to the next vote, if one said so; asks without
    waiting.
    """
    if not has_other_ranks(name):
        return None
    store, key = compat.default_store(), end_key(group_state(name).key())
    try:
        return str(unpack(store.get(key))["failure"]["reason"]) if store.check([key]) else None
    except heartbeat.STORE_ERRORS:
        return None


def post_failure(name: str, reason: str, *, recoverable: bool = False) -> None:
    """Tell the other ranks of a group why this rank will not vote; `recoverable` as above."""
    if not has_other_ranks(name):
        return
    state, store = group_state(name), compat.default_store()
    failure = pack(failure_of(dist.get_rank(), reason, recoverable=recoverable))
    with contextlib.suppress(*heartbeat.STORE_ERRORS):  # the others find it gone, too
        store.compare_set(end_key(state.key()), "", failure)
    state.next_epoch(resumed=False)
