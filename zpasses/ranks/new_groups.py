"""Process groups that the ranks of a group make together, after a vote: second groups, on which
reductions run beside the all-gathers of the first, groups within and between nodes, and groups of
consecutive ranks.

The vote gives the new group a name that is equal on all ranks. A rank that does not come is an
error on the others.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks import heartbeat
from zpasses.ranks.agree import Answers, exchange, first_two, forget_answer
from zpasses.ranks.group_texts import name_group
from zpasses.ranks.vote import (
    GROUP_TIMEOUT,
    TimeLimit,
    current_timeout_s,
    has_other_ranks,
    waits_longer,
)

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
        tried = exchange(name, occasion, tried, limit_s, merge=max)
    _tried[group] = tried + 1
    second = compat.second_group_name(name, tried)
    what = (
        f"process group {second!r}, on which the reductions of group {name!r} run "
        "(schedule{reduction_group=own}),"
    )
    _make_group(name, second, compat.group_ranks(name), _reductions_of(name), limit_s, what)
    return second


@dataclass(frozen=True)
class NodeGroups:
    """The two process groups of this rank through which the ranks of a group reduce in two hops."""

    inside: str
    """The ranks of this rank's node."""
    across: str
    """The ranks with this rank's place within their nodes, one of each node."""


_tried_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_NODES = re.compile(r"process groups of nodes of (\d+) ranks")


def node_groups(name: str, per_node: int) -> NodeGroups:
    """Returns this rank's groups within its node and between nodes, and makes them at the first
    call.

    All ranks of the group must come to the first call with the same number. They wait for each
    other as long as votes do, and again as long while they connect. Later calls exchange nothing.

    Args:
        name: a process group whose ranks fill one node after the other.
        per_node: how many of its ranks each node has, a divisor of its size.

    Raises:
        AgreementError: if a rank does not come, has another number, failed, or ends before the
            groups are made.
    """
    group, limit_s = compat.process_group(name), current_timeout_s()
    ranks, place = compat.group_ranks(name), group.rank()
    first, local = place // per_node * per_node, place % per_node
    question = f"process groups of nodes of {per_node} ranks"
    tried = _tried_nodes.get(group, 0)
    number = exchange(name, question, tried, limit_s, remember=question, merge=max)
    found = []
    for kind, members in (
        ("in_node", ranks[first : first + per_node]),
        ("across_nodes", ranks[local::per_node]),
    ):
        made = compat.node_group_name(name, kind, members, number)
        found.append(made)
        if made in compat.group_names():
            continue
        what = f"process group {made!r}, on which the reductions of group {name!r} run in two hops,"
        try:
            _make_group(name, made, members, _reductions_of(name), limit_s, what)
        except AgreementError:
            # The store keeps the addresses of a group that was tried before, so no name is used
            # twice.
            _tried_nodes[group] = number + 1
            forget_answer(name, question)
            raise
    return NodeGroups(*found)


def _reductions_of(group: str) -> str:
    return f"zpasses: reductions of group {group}"


def restore_node_groups(answers: Answers) -> None:
    """Makes the groups that a graph of the compile cache communicates over, if there are none.

    All ranks of their parents must come here with the same answers.

    Args:
        answers: what the votes of the graph's passes came to, which are remembered already.
    """
    for group, remembered in answers:
        if nodes := _NODES.fullmatch(remembered):
            node_groups(group, int(nodes[1]))


def consecutive_ranks(mesh: DeviceMesh, size: int) -> str:
    """Returns the process group of this rank among each `size` consecutive ranks of a mesh.

    All ranks of the mesh must come to each call. They wait for each other as long as the mesh's
    collectives do, and again as long while they connect at the first call with the same ranks.

    Args:
        mesh: one-dimensional; `size` divides its size.
        size: ranks of the group.

    Raises:
        AgreementError: if another rank has another size, does not come, or ends before the group
            is made.
    """
    whole = mesh.get_group()
    name = compat.group_name(whole)
    ranks = compat.group_ranks(name)
    limit = TimeLimit(compat.collective_timeout(whole).total_seconds(), GROUP_TIMEOUT)
    world = dist.group.WORLD
    assert world is not None
    made = _consecutive.setdefault(world, _Consecutive())
    different, tried = exchange(
        name,
        "shard(reshard_after_forward=...)",
        [size, made.tried],
        limit,
        merge=lambda answers: [
            first_two([size for size, _ in answers]),
            max(tried for _, tried in answers),
        ],
    )
    _check_sizes(name, ranks, different)
    first = mesh.get_local_rank() // size * size
    members = tuple(ranks[first : first + size])
    if members in made.groups:
        return made.groups[members]
    label = f"{(mesh.mesh_dim_names or (compat.mesh_dimension(name),))[0] or 'ranks'}_of_{size}"
    # The store keeps the addresses of a group that was tried before, so no name is used twice.
    made.tried = tried + 1
    group = f"{name}.{label}.{members[0]}-{tried}"
    what = (
        f"the process group of ranks {', '.join(map(str, members))}, from which "
        f"shard(reshard_after_forward={size}) gathers again,"
    )
    _make_group(name, group, members, f"mesh_{label}", limit, what, limited_alike=False)
    made.groups[members] = group
    return group


@dataclass
class _Consecutive:
    """The groups of consecutive ranks that this rank has made in a world."""

    groups: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Ranks -> their group."""
    tried: int = 0
    """Groups that it has tried to make."""


_consecutive: weakref.WeakKeyDictionary[dist.ProcessGroup, _Consecutive] = (
    weakref.WeakKeyDictionary()
)
"""Default process group -> the groups that `consecutive_ranks` made in it."""


def _check_sizes(group: str, ranks: Sequence[int], different: Sequence[tuple[int, int]]) -> None:
    (_, first), *others = different
    for at, size in others:
        raise AgreementError(
            f"ranks of {name_group(group)} gather again from different numbers of ranks: rank "
            f"{ranks[0]} called shard(reshard_after_forward={first}), but rank {ranks[at]} "
            f"called shard(reshard_after_forward={size}). Give every rank of a mesh the same "
            "number."
        )


def _make_group(
    parent: str,
    name: str,
    ranks: Sequence[int],
    description: str,
    limit_s: float,
    what: str,
    **how: bool,
) -> None:
    """Makes a group as `compat.make_group` does, with an error that names what was made (`what`)
    if ranks do not connect in time.
    """
    limit = timedelta(seconds=limit_s)
    try:
        with compat.no_dispatch_modes():  # torch may be compiling
            compat.make_group(parent, name, ranks, description, limit, **how)
    except RuntimeError as error:
        me = compat.global_rank()
        others = [rank for rank in ranks if rank != me]
        raise AgreementError(
            f"rank {me} could not connect {what} within {limit_s:g} s "
            f"({type(error).__name__}: {str(error)[:200]}). {heartbeat.describe(others[:8])} Look "
            f"at the logs of these ranks; {waits_longer(limit_s)}"
        ) from error
