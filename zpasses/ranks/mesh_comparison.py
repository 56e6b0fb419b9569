"""Ranks compare their device meshes, and the arguments of `zpasses.shard` and
`zpasses.encode_parameters`, when they call these.

A rank that takes the replicas of hybrid sharding for the shards would gather with the wrong ranks.
If these use their own groups only, no vote of a group would ever see it. A rank that divides
gradients by another number would train another model, without an error.

Nobody waits for it: see `zpasses.ranks.notes`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks.group_texts import call_dimension, list_ranks, name_group
from zpasses.ranks.notes import compare_note, end_conflict, leave_conflict
from zpasses.ranks.vote import group_state, has_other_ranks

_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[str, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""Default process group -> names of the groups of each mesh that this rank has registered."""

_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""Process group -> calls of each function for it that were compared."""


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
                f"group {name!r} of ranks {list_ranks(ranks)} is {mine}, but for rank "
                f"{rank} it is {taken}. Make the mesh with the same sizes and the same names in "
                "the same order on every rank.",
            )


def compare_shard_calls(
    mesh: DeviceMesh, given: Mapping[str, Any], function: str = "shard"
) -> None:
    """Compare with the other ranks of a mesh what `zpasses.shard` was called with.

    Args:
        mesh: the mesh to shard over.
        given: what was given, as text for errors -> its value, of plain JSON values.
        function: the function of zpasses, if it is another one.

    Raises:
        AgreementError: if another rank gave something else in the same call.
    """
    mine = {"mesh": _sizes(mesh), **given}
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    groups = [group for group in groups if has_other_ranks(compat.group_name(group))]
    for group in groups:  # also those that an error leaves out, so that later calls have one number
        _calls.setdefault(group, Counter())[function] += 1
    for group in groups:
        name, number = compat.group_name(group), _calls[group][function]
        key = f"{group_state(name).prefix}/{function}/{number}"
        found = compare_note(key, len(compat.group_ranks(name)), mine)
        if found is not None:
            rank, first = found
            keys = [key for key in {**first, **mine} if first.get(key) != mine.get(key)]
            _raise_conflict(
                f"ranks shard differently over {name_group(name)}: in call {number} of "
                f"zpasses.{function} for it, rank {dist.get_rank()} has {_said(mine, keys)}, but "
                f"rank {rank} has {_said(first, keys)}. Call zpasses.{function} with the same "
                "arguments in the same order on every rank.",
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
