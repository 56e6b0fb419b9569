"""Reads of a sharded parameter: the class that a sharded module becomes, and the guard on what a
read returns.

`module.weight` on a sharded module is a gathered copy. Writing to that copy would silently change
nothing, so eager code gets it as a `GatheredCopy`, which refuses to be written to and says what to
do instead. Compiled code gets the plain tensor."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.graph.ops import rows_per_rank
from zpasses.runtime.local_shards import local_shard
from zpasses.runtime.windows import PENDING_ATTRIBUTE, pending_of
from zpasses.sharding.inplace import DTensorInplaceMode

__all__ = [
    "GatheredCopy",
    "ParamShardSpec",
    "ShardedModule",
    "as_shard",
    "local_rows",
    "local_shards",
    "shard_tensor",
    "sharded_class",
    "sharded_parameters",
    "with_plain_inputs",
]


@dataclass(frozen=True)
class ParamShardSpec:
    """How one parameter of a module is sharded and read."""

    name: str
    mesh: DeviceMesh
    group_name: str
    """The mesh's process group; meshes over the same ranks compare equal, their groups do not."""
    param_dtype: torch.dtype | None
    """Gather and compute in this dtype; None keeps the shard's."""
    reduce_dtype: torch.dtype | None
    """Reduce gradients in this dtype; None keeps the gradient's."""


