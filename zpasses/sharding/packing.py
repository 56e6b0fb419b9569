"""Packing of shards into flat buffers: which shards share a buffer, and their offsets.

The layout is the same on every rank, regardless of how many rows the rank holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.graph.ops import rows_per_rank
from zpasses.runtime.layout import ParamLayout
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


def next_batch(
    params: deque[P], layouts: Mapping[int, ParamLayout], pack_mb: float | None
) -> list[P]:
    """Remove the parameters of the next flat buffer from the front of a queue, and return them.

    A batch holds as many parameters as fit `pack_mb`, or one if that is None. A parameter of
    another mesh ends the batch. Sizes are those of full blocks, so that ranks with fewer rows get
    the same batches.

    Args:
        layouts: how the parameters are cut, by their identity.
    """

    def nbytes(param: P) -> int:
        return _block_numel(param.shape, layouts[id(param)]) * param.element_size()

    batch = [params.popleft()]
    mesh = layouts[id(batch[0])].mesh
    room = (pack_mb or 0) * _MIB - nbytes(batch[0])
    while params and pack_mb is not None and layouts[id(params[0])].mesh == mesh:
        room -= nbytes(params[0])
        if room < 0:
            break
        batch.append(params.popleft())
    return batch


def pack_local_rows(
    shards: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    names: Sequence[str],
    layouts: Sequence[ParamLayout],
) -> list[Tensor]:
    """Copy this rank's shards of parameters of one mesh into flat buffers on the mesh's device.

    Args:
        shards: this rank's shard of each parameter, on the host or the device.
        shapes: shapes of the full parameters.
        names: names of the parameters.
        layouts: how they are cut.

    Returns:
        The shards, as parts of the buffers, with the cut dimension first in memory. Each has room
        for a full block in its buffer.
    """
    mesh = layouts[0].mesh if layouts else None
    if mesh is None:
        return []
    reserve = [_block_numel(shape, layout) for shape, layout in zip(shapes, layouts, strict=True)]
    rows = [layout.rows_first(shard) for layout, shard in zip(layouts, shards, strict=True)]
    packed: dict[int, Tensor] = {}
    group = compat.group_name(mesh.get_group())
    for flat in pack_parameters(
        rows, device=mesh.device_type, group=group, reserve=reserve, names=names
    ):
        packed.update(flat.views)
    return [layout.rows_back(packed[i]) for i, layout in enumerate(layouts)]


def _block_numel(shape: torch.Size, layout: ParamLayout) -> int:
    if not shape:
        return 1
    block = rows_per_rank(layout.rows(shape), layout.mesh.size())
    gathered = layout.gathered_shape(shape)
    return (
        block * torch.Size(size for dim, size in enumerate(gathered) if dim != layout.dim).numel()
    )
