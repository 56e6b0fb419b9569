"""Which layout each parameter of a call of `zpasses.shard` gets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.runtime.layout import ParamLayout

PlacementFn = Callable[[nn.Parameter], Shard | None]


def check_divide_factor(factor: object) -> None:
    """Raise ShardingError unless `factor` is None or a number above 0."""
    if factor is not None and not (
        isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor > 0
    ):
        raise ShardingError(
            f"grad_divide_factor is {factor!r}; expected a number above 0 by which to divide the "
            "sum of the gradients, or None for the size of the mesh."
        )


def check_reshard_size(size: object, ranks: int) -> None:
    """Raise ShardingError unless `size` is None or a number of ranks to gather from again.

    Args:
        size: argument `reshard_after_forward` of `zpasses.shard`.
        ranks: ranks over which the model is sharded.
    """
    if isinstance(size, bool):
        raise ShardingError(
            f"reshard_after_forward is {size}; expected a number of ranks, or None. Whether full "
            'parameters are freed after forward is decided where the model is compiled: options={"'
            'zero_stage": 3} frees them, 2 keeps them.'
        )
    if size is not None and not (isinstance(size, int) and 1 < size < ranks and ranks % size == 0):
        raise ShardingError(
            f"reshard_after_forward is {size!r}; expected None, or a number of ranks above 1 that "
            f"divides the {ranks} ranks over which the model is sharded and is smaller. To gather "
            "from all of them again, leave it out; to keep full parameters, compile with "
            'options={"zero_stage": 2}.'
        )


def cut_dims(
    params: Iterable[nn.Parameter], names: Mapping[int, str], placement_fn: PlacementFn | None
) -> dict[int, int]:
    """Returns the dimension of each parameter that is cut, by the parameter's identity.

    Args:
        params: full parameters, and DTensors of tensor or expert parallelism.
        names: their names, by their identity.
        placement_fn: argument `shard_placement_fn` of `zpasses.shard`.

    Raises:
        ShardingError: for a dimension that cannot be cut.
    """
    return {id(param): _cut_dim(param, names[id(param)], placement_fn) for param in params}


def layouts_of(
    params: Iterable[nn.Parameter],
    names: Mapping[int, str],
    mesh: DeviceMesh,
    hybrid_mesh: DeviceMesh | None,
    dims: Mapping[int, int],
    divide_factor: float | None,
    reshard_group: str | None = None,
) -> dict[int, ParamLayout]:
    """Returns the layout of each parameter, by its identity. Equal layouts are one object.

    Args:
        params: full parameters, and DTensors of tensor or expert parallelism.
        names: their names, by their identity.
        mesh: one-dimensional, over which they are sharded.
        hybrid_mesh: two-dimensional (replicate, shard), with `mesh` as its second dimension; None
            without replicas.
        dims: what `cut_dims` returns.
        divide_factor: argument `grad_divide_factor` of `zpasses.shard`.
        reshard_group: process group from which stage 3 gathers again.

    Raises:
        ShardingError: for a DTensor that cannot be sharded further.
    """
    outer = hybrid_mesh or mesh
    make = functools.partial(
        ParamLayout,
        mesh,
        hybrid_mesh=hybrid_mesh,
        grad_scale=1.0 if divide_factor is None else outer.size() / divide_factor,
        reshard_group=reshard_group,
    )
    known: dict[Any, ParamLayout] = {}
    found: dict[int, ParamLayout] = {}
    for param in params:
        name, dim = names[id(param)], dims[id(param)]
        if isinstance(param, DTensor):
            _check_piece(param, name, outer)
            key: Any = dim, param.device_mesh, param.placements
            if key not in known:
                known[key] = _piece_layout(make, param, name, mesh, dim)
        elif (key := dim) not in known:
            known[key] = make(dim)
        found[id(param)] = known[key]
    return found


def _piece_layout(
    make: Callable[..., ParamLayout], param: DTensor, name: str, mesh: DeviceMesh, dim: int
) -> ParamLayout:
    try:
        return make(dim, param.device_mesh, param.placements)
    except RuntimeError as error:
        raise ShardingError(
            f"parameter {name} is a DTensor on {param.device_mesh}, which does not go together "
            f"with the mesh to shard over, {mesh}: {error}. Make one device mesh of all dimensions,"
            ' mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp")); pass '
            'mesh["tp"] to parallelize_module and mesh["dp"] to zpasses.shard.'
        ) from error


def _cut_dim(param: nn.Parameter, name: str, placement_fn: PlacementFn | None) -> int:
    placement = placement_fn(param) if placement_fn is not None else None
    if placement is None:
        return 0
    if type(placement) is not Shard:
        raise ShardingError(
            f"shard_placement_fn returned {placement!r} for parameter {name}; expected a "
            "torch.distributed.tensor.Shard, or None to cut dimension 0."
        )
    dim = placement.dim + param.dim() if placement.dim < 0 else placement.dim
    if not param.dim():
        return 0
    if not 0 <= dim < param.dim():
        raise ShardingError(
            f"shard_placement_fn returned {placement} for parameter {name}, which has "
            f"{param.dim()} dimensions {tuple(param.shape)}. Return Shard(dim) with dim below "
            f"{param.dim()}, or None to cut dimension 0."
        )
    return dim


def _check_piece(param: DTensor, name: str, mesh: DeviceMesh) -> None:
    """Raise ShardingError unless a DTensor parameter is the piece of a rank."""
    for placement in param.placements:
        if type(placement) not in (Shard, Replicate):
            raise ShardingError(
                f"parameter {name} is a DTensor with placements {param.placements} on "
                f"{param.device_mesh}; zpasses.shard takes Shard and Replicate. If FSDP2 or "
                "another call of zpasses.shard has sharded it already, shard it once."
            )
    shared = set(compat.mesh_ranks(param.device_mesh)) & set(compat.mesh_ranks(mesh))
    if len(shared) > 1:
        raise ShardingError(
            f"parameter {name} is a DTensor already ({param.placements} on {param.device_mesh}) "
            f"over ranks of {mesh}, the mesh to shard over. A model is sharded over ranks that "
            "hold the same parameters: shard over another dimension of the device mesh than tensor "
            'parallelism uses, e.g. mesh["dp"].'
        )
