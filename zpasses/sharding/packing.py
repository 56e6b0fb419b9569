"""Packing of shards into flat buffers: which shards share a buffer, and their offsets.

The layout is the same on every rank, regardless of how many rows the rank holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.graph.ops import rows_per_rank
from zpasses.sharding.flat_buffers import pack_parameters

__all__ = ["check_pack_mb", "next_batch", "pack_local_rows"]

_MIB = 1 << 20

P = TypeVar("P", bound=Tensor)


def check_pack_mb(pack_mb: object) -> None:
    """Raise ShardingError unless `pack_mb` is None or a number above 0."""
    if pack_mb is not None and not (
        isinstance(pack_mb, (int, float)) and not isinstance(pack_mb, bool) and pack_mb > 0
    ):
        raise ShardingError(
            f"pack_mb is {pack_mb!r}; expected MiB of shards per flat buffer, a number above 0, or "
            "None."
        )


def next_batch(params: deque[P], mesh: DeviceMesh, pack_mb: float | None) -> list[P]:
    """Remove the parameters of the next flat buffer from the front of a queue, and return them.

    A batch holds as many parameters as fit `pack_mb`, or one if that is None. A parameter of
    another mesh ends the batch. Sizes are those of full blocks, so that ranks with fewer rows get
    the same batches.
    """
    batch = [params.popleft()]
    room = (pack_mb or 0) * _MIB - _block_numel(batch[0].shape, mesh) * batch[0].element_size()
    while params and pack_mb is not None and getattr(params[0], "device_mesh", mesh) == mesh:
        room -= _block_numel(params[0].shape, mesh) * params[0].element_size()
        if room < 0:
            break
        batch.append(params.popleft())
    return batch


def pack_local_rows(
    rows: Sequence[Tensor], shapes: Sequence[torch.Size], names: Sequence[str], mesh: DeviceMesh
) -> list[Tensor]:
    """Copy this rank's rows of each parameter into flat buffers on the mesh's device.

    Args:
        rows: this rank's rows of each parameter, [local rows, ...], on the host or the device.
        shapes: shapes of the full parameters.
        names: names of the parameters.

    Returns:
        The rows, contiguous, as parts of the buffers. Each has room for a full block in its buffer.
    """
    reserve = [_block_numel(shape, mesh) for shape in shapes]
    packed: dict[int, Tensor] = {}
    group = compat.group_name(mesh.get_group())
    for flat in pack_parameters(
        list(rows), device=mesh.device_type, group=group, reserve=reserve, names=names
    ):
        packed.update(flat.views)
    return [packed[i] for i in range(len(rows))]


def _block_numel(shape: torch.Size, mesh: DeviceMesh) -> int:
    if not shape:
        return 1
    return rows_per_rank(shape[0], mesh.size()) * shape[1:].numel()
