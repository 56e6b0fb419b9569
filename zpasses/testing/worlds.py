"""A process group of any size in one process, whose collectives do nothing, for capturing and
rewriting graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zpasses import compat


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """Act as rank `rank` of `world_size` ranks that do not exist. Yields the one-dimensional CPU
    mesh over all of them.

    Collectives return at once and leave their outputs uninitialised. Use it to shard, capture and
    rewrite; use `simulate` to run graphs.

    Raises:
        RuntimeError: if this process already has a process group.
        ValueError: unless 0 <= rank < world_size.
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"fake_world: got rank {rank} of {world_size}; expected 0 <= rank < world_size."
        )
    if dist.is_initialized():
        raise RuntimeError(
            f"fake_world: this process is already rank {dist.get_rank()} of "
            f"{dist.get_world_size()} of a {dist.get_backend()!r} process group. Call "
            "torch.distributed.destroy_process_group() first."
        )
    compat.clear_sharding_prop_cache()  # they hold for one rank only
    dist.init_process_group("fake", store=compat.fake_store(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        compat.clear_sharding_prop_cache()


def world_mesh() -> DeviceMesh:
    """The one-dimensional CPU mesh over all ranks of this process's group. Call it on a rank.

    Raises:
        ValueError: if there is no process group.
    """
    return init_device_mesh("cpu", (dist.get_world_size(),))
