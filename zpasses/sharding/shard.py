"""`zpasses.shard`, which shards a model's parameters over a device mesh in place, and functions for
sharded models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.ranks.meshes import compare_shard_calls, consecutive_ranks, register_mesh
from zpasses.runtime.layout import ParamLayout, layout_of
from zpasses.runtime.param_value import as_sharded_parameter, drop_cached, mark_edited
from zpasses.runtime.watched import set_shard
from zpasses.runtime.windows import register_step_window
from zpasses.sharding.layouts import (
    PlacementFn,
    check_divide_factor,
    check_reshard_size,
    cut_dims,
    layouts_of,
)
from zpasses.sharding.module import (
    ShardedModule,
    add_reads,
    mark_ignored,
    sharded_parameters,
)
from zpasses.sharding.packing import check_pack_mb, next_batch, pack_local_rows
from zpasses.sharding.param_spec import ParamShardSpec, own_part
from zpasses.sharding.registrations import install_registration_hooks
from zpasses.sharding.replaced_params import mark_replaced, sharded_form
from zpasses.sharding.saved_shards import install_optimizer_state_check
from zpasses.sharding.scalars import refuse_parts_as_numbers
from zpasses.sharding.wrappers import check_no_ddp_inside, prepare_for_wrappers

__all__ = ["invalidate", "pack_shards", "shard"]

REPLICATE_DIMENSIONS = ("replicate", "dp_replicate")
"""Names of a mesh dimension that say that it holds replicas, as for `zpasses capture --mesh`."""

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
    _check_arguments(mesh, param_dtype, reduce_dtype)
    check_divide_factor(grad_divide_factor)
    check_pack_mb(pack_mb)
    check_reshard_size(reshard_after_forward, mesh.size(mesh.ndim - 1))
    ignored = {id(param) for param in ignored_params}
    places, params = _find(model, ignored)
    if not params:
        raise ShardingError(_nothing_to_do(model))
    register_mesh(mesh)
    _check_order(mesh)  # after the comparison, which tells the other ranks
    check_no_ddp_inside(model)
    for path, module in model.named_modules():
        _check_module(path, module, ignored)
    _check_parameters(places, params, mesh, pack_mb)
    names = {key: found[0][0] for key, found in places.items()}
    hybrid_mesh = mesh if mesh.ndim == 2 else None
    shard_mesh = mesh if hybrid_mesh is None else compat.submesh_of_dimension(mesh, 1)
    dims = cut_dims(params, names, shard_placement_fn)
    compare_shard_calls(
        mesh,
        {
            "param_dtype": str(param_dtype),
            "reduce_dtype": str(reduce_dtype),
            "grad_divide_factor": mesh.size() if grad_divide_factor is None else grad_divide_factor,
            "reshard_after_forward": reshard_after_forward,
            "pack_mb": pack_mb,
            "shard_placement_fn": {names[key]: f"Shard({dim})" for key, dim in dims.items() if dim},
        },
    )
    reshard_group = None
    if reshard_after_forward is not None:
        reshard_group = consecutive_ranks(shard_mesh, reshard_after_forward)
    layouts = layouts_of(
        params,
        names,
        shard_mesh,
        hybrid_mesh,
        dims,
        grad_divide_factor,
        reshard_group,
    )
    _check_tied(places, params, layouts)
    mark_ignored(ignored_params)

    group = compat.group_name(shard_mesh.get_group())
    specs: dict[nn.Module, list[ParamShardSpec]] = {}
    while params:
        batch = next_batch(params, layouts, pack_mb)
        for key, made in _shard_parameters(batch, names, layouts, pack_mb).items():
            for _, module, name in places.pop(key):
                module._parameters[name] = made
                floating = made.is_floating_point()
                spec = ParamShardSpec(
                    name,
                    layouts[key],
                    group,
                    param_dtype if floating else None,
                    reduce_dtype if floating else None,
                    is_scalar=not made.dim(),
                )
                specs.setdefault(module, []).append(spec)
        batch.clear()  # frees the full parameters
    for module, own in specs.items():
        add_reads(module, own)
    prepare_for_wrappers(model)
    install_optimizer_state_check()  # first: a step that it refuses has not begun
    register_step_window(
        [(module, spec.name) for module, own in specs.items() for spec in own],
        {module: path for path, module in model.named_modules()},
    )
    install_registration_hooks()
    refuse_parts_as_numbers(mesh)
    return model


def pack_shards(model: M, pack_mb: float) -> M:
    """Pack the shards of a sharded model into flat buffers, in place, and return `model`.

    Consecutive parameters, up to `pack_mb` MiB of shards, share one buffer per dtype. The buffers
    are laid out identically on every rank: each parameter has room for a full block of rows, padded
    with zeros, at the same offset, a multiple of 16 bytes. Parameters stay the same objects, so
    existing optimizers keep working. Operations that reassign memory (`to`, `to_empty`, a copy
    through DTensor) give each shard memory of its own again. Call it on every rank.

    Raises:
        ShardingError: for a model that is not sharded or is on meta, or if `pack_mb` is not a
            number above 0.
    """
    check_pack_mb(pack_mb)
    left = deque(sharded_parameters(model))
    if not left:
        raise ShardingError(
            f"{type(model).__name__} has no sharded parameter to pack. Call zpasses.shard first."
        )
    if any(param.is_meta for param in left):
        raise ShardingError(
            f"{type(model).__name__} is on meta and has no memory to pack. Call "
            "to_empty(device=...) first."
        )
    names = {id(param): name for name, param in model.named_parameters()}
    layouts = {id(param): layout_of(param) for param in left}
    while left:
        batch = next_batch(left, layouts, pack_mb)
        owns = [layouts[id(param)] for param in batch]
        shapes, called = [param.shape for param in batch], [names[id(param)] for param in batch]
        packed = pack_local_rows([compat.local_of(param) for param in batch], shapes, called, owns)
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


def _unsharded(
    model: nn.Module, ignored: Collection[int]
) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for prefix, module in model.named_modules():
        taken = module._zpasses_specs if isinstance(module, ShardedModule) else {}
        for name, param in module._parameters.items():
            if param is not None and name not in taken and id(param) not in ignored:
                yield f"{prefix}.{name}" if prefix else name, module, param


_Places = dict[int, list[tuple[str, nn.Module, str]]]
"""Identity of a parameter -> path, module and name of each place that holds it."""


def _find(model: nn.Module, ignored: Collection[int]) -> tuple[_Places, deque[nn.Parameter]]:
    """Return the places of unsharded parameters, and each such parameter once.

    The queue holds the only further reference to the parameters, so that they can be freed one by
    one.
    """
    places: _Places = {}
    params: deque[nn.Parameter] = deque()
    for path, module, param in _unsharded(model, ignored):
        if id(param) not in places:
            params.append(param)
        places.setdefault(id(param), []).append((path, module, path.rpartition(".")[2]))
    return places, params


def _check_parameters(
    places: _Places, params: Iterable[nn.Parameter], mesh: DeviceMesh, pack_mb: float | None
) -> None:
    for param in params:
        for path, _, _ in places[id(param)]:
            _check_parameter(path, param, mesh, pack_mb is not None)


def _check_tied(
    places: _Places, params: Iterable[nn.Parameter], layouts: Mapping[int, ParamLayout]
) -> None:
    for param in params:
        known = sharded_form(param)
        if isinstance(known, DTensor) and layout_of(known) != layouts[id(param)]:
            raise ShardingError(
                f"parameter {places[id(param)][0][0]} is tied to one that an earlier call sharded "
                f"over another mesh, along another dimension or with another grad_divide_factor "
                f"({known.placements} on {known.device_mesh}). Shard both the same way, or untie "
                "them by giving one module a copy."
            )


def _shard_parameters(
    batch: Sequence[nn.Parameter],
    names: Mapping[int, str],
    layouts: Mapping[int, ParamLayout],
    pack_mb: float | None,
) -> dict[int, nn.Parameter]:
    """Shard a batch of parameters. Returns identity of the full parameter -> sharded parameter."""
    made = {id(param): sharded_form(param) for param in batch}
    todo = [param for param in batch if made[id(param)] is None]
    owns = [layouts[id(param)] for param in todo]
    parts = [own_part(param, layout) for param, layout in zip(todo, owns, strict=True)]
    if pack_mb is None:
        parts = [layout.owned(part) for part, layout in zip(parts, owns, strict=True)]
    else:
        shapes = [param.shape for param in todo]
        parts = pack_local_rows(parts, shapes, [names[id(param)] for param in todo], owns)
    for param, part, layout in zip(todo, parts, owns, strict=True):
        made[id(param)] = _as_parameter(part, param, layout)
    return {key: param for key, param in made.items() if param is not None}


def _as_parameter(part: Tensor, param: nn.Parameter, layout: ParamLayout) -> nn.Parameter:
    sharded = layout.wrap(part, param.shape)
    made = nn.Parameter(sharded, requires_grad=param.requires_grad)
    compat.set_spec(made, compat.spec_of(sharded))
    made.__dict__.update(param.__dict__)
    as_sharded_parameter(made, layout)
    mark_replaced(param, made)
    return made


def _check_arguments(mesh: Any, param_dtype: Any, reduce_dtype: Any) -> None:
    if not dist.is_initialized():
        raise ShardingError(
            "no process group: call torch.distributed.init_process_group() and make a mesh with "
            "init_device_mesh() first."
        )
    if not isinstance(mesh, DeviceMesh):
        raise ShardingError(
            f"mesh is a {type(mesh).__name__}; expected a DeviceMesh, e.g. "
            "init_device_mesh('cuda', (world_size,))."
        )
    if mesh.ndim > 2:
        raise ShardingError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}; expected one, or two "
            "for hybrid sharding (replicate, shard). Pass the submesh to shard over, e.g. "
            "mesh['shard'] or mesh['replicate', 'shard']."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ShardingError(
            f"mesh has two dimensions of sizes {tuple(mesh.shape)} without names; hybrid sharding "
            "needs names, e.g. init_device_mesh('cuda', (2, 4), mesh_dim_names=('replicate', "
            "'shard'))."
        )
    kind = mesh.device_type
    backend = dist.get_default_backend_for_device(kind)
    groups = [compat.group_name(group) for group in mesh.get_all_groups()]
    if backend != "gloo" and any(compat.is_gloo(name, torch.device(kind)) for name in groups):
        raise ShardingError(
            f"mesh is on {kind} and communicates through gloo, which cannot gather tensors of that "
            f"device. Call init_process_group({backend!r}), or init_process_group() for a backend "
            "per device, before the mesh is made."
        )
    for label, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ShardingError(
                f"{label} is {dtype!r}; expected a floating-point torch.dtype such as "
                "torch.bfloat16, or None."
            )


def _check_order(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 2 and names[1] in REPLICATE_DIMENSIONS:
        raise ShardingError(
            f"mesh has the dimensions {names}; expected replicas first and shards "
            "second, since neighbouring ranks, which share a node, should gather parameters from "
            "each other. Make it with init_device_mesh('cuda', (2, 4), mesh_dim_names=('replicate',"
            " 'shard'))."
        )


def _nothing_to_do(model: nn.Module) -> str:
    kind = type(model).__name__
    if any(isinstance(module, ShardedModule) for module in model.modules()):
        return (
            f"{kind} is sharded already. Shard a model once; to shard it differently, build a new "
            "one."
        )
    return f"{kind} has no parameter to shard."


def _check_module(path: str, module: nn.Module, ignored: Collection[int]) -> None:
    where = f"module {path or '(root)'} ({type(module).__name__})"
    if isinstance(module, torch.jit.ScriptModule):
        raise ShardingError(
            f"{where} is a TorchScript module, whose class cannot change. Shard the Python module "
            "instead."
        )
    if (
        isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.max_norm is not None
        and id(module._parameters["weight"]) not in ignored
    ):
        raise ShardingError(
            f"{where} has max_norm: its forward writes to its weight, and reading a sharded weight "
            "returns a gathered copy. Set max_norm=None and renormalise the shards after each "
            "optimizer step, or pass its weight as ignored_params."
        )
    if (
        isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.sparse
        and id(module._parameters["weight"]) not in ignored
    ):
        raise ShardingError(
            f"{where} has sparse gradients, which cannot be reduced to shards. Set sparse=False, "
            "or pass its weight as ignored_params."
        )
    for name, value in vars(module).items():
        if name not in ("_parameters", "_modules", "_buffers") and _holds_parameter(value):
            raise ShardingError(
                f"{where} holds parameters outside its parameter table, in attribute {name!r}. "
                "Sharding would leave the full, stale weights there. Replace the module (for RNNs: "
                "a loop over cells such as nn.LSTMCell), shard only its siblings, or pass its "
                "parameters as ignored_params and move it out of the sharded model."
            )


def _holds_parameter(value: object, depth: int = 3) -> bool:
    if isinstance(value, nn.Parameter):
        return True
    if depth and isinstance(value, (list, tuple, set)):
        return any(_holds_parameter(item, depth - 1) for item in value)
    if depth and isinstance(value, dict):
        return any(_holds_parameter(item, depth - 1) for item in value.values())
    return False


def _check_parameter(path: str, param: nn.Parameter, mesh: DeviceMesh, packs: bool) -> None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ShardingError(
            f"parameter {path} has no shape yet (lazy module). Run one forward on a small input "
            "first."
        )
    if param.is_complex():
        raise ShardingError(
            f"parameter {path} is complex; keep its real view (torch.view_as_real) as the "
            "parameter instead."
        )
    if packs and param.is_meta:
        raise ShardingError(
            f"parameter {path} is on meta and has no memory to pack. Leave pack_mb out, and call "
            "zpasses.pack_shards after to_empty."
        )
    if param.device.type not in (mesh.device_type, "meta", *(("cpu",) if packs else ())):
        raise ShardingError(
            f"parameter {path} is on {param.device.type}, the mesh on {mesh.device_type}. Move the "
            "model first "
            f"(model.to({mesh.device_type!r})), give pack_mb=... so that each rank moves its own "
            "shards from the host, or build it on "
            "meta and call to_empty after sharding."
        )
    if compat.has_tensor_hooks(param) or compat.has_accumulation_hooks(param):
        raise ShardingError(
            f"parameter {path} has hooks (register_hook or register_post_accumulate_grad_hook). "
            "Sharding replaces it by a DTensor, and they would not be called. Register them after "
            f"zpasses.shard, on model.get_parameter({path!r}): they get DTensors, and "
            "the average of the gradient over the ranks. Or pass the parameter as ignored_params."
        )
