"""Ranks compare their device meshes, and the arguments of `zpasses.shard`, when they shard.

A rank that takes the replicas of hybrid sharding for the shards would gather with the wrong ranks.
If these use their own groups only, no vote of a group would ever see it. A rank that divides
gradients by another number would train another model, without an error.

Nobody waits for it: see `zpasses.ranks.notes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks import heartbeat
from zpasses.ranks.agree import exchange
from zpasses.ranks.group_names import call_dimension, name_group
from zpasses.ranks.notes import compare_note, end_conflict, leave_conflict
from zpasses.ranks.vote import group_state, has_other_ranks

_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""Default process group -> names of the groups of each mesh that this rank has registered."""

_shard_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Process group -> calls of `zpasses.shard` for it that were compared."""


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
    ranks, limit = compat.group_ranks(name), compat.collective_timeout(whole)
    world = dist.group.WORLD
    assert world is not None
    made = _consecutive.setdefault(world, _Consecutive())
    answers = exchange(
        name,
        "shard(reshard_after_forward=...)",
        [size, made.tried],
        limit.total_seconds(),
        timeout_option="init_process_group(timeout=...)",
    )
    _check_sizes(name, ranks, [answer[0] for answer in answers])
    first = mesh.get_local_rank() // size * size
    members = tuple(ranks[first : first + size])
    if members in made.groups:
        return made.groups[members]
    label = f"{(mesh.mesh_dim_names or (compat.mesh_dimension(name),))[0] or 'ranks'}_of_{size}"
    # The store keeps the addresses of a group that was tried before, so no name is used twice.
    tried = max(answer[1] for answer in answers)
    made.tried = tried + 1
    group = f"{name}.{label}.{members[0]}-{tried}"
    try:
        compat.make_group(name, group, members, label, limit)
    except RuntimeError as error:
        me = compat.global_rank()
        others = [rank for rank in members if rank != me]
        raise AgreementError(
            f"rank {me} could not connect the process group of ranks "
            f"{', '.join(map(str, members))}, from which shard(reshard_after_forward={size}) "
            f"gathers again, within {limit.total_seconds():g} s ({type(error).__name__}: "
            f"{str(error)[:200]}). {heartbeat.describe(others[:8])} Look at the logs of these "
            "ranks; init_process_group(timeout=...) waits longer."
        ) from error
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


def _check_sizes(group: str, ranks: Sequence[int], sizes: Sequence[int]) -> None:
    other = next((at for at, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        raise AgreementError(
            f"ranks of {name_group(group)} gather again from different numbers of ranks: rank "
            f"{ranks[0]} called shard(reshard_after_forward={sizes[0]}), but rank {ranks[other]} "
            f"called shard(reshard_after_forward={sizes[other]}). Give every rank of a mesh the "
            "same number."
        )


def register_mesh(mesh: DeviceMesh) -> None:
    """Compare with the other ranks what this rank takes the process groups of a mesh for.

    Args:
        mesh: a mesh to shard over. The mesh that it is a part of is compared as a whole.

    Raises:
        AgreementError: if another rank takes one of these groups for another dimension, or for a
            dimension of a mesh of another shape.
    """
    whole = compat.root_mesh(mesh)
    names = tuple(compat.group_name(whole.get_group(dim)) for dim in range(whole.ndim))
    world = dist.group.WORLD
    assert world is not None
    known = _meshes.setdefault(world, set())
    if names in known or not any(map(has_other_ranks, names)):
        return
    known.add(names)
    for dim, name in enumerate(names):
        if whole.mesh_dim_names is not None:
            call_dimension(name, whole.mesh_dim_names[dim])
        if name == compat.group_name(world) or not has_other_ranks(name):
            continue  # torch takes the default group for any dimension of all ranks
        ranks = compat.group_ranks(name)
        mine = f"dimension {_named(whole, dim)} of a mesh of {_sizes(whole)}"
        found = compare_note(f"{group_state(name).prefix}/mesh", len(ranks), mine)
        if found is not None:
            rank, taken = found
            _raise_conflict(
                f"ranks have different device meshes: for rank {dist.get_rank()}, the process "
                f"group {name!r} of ranks {', '.join(map(str, ranks))} is {mine}, but for rank "
                f"{rank} it is {taken}. Make the mesh with the same sizes and the same names in "
                "the same order on every rank.",
            )


def compare_shard_calls(mesh: DeviceMesh, given: Mapping[str, Any]) -> None:
    """Compare with the other ranks of a mesh what `zpasses.shard` was called with.

    Args:
        mesh: the mesh to shard over.
        given: what was given, as text for errors -> its value, of plain JSON values.

    Raises:
        AgreementError: if another rank gave something else in the same call.
    """
    mine = {"mesh": _sizes(mesh), **given}
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    groups = [group for group in groups if has_other_ranks(compat.group_name(group))]
    for group in groups:  # also those that an error leaves out, so that later calls have one number
        _shard_calls[group] = _shard_calls.get(group, 0) + 1
    for group in groups:
        name, number = compat.group_name(group), _shard_calls[group]
        key = f"{group_state(name).prefix}/shard/{number}"
        found = compare_note(key, len(compat.group_ranks(name)), mine)
        if found is not None:
            rank, first = found
            keys = [key for key in {**first, **mine} if first.get(key) != mine.get(key)]
            _raise_conflict(
                f"ranks shard differently over {name_group(name)}: in call {number} of "
                f"zpasses.shard for it, rank {dist.get_rank()} has {_said(mine, keys)}, but rank "
                f"{rank} has {_said(first, keys)}. Call zpasses.shard with the same arguments in "
                "the same order on every rank.",
            )
    end_conflict()


def _said(given: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={given.get(key)}" for key in keys[:4])


def _raise_conflict(error: str) -> None:
    leave_conflict(error)
    raise AgreementError(error)


def _sizes(mesh: DeviceMesh) -> str:
    return " x ".join(f"{_named(mesh, dim)}={mesh.size(dim)}" for dim in range(mesh.ndim))


def _named(mesh: DeviceMesh, dim: int) -> str:
    return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else str(dim)
