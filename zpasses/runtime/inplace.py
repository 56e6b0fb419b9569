"""In-place operations on DTensors that act as they do on full tensors.

torch's DTensor gets some in-place operations wrong, most of them without an error. `run_in_place`
corrects these:

  - Random numbers: on meshes without DTensor's random-number tracker (CPU), ranks with equal seeds
  draw equal numbers, so every rank would hold the same block. The full tensor is drawn, and each
  rank keeps its rows. With equal seeds the result equals the unsharded one.
  - `weight += a @ b`: DTensor refuses to add a sum over ranks in place. The sum is taken first.
  - `weight[0] = 1.0`, `weight.copy_(full)`, `weight.add_(full)`: DTensor refuses to mix plain
  tensors with DTensors. The plain tensor is a full one, equal on all ranks.
  - `torch.eye(..., out=weight)`, as in `nn.init.eye_`: DTensor writes the whole result into one
  shard. Here each rank keeps its rows.
  - `average.lerp_(weight, 0.1)` of a plain `average`: the parameter is gathered.
  - Lists (`torch._foreach_*`, fused optimizers): DTensor lacks some of these operators, and takes
  time that grows with the square of the number of tensors. They run on the shards, because they
  act on each element alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from zpasses import compat
from zpasses.errors import AgreementError, ShardingError
from zpasses.ranks.vote import current_timeout_s
from zpasses.runtime.edits import count_edit

Call = Callable[..., Any]


def run_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
    """Run an operator that writes to its first argument or to `out`, which is a sharded DTensor.

    Some operations communicate, so every rank must run them.

    Args:
        func: the operator.
        call: runs an operator on DTensors by torch's own rules.

    Raises:
        ShardingError: for a plain tensor that does not have the shape of the full parameter.
    """
    out = kwargs.get("out")
    if is_sharded(out) and not _any_dtensor(args):
        _write_drawn(func, out, func(*args, **{**kwargs, "out": _full_like(out)}))
        return out
    target: DTensor = args[0]
    plain = [each for each in _flat(args[1:]) if _is_plain(each)]
    if is_random(func) and not _any_dtensor(args[1:]) and not _has_rng_tracker(target):
        _write_drawn(func, target, func(_full_like(target), *args[1:], **kwargs))
        return target
    if not plain or _any_dtensor(args[1:]):
        try:
            return call(func, target, *(_placed_like(target, arg) for arg in args[1:]), **kwargs)
        except ShardingError as error:
            if error.__cause__ is None or not compat.is_placement_error(error.__cause__):
                raise
        args = (target, *compat.pytree.tree_map(_gathered, args[1:]))
    if torch.Tag.pointwise in func.tags or func is torch.ops.aten.copy_.default:
        own = [_rows_like(func, target, each) if _is_plain(each) else each for each in args[1:]]
        func(compat.local_of(target), *own, **kwargs)
        return target
    full = target.full_tensor().contiguous()
    func(full, *args[1:], **kwargs)
    write_rows(target, full)
    return target


def edit_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes to a plain tensor and reads sharded ones, which it gathers.

    Averages that were copied from a model before it was sharded are edited so.
    """
    return func(*map(_gathered, args), **kwargs)


def _gathered(value: Any) -> Any:
    """Returns the full tensor of a DTensor. Every rank must come.

    Raises:
        AgreementError: if a rank does not come within the time limit of votes.
    """
    if not isinstance(value, DTensor):
        return value
    groups = [compat.group_name(each) for each in value.device_mesh.get_all_groups()]
    limit, started = current_timeout_s(), time.monotonic()
    try:
        with compat.limited_timeouts(groups, limit):
            return value.full_tensor()
    except RuntimeError as error:
        if not compat.is_collective_timeout(error):
            raise
        raise AgreementError(
            f"rank {compat.global_rank()} waited {time.monotonic() - started:.1f} s (limit "
            f"{limit:g} s) to gather a parameter of shape {list(value.shape)} into a plain tensor, "
            "or another rank ended. Every rank must run this edit."
        ) from error


def run_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Run an operator such as `rand_like` of a sharded DTensor."""
    result = cast(DTensor, torch.empty_like(args[0]))
    _write_drawn(func, result, func(_full_like(args[0]), *args[1:], **kwargs))
    return result


def _write_drawn(func: Any, target: DTensor, full: Tensor) -> None:
    """Write this rank's part of values that each rank has computed, equally."""
    write_rows(target, full)
    count_edit(target, f"values of {func.overloadpacket.__name__}", full)


