"""Flat buffers: several tensors laid end to end in one allocation, and returned as views of it.

Each tensor is copied from where it is to its place in the buffer. So the device needs memory for
the buffer only, and the host concatenates nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.graph.dialect import rows_per_rank
from zpasses.graph.padding import rounded_up
from zpasses.runtime.layout import ParamLayout

_MIB = 1 << 20

P = TypeVar("P", bound=Tensor)


@dataclass(frozen=True)
class FlatBuffer:
    """One flat buffer."""

    buffer: Tensor
    """[elements], on the device; zeros between the tensors."""
    views: dict[int, Tensor]
    """Position in the packed list -> that tensor's values, in its shape, in the buffer's memory.

    Each view is contiguous and does not require grad. It has a storage and a version counter of its
    own, so writing to one view does not change the version of the others."""


def pack_parameters(
    tensors: Sequence[Tensor],
    *,
    device: torch.device | str | None = None,
    align_bytes: int = 16,
    reserve: Sequence[int] | None = None,
) -> list[FlatBuffer]:
    """Copy tensors end to end into one flat buffer per dtype.

    Args:
        tensors: strided tensors of any shapes, dtypes and strides, on the host or the device, none
            on meta. A tensor that is listed twice (a tied parameter) is copied once.
        device: device of the buffers; None takes the device of the first tensor.
        align_bytes: every tensor starts, and every buffer ends, at a multiple of this many bytes.
        reserve: number of elements to reserve per tensor, at least its own number. The rest is
            zero.

    Returns:
        One FlatBuffer per dtype, in the order in which dtypes first appear. Its tensors do not
        require grad.

    Raises:
        ValueError: for tensors on meta, a reservation smaller than its tensor, or an alignment that
            is not a multiple of the element size.
    """
    room = _room(tensors, reserve)
    target = tensors[0].device if tensors and device is None else device
    buffers = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        if align_bytes < 1 or align_bytes % dtype.itemsize:
            raise ValueError(
                f"pack_parameters: align_bytes is {align_bytes}; expected a multiple of the "
                f"{dtype.itemsize} bytes of {dtype}."
            )
        grain, end, offsets = align_bytes // dtype.itemsize, 0, dict[int, int]()
        own = {i: tensor for i, tensor in enumerate(tensors) if tensor.dtype == dtype}
        for key in dict.fromkeys(map(id, own.values())):
            offsets[key] = end
            end += rounded_up(room[key], grain)
        buffer = torch.zeros(end, dtype=dtype, device=target)
        views = {i: _copied(tensor, buffer, offsets[id(tensor)]) for i, tensor in own.items()}
        buffers.append(FlatBuffer(buffer, views))
    return buffers


def _room(tensors: Sequence[Tensor], reserve: Sequence[int] | None) -> dict[int, int]:
    """Returns the elements to reserve per tensor, by its identity."""
    room: dict[int, int] = {}
    for i, tensor in enumerate(tensors):
        if tensor.is_meta:
            raise ValueError(
                f"pack_parameters: tensor {i} ({list(tensor.shape)}) is on meta and has no "
                "values. Call to_empty() first."
            )
        wanted = tensor.numel() if reserve is None else reserve[i]
        if wanted < tensor.numel():
            raise ValueError(
                f"pack_parameters: reserve[{i}] is {wanted}, but the tensor has "
                f"{tensor.numel()} elements. Reserve at least as many."
            )
        room[id(tensor)] = max(room.get(id(tensor), 0), wanted)
    return room


def _copied(tensor: Tensor, buffer: Tensor, offset: int) -> Tensor:
    """Copy a tensor into a buffer. Returns that part of it as a tensor with a storage of its own,
    which keeps the buffer's memory alive.

    A plain view would share the version counter and the storage with the other parts. `torch.save`
    would then write the whole storage, and `copy.deepcopy` fails on DTensors with a storage offset.
    """
    part = buffer.narrow(0, offset, tensor.numel())
    # Unlike Tensor.copy_, the operator also takes fake tensors of a device that torch was not
    # built for.
    torch.ops.aten.copy_(part.view(tensor.shape), tensor.detach())
    if not tensor.numel() or isinstance(buffer, compat.FakeTensor):
        return buffer.new_empty(tensor.shape)
    return from_dlpack(part.view(torch.uint8)).view(buffer.dtype).view(tensor.shape).data


# --- shards ---------------------------------------------------------------------------------------
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
    shards: Sequence[Tensor], shapes: Sequence[torch.Size], layouts: Sequence[ParamLayout]
) -> list[Tensor]:
    """Copy this rank's shards of parameters of one mesh into flat buffers on the mesh's device.

    The buffers are laid out identically on every rank, regardless of how many rows it holds.

    Args:
        shards: this rank's shard of each parameter, on the host or the device.
        shapes: shapes of the full parameters.
        layouts: how they are cut.

    Returns:
        The shards, as parts of the buffers, with the cut dimension first in memory. Each has room
        for a full block in its buffer.
    """
    if not shards:
        return []
    reserve = [_block_numel(shape, layout) for shape, layout in zip(shapes, layouts, strict=True)]
    rows = [layout.rows_first(shard) for layout, shard in zip(layouts, shards, strict=True)]
    flats = pack_parameters(rows, device=layouts[0].mesh.device_type, reserve=reserve)
    packed = {i: view for flat in flats for i, view in flat.views.items()}
    return [layout.rows_back(packed[i]) for i, layout in enumerate(layouts)]


def _block_numel(shape: torch.Size, layout: ParamLayout) -> int:
    if not shape:
        return 1
    block = rows_per_rank(layout.rows(shape), layout.mesh.size())
    gathered = layout.gathered_shape(shape)
    return (
        block * torch.Size(size for dim, size in enumerate(gathered) if dim != layout.dim).numel()
    )
