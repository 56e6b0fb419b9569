"""Second process groups, on which reductions run beside the all-gathers of the first.

The ranks of a group make its second group together, after a vote. The vote gives the group a name
that is equal on all ranks. A rank that does not come is an error on the others.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch.distributed as dist

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks import heartbeat
from zpasses.ranks.agree import exchange
from zpasses.ranks.vote import COMPILE_TIMEOUT, current_timeout_s, has_other_ranks

# How many second groups this process has tried to make of a group. A name is never used again,
# because the store keeps the addresses that the earlier group had.
_tried: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def reduction_group(name: str) -> str:
    """Returns the name of a group's second group, and makes it at the first call.

    All ranks of the group must come to the first call. They wait for each other as long as votes
    do, and again as long while they connect. Later calls exchange nothing.

    Args:
        name: a process group. A second group is its own second group.

    Raises:
        AgreementError: if a rank does not come, failed, or ends before the group is made.
    """
    if compat.parent_group(name) != name:
        return name
    known = compat.second_group(name)
    if known is not None:
        return known
    group, limit_s = compat.process_group(name), current_timeout_s()
    tried = _tried.get(group, 0)
    if has_other_ranks(name):
        occasion = f"the second process group of group {name!r}"
        tried = max(exchange(name, occasion, tried, limit_s))
    _tried[group] = tried + 1
    second = compat.second_group_name(name, tried)
    try:
        with compat.no_dispatch_modes():  # torch may be compiling
            compat.make_second_group(name, second, timedelta(seconds=limit_s))
    except RuntimeError as error:
        me = compat.global_rank()
        others = [rank for rank in compat.group_ranks(name) if rank != me]
        raise AgreementError(
            f"rank {me} could not connect process group {second!r}, on which the reductions of "
            f"group {name!r} run (schedule{{reduction_group=own}}), within {limit_s:g} s "
            f"({type(error).__name__}: {str(error)[:200]}). {heartbeat.describe(others[:8])} Look "
            f"at the logs of these ranks; {COMPILE_TIMEOUT} waits longer."
        ) from error
    return second