def shard_tensor(param: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's block of rows as a DTensor: a copy, so that the full tensor can be freed.

    Args:
        param: the full parameter, the same on every rank (nothing is communicated). 0-dimensional
            ones are kept whole.
    """
    return as_shard(
        local_rows(param, mesh).clone(memory_format=torch.contiguous_format), param.shape, mesh
    )


def local_rows(param: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's block of rows, a view without autograd; all of a 0-dimensional parameter."""
    full = param.detach()
    if full.dim() == 0:
        return full
    block = rows_per_rank(full.shape[0], mesh.size())
    start = min(mesh.get_local_rank() * block, full.shape[0])
    return full.narrow(0, start, min(block, full.shape[0] - start))


def as_shard(rows: Tensor, shape: torch.Size, mesh: DeviceMesh) -> DTensor:
    """A DTensor around this rank's rows of a parameter of this shape."""
    placements: tuple[Placement, ...] = (Shard(0),) if len(shape) else (Replicate(),)
    return compat.make_dtensor(rows, mesh, placements, shape)


class GatheredCopy(Tensor):
    """A full parameter, gathered for reading, or a view of one. Writing to it raises ShardingError;
    what is computed is plain."""

    _label: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (
            torch.compiler.is_compiling()
        ):  # the copy is an input of the graph, which is checked for writes as a whole
            with compat.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        target = _target(func, args, kwargs)
        if target is not None and not compat.is_tracing():
            raise ShardingError(
                f"{_name(func)} would write to {target._label}, which is sharded: what was read is "
                "a gathered copy, and the write "
                "would be lost (its gradient lives on the shards as well). Use the shards: `with "
                "zpasses.local_shards(model): ...` makes "
                "every parameter read return its DTensor, and model.parameters() always does. "
                "(model.apply and reset_parameters do "
                "so themselves.)"
            )
        with compat.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            source = next((arg for arg in args if isinstance(arg, GatheredCopy)), None)
            if source is None or func is _BASE or compat.is_tracing():
                return result
            return _guard_views(result, source)


_HANDLES: tuple[Any, ...] = tuple(getattr(Tensor, name).__get__ for name in ("data", "grad"))
_BASE: Any = getattr(Tensor, "_base").__get__  # noqa: B009
_ITEM_WRITES = frozenset({"__setitem__", "__set__", "__delete__"})


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        in_place = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        # `.data` and `.grad` hand out, without a trace, what the caller means to write to.
        return in_place or name in _ITEM_WRITES or func in _HANDLES
    return name.endswith("_")


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    attribute = getattr(getattr(func, "__self__", None), "__name__", None)
    return f".{attribute}" if name in ("__get__", "__set__", "__delete__") and attribute else name


def _target(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> GatheredCopy | None:
    """The gathered copy that a call would write to."""
    written = [kwargs.get("out")]
    if _writes(func):
        written.append(
            args[0] if args else next(iter(kwargs.values()), None)
        )  # nn.init hands everything on by keyword
    flat = [
        item
        for value in written
        for item in (value if isinstance(value, (list, tuple)) else [value])
    ]
    return next((item for item in flat if isinstance(item, GatheredCopy)), None)


def _guard(full: Tensor, label: str) -> Tensor:
    if type(full) is not Tensor:
        return full  # fake, simulated or functional tensors have their own rules
    copy = full.as_subclass(GatheredCopy)
    copy._label = label
    return copy


def with_plain_inputs(
    compiled: Callable[..., Any], example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """`compiled`, called with plain tensors where frames that were not compiled hand gathered
    copies to it."""
    positions = [i for i, value in enumerate(example_inputs) if isinstance(value, GatheredCopy)]
    if not positions:
        return compiled

    def run(*args: Any) -> Any:
        values = list(args)
        for i in positions:
            values[i] = values[i].as_subclass(Tensor)
        return compiled(*values)

    return compat.dynamo_disable(run)


def _guard_views(result: Any, source: GatheredCopy) -> Any:
    if isinstance(result, (list, tuple)) and type(result) in (list, tuple):
        return type(result)(_guard_views(item, source) for item in result)
    if type(result) is Tensor and compat.storage_id(result) == compat.storage_id(source):
        return _guard(result, source._label)
    return result


def _reader(read: ParamShardSpec, class_name: str) -> property:
    name, param_dtype, reduce_dtype = read.name, read.param_dtype, read.reduce_dtype
    group, label = read.group_name, f"parameter {read.name!r} of a {class_name}"

    def gather(module: nn.Module) -> Tensor | None:
        if name not in module._parameters:
            raise AttributeError(
                f"{class_name!r} object has no attribute {name!r}"
            )  # deleted, as parametrizations do
        param = module._parameters[name]
        if not isinstance(param, DTensor):
            return param  # None, or a tensor swapped in by torch.func.functional_call
        rows = param.shape[0] if param.dim() else 0
        if torch.compiler.is_compiling():
            traced: Tensor = torch.ops.zpasses.unshard(
                param.to_local(), rows, param_dtype, reduce_dtype, group
            )
            return traced
        return _guard(
            torch.ops.zpasses.unshard(local_shard(param), rows, param_dtype, reduce_dtype, group),
            label,
        )

    return property(gather, doc=f"{name}, gathered for reading")


class ShardedModule(nn.Module):
    """What a module with sharded parameters also is; `reads` says how each is sharded."""

    _zpasses_reads: dict[str, ParamShardSpec]
    _zpasses_base: type[nn.Module]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Assigning a full parameter under a sharded name shards it in the same way; a DTensor must
        be sharded alike already."""
        read = self._zpasses_reads.get(name)
        if read is None or param is None:
            super().register_parameter(name, param)
        else:
            self._parameters[name] = _as_sharded(param, read)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Accept full tensors under sharded names: each rank takes its rows."""
        for name, read in self._zpasses_reads.items():
            value = state_dict.get(prefix + name)
            current = self._parameters.get(name)
            if (
                isinstance(value, Tensor)
                and not isinstance(value, DTensor)
                and current is not None
                and value.shape == current.shape
            ):
                state_dict[prefix + name] = shard_tensor(value, read.mesh)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedModule:
        """Moves and casts give a parameter other attributes; whose backwards it counts with
        stays."""
        before = {
            name: pending_of(param)
            for name in self._zpasses_reads
            if (param := self._parameters.get(name)) is not None
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, entry in before.items():
            setattr(self._parameters[name], PENDING_ATTRIBUTE, entry)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> ShardedModule:
        """As nn.Module.apply; `fn` sees this module's parameters as DTensors, so that initialisers
        work on the shards."""
        for child in self.children():
            child.apply(fn)
        with local_shards(self, recurse=False):
            fn(self)
        return self

    def _fqn_modifiers(self) -> dict[str, str]:
        # torch.distributed.checkpoint walks to a parameter by getattr; this sends it to the
        # DTensors instead of gathering.
        return dict.fromkeys(self._zpasses_reads, "_zpasses_shards")

    @property
    def _zpasses_shards(self) -> object:
        return _Namespace(self._parameters)


class _Namespace:
    def __init__(self, values: dict[str, nn.Parameter | None]) -> None:
        self.__dict__.update(values)


def _as_sharded(param: nn.Parameter, read: ParamShardSpec) -> nn.Parameter:
    if not isinstance(param, DTensor):
        if param.device.type not in (read.mesh.device_type, "meta"):
            raise ShardingError(
                f"assigned to {read.name!r}: a parameter on {param.device.type}, but its mesh is "
                f"on {read.mesh.device_type}. "
                f"Move it first: value.to({read.mesh.device_type!r})."
            )
        return nn.Parameter(shard_tensor(param, read.mesh), requires_grad=param.requires_grad)
    expected: Placement = Shard(0) if param.dim() else Replicate()
    if param.device_mesh != read.mesh or param.placements != (expected,):
        raise ShardingError(
            f"assigned to {read.name!r}: a DTensor with placements {param.placements} on "
            f"{param.device_mesh}, but the module is "
            f"sharded as ({expected},) on {read.mesh}. Assign a full tensor, or redistribute the "
            "DTensor first."
        )
    return param


def _reset(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reset_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with local_shards(self):
            return original(self, *args, **kwargs)

    return reset_parameters


@functools.cache
def sharded_class(base: type[Any], reads: tuple[ParamShardSpec, ...]) -> type[Any]:
    """The class of a module of class `base` with these parameters sharded: same name, a subclass of
    `base`.

    Modules that are alike share one class, so that compiled code for one block serves all blocks.
    """
    members: dict[str, Any] = {read.name: _reader(read, base.__name__) for read in reads}
    members["_zpasses_reads"] = {read.name: read for read in reads}
    members["_zpasses_base"] = base
    members["__module__"], members["__qualname__"] = base.__module__, base.__qualname__
    if hasattr(base, "reset_parameters"):
        members["reset_parameters"] = _reset(base.reset_parameters)
    return type(base.__name__, (ShardedModule, base), members)


def sharded_parameters(model: nn.Module) -> list[DTensor]:
    """The parameters of a model that `zpasses.shard` made, each once, in module order."""
    found: dict[int, DTensor] = {}
    for module in model.modules():
        for name in module._zpasses_reads if isinstance(module, ShardedModule) else ():
            param = module._parameters.get(name)
            if isinstance(param, DTensor):
                found[id(param)] = param
    return list(found.values())


@contextlib.contextmanager
def local_shards(model: nn.Module, *, recurse: bool = True) -> Iterator[nn.Module]:
    """Inside, parameter reads return the DTensor shards instead of gathered copies: for
    initialisers and surgery.

    Initialisers give what they give on an unsharded model, if every rank is seeded alike. (Random
    numbers on accelerators are the exception: they come from DTensor's generator, which draws
    another sequence.) Edits run on every rank: some communicate.

    Args:
        model: a sharded module, or one that contains sharded modules.
        recurse: also for the modules inside `model`.
    """
    original = getattr(model, "_orig_mod", model)
    exposed: list[tuple[nn.Module, Any]] = []
    try:
        for module in original.modules() if recurse else [original]:
            if isinstance(module, ShardedModule):
                exposed.append((module, type(module)))
                module.__class__ = type(module)._zpasses_base  # type: ignore[assignment]
        with DTensorInplaceMode() if exposed else contextlib.nullcontext():
            yield model
    finally:
        for module, cls in exposed:
            module.__class__ = cls
