"""DTensor: local tensors and specs, without dispatch and without checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta

from zpasses.compat.autograd import DisableTorchFunctionSubclass
from zpasses.compat.fake import FakeTensor, no_dispatch_modes


def make_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    """Builds a DTensor of global shape `shape`, contiguous, without communication or checks."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    spec = _SharedSpec(
        mesh, placements, tensor_meta=TensorMeta(shape, tuple(reversed(strides)), local.dtype)
    )
    return wrap_local(local, spec)


class _SharedSpec(DTensorSpec):
    """A spec whose deep copies are itself, as nothing changes a spec.

    Dynamo's guard compares a parameter's spec with a deep copy in every call. A copy of the mesh is
    compared rank by rank, and the same mesh at once.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedSpec:
        return self

    def _stable_hash(self) -> str:
        """What AOTAutograd's cache knows of a DTensor.

        torch names the whole tensor only. Where its rows are not divisible by the number of ranks,
        a rank would then run what another one compiled for more rows, as in a compiled step of an
        optimizer.
        """
        assert self.tensor_meta is not None
        own = local_range(self.tensor_meta.shape, self.mesh, self.placements)
        lengths = [length for _, length in own]
        return f"{super()._stable_hash()}{lengths}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain spec, so that checkpoints can be loaded without zpasses."""
        return plain_spec(self).__reduce_ex__(protocol)


def plain_spec(spec: DTensorSpec) -> DTensorSpec:
    """Returns an equal spec that a checkpoint may hold."""
    plain = DTensorSpec.__new__(DTensorSpec)
    plain.__dict__.update(spec.__dict__)
    return plain


def wrap_local(local: Tensor, spec: DTensorSpec, kind: type[DTensor] = DTensor) -> DTensor:
    """Builds a DTensor around `local` without dispatch (`from_local` is 20 times slower).

    Args:
        kind: the class of the result, DTensor or a subclass.
    """
    # Not by a call of the class: DTensor's `__init__` does nothing, behind two wrappers of Dynamo
    # and export that take longer than the rest.
    made: DTensor = _new(kind, local, spec, requires_grad=False)
    return made


_new: Any = DTensor.__new__


def concatenate_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Returns the mesh of the dimensions of `outer`, followed by those of `inner`.

    Both are submeshes of one mesh, with names.

    Raises:
        RuntimeError: if they overlap, are of different meshes, or have no names.
    """
    if outer.mesh_dim_names is None or inner.mesh_dim_names is None:
        raise RuntimeError("the dimensions of the meshes have no names")
    with no_dispatch_modes():  # a mesh holds real tensors of ranks
        return DeviceMesh._concatenate([outer, inner])


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that a mesh was cut from, or the mesh itself."""
    return cast(DeviceMesh, cast(Any, mesh)._get_root_mesh())


def submesh_of_dimension(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    """Returns the one-dimensional submesh of this rank along a dimension of a mesh with names."""
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[dim]]


def mesh_ranks(mesh: DeviceMesh) -> list[int]:
    """Returns the global ranks of a mesh, also inside a fake mode."""
    with no_dispatch_modes():
        return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Returns the placement of a dimension that a later dimension of the mesh has cut before.

    Args:
        split_factor: into how many pieces it was cut before.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return cast(Placement, _StridedShard(dim, split_factor=split_factor))


