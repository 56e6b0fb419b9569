"""Ranks compare their device meshes when they shard: a mesh of other names or shape is an error.

A rank that takes the replicas of hybrid sharding for the shards would gather with the wrong ranks.
If these use their own groups only, no vote of a group would ever see it.

Each rank writes what it takes its process groups for into the store. The first rank that writes
about a group is right. A rank that takes the group for something else raises an error, and leaves a
note that the other ranks find when they compile or step next. Nobody waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks import heartbeat
from zpasses.ranks.vote import exchange, has_other_ranks, name_group

__all__ = ["check_meshes", "consecutive_ranks", "register_mesh"]

_MOST_CHECKS = 200
"""Checks of a mesh that some rank never registers, as ranks of other pipeline stages may not."""


@dataclass
class _Mesh:
    """A device mesh that this rank has registered."""

    ranks: int
    keys: list[str] = field(default_factory=list)
    """Keys of its process groups in the store."""
    checks: int = 0


_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ...], _Mesh]] = (
    weakref.WeakKeyDictionary()
)
"""Default process group -> names of the groups of a mesh -> what this rank knows of it."""


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
    """Tell the other ranks what this rank takes the process groups of a mesh for.

    Args:
        mesh: a mesh to shard over. The mesh that it is a part of is compared as a whole.

    Raises:
        AgreementError: if another rank takes one of these groups for another dimension, or for a
            dimension of a mesh of another shape.
    """
    whole = compat.root_mesh(mesh)
    groups = [whole.get_group(dim) for dim in range(whole.ndim)]
    names = tuple(compat.group_name(group) for group in groups)
    world = dist.group.WORLD
    assert world is not None
    known = _meshes.setdefault(world, {})
    if whole.ndim < 2 or names in known or not any(map(has_other_ranks, names)):
        return
    found = known[names] = _Mesh(whole.size())
    store, sizes = compat.default_store(), _sizes(whole)
    for dim, name in enumerate(names):
        if name == compat.group_name(world) or not has_other_ranks(name):
            continue  # torch takes the default group for any dimension of all ranks
        key = f"zpasses/mesh/{name}"
        found.keys.append(key)
        mine = f"dimension {_named(whole, dim)} of a mesh of {sizes}"
        first = store.compare_set(key, "", f"{dist.get_rank()}:{mine}").decode()
        rank, _, taken = first.partition(":")
        if taken != mine:
            ranks = ", ".join(map(str, compat.group_ranks(name)))
            error = (
                f"ranks have different device meshes: for rank {dist.get_rank()}, the process "
                f"group {name!r} of ranks {ranks} is {mine}, but for rank {rank} it is {taken}. "
                "Make the mesh with the same sizes and the same names in the same order on every "
                "rank."
            )
            store.set(f"{key}/conflict", error)
            raise AgreementError(error)
        store.add(f"{key}/registered", 1)


def check_meshes() -> None:
    """Raise what a rank with other meshes has noted since this rank registered its own.

    Raises:
        AgreementError: if another rank has other meshes.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    for mesh in _meshes.get(world, {}).values() if world is not None else ():
        if not mesh.keys:
            continue
        store = compat.default_store()
        complete = True
        for key in mesh.keys:
            if store.check([f"{key}/conflict"]):
                raise AgreementError(store.get(f"{key}/conflict").decode())
            ranks = len(compat.group_ranks(key.rpartition("/")[2]))
            complete &= store.add(f"{key}/registered", 0) >= ranks
        mesh.checks += 1
        if complete or mesh.checks >= _MOST_CHECKS:
            mesh.keys.clear()


def _sizes(mesh: DeviceMesh) -> str:
    return " x ".join(f"{_named(mesh, dim)}={mesh.size(dim)}" for dim in range(mesh.ndim))


def _named(mesh: DeviceMesh, dim: int) -> str:
    return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else str(dim)
