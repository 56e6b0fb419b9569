"""Tensors that see every edit of a sharded parameter.

A sharded parameter, what `.data`, `detach` and views return of it, and the values of a state dict
are `WatchedShard`s. Those that share memory share one `ShardMemory`, which counts the edits: by
operators in place, by `torch._foreach_*` and optimizers, by `param.data = value`. Cached copies and
the backward compare the counts, so nothing that was computed from an older value passes for new.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from zpasses import compat
from zpasses.errors import ShardingError, ZpassesError
from zpasses.runtime.edits import (
    EditedParam,
    ShardMemory,
    argument_number,
    count_edit,
    memory_of,
    named_source,
    number_of,
    origin_of,
    owner_of,
)
from zpasses.runtime.full_value import with_averaged_grad
from zpasses.runtime.inplace import (
    draws_full,
    edit_plain,
    is_sharded,
    run_in_place,
    run_on_lists,
    run_random,
    write_rows,
)
from zpasses.runtime.layout import LAYOUT_ATTRIBUTE
from zpasses.runtime.offloaded import DEVICE_ATTRIBUTE
from zpasses.runtime.reductions import (
    NEED_ELEMENTS,
    OVER_DIMS,
    has_empty_part,
    mean_loss,
    takes_mean,
    with_all_dims,
    with_full_inputs,
)

VALUE_ATTRIBUTE = "_zpasses_value"
"""Attribute of a sharded parameter that holds its `zpasses.runtime.param_value.ParamValue`."""


@dataclass(frozen=True)
class _CopiedView:
    """How a view of a DTensor was made that has memory of its own: `view(source, *args)`."""

    made: DTensor
    """The memory of the view, as another object than the view, which refers to this."""
    source: DTensor
    view: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int
    """Equal on all ranks, and for equal views."""


class WatchedShard(DTensor):
    """A sharded parameter, or a tensor that shares its memory. Edits are counted.

    In-place operations act as they do on the full parameter (zpasses.runtime.inplace). A view
    across the sharded dimension is a copy, and writes to it are written back.
    """

    _zpasses_memory: ShardMemory | None
    _zpasses_copied_view: _CopiedView | None
    _zpasses_view: int
    """Which view of the memory it is; missing for the whole."""
    _zpasses_origin: int
    """Where its values come from, if its memory is not that of a parameter."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # DTensor's is untyped
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    @staticmethod
    def __tensor_unflatten__(*parts: Any) -> WatchedShard:
        return watch(cast(DTensor, DTensor.__tensor_unflatten__(*parts)), None)

    def _stable_hash_for_caching(self) -> str:
        # torch's cache of compiled code is shared with programs whose parameters are DTensors.
        return f"zpasses {super()._stable_hash_for_caching()}"

    @property
    def data(self) -> WatchedShard:
        """The rows without autograd history. Writing to them edits the parameter."""
        return alias(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Give the parameter the memory of another DTensor, or its rows of a full tensor.

        Raises:
            ShardingError: for another shape or dtype.
        """
        _set_data(self, value)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole value, on every rank. Its gradient is the average over the ranks, unless
        `grad_placements` says how it is placed.
        """
        full = super().full_tensor(grad_placements=grad_placements)
        return full if grad_placements else with_averaged_grad(full, self.device_mesh)

    def requires_grad_(self, mode: bool = True) -> WatchedShard:
        """Refused with its name for a parameter of codes, of which torch says only the dtype."""
        if mode and not (self.is_floating_point() or self.is_complex()):
            value = getattr(self, VALUE_ATTRIBUTE, None)
            name = value.identity.partition(":")[2] if value is not None else ""
            raise ZpassesError(
                f"parameter{f' {name!r}' if name else ''} holds {self.dtype}, as "
                "parameters that rest encoded do, and cannot be trained. Give requires_grad_() to "
                "the parts of the model that are trained, or train it before "
                "zpasses.encode_parameters."
            )
        super().requires_grad_(mode)
        return self

    def share_memory_(self) -> NoReturn:
        """Refused: torch would end the process."""
        raise ShardingError(
            "share_memory_() of a sharded parameter: each rank holds other rows. Share a full copy:"
            " zpasses.full_state_dict(model) on every rank, and load it into an unsharded model."
        )

    def to_local(self, **kwargs: Any) -> Tensor:
        """Returns this rank's rows, which share memory with the parameter."""
        await_device_reads(self)
        memory = memory_of(self)
        if memory is not None and not compat.is_saving_checkpoint():
            memory.expose(compat.local_of(self))
        with compat.outside_transforms():
            return super().to_local(**kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """A copy of a parameter is another parameter of a sharded model."""
        if id(self) not in memo:
            memo[id(self)] = _deep_copy(self, memo)
        made: DTensor = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain DTensor, so that checkpoints can be loaded without zpasses."""
        return plain_dtensor(self).__reduce_ex__(protocol)


def await_device_reads(value: DTensor) -> None:
    """Make the host wait until the device has read a shard that rests on the host, so that whoever
    gets it may write to it.
    """
    if compat.local_of(value).is_cpu and value.device_mesh.device_type != "cpu":
        torch.accelerator.synchronize()


def plain_dtensor(value: DTensor) -> DTensor:
    """Return the DTensor that shares a value's memory."""
    return compat.wrap_local(compat.local_of(value), compat.spec_of(value))


def watch(value: Tensor, memory: ShardMemory | None) -> WatchedShard:
    """Make a DTensor a WatchedShard, in place.

    Args:
        memory: what counts its edits; None for a tensor of its own.
    """
    made: Any = value
    made.__class__ = WatchedShard
    made._zpasses_memory = memory
    return cast(WatchedShard, made)


def alias(source: WatchedShard) -> WatchedShard:
    """Return another tensor of the same memory, which is edited as the source is."""
    made = watch(plain_dtensor(source), memory_of(source))
    for name in ("_zpasses_view", "_zpasses_origin"):
        if name in source.__dict__:
            setattr(made, name, source.__dict__[name])
    return made


def watch_if_needed(value: Any) -> Any:
    """Make a DTensor that is no parameter a WatchedShard if torch's reductions cannot take it
    (zpasses.runtime.reductions), in place. Gradients and what is computed from them are such.

    Args:
        value: what an operator returned, maybe a list.
    """
    if isinstance(value, (list, tuple)):
        for each in value:
            watch_if_needed(each)
    if type(value) is DTensor and has_empty_part(value):
        return watch(value, None)
    return value


def set_shard(target: Any, local: Tensor, memory: ShardMemory | None = None) -> None:
    """Give a parameter another local tensor of the same shape and dtype.

    Args:
        memory: what counts the edits of the tensor; None if nothing does yet.
    """
    compat.set_local(target, local)
    target._zpasses_memory = memory or ShardMemory(owner_of(target))


def replace_shard(target: Any, value: DTensor) -> None:
    """Give a parameter the local tensor, dtype and device of a DTensor that nothing else has."""
    compat.replace_dtensor(target, value)
    target._zpasses_memory = ShardMemory(owner_of(target))
    count_edit(target, "conversion")


def _set_data(target: WatchedShard, value: Tensor) -> None:
    if value.shape != target.shape or value.dtype != target.dtype:
        raise ShardingError(
            f"assigned {value.dtype}{list(value.shape)} to `.data` of a sharded parameter, "
            f"which is {target.dtype}{list(target.shape)}. Assign a tensor of the same shape "
            "and dtype, or convert the model with model.to(dtype). Change shapes, as "
            "resize_token_embeddings does, before you shard the model."
        )
    old = compat.local_of(target)
    memory = memory_of(value)
    if isinstance(value, DTensor):
        with torch.no_grad():
            placed = value.redistribute(target.device_mesh, target.placements)
        local = compat.local_of(placed)
        if local is not compat.local_of(value):
            memory = None
        elif memory is None:
            memory = ShardMemory(owner_of(target))
            memory.history = origin_of(value)
            if type(value) is DTensor:
                watch(value, None)
            cast(Any, value)._zpasses_memory = memory  # the two share memory from now on
    else:
        own = torch.empty_like(old)
        copied = compat.wrap_local(own, compat.spec_of(target))
        write_rows(copied, value.detach())
        local = own
    count_edit(target, "assignment of .data", value)
    if local.device != old.device:
        raise ShardingError(
            f"assigned a tensor on {local.device} to `.data` of a parameter on {old.device}. Move "
            "the value first."
        )
    if memory is None:
        memory = ShardMemory(owner_of(target))
        memory.history = origin_of(target)
    set_shard(target, local, memory)


def _deep_copy(source: WatchedShard, memo: dict[int, Any]) -> DTensor:
    made = compat.wrap_local(compat.local_of(source).detach().clone(), compat.spec_of(source))
    value = getattr(source, VALUE_ATTRIBUTE, None)
    if value is None and not isinstance(source, nn.Parameter):
        watch(made, None)._zpasses_origin = origin_of(source)
        return made
    param: Any = nn.Parameter(made, requires_grad=source.requires_grad)
    compat.set_spec(param, compat.spec_of(source))
    watch(param, ShardMemory())
    for name, attribute in vars(source).items():
        if name in (LAYOUT_ATTRIBUTE, DEVICE_ATTRIBUTE):
            setattr(param, name, attribute)
        elif not name.startswith("_zpasses_"):
            setattr(param, name, copy.deepcopy(attribute, memo))
    if value is not None:
        copied = value.copied()
        setattr(param, VALUE_ATTRIBUTE, copied)
        layout = getattr(param, LAYOUT_ATTRIBUTE, None)
        if layout is not None and copied.identity:
            param._zpasses_memory.owner = EditedParam(copied.identity, layout.sharding_groups)
    return cast(DTensor, param)


# --- dispatch -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Writes:
    """What an operator writes to."""

    first: bool
    """Whether its first argument is a tensor that it writes to."""
    positions: tuple[int, ...]
    names: tuple[str, ...]
    lists: bool
    """Whether one of them is a list."""
    name: str
    number: int
    """What counts it; see `zpasses.runtime.edits`."""
    copies: bool
    """Whether it only copies values."""
    moves: bool
    """Whether it changes the memory of its first argument."""


@functools.cache
def _writes_of(func: Any) -> _Writes | None:
    arguments = func._schema.arguments
    written = [
        (i, each)
        for i, each in enumerate(arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    if not written:
        return None
    lists = any("List" in str(each.type) or "[]" in str(each.type) for _, each in written)
    name = func.overloadpacket.__name__
    return _Writes(
        written[0][0] == 0 and not lists,
        tuple(i for i, each in written if not each.kwarg_only),
        tuple(each.name for _, each in written),
        lists,
        name,
        number_of(name),
        name in ("copy_", "_foreach_copy_"),
        name in ("set_", "resize_"),
    )


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    writes = _writes_of(func)
    if writes is None:
        if args and draws_full(func, args):
            return run_random(func, args, kwargs)
        if func is _VIEW and _must_gather(*args):
            return _gathered_view(*args)
        if func in NEED_ELEMENTS:
            args = with_full_inputs(args)
        elif func in OVER_DIMS:
            args = with_all_dims(args)
        if torch.is_grad_enabled():
            _check_gradients(func, args)
        if takes_mean(func, args, kwargs):
            result = mean_loss(func, args, kwargs, _by_torch)
        else:
            result = _by_torch(func, *args, **kwargs)
        if func.is_view and isinstance(args[0], DTensor):
            return _watch_views(args[0], result, func, args[1:], kwargs)
        if type(result) is DTensor and not (_is_factory(func) and _is_in_optimizer()):
            # Edits by the result are compared, torch's errors explained, random numbers drawn.
            watch(result, None)._zpasses_origin = _origin_of_call(func, args, kwargs)
            return result
        return watch_if_needed(result)
    targets = list(_targets(writes, args, kwargs))
    for target in targets:
        await_device_reads(target)
    if targets and _assigns_data(func, args):
        return _dispatch(_COPY, args, kwargs)
    if writes.moves and targets:
        raise ShardingError(
            f"{writes.name}() of a sharded parameter of shape {list(targets[0].shape)} would give "
            "it other memory. Assign the value: param.data = value, or param.copy_(value), with "
            "a DTensor or a full tensor of the same shape."
        )
    try:
        if writes.lists:
            if run_on_lists(func, args, kwargs):
                return None
        elif is_sharded(args[0] if writes.first else kwargs.get("out")):
            return run_in_place(func, args, kwargs, _by_torch)
        elif writes.first and not isinstance(args[0], DTensor):
            return edit_plain(func, args, kwargs)
        return _by_torch(func, *args, **kwargs)
    finally:
        if targets:
            number = _number_of_call(writes, args, kwargs)
            for at, target in enumerate(targets):
                _count_edit(target, writes, number, args[1:], at)


_COPY = torch.ops.aten.copy_.default


def _assigns_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator is `param.data = value` in compiled code. Dynamo makes a `set_` of it,
    which AOTAutograd cannot do to a shard that it gets as an input. A copy has the same effect.
    """
    return (
        func is torch.ops.aten.set_.source_Tensor
        and compat.is_tracing()
        and args[0].shape == args[1].shape
    )


def _check_gradients(func: Any, args: tuple[Any, ...]) -> None:
    """Raise ShardingError for an operator whose gradient for a plain tensor would be a DTensor."""
    plain = (each for each in args if isinstance(each, Tensor) and not isinstance(each, DTensor))
    if any(each.requires_grad for each in plain):
        param = next((each for each in args if memory_of(each) is not None), None)
        if param is not None:
            raise ShardingError(
                f"{func.overloadpacket.__name__} of a plain tensor that needs a gradient, and of a "
                f"sharded parameter of shape {list(param.shape)}. {_READ_AS_ATTRIBUTE} Elsewhere, "
                "take its full value, on every rank: param.full_tensor()."
            )
        raise ShardingError(
            f"{func.overloadpacket.__name__} of a plain tensor that needs a gradient, such as a "
            "loss, and of a DTensor that was computed from sharded parameters, such as a penalty. "
            "Make the second one plain first, on every rank: penalty.full_tensor()."
        )


def _origin_of_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return hash((_number_of(func), argument_number((*args, *kwargs.values()))))


@functools.cache
def _number_of(func: Any) -> int:
    return number_of(str(func))


@functools.cache
def _is_factory(func: Any) -> bool:
    """Whether an operator makes a tensor like another one."""
    name = func.overloadpacket.__name__
    return bool(name.endswith("_like") or name.startswith("new_"))


def _is_in_optimizer() -> bool:
    """Whether a step of an optimizer runs. What it makes is its state, which nothing needs to
    watch, and whose operators are called in each step.
    """
    return compat.module_among_callers((torch.optim.Optimizer.__module__,)) is not None


_VIEW = torch.ops.aten.view.default
_ITEM = torch.ops.aten._local_scalar_dense.default


def _must_gather(source: Any, shape: list[int]) -> bool:
    """Whether a view merges the sharded dimension with others, and DTensor cannot express it: the
    rows do not divide, there is one, or another dimension than the first is sharded. Equal on all
    ranks.
    """
    if not isinstance(source, WatchedShard) or not is_sharded(source) or source.dim() < 2:
        return False
    cut = [
        (dim, size)
        for each, size in zip(source.placements, source.device_mesh.shape, strict=True)
        if (dim := getattr(each, "dim", None)) is not None
    ]
    kept = len(shape) > 0 and shape[0] == source.shape[0]
    return not kept and any(
        d > 0 or source.shape[d] == 1 or source.shape[d] % size for d, size in cut
    )


def _gathered_view(source: WatchedShard, shape: list[int]) -> WatchedShard:
    """A view of the full tensor. Writes to it are written back."""
    full = source.full_tensor().contiguous().view(shape)
    replicated = (Replicate(),) * source.device_mesh.ndim
    made = compat.make_dtensor(full, source.device_mesh, replicated, full.shape)
    number = argument_number(shape)
    copy_of = _CopiedView(plain_dtensor(made), source, _VIEW, (shape,), {}, number)
    view = watch(made, None)
    view._zpasses_copied_view = copy_of
    view._zpasses_origin = hash((origin_of(source), number))
    return view


def _targets(
    writes: _Writes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[WatchedShard]:
    values = [args[i] for i in writes.positions if i < len(args)]
    values += [kwargs[name] for name in writes.names if name in kwargs]
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, WatchedShard):
                yield item


def _number_of_call(writes: _Writes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns a number of an edit, with its arguments. Those of lists are numbers only, unless they
    are copied, because optimizers call these operators in each step.
    """
    given = (*args[writes.first :], *kwargs.values())
    if writes.lists and not writes.copies:
        given = tuple(each for each in given if not _has_tensors(each))
    return hash((writes.number, argument_number(given)))


def _has_tensors(value: Any) -> bool:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, Tensor)


def _count_edit(
    target: WatchedShard, writes: _Writes, number: int, given: Sequence[Any], at: int
) -> None:
    """Args:
    number: of the call.
    given: what is written, for errors.
    at: position of the target among those of the call.
    """
    memory = memory_of(target)
    if memory is None:
        target._zpasses_origin = hash((origin_of(target), number))
    else:
        what = writes.name
        if writes.copies:
            what += named_source(given[0][at] if writes.lists else given[0])
        view = getattr(target, "_zpasses_view", 0)
        memory.edit(what, writes.number, hash((number, view)) if view else number)
    copied: _CopiedView | None = getattr(target, "_zpasses_copied_view", None)
    if copied is None:
        return
    source = copied.source
    full = source.full_tensor()
    copied.view(full, *copied.args, **copied.kwargs).copy_(copied.made.full_tensor())
    write_rows(source, full)
    if isinstance(source, WatchedShard):
        _count_edit(source, writes, hash((number, copied.number)), given, at)


def _by_torch(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator by DTensor's rules, which know no subclasses."""
    watched = [
        (item, type(item))
        for value in (*args, *kwargs.values())
        for item in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(item, WatchedShard)
    ]
    for item, _ in watched:
        item.__class__ = DTensor  # type: ignore[assignment]
    try:
        return run_explained(func, args, kwargs)
    finally:
        for item, kind in watched:
            item.__class__ = kind


_READ_AS_ATTRIBUTE = (
    "In a model's forward, read a parameter as an attribute of its module, such as self.weight, "
    "which gathers it: named_parameters() and _parameters hold shards."
)


def run_explained(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on DTensors.

    Raises:
        ShardingError: if it has plain tensors, too. torch's error does not say where they are from.
    """
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if compat.is_placement_error(error):
            raise ShardingError(
                f"torch cannot run {func.overloadpacket.__name__} on sharded parameters, or on "
                f"what was computed from them ({str(error)[:200]}). Run it on the full value, on "
                "every rank, and write the result back: full = param.full_tensor(), and "
                "param.copy_(full). Or run it before zpasses.shard."
            ) from error
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ShardingError(
            f"{func.overloadpacket.__name__} of plain tensors and DTensors, which are sharded "
            "parameters or gradients, or were computed from them. Expected tensors of one kind. "
            f"{_READ_AS_ATTRIBUTE} "
            "Averages and copies: shard the other model, too (zpasses.shard), or read the full "
            "value on every rank, param.full_tensor(). Parameters that are sharded and others, "
            "such as ignored_params: clip with zpasses.clip_grad_norm_, and give each kind an "
            "optimizer or a parameter group if it steps lists of tensors (foreach, fused)."
        ) from error


def _watch_views(
    source: DTensor, result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    several = isinstance(result, (list, tuple))
    memory, copied = memory_of(source), getattr(source, "_zpasses_copied_view", None)
    view = hash((_number_of(func), argument_number((*args, *kwargs.values()))))
    for i, made in enumerate(result if several else [result]):
        if not isinstance(made, DTensor) or not is_sharded(source):
            continue
        if _storage(made) != _storage(source):
            pick = functools.partial(_pick, func, i) if several else func
            copy_of = _CopiedView(plain_dtensor(made), source, pick, args, kwargs, hash((view, i)))
            copied_view = watch(made, None)
            copied_view._zpasses_copied_view = copy_of
            copied_view._zpasses_origin = hash((origin_of(source), view, i))
        elif isinstance(source, WatchedShard):
            shared = watch(made, memory)
            shared._zpasses_copied_view = copied
            if memory is None:
                shared._zpasses_origin = hash((origin_of(source), view, i))
            shared._zpasses_view = hash((getattr(source, "_zpasses_view", 0), view, i))
    return result


def _pick(func: Callable[..., Any], i: int, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)[i]


def _storage(tensor: DTensor) -> int:
    return compat.storage_id(compat.local_of(tensor))


# Compiled code that calls an operator between two graphs would have it compiled.
compat.begin_no_compile_at(cast(Any, WatchedShard).__torch_dispatch__.__func__)


class DTensorInplaceMode(compat.TorchDispatchMode):
    """Dispatch mode in which in-place operations on all DTensors act as they do on full tensors.

    Initialisers also write to DTensors that are no parameters. Applies to DTensors that are not
    partial. Some operations communicate, so every rank must run them.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ITEM and isinstance(args[0], DTensor):  # initialisers loop until all values fit
            return func(args[0].full_tensor())
        if isinstance(kwargs.get("out"), DTensor) or (args and isinstance(args[0], DTensor)):
            return _dispatch(func, args, kwargs)
        return func(*args, **kwargs)
