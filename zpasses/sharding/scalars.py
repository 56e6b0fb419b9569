"""`item()` of a value of which each rank has a part, such as the norm of a gradient: refused.

torch returns this rank's part. `float(value)` and `if value:` call `item()`, too. A sum over the
ranks inside of `item()` would hang in a program that calls it on one rank, for a log.
"""

from __future__ import annotations

import weakref

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import ShardingError

_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def refuse_parts_as_numbers(mesh: DeviceMesh) -> None:
    """From now on, `item()` of a DTensor over this mesh raises ShardingError if it has not one
    value on all ranks. Other meshes are left alone.
    """
    _meshes.add(mesh)
    compat.check_items(_check)
    compat.look_for_nan_in_own_rows()
    compat.share_overflows()


def _check(value: DTensor) -> None:
    mesh = value.device_mesh
    parts = [
        placement
        for placement, size in zip(value.placements, mesh.shape, strict=True)
        if size > 1 and not placement.is_replicate()
    ]
    if parts and mesh in _meshes:
        raise ShardingError(
            f"item() of a DTensor with placements {value.placements}, of which each rank has a "
            "part, so the number would differ between ranks. Call full_tensor() first, on every "
            "rank: param.grad.norm().full_tensor().item(). For the norm of all gradients, "
            "zpasses.clip_grad_norm_ returns a plain tensor."
        )