def draws_full(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether `run_random` has to run an operator."""
    if not is_random(func) or _any_dtensor(args[1:]):
        return False
    return is_sharded(args[0]) and not _has_rng_tracker(args[0])


def write_rows(target: DTensor, full: Tensor) -> None:
    """Write this rank's part of a full tensor to a DTensor."""
    compat.local_of(target).copy_(_own_rows(target, full))


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor that is no sum over ranks."""
    return isinstance(value, DTensor) and not any(each.is_partial() for each in value.placements)


def is_random(func: Any) -> bool:
    """Whether an operator fills a tensor, or one like it, with random numbers."""
    name = func.overloadpacket.__name__
    return torch.Tag.nondeterministic_seeded in func.tags and name.endswith(("_", "_like"))


# --- lists ----------------------------------------------------------------------------------------
def run_on_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run an operator that writes to lists of tensors, element by element, on the shards.

    Returns whether it ran. It does not if tensors that belong together are placed differently.

    Raises:
        ShardingError: for a plain tensor that does not have the shape of the full parameter.
    """
    lists = [each for each in (*args, *kwargs.values()) if _is_tensor_list(each)]
    if not lists or func is compat.FIND_OVERFLOWS:  # which ranks share
        return False
    first: Sequence[Tensor] = lists[0]
    for each in lists[1:]:
        if len(each) == len(first) and not all(map(_belong_together, first, each)):
            return False

    def local(value: Any) -> Any:
        if _is_tensor_list(value):
            paired = len(value) == len(first)
            likes: Sequence[Any] = first if paired else [None] * len(value)
            return [_local_like(func, like, item) for like, item in zip(likes, value, strict=True)]
        return plain_scalar(value) if isinstance(value, DTensor) else value

    func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    return True


def plain_scalar(value: DTensor) -> Tensor:
    """Returns the full value of what belongs to a whole list, such as a factor. Every rank calls
    it.
    """
    return compat.local_of(value) if _is_replicated(value) else value.full_tensor()


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value)


def _belong_together(like: Any, other: Any) -> bool:
    if not isinstance(other, DTensor):
        return True
    if not is_sharded(other):
        return False
    if not isinstance(like, DTensor):
        return True
    a, b = compat.spec_of(like), compat.spec_of(other)
    same = a is b or (a.placements == b.placements and a.mesh == b.mesh)
    return same or (not other.dim() and _is_replicated(other))


def _local_like(func: Any, like: Any, value: Any) -> Any:
    if isinstance(value, DTensor):
        return compat.local_of(value) if isinstance(like, DTensor) else _gathered(value)
    if not isinstance(like, DTensor) or not isinstance(value, Tensor):
        return value
    return _rows_like(func, like, value)


def _is_replicated(value: DTensor) -> bool:
    return all(isinstance(each, Replicate) for each in value.placements)


# --- parts ----------------------------------------------------------------------------------------
def _rows_like(func: Any, target: DTensor, full: Tensor) -> Tensor:
    """Returns the part of a full tensor that belongs to this rank's shard.

    Raises:
        ShardingError: if it cannot be expanded to the shape of the full parameter.
    """
    if not full.dim():
        return full
    try:
        return _own_rows(target, full.expand(target.shape))
    except RuntimeError:
        raise ShardingError(
            f"{func.overloadpacket.__name__}: got a plain tensor of shape {list(full.shape)} for a "
            f"parameter of shape {list(target.shape)}, sharded as {target.placements}. Plain "
            "tensors are full ones: give a tensor of the parameter's shape, equal on every rank. "
            "To write rows of this rank alone, write to `param.to_local()`."
        ) from None


def _own_rows(target: DTensor, full: Tensor) -> Tensor:
    own = compat.local_range(target.shape, target.device_mesh, target.placements)
    for dim, (start, length) in enumerate(own):
        full = full.narrow(dim, start, length)
    return full


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _any_dtensor(values: Sequence[Any]) -> bool:
    return any(isinstance(value, DTensor) for value in _flat(values))


def _placed_like(target: DTensor, value: Any) -> Any:
    """Redistribute a DTensor so that an in-place operation can add it to the rows of `target`."""
    if not isinstance(value, DTensor) or value.placements == target.placements:
        return value
    if value.shape == target.shape:
        return value.redistribute(value.device_mesh, target.placements)
    if any(each.is_partial() for each in value.placements):
        return value.redistribute(value.device_mesh, [Replicate()] * len(value.placements))
    return value


def _has_rng_tracker(tensor: DTensor) -> bool:
    return hasattr(torch.get_device_module(tensor.device_mesh.device_type), "set_rng_state")


def _full_like(tensor: DTensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=compat.local_of(tensor).device)
