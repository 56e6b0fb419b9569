"""`zpasses.shard`, which shards a model's parameters over a device mesh in place, and functions for
sharded models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.runtime.layout import layout_of
from zpasses.runtime.param_value import drop_cached, mark_edited
from zpasses.runtime.watched import set_shard
from zpasses.sharding.flat_buffers import check_pack_mb, next_batch, pack_local_rows
from zpasses.sharding.layouts import PlacementFn
from zpasses.sharding.module import parameters_on_host, sharded_parameters
from zpasses.sharding.shard_plan import ShardPlan

M = TypeVar("M", bound=nn.Module)


def shard(
    model: M,
    *,
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    pack_mb: float | None = None,
    shard_placement_fn: PlacementFn | None = None,
    grad_divide_factor: float | None = None,
    reshard_after_forward: int | None = None,
) -> M:
    """Shard every parameter of `model` over `mesh`, in place, and return `model`.

    Each parameter becomes a DTensor parameter with placement `Shard(0)` under its own name. Reading
    the parameter gathers it, and its gradient is averaged over the ranks. Dimension 0 need not be
    divisible by the world size. 0-dimensional parameters are replicated (`Replicate()`). Tied
    parameters are sharded once. Nothing is communicated, so every rank must hold the same values.

    A parameter that is a DTensor already, cut by `parallelize_module` over another dimension of the
    same device mesh, is sharded further: it becomes a DTensor over both dimensions. Reading it
    returns a DTensor on the mesh on which it was before.

    Parameters are sharded one after the other. Each full parameter is freed before the next one is
    sharded, if nothing else references it. So there is never a second full copy of the model.

    Call it before you build the optimizer. The model may be on the mesh's device or on meta. For a
    model on meta, call `to_empty` afterwards and initialise the shards: by `model.apply(fn)`, by
    `reset_parameters()`, or by any code inside `with zpasses.local_shards(model):`. Calls on
    submodules may use different dtypes and meshes. A later call on the whole model shards the
    remaining parameters.

    Args:
        mesh: one-dimensional; its size is the number of shards. With two dimensions, which need
            names, sharding is hybrid: the first has replicas of the model, the second the shards of
            each. Parameters are gathered within a replica, and gradients are averaged over all
            ranks of the mesh. Parameters become DTensors with placements `Replicate(), Shard(0)`.
        param_dtype: gather and compute in this dtype, e.g. torch.bfloat16. The shards, and so the
            optimizer, keep their dtype. Inputs are not cast: pass them in this dtype.
        reduce_dtype: reduce gradients in this dtype; None reduces in the dtype in which they were
            computed.
        ignored_params: parameters to leave unsharded. Their gradients are not reduced.
        shard_placement_fn: called with each parameter; returns `Shard(dim)` for the dimension to
            cut, or None for dimension 0. A parameter whose dimension 0 is smaller than the mesh is
            cut better along another one, because no rank is left with an empty shard then.
        grad_divide_factor: divide the sum of the gradients over the ranks of `mesh` by this number
            instead of their number. Experts that get tokens from all data-parallel ranks are
            sharded over fewer ranks, and divide by the number of all.
        reshard_after_forward: with stage 3, keep a part of each full parameter after forward, and
            gather it again in backward from this many consecutive ranks of the mesh, such as those
            of one node, instead of all. It takes the memory of the parts: the bytes of the full
            parameters, divided by this number. None keeps nothing. The ranks connect to each other
            here, so every rank must come to the call.
        pack_mb: put the shards of consecutive parameters, up to this many MiB, into one flat buffer
            per dtype; None gives each shard memory of its own. With `pack_mb`, the model may be on
            the host while the mesh is on accelerators: each rank then moves only its own shards.
            See `pack_shards`, which packs a model that is sharded already, or was on meta.

    Raises:
        ShardingError: for a model that cannot be sharded, before anything is changed. The message
            names the module.
        AgreementError: if another rank has made another device mesh of the same ranks, or gives
            other arguments. A rank that called earlier raises it when it next compiles, steps an
            optimizer or waits for other ranks. With `reshard_after_forward`: also if a rank does
            not come within the time limit of the mesh's process group
            (`init_process_group(timeout=...)`).
    """
    plan = ShardPlan.of(
        model,
        mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        ignored_params=ignored_params,
        pack_mb=pack_mb,
        shard_placement_fn=shard_placement_fn,
        grad_divide_factor=grad_divide_factor,
        reshard_after_forward=reshard_after_forward,
    )
    plan.apply()
    return model


def pack_shards(model: M, pack_mb: float) -> M:
    """Pack the shards of a sharded model into flat buffers, in place, and return `model`.

    Consecutive parameters, up to `pack_mb` MiB of shards, share one buffer per dtype. The buffers
    are laid out identically on every rank: each parameter has room for a full block of rows, padded
    with zeros, at the same offset, a multiple of 16 bytes. Parameters stay the same objects, so
    existing optimizers keep working. Shards on the host stay there. Operations that reassign memory
    (`to`, `to_empty`, a copy through DTensor) give each shard memory of its own again. Call it on
    every rank.

    Raises:
        ShardingError: for a model that is not sharded or is on meta, or if `pack_mb` is not a
            number above 0.
    """
    check_pack_mb(pack_mb)
    on_host = parameters_on_host(model)
    left = deque(param for param in sharded_parameters(model) if param not in on_host)
    if not left:
        raise ShardingError(
            f"{type(model).__name__} has no sharded parameter to pack. Call zpasses.shard first."
            if not on_host
            else f"all sharded parameters of {type(model).__name__} rest on the host, where none "
            "is packed. Leave this call out."
        )
    if any(param.is_meta for param in left):
        raise ShardingError(
            f"{type(model).__name__} is on meta and has no memory to pack. Call "
            "to_empty(device=...) first."
        )
    layouts = {id(param): layout_of(param) for param in left}
    while left:
        batch = next_batch(left, layouts, pack_mb)
        packed = pack_local_rows(
            [compat.local_of(param) for param in batch],
            [param.shape for param in batch],
            [layouts[id(param)] for param in batch],
        )
        for param, rows in zip(batch, packed, strict=True):
            set_shard(param, rows)
            drop_cached(param)
    return model


def invalidate(model: nn.Module) -> None:
    """Drop the gathered parameters that stages 1 and 2 cache, after code that is not torch's has
    written to the memory of shards, such as a kernel that was given `data_ptr()`.

    Call it on every rank. Edits by torch are detected without it, through `.data`, too.
    """
    for param in model.parameters():
        mark_edited(param, "zpasses.invalidate")
