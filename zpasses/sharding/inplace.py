"""Correct in-place operations on sharded parameters, for initialisers that run on the shards.

Some in-place operations give wrong results on torch's DTensor, most of them without an error.
`DTensorInplaceMode` corrects these:

  - Random numbers: on meshes without DTensor's random-number tracker (CPU), ranks with equal seeds
  draw equal numbers, so every rank would hold the same block. The mode draws the full tensor, and
  each rank keeps its rows. With equal seeds the result equals the unsharded one.
  - `weight[padding_idx].fill_(0)`: a view across the sharded dimension is a copy, and DTensor loses
  the write. The mode writes the copy back.
  - `weight += a @ b`: DTensor refuses to add a sum over ranks in place. The mode takes the sum
  first.
  - `weight[0] = 1.0` and `weight.copy_(full)`: DTensor refuses to mix plain tensors with DTensors.
  The mode treats the plain tensor as a full one.
  - `torch.eye(..., out=weight)`, as in `nn.init.eye_`: DTensor writes the whole result into one
  shard. With the mode, each rank keeps its rows.

`DTensorDataMode` corrects `weight.data = value`, which DTensor loses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from zpasses import compat
from zpasses.errors import ShardingError

__all__ = ["DTensorDataMode", "DTensorInplaceMode"]


@dataclass(frozen=True)
class _CopiedView:
    """A view of a DTensor that has memory of its own: `made` is `view(source, *args, **kwargs)`."""

    made: DTensor
    source: DTensor
    view: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class DTensorInplaceMode(compat.TorchDispatchMode):
    """Dispatch mode in which in-place operations on DTensors act as they do on full tensors.

    Applies to DTensors that are not partial. Some operations communicate, so every rank must run
    them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies: defaultdict[int, list[_CopiedView]] = defaultdict(list)

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = kwargs.get("out")
        if _is_sharded(out) and not _any_dtensor(args):
            return _copy_local_rows(out, func(*args, **{**kwargs, "out": _full_like(out)}))
        target = args[0] if args else None
        if not _is_sharded(target):
            return func(*args, **kwargs)
        if _is_random(func) and not _any_dtensor(args[1:]) and not _has_rng_tracker(target):
            filled = func(_full_like(target), *args[1:], **kwargs)
            result = target if _mutates(func) else torch.empty_like(target)
            _copy_local_rows(result, filled)
        elif _mutates(func) and _any_plain_tensor(args[1:]):
            full = target.full_tensor().contiguous()
            func(full, *args[1:], **kwargs)
            result = _copy_local_rows(target, full)
        elif _mutates(func):
            result = func(target, *(_placed_like(target, arg) for arg in args[1:]), **kwargs)
        else:
            result = func(*args, **kwargs)
        if _mutates(func):
            self._write_back(target)
        elif func.is_view:
            self._remember_copy(target, result, func, args[1:], kwargs)
        return result

    def _remember_copy(
        self, source: DTensor, result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for i, made in enumerate(result if isinstance(result, (list, tuple)) else [result]):
            if isinstance(made, DTensor) and _storage(made) != _storage(source):
                pick = (
                    (lambda *a, _i=i, **k: func(*a, **k)[_i])
                    if isinstance(result, (list, tuple))
                    else func
                )
                self._copies[_storage(made)].append(_CopiedView(made, source, pick, args, kwargs))

    def _write_back(self, edited: DTensor) -> None:
        # Several copies, because the parts of one split share memory.
        for copy in tuple(self._copies.get(_storage(edited), ())):
            full = copy.source.full_tensor()
            copy.view(full, *copy.args, **copy.kwargs).copy_(copy.made.full_tensor())
            _copy_local_rows(copy.source, full)
            self._write_back(copy.source)


class DTensorDataMode(TorchFunctionMode):
    """Function mode in which `weight.data = value` writes to the shard of a sharded `weight`.

    The value is a DTensor or a full tensor. DTensor would change the wrapper only, without an
    error, and its shard would keep the old values.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func != _SET_DATA or not _is_sharded(args[0]) or not isinstance(args[1], Tensor):
            return func(*args, **(kwargs or {}))
        target, value = args
        if value.shape != target.shape or value.dtype != target.dtype:
            raise ShardingError(
                f"assigned {value.dtype}{list(value.shape)} to `.data` of a sharded parameter, "
                f"which is {target.dtype}{list(target.shape)}. Assign a tensor of the same shape "
                "and dtype, or convert the model with model.to(dtype)."
            )
        with torch.no_grad():
            if isinstance(value, DTensor):
                value = value.redistribute(target.device_mesh, target.placements)
                compat.local_of(target).copy_(compat.local_of(value))
            else:
                _copy_local_rows(target, value)
        return None


_SET_DATA: Any = getattr(Tensor, "data").__set__  # noqa: B009


def _is_random(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return torch.Tag.nondeterministic_seeded in func.tags and name.endswith(("_", "_like"))


def _mutates(func: Any) -> bool:
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return first is not None and first.is_write


def _any_dtensor(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, DTensor) for value in values)


def _any_plain_tensor(values: tuple[Any, ...]) -> bool:
    flat = [
        item
        for value in values
        for item in (value if isinstance(value, (list, tuple)) else [value])
    ]
    return any(isinstance(item, Tensor) for item in flat) and not _any_dtensor(tuple(flat))


def _placed_like(target: DTensor, value: Any) -> Any:
    """Redistribute a DTensor so that an in-place operation can add it to the rows of `target`."""
    if not isinstance(value, DTensor) or value.placements == target.placements:
        return value
    if value.shape == target.shape:
        return value.redistribute(value.device_mesh, target.placements)
    if any(each.is_partial() for each in value.placements):
        return value.redistribute(value.device_mesh, [Replicate()] * len(value.placements))
    return value


def _is_sharded(value: object) -> TypeGuard[DTensor]:
    return isinstance(value, DTensor) and not any(each.is_partial() for each in value.placements)


def _has_rng_tracker(tensor: DTensor) -> bool:
    return hasattr(torch.get_device_module(tensor.device_mesh.device_type), "set_rng_state")


def _full_like(tensor: DTensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=compat.local_of(tensor).device)


def _copy_local_rows(target: Any, full: Tensor) -> DTensor:
    own = compat.local_range(full.shape, target.device_mesh, target.placements)
    for dim, (start, length) in enumerate(own):
        full = full.narrow(dim, start, length)
    compat.local_of(target).copy_(full)
    kept: DTensor = target
    return kept


def _storage(tensor: DTensor) -> int:
    return compat.storage_id(compat.local_of(tensor))