def local_range(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> list[tuple[int, int]]:
    """Returns start and length of this rank's part of each dimension of a DTensor.

    A strided placement cuts what the later dimensions of the mesh have left. No other dimension may
    be cut in strides.

    Args:
        shape: shape of the whole tensor.
    """
    ranges = [(0, size) for size in shape]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    cuts = [(_is_strided(each), at) for at, each in enumerate(placements) if _cut_dim(each) >= 0]
    for _, at in sorted(cuts):
        dim = _cut_dim(placements[at])
        start, length = ranges[dim]
        block = -(-length // mesh.size(at))
        before = min(coordinate[at] * block, length)
        ranges[dim] = (start + before, min(block, length - before))
    return ranges


def has_empty_part(spec: DTensorSpec) -> bool:
    """Whether a rank holds no element of a tensor that has elements. Equal on all ranks."""
    known: bool | None = spec.__dict__.get("_zpasses_has_empty_part")
    if known is None:
        known = _cuts_to_nothing(spec)
        cast(Any, spec)._zpasses_has_empty_part = known
    return known


def _cuts_to_nothing(spec: DTensorSpec) -> bool:
    sizes = list(spec.shape)
    if 0 in sizes:
        return False
    for placement, ranks in zip(spec.placements, spec.mesh.shape, strict=True):
        dim = _cut_dim(placement)
        if dim >= 0:  # the last rank has the least
            sizes[dim] -= (ranks - 1) * -(-sizes[dim] // ranks)
    return min(sizes, default=1) <= 0


def _is_strided(placement: Placement) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _cut_dim(placement: Placement) -> int:
    return int(getattr(placement, "dim", -1)) if not placement.is_partial() else -1


def check_items(check: Callable[[DTensor], None]) -> None:
    """Call `check` with each DTensor whose `item()` is called, in place of an earlier check."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check(args[0])
        return op(local_of(args[0]))

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = handler


def look_for_nan_in_own_rows() -> None:
    """Let autograd's anomaly mode look for NaN in gradients that are DTensors: in this rank's part,
    so only the ranks raise that have one.

    It calls `isnan(grad)._is_any_true().item()`, for which DTensor has no strategy.
    """

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return op(local_of(args[0]))

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._is_any_true.default] = handler


FIND_OVERFLOWS: Any = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""What `GradScaler` runs on the gradients of a device and dtype."""


def share_overflows() -> None:
    """Let all ranks of all meshes of an optimizer's gradients know of an overflow that
    `GradScaler` finds on one, so that they skip the same steps.

    torch shares it over the mesh of the first gradient only, and not along its replicated
    dimensions, as if plain tensors were equal on all ranks.
    """

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grads, found_inf, *others = args
        sharded = [each for each in grads if isinstance(each, DTensor)]
        op([local_of(e) if isinstance(e, DTensor) else e for e in grads], found_inf, *others)
        for mesh in dict.fromkeys(each.device_mesh for each in sharded):
            found = found_inf.to(mesh.device_type)  # gradients may rest on the host
            for group in mesh.get_all_groups():
                if group.size() > 1:
                    dist.all_reduce(found, dist.ReduceOp.MAX, group)
            found_inf.copy_(found)

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[FIND_OVERFLOWS] = handler


def is_placement_error(error: BaseException) -> bool:
    """Whether DTensor has no way to run an operator on tensors that are placed like its arguments.

    Only the text says so.
    """
    text = str(error)
    signs = ("Sharding propagation failed", "sharding strategy", "not supported with DTensor")
    return any(sign in text for sign in signs)


def clear_sharding_prop_cache() -> None:
    """Clears DTensor's sharding propagation cache.

    Its entries hold local shapes of one rank, but its keys do not name the rank.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def local_of(dtensor: DTensor) -> Tensor:
    """Returns the local tensor itself: no autograd node, same version counter."""
    return dtensor._local_tensor


def local_part(value: Any) -> Any:
    """Returns the rows of a DTensor that this rank holds, and other values as they are."""
    return value._local_tensor if isinstance(value, DTensor) else value


def locals_of(dtensors: Sequence[DTensor]) -> list[Tensor]:
    """Returns `local_of` each DTensor."""
    return [each._local_tensor for each in dtensors]


def version_of(value: object) -> int:
    """Returns how often a tensor, or a view of it, was written to; 0 if nothing counts it."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return 0
    return value._version


def versions_of(dtensors: Sequence[DTensor]) -> list[int]:
    """Returns the version of each local tensor.

    Raises:
        RuntimeError: if one was made in inference mode.
    """
    return [each._local_tensor._version for each in dtensors]


def set_local(dtensor: DTensor, local: Tensor) -> None:
    """Replaces a DTensor's local tensor by one of the same shape and dtype."""
    if local.storage_offset() != dtensor.storage_offset():  # torch compares the two in Dynamo
        with DisableTorchFunctionSubclass():
            _set_data(dtensor, wrap_local(local, spec_of(dtensor)))
    dtensor._local_tensor = local


def swap_local(dtensor: DTensor, local: Tensor) -> None:
    """Gives a DTensor another local tensor of the same shape and dtype, maybe on another device,
    for a while in which Dynamo does not see it.
    """
    dtensor._local_tensor = local


def replace_dtensor(target: Any, value: DTensor) -> None:
    """Gives a DTensor, in place, the local tensor, dtype and device of another one, which nothing
    else may reference, and which requires no grad.

    Whether the first requires grad stays, and so do its hooks where torch can change the dtype and
    the device of a tensor: not from and to the meta device.
    """
    local, spec = local_of(value), spec_of(value)
    with DisableTorchFunctionSubclass():
        if torch._has_compatible_shallow_copy_type(target, value):
            _set_data(target, value)
        else:
            value.requires_grad_(target.requires_grad)
            cast(Any, torch._C)._swap_tensor_impl(target, value)
    target._local_tensor, target._spec = local, spec


_set_data: Any = getattr(Tensor, "data").__set__  # noqa: B009


def address(tensor: Tensor) -> int:
    """Returns the address of a tensor's first element; of a fake tensor, an id of its memory."""
    return storage_id(tensor) if isinstance(tensor, FakeTensor) else tensor.data_ptr()


def storage_id(tensor: Tensor) -> int:
    """Returns an id of the memory that a tensor shares with its views.

    The id is valid as long as one of them is alive. Unlike an address, it also identifies empty
    memory.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # of a transform of torch.func
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return int(tensor.untyped_storage()._cdata)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill its part of the memory, in any order."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in steps) + 1 == tensor.numel()


def spec_of(dtensor: DTensor) -> DTensorSpec:
    return dtensor._spec


def set_spec(dtensor: Any, spec: DTensorSpec) -> None:
    """Gives a DTensor another spec, equal to its own."""
    dtensor._spec = spec
