"""`zpasses.init_device_mesh`: torch's, which ranks with different arguments do not hang in."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

from zpasses import compat
from zpasses.errors import OptionError
from zpasses.ranks.agree import compare
from zpasses.ranks.group_texts import list_ranks
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S, Ballot, TimeLimit


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **kwargs: Any,
) -> DeviceMesh:
    """Call `torch.distributed.device_mesh.init_device_mesh`, after the ranks compared its
    arguments.

    In torch's function, ranks with different arguments wait for each other until the limit of the
    process groups that it makes, which is 30 minutes for gloo.

    Args:
        device_type: as for torch.
        mesh_shape: as for torch.
        mesh_dim_names: as for torch.
        timeout_s: seconds to wait for the other ranks.
        kwargs: further arguments of torch's function.

    Raises:
        AgreementError: on every rank, if ranks give different arguments or one does not come.
        OptionError: if `timeout_s` is not a number of seconds above 0.
    """
    if not 0 < timeout_s < math.inf:
        raise OptionError(f"timeout_s={timeout_s}; expected seconds > 0, not inf.")
    if dist.is_initialized() and not compat.is_fake_world():
        _compare(device_type, tuple(mesh_shape), mesh_dim_names, timeout_s)
    return torch_init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names, **kwargs)


def _compare(
    device_type: str,
    shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    timeout_s: float,
) -> None:
    world = dist.group.WORLD
    assert world is not None
    ballot = {"device": device_type, "shape": list(shape), "names": list(names or ())}
    compare(
        compat.group_name(world),
        "init_device_mesh",
        ballot,
        _difference,
        TimeLimit(timeout_s, "init_device_mesh(timeout_s=...)"),
        missed=f"reach init_device_mesh{_text(ballot)}",
    )


def _difference(_: int, first: Ballot, rank: int, other: Ballot) -> str | None:
    if first == other:
        return None
    said = (
        f"ranks make different device meshes: rank 0 calls init_device_mesh{_text(first)}, but "
        f"rank {rank} init_device_mesh{_text(other)}. "
    )
    dims = max(len(first["shape"]), len(other["shape"]))
    for dim in range(dims):
        one, two = _dimension(first, dim, 0), _dimension(other, dim, rank)
        if one != two:
            said += f"Dimension {dim} is {one} for rank 0, but {two} for rank {rank}. "
            break
    return said + "Give the same device, sizes and names in the same order on every rank."


def _dimension(ballot: Ballot, dim: int, rank: int) -> str:
    """A dimension of a mesh of all ranks: "'shard' of 2 ranks (rank 3 with 2, 3)"."""
    shape, names = ballot["shape"], ballot["names"]
    if dim >= len(shape):
        return "none"
    name = repr(names[dim]) if dim < len(names) else "without a name"
    step = math.prod(shape[dim + 1 :])
    start = rank - rank // step % shape[dim] * step
    ranks = [start + at * step for at in range(shape[dim])]
    return f"{name} of size {shape[dim]} with ranks {list_ranks(ranks)} in its group"


def _text(ballot: Ballot) -> str:
    names = tuple(ballot["names"])
    named = f", mesh_dim_names={names}" if names else ""
    return f"({ballot['device']!r}, {tuple(ballot['shape'])}{named})"
