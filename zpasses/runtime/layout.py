"""Where the pieces of a sharded parameter lie: which dimension is cut, and over which meshes.

`zpasses.shard` cuts a parameter over one mesh. The parameter may be a piece already, cut by tensor
or expert parallelism over another mesh of the same ranks. A read then gathers that piece, not the
whole parameter. With hybrid sharding, several replicas of the model are sharded the same way, and
gradients are averaged over them. The sharded parameter is one DTensor over all these meshes, as
FSDP2 makes it.

The dialect and all passes see parameters that are cut along dimension 0. For a parameter that is
cut along another dimension, they see that dimension first: shards are stored in that order, so
neither the exchange of the dimensions nor the collective costs a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from zpasses import compat
from zpasses.graph.dialect import rows_per_rank

LAYOUT_ATTRIBUTE = "_zpasses_layout"


@dataclass(frozen=True)
class ParamLayout:
    """How a parameter is cut. Equal for all parameters of any shape that are cut the same way."""

    mesh: DeviceMesh
    """One-dimensional: the ranks that gather the parameter and average its gradient first."""
    dim: int = 0
    """The dimension that is cut over `mesh`."""
    inner_mesh: DeviceMesh | None = None
    """The mesh over which the parameter was a DTensor before it was sharded: that of tensor or
    expert parallelism. None for a plain parameter."""
    inner_placements: tuple[Placement, ...] = ()
    """Its placements on `inner_mesh`."""
    hybrid_mesh: DeviceMesh | None = None
    """Two-dimensional (replicate, shard), with `mesh` as its second dimension; None without
    replicas."""
    whole_mesh: DeviceMesh = field(default=cast(DeviceMesh, None))
    """The mesh of the sharded parameter: `hybrid_mesh` or `mesh`, followed by the dimensions of
    `inner_mesh`."""
    grad_scale: float = 1.0
    """Factor on the average of the gradients over `mesh` and all replicas."""
    reshard_group: str | None = None
    """Process group of consecutive ranks of `mesh`, from which stage 3 gathers the parameter again
    in backward; None for all ranks of `mesh`."""
    sharding_groups: tuple[str, ...] = field(init=False)
    """Names of the process groups of `mesh`, and of the ranks that hold equal shards if there are
    replicas."""
    group_names: tuple[str, ...] = field(init=False)
    """Process groups of the dimensions of `whole_mesh`. Two meshes over the same ranks compare
    equal, but may have different groups."""
    groups: tuple[weakref.ref[dist.ProcessGroup], ...] = field(init=False, repr=False)
    """The same groups. Those of a new world have the names of the groups that were destroyed."""
    cuts: tuple[tuple[int, int, int], ...] = field(init=False)
    """For each dimension of `inner_mesh` that cuts the parameter: the dimension of the parameter,
    the number of pieces, and the number of this rank's piece."""

    def __post_init__(self) -> None:
        hybrid = self.hybrid_mesh
        if self.whole_mesh is None:
            outer = self.mesh if hybrid is None else hybrid
            whole = (
                outer
                if self.inner_mesh is None
                else compat.concatenate_meshes(outer, self.inner_mesh)
            )
            object.__setattr__(self, "whole_mesh", whole)
        names = [compat.group_name(self.mesh.get_group())]
        if hybrid is not None and hybrid.size(0) > 1:
            names.append(compat.group_name(hybrid.get_group(0)))
        object.__setattr__(self, "sharding_groups", tuple(names))
        for at in range(self.inner_mesh.ndim if self.inner_mesh is not None else 0):
            names.append(compat.group_name(cast(DeviceMesh, self.inner_mesh).get_group(at)))
        object.__setattr__(self, "group_names", tuple(names))
        groups = tuple(weakref.ref(compat.process_group(name)) for name in names)
        object.__setattr__(self, "groups", groups)
        # Kept, because Dynamo traces reads.
        coordinate = self.inner_mesh.get_coordinate() if self.inner_mesh is not None else None
        cuts = tuple(
            (placement.dim, self.inner_mesh.size(at), coordinate[at])
            for at, placement in enumerate(self.inner_placements)
            if self.inner_mesh is not None and coordinate is not None
            if isinstance(placement, Shard)
        )
        object.__setattr__(self, "cuts", cuts)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamLayout:
        return self

    # --- shapes -----------------------------------------------------------------------------------
    def inner_range(self, length: int, dim: int) -> tuple[int, int]:
        """Returns start and length of this rank's piece on `inner_mesh` of a dimension.

        Args:
            length: its length in the whole parameter.
            dim: its number.
        """
        start = 0
        for cut, pieces, own in self.cuts:
            if cut == dim:
                block = rows_per_rank(length, pieces)
                before = min(own * block, length)
                start, length = start + before, min(block, length - before)
        return start, length

    def gathered_shape(self, shape: torch.Size) -> torch.Size:
        """Returns the shape of what a read gathers.

        Args:
            shape: shape of the whole parameter.
        """
        if self.inner_mesh is None:
            return shape
        return torch.Size(self.inner_range(size, dim)[1] for dim, size in enumerate(shape))

    def rows(self, shape: torch.Size) -> int:
        """Returns the length of the cut dimension of what a read gathers; 0 if there is none.

        Args:
            shape: shape of the whole parameter.
        """
        return self.inner_range(shape[self.dim], self.dim)[1] if len(shape) else 0

    def row_range(self, shape: torch.Size) -> tuple[int, int]:
        """Returns start and number of this rank's rows, of `rows(shape)`."""
        rows = self.rows(shape)
        block = rows_per_rank(rows, self.mesh.size())
        start = min(self.mesh.get_local_rank() * block, rows)
        return start, min(block, rows - start)

    def placements(self, ndim: int) -> tuple[Placement, ...]:
        """Returns the placements of the sharded parameter on `whole_mesh`.

        Args:
            ndim: number of its dimensions.
        """
        replicas = () if self.hybrid_mesh is None else (Replicate(),)
        if not ndim:
            return (*replicas, Replicate(), *self.inner_placements)
        factor = 1
        for cut, pieces, _ in self.cuts:
            factor *= pieces if cut == self.dim else 1
        outer: Placement = (
            Shard(self.dim) if factor == 1 else compat.strided_shard(self.dim, factor)
        )
        return (*replicas, outer, *self.inner_placements)

    # --- pieces -----------------------------------------------------------------------------------
    def gathered_part(self, full: Tensor) -> Tensor:
        """Returns the view of a whole parameter that a read on this rank gathers."""
        for dim in {cut for cut, _, _ in self.cuts}:
            full = full.narrow(dim, *self.inner_range(full.shape[dim], dim))
        return full

    def local_part(self, full: Tensor) -> Tensor:
        """Returns the view of a whole parameter that is this rank's shard."""
        part = self.gathered_part(full)
        return part.narrow(self.dim, *self.row_range(full.shape)) if full.dim() else part

    def rows_first(self, local: Tensor) -> Tensor:
        """Returns a view of a shard, or of a gathered parameter, with the cut dimension first."""
        return local.movedim(self.dim, 0) if self.dim else local

    def rows_back(self, rows: Tensor) -> Tensor:
        """The inverse of `rows_first`."""
        return rows.movedim(0, self.dim) if self.dim else rows

    def owned(self, local: Tensor) -> Tensor:
        """Returns a copy of a shard whose memory has the cut dimension first."""
        rows = self.rows_first(local)
        return self.rows_back(rows.clone(memory_format=torch.contiguous_format))

    def wrap_piece(self, piece: Tensor, shape: torch.Size) -> DTensor:
        """Wraps what a read gathers as a DTensor on `inner_mesh`. Differentiable.

        A gradient that is a sum over `inner_mesh` is reduced over it in backward.

        Args:
            piece: what was gathered.
            shape: shape of the whole parameter.
        """
        strides, step = [0] * len(shape), 1
        order = sorted(range(len(shape)), key=lambda dim: (dim != self.dim, dim))
        for dim in reversed(order):
            strides[dim] = step
            step *= max(shape[dim], 1)
        return DTensor.from_local(
            piece,
            self.inner_mesh,
            self.inner_placements,
            run_check=False,
            shape=shape,
            stride=tuple(strides),
        )

    def wrap(self, local: Tensor, shape: torch.Size) -> DTensor:
        """Wraps a shard as a DTensor.

        Args:
            local: this rank's shard.
            shape: shape of the whole parameter.
        """
        return compat.make_dtensor(local, self.whole_mesh, self.placements(len(shape)), shape)


def layout_of(param: DTensor) -> ParamLayout:
    """Returns how a sharded parameter is cut."""
    known: ParamLayout | None = getattr(param, LAYOUT_ATTRIBUTE, None)
    if known is None:
        mesh, placement = param.device_mesh, param.placements[-1]
        dim = placement.dim if isinstance(placement, Shard) else 0
        known = (
            ParamLayout(mesh, dim)
            if mesh.ndim == 1
            else ParamLayout(compat.submesh_of_dimension(mesh, 1), dim, hybrid_mesh=mesh)
        )
    return known


def rows_of(param: DTensor) -> Tensor:
    """Returns the local tensor of a parameter as the dialect sees it: the cut dimension first."""
    return layout_of(param).rows_first(compat.local_of(param))


def rows_of_all(params: Sequence[DTensor]) -> list[Tensor]:
    """Returns `rows_of` each parameter. Every call of compiled code does this."""
    return [
        layout.rows_first(local) if (layout := layout_of(param)).dim else local
        for param, local in zip(params, compat.locals_of(params), strict=True)
    ]
