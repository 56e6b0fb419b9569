"""Shard a model's parameters over a device mesh, in place."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.pending import count_together
from zpasses.reads import Read, ShardedModule, cut, sharded_class
from zpasses.retained import forget

__all__ = ["invalidate", "shard"]

M = TypeVar("M", bound=nn.Module)


def shard(
    model: M,
    *,
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    ignored_params: Collection[nn.Parameter] = (),
) -> M:
    """Shard every parameter of `model` over `mesh`, in place, and return `model`.

    Each parameter becomes a DTensor parameter, `Shard(0)`, under its own name; reading it gathers the full one, and its gradient is
    averaged over the ranks. Rows need not divide by the number of ranks. 0-dimensional parameters stay whole on every rank
    (`Replicate()`). Tied parameters are sharded once. Nothing is communicated: every rank must hold the same values.

    Call it before the optimizer is built, on a model on the mesh's device or on meta (then `to_empty` and an initialiser that runs on
    the shards: `model.apply(fn)`, `reset_parameters()`, or anything inside `zpasses.shards(model)`). Calls on submodules may differ
    in dtype and mesh; a later call on the whole model shards the rest.

    Args:
        mesh: one-dimensional; its size is the number of shards.
        param_dtype: gather and compute in this dtype, e.g. torch.bfloat16. The shards, and so the optimizer, keep theirs. Inputs are
            not cast: feed them in this dtype.
        reduce_dtype: reduce gradients in this dtype; None reduces in the dtype in which they were computed.
        ignored_params: parameters to leave alone, unsharded and unreduced.

    Raises:
        ShardingError: before anything is changed, for a model that cannot be sharded; the message names the module.
    """
    _check_arguments(mesh, param_dtype, reduce_dtype)
    ignored = {id(param) for param in ignored_params}
    todo = list(_unsharded(model, ignored))
    if not todo:
        raise ShardingError(_nothing_to_do(model))
    for path, module in model.named_modules():
        _check_module(path, module, ignored)
    for path, _, param in todo:
        _check_parameter(path, param, mesh)

    group = compat.group_name(mesh.get_group())
    sharded: dict[int, nn.Parameter] = {}
    reads: dict[nn.Module, list[Read]] = {}
    for path, module, param in todo:
        name = path.rpartition(".")[2]
        if id(param) not in sharded:
            sharded[id(param)] = _shard_parameter(param, mesh)
        module._parameters[name] = sharded[id(param)]
        floating = param.is_floating_point()
        read = Read(name, mesh, group, param_dtype if floating else None, reduce_dtype if floating else None)
        reads.setdefault(module, []).append(read)
    for module, own in reads.items():
        _swap_class(module, own)
    count_together([(module, path.rpartition(".")[2]) for path, module, _ in todo])
    return model


def invalidate(model: nn.Module) -> None:
    """Forget gathered parameters that stages 1 and 2 keep, after an edit that torch cannot see (through `.data`).

    Call it on every rank. Edits by an optimizer, `load_state_dict` or in-place operations are seen without it.
    """
    forget(model.parameters())


def _unsharded(model: nn.Module, ignored: Collection[int]) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for prefix, module in model.named_modules():
        taken = module._zpasses_reads if isinstance(module, ShardedModule) else {}
        for name, param in module._parameters.items():
            if param is not None and name not in taken and id(param) not in ignored:
                yield f"{prefix}.{name}" if prefix else name, module, param


def _shard_parameter(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    known = _sharded_earlier(param)
    if known is not None:
        return known
    made = nn.Parameter(cut(param, mesh), requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    param._zpasses_sharded_as = weakref.ref(made)  # type: ignore[attr-defined]
    return made


def _sharded_earlier(param: nn.Parameter) -> nn.Parameter | None:
    """What an earlier call made of a parameter that is tied to one in another module."""
    earlier = getattr(param, "_zpasses_sharded_as", None)
    known: nn.Parameter | None = earlier() if earlier is not None else None
    return known


def _swap_class(module: nn.Module, added: list[Read]) -> None:
    earlier = tuple(module._zpasses_reads.values()) if isinstance(module, ShardedModule) else ()
    base: type[Any] = module._zpasses_base if isinstance(module, ShardedModule) else type(module)
    module.__class__ = sharded_class(base, (*earlier, *added))  # type: ignore[arg-type]


def _check_arguments(mesh: Any, param_dtype: Any, reduce_dtype: Any) -> None:
    if not dist.is_initialized():
        raise ShardingError("no process group: call torch.distributed.init_process_group() and make a mesh with init_device_mesh() first.")
    if not isinstance(mesh, DeviceMesh):
        raise ShardingError(f"mesh is a {type(mesh).__name__}; expected a DeviceMesh, e.g. init_device_mesh('cuda', (world_size,)).")
    if mesh.ndim != 1:
        raise ShardingError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}; sharding over more than one (hybrid sharding) is not there "
            "yet. Pass the one-dimensional submesh to shard over, e.g. mesh['shard']."
        )
    for label, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ShardingError(f"{label} is {dtype!r}; expected a floating-point torch.dtype such as torch.bfloat16, or None.")


def _nothing_to_do(model: nn.Module) -> str:
    kind = type(model).__name__
    if any(isinstance(module, ShardedModule) for module in model.modules()):
        return f"{kind} is sharded already. Shard a model once; to shard it otherwise, build it anew."
    return f"{kind} has no parameter to shard."


def _check_module(path: str, module: nn.Module, ignored: Collection[int]) -> None:
    where = f"module {path or '(root)'} ({type(module).__name__})"
    if isinstance(module, torch.jit.ScriptModule):
        raise ShardingError(f"{where} is a TorchScript module, whose class cannot change. Shard the Python module instead.")
    if (
        isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.max_norm is not None
        and id(module._parameters["weight"]) not in ignored
    ):
        raise ShardingError(
            f"{where} has max_norm: its forward writes to its weight, and what is read of a sharded one is a gathered copy. Set "
            "max_norm=None and renormalise the shards after each optimizer step, or pass its weight as ignored_params."
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and id(module._parameters["weight"]) not in ignored:
        raise ShardingError(
            f"{where} has sparse gradients, which cannot be reduced to shards. Set sparse=False, or pass its weight as ignored_params."
        )
    for name, value in vars(module).items():
        if name not in ("_parameters", "_modules", "_buffers") and _holds_parameter(value):
            raise ShardingError(
                f"{where} holds parameters outside its parameter table, in attribute {name!r}; they would keep the full, stale "
                "weights. Replace the module (for RNNs: a loop over cells such as nn.LSTMCell), shard its siblings only, or pass its "
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


def _check_parameter(path: str, param: nn.Parameter, mesh: DeviceMesh) -> None:
    if isinstance(param, DTensor):
        raise ShardingError(
            f"parameter {path} is a DTensor already ({param.placements} on {param.device_mesh}). Shard a model once; sharding on top "
            "of tensor parallelism is not there yet."
        )
    known = _sharded_earlier(param)
    if isinstance(known, DTensor) and known.device_mesh != mesh:
        raise ShardingError(
            f"parameter {path} is tied to one that an earlier call sharded over another mesh ({known.device_mesh}). Shard both over one "
            "mesh, or untie them: give one module a copy."
        )
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ShardingError(f"parameter {path} has no shape yet (lazy module). Run one forward on a small input first.")
    if param.is_complex():
        raise ShardingError(f"parameter {path} is complex; keep its real view (torch.view_as_real) as the parameter instead.")
    if param.device.type not in (mesh.device_type, "meta"):
        raise ShardingError(
            f"parameter {path} is on {param.device.type}, the mesh on {mesh.device_type}. Move the model first "
            f"(model.to({mesh.device_type!r})), or build it on meta and call to_empty after sharding."
        )
