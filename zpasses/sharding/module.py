"""Sharded modules: the class that `zpasses.shard` gives to a module, whose parameter reads gather.

On a sharded module, `module.weight` returns a gathered copy of the full parameter. A write to the
copy would have no effect on the parameter. So eager code gets a `GatheredCopy`, which raises an
error on writes. Compiled code gets a plain tensor, and zpasses.backend.capture checks the graph for
writes.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.runtime.gloo import use_exchanges_in_eager_code
from zpasses.runtime.layout import ParamLayout
from zpasses.runtime.local_shards import to_local_shard
from zpasses.runtime.param_value import (
    ParamValue,
    as_sharded_parameter,
    drop_cached,
    is_sharded_parameter,
    mark_edited,
    param_value_of,
)
from zpasses.runtime.watched import DTensorInplaceMode, WatchedShard, replace_shard
from zpasses.sharding.saved_shards import StateShard, as_state_shard, check_owner

__all__ = [
    "GatheredCopy",
    "GatheredPiece",
    "ParamShardSpec",
    "ShardedModule",
    "add_reads",
    "check_source",
    "local_shards",
    "own_part",
    "register_source",
    "shard_tensor",
    "sharded_class",
    "sharded_parameters",
    "unsharded_class",
    "with_plain_inputs",
]

use_exchanges_in_eager_code()


@dataclass(frozen=True)
class ParamShardSpec:
    """How one parameter of a module is sharded and read."""

    name: str
    layout: ParamLayout
    group_name: str
    """The process group of the layout's mesh. Two meshes over the same ranks compare equal, but may
    have different groups."""
    param_dtype: torch.dtype | None
    """Gather and compute in this dtype; None keeps the shard's dtype."""
    reduce_dtype: torch.dtype | None
    """Reduce gradients in this dtype; None keeps the gradient's dtype."""
    is_scalar: bool = False
    """Whether the parameter has no dimensions."""

    @property
    def other_groups(self) -> tuple[str | None, ...]:
        """The process groups that `unshard` takes after the first, as few as it needs."""
        replicas = self.layout.sharding_groups[1:]
        if self.layout.reshard_group is None:
            return replicas
        return (*(replicas or (None,)), self.layout.reshard_group)


def shard_tensor(param: Tensor, layout: ParamLayout) -> DTensor:
    """Shard a full parameter, as a DTensor with memory of its own.

    Nothing is communicated. The shard is copied, so that the full tensor can be freed.

    Args:
        param: the full parameter, equal on every rank; or a DTensor on the layout's inner mesh. A
            0-dimensional one is replicated.
    """
    return layout.wrap(layout.owned(own_part(param, layout)), param.shape)


def own_part(param: Tensor, layout: ParamLayout) -> Tensor:
    """Return this rank's shard of a parameter as a detached view: the whole of a 0-dimensional one.

    Args:
        param: as for `shard_tensor`.
    """
    full = param.detach()
    if not isinstance(full, DTensor):
        return layout.local_part(full)
    piece = compat.local_of(full)
    return piece.narrow(layout.dim, *layout.row_range(full.shape)) if full.dim() else piece


@dataclass(frozen=True)
class Source:
    """The parameter that was gathered."""

    param: nn.Parameter
    """A DTensor."""
    spec: ParamShardSpec


class _StandsForParameter:
    """What a read of a sharded parameter has in common with the parameter.

    Where a module registers a parameter, it registers the parameter that was read. So weights are
    tied, and torch's parametrizations registered, as in an unsharded model. Marks (attributes that
    programs set) are those of the parameter, too.
    """

    _label: str
    _source: Source | None = None
    """None for a view."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self._source is None or not _is_mark(name):
            super().__setattr__(name, value)
        else:
            setattr(self._source.param, name, value)

    def __getattr__(self, name: str) -> Any:
        if self._source is not None and _is_mark(name) and name in self._source.param.__dict__:
            return self._source.param.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def set_(self, source: Tensor) -> Tensor:
        """Replace the whole value, in the shards. torch's parametrizations do that."""
        copy = cast(Tensor, self)
        if source is not copy:
            _replace_value(copy, self._source, source)
        return copy


class GatheredCopy(_StandsForParameter, Tensor):  # type: ignore[misc]  # set_
    """A gathered full parameter, or a view of one. Writing to it raises ShardingError.

    Results of other operations are plain tensors.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            # The copy is an input of the graph. The captured graph is checked for writes later.
            with compat.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ABOUT_PARAMETERS and not compat.is_tracing():
            answer = _about_parameter(func, args, kwargs)
            if answer is not _NO_ANSWER:
                return answer
        target = _written_copy(func, args, kwargs)
        if target is not None and not compat.is_tracing():
            raise ShardingError(_lost_write(func, target._label))
        with compat.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                hint = _unused_hint(func, args) or _dtype_hint(args, kwargs)
                if hint:
                    raise ShardingError(f"{_name(func)}: {error}. {hint}") from error
                raise
            source = next((arg for arg in args if isinstance(arg, GatheredCopy)), None)
            if source is None or func is _BASE or compat.is_tracing():
                return result
            return _guard_views(result, source)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._copied()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return cast(Any, self._copied()).__reduce_ex__(protocol)

    def _copied(self) -> Tensor:
        """A copy with memory of its own: a full parameter, or a plain tensor of a view."""
        plain = self.as_subclass(Tensor).detach().clone()
        source = self._source
        return plain if source is None else nn.Parameter(plain, source.param.requires_grad)


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_NO_ANSWER = object()
_GET_GRAD, _GET_GRAD_FN, _GET_RETAINS_GRAD = map(_getter, ("grad", "grad_fn", "retains_grad"))
_SET_REQUIRES_GRAD: Any = getattr(Tensor, "requires_grad").__set__  # noqa: B009
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)
_ABOUT_PARAMETERS = frozenset(
    (
        *(*_HOOKS, _GET_GRAD, _GET_GRAD_FN, _GET_RETAINS_GRAD),
        *(Tensor.requires_grad_, _SET_REQUIRES_GRAD),
    )
)
"""Functions of a tensor that concern the parameter, and not its value."""


def _about_parameter(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Return what a function of `_ABOUT_PARAMETERS` gives for a gathered copy; `_NO_ANSWER` if it
    runs on the copy itself.

    Raises:
        ShardingError: if it is about the gradient, which is stored with the shards.
    """
    copy = args[0]
    if func == _GET_GRAD:
        raise ShardingError(
            f"{copy._label} is sharded: the gradient is stored with the shards, and this "
            "is a gathered copy, which has none. Read it from the parameter itself: "
            "model.parameters() and named_parameters() yield DTensors, and their .grad is a "
            "DTensor; .grad.full_tensor(), on every rank, gathers it."
        )
    source: Source | None = copy._source
    if source is None:
        # A detached view, of which nn.Parameter makes a leaf. To register it is refused.
        if func is Tensor.requires_grad_ and compat.is_called_by(nn.Parameter.__new__, depth=2):
            with compat.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _NO_ANSWER
    if func in (*_HOOKS, _GET_RETAINS_GRAD):
        raise ShardingError(
            f"{_name(func)} on {copy._label}, which is sharded: a read returns a gathered copy. "
            "The gradient is stored with the shards, so a hook on the copy would not see it, and "
            "an optimizer could not step it. Use the parameter itself, whose hooks get DTensors: "
            "dict(model.named_parameters())[...] returns it, and so does the attribute inside "
            "`with zpasses.local_shards(model):`."
        )
    if func == _GET_GRAD_FN:
        is_registered = compat.is_called_by(nn.Module.register_parameter, depth=2)
        return None if is_registered else _NO_ANSWER
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if wanted == source.param.requires_grad:
        return copy if func is Tensor.requires_grad_ else None
    return _NO_ANSWER  # a write


def _is_mark(name: str) -> bool:
    known = hasattr(Tensor, name) or name in ("_label", "_source", "_is_param")
    return not known and not name.startswith(("_dynamo", "_zpasses"))


def _replace_value(copy: Tensor, source: Source | None, value: Tensor) -> None:
    label = cast(Any, copy)._label
    if source is None:
        raise ShardingError(_lost_write(Tensor.set_, label))
    param = cast(DTensor, source.param)
    if value.shape != copy.shape or value.dtype != param.dtype:
        raise ShardingError(
            f"set_ on {label}, whose shards are {param.dtype} of {list(copy.shape)}: got "
            f"{value.dtype} of {list(value.shape)}. Give a tensor of that shape and dtype; with "
            "param_dtype, register parametrizations before zpasses.shard."
        )
    with torch.no_grad(), compat.DisableTorchFunctionSubclass():
        plain = value.as_subclass(Tensor) if isinstance(value, GatheredCopy) else value
        compat.local_of(param).copy_(own_part(plain, source.spec.layout))
        _SET_DATA(copy, plain.detach())
    mark_edited(param)


_SET_DATA: Any = getattr(Tensor, "data").__set__  # noqa: B009
_BASE: Any = getattr(Tensor, "_base").__get__  # noqa: B009
_ITEM_WRITES = frozenset({"__setitem__", "__set__", "__delete__"})


def _lost_write(func: Callable[..., Any], label: str) -> str:
    utility = compat.module_among_callers(_REGISTRARS)
    if utility is not None:
        return _late_registration(utility, label)
    return (
        f"{_name(func)} would write to {label}, which is sharded. A read returns a gathered copy, "
        "so the write would be lost. Write to the shards instead: inside "
        "`with zpasses.local_shards(model):` every parameter read returns its DTensor, and "
        "model.parameters() always does. (model.apply and reset_parameters use the shards already.)"
    )


_REGISTRARS = (
    *("torch.nn.utils.parametrize", "torch.nn.utils.prune"),
    *("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm"),
)
"""Modules of torch that keep parameters in another form."""


def _late_registration(utility: str, label: str) -> str:
    return (
        f"{utility} makes new parameters of {label}, which is sharded already. They would be whole "
        "on every rank, and their gradients would not be averaged. Call it before zpasses.shard, "
        "which then shards the new parameters. If a forward calls it, as with PEFT's "
        "target_parameters, compile the rest of the model only: "
        "module.forward = torch.compiler.disable(module.forward)."
    )


def check_source(copy: Any, name: str) -> Source:
    """Return the parameter that a gathered copy stands for, which is to be registered.

    Raises:
        ShardingError: for a new parameter, or a view, that was made of the copy.
    """
    source: Source | None = copy._source
    if source is None:
        utility = compat.module_among_callers(_REGISTRARS)
        raise ShardingError(
            _late_registration(utility, copy._label)
            if utility is not None
            else f"registered as {name!r}: a parameter that shares the memory of {copy._label}, "
            "which is sharded. Register what the read returned, without nn.Parameter, to tie both "
            "names to one parameter; or a copy, nn.Parameter(value.detach().clone()), and call "
            "zpasses.shard on the model again."
        )
    return source


def _unused_hint(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Why torch.autograd.grad has found no path to a gathered copy; "" for other functions."""
    given = args[1] if func is torch.autograd.grad and len(args) > 1 else ()
    copies = [each for each in given if isinstance(each, GatheredCopy)]
    if not copies:
        return ""
    return (
        f"{copies[0]._label} is sharded, and each read of it returns another gathered copy. "
        "Differentiate with respect to the parameter itself: dict(model.named_parameters())[...]."
    )


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        in_place = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        return in_place or name in _ITEM_WRITES
    return name.endswith("_")


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    attribute = getattr(getattr(func, "__self__", None), "__name__", None)
    return f".{attribute}" if name in ("__get__", "__set__", "__delete__") and attribute else name


def _written_copy(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> GatheredCopy | GatheredPiece | None:
    """Return the gathered copy that a call would write to; None if there is none."""
    written = [kwargs.get("out")]
    if _writes(func):
        # nn.init passes all arguments by keyword.
        written.append(args[0] if args else next(iter(kwargs.values()), None))
    flat = [
        item
        for value in written
        for item in (value if isinstance(value, (list, tuple)) else [value])
    ]
    return next((item for item in flat if isinstance(item, (GatheredCopy, GatheredPiece))), None)


def _dtype_hint(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why an operation failed that mixes a gathered copy with another dtype; "" if it does not."""
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    copy = next((each for each in values if isinstance(each, GatheredCopy)), None)
    if copy is None:
        return ""
    other = next((each for each in values if _is_other_float(each, copy.dtype)), None)
    if other is None:
        return ""
    return (
        f"{copy._label} is gathered in {copy.dtype}, and another argument is {other.dtype}: "
        "zpasses.shard(param_dtype=...) converts parameters only. Convert the inputs of the model, "
        f"x.to({copy.dtype}), or run it under torch.autocast and leave param_dtype out."
    )


def _is_other_float(value: Tensor, dtype: torch.dtype) -> bool:
    return value.is_floating_point() and value.dtype != dtype


def _guard(full: Tensor, label: str, source: Source | None = None) -> Tensor:
    if type(full) is not Tensor:
        return full  # leave fake, simulated and functional tensors as they are
    copy = full.as_subclass(GatheredCopy)
    copy._label = label
    if source is not None:
        copy._source = source
        copy._is_param = True  # for isinstance(copy, nn.Parameter)
    return copy


def with_plain_inputs(
    compiled: Callable[..., Any], example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Wrap compiled code so that gathered copies among its inputs become plain tensors.

    Frames that are not compiled may pass gathered copies to compiled ones.
    """
    positions = [i for i, value in enumerate(example_inputs) if isinstance(value, GatheredCopy)]
    if not positions:
        return compiled

    def run(*args: Any) -> Any:
        values = list(args)
        for i in positions:
            values[i] = values[i].as_subclass(Tensor)
        return compiled(*values)

    return compat.dynamo_disable(run)


class GatheredPiece(_StandsForParameter, DTensor):  # type: ignore[misc]  # set_
    """What a read of a parameter under tensor parallelism returns: a DTensor on the mesh of tensor
    parallelism. Writing to it raises ShardingError.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT_PARAMETERS and not compat.is_tracing():
            answer = _about_parameter(func, args, kwargs)
            if answer is not _NO_ANSWER:
                return answer
        target = _written_copy(func, args, kwargs)
        if target is not None and not compat.is_tracing():
            raise ShardingError(_lost_write(func, target._label))
        with compat.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _guard_piece(piece: DTensor, label: str, source: Source) -> DTensor:
    if type(piece) is not DTensor:
        return piece
    made = cast(Any, piece)
    made.__class__ = GatheredPiece
    made._label, made._is_param, made._source = label, True, source
    return piece


def _guard_views(result: Any, source: GatheredCopy) -> Any:
    if isinstance(result, (list, tuple)) and type(result) in (list, tuple):
        return type(result)(_guard_views(item, source) for item in result)
    if type(result) is Tensor and compat.storage_id(result) == compat.storage_id(source):
        return _guard(result, source._label)
    return result


def _gathering_property(spec: ParamShardSpec) -> property:
    layout, groups = spec.layout, (spec.group_name, *spec.other_groups)
    gather: Callable[..., Any]
    is_plain = layout.dim == 0 and layout.inner_mesh is None and len(groups) == 1
    if is_plain and not spec.is_scalar:
        dtypes = {"param_dtype": spec.param_dtype, "reduce_dtype": spec.reduce_dtype}
        gather = _with_constants(_gather_rows, {"name": spec.name, "group": groups[0], **dtypes})
    else:
        gather = _gather_of(spec)
    name = spec.name
    return property(
        gather,
        lambda module, value: _set_plain_value(module, name, value),
        lambda module: module.__dict__.pop(name),
        f"{name}, gathered for reading",
    )


def _gather_rows(module: nn.Module) -> Any:
    """Read a parameter that is cut along dimension 0, and is no piece of tensor parallelism.

    Dynamo traces each read, and checks at each call what the read depends on. Texts of this
    function stand for constants of its copies (`_with_constants`), which need no check.
    """
    try:
        param = module._parameters["$name"]
    except KeyError:
        return _plain_value(module, "$name")
    if not isinstance(param, DTensor):
        return param  # None, or a tensor swapped in by torch.func.functional_call
    if _is_compiling():
        shard, rows = param.to_local(), param.shape[0]
        return _UNSHARD(shard, rows, "$param_dtype", "$reduce_dtype", "$group")
    return _read_eagerly(module, "$name", param)


_UNSHARD = torch.ops.zpasses.unshard
_is_compiling = torch.compiler.is_compiling


def _with_constants(template: Callable[..., Any], constants: dict[str, Any]) -> Callable[..., Any]:
    """Returns a copy of a function with these constants in place of its texts "$name"."""
    given = {f"${name}": value for name, value in constants.items()}
    code = template.__code__
    consts = tuple(
        given.get(each, each) if isinstance(each, str) else each for each in code.co_consts
    )
    return types.FunctionType(code.replace(co_consts=consts), template.__globals__)


def _gather_of(spec: ParamShardSpec) -> Callable[..., Any]:
    name, layout = spec.name, spec.layout
    param_dtype, reduce_dtype = spec.param_dtype, spec.reduce_dtype
    groups = (spec.group_name, *spec.other_groups)
    # Dynamo makes the attribute `dim` of a layout an input where the layouts of a model differ.
    rows_first, rows_back = (
        _with_constants(exchange, {"dim": layout.dim}) if layout.dim else _unchanged
        for exchange in (_rows_first, _rows_back)
    )

    def gather(module: nn.Module) -> Any:
        try:
            param = module._parameters[name]
        except KeyError:
            return _plain_value(module, name)
        if not isinstance(param, DTensor):
            return param
        if not torch.compiler.is_compiling():
            return _read_eagerly(module, name, param)
        # zpasses.backend.capture looks for this exchange of dimensions.
        traced: Tensor = rows_back(
            torch.ops.zpasses.unshard(
                rows_first(param.to_local()),
                layout.rows(param.shape),
                param_dtype,
                reduce_dtype,
                *groups,
            )
        )
        return traced if layout.inner_mesh is None else layout.wrap_piece(traced, param.shape)

    return gather


def _rows_first(local: Any) -> Any:
    return local.movedim("$dim", 0)


def _rows_back(rows: Any) -> Any:
    # The model may view its parameters as contiguous tensors, and so do some kernels.
    return rows.movedim(0, "$dim").contiguous()


def _unchanged(value: Any) -> Any:
    return value


def _plain_value(module: nn.Module, name: str) -> Any:
    """Read what was assigned to the name of a parameter that was deleted, such as a pruned weight.

    Raises:
        AttributeError: if nothing was.
    """
    if name not in module.__dict__:
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
    return module.__dict__[name]


def _set_plain_value(module: nn.Module, name: str, value: Any) -> None:
    """Assign to the name of a parameter that was deleted."""
    if isinstance(value, DTensor):
        label = f"parameter {name!r} of a {type(module).__name__}"
        utility = compat.module_among_callers(_REGISTRARS)
        raise ShardingError(
            _late_registration(utility, label)
            if utility is not None
            else f"assigned a DTensor to {label}, which was sharded and has been deleted. Assign "
            "a parameter, nn.Parameter(value), or a plain tensor."
        )
    module.__dict__[name] = value


def _read_eagerly(module: Any, name: str, param: DTensor) -> Tensor:
    spec: ParamShardSpec = module._zpasses_specs[name]
    layout = spec.layout
    full = layout.rows_back(
        torch.ops.zpasses.unshard(
            to_local_shard(param),
            layout.rows(param.shape),
            spec.param_dtype,
            spec.reduce_dtype,
            spec.group_name,
            *spec.other_groups,
        )
    ).contiguous()
    label = f"parameter {name!r} of a {type(module).__name__}"
    source = Source(cast(nn.Parameter, param), spec)
    if layout.inner_mesh is None:
        return _guard(full, label, source)
    return _guard_piece(layout.wrap_piece(full, param.shape), label, source)


class ShardedModule(nn.Module):
    """Mixin of modules with sharded parameters. `_zpasses_specs` says how each is sharded."""

    _zpasses_specs: dict[str, ParamShardSpec]
    _zpasses_unsharded_class: type[nn.Module]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Shard a full parameter that is assigned to a sharded name.

        A DTensor must have the mesh and the placement of the parameter that it replaces, and so
        must a parameter that was read from a sharded module, which ties the two.

        Raises:
            ShardingError: for another mesh, placement or device type.
        """
        spec = self._zpasses_specs.get(name)
        if spec is None or param is None:
            super().register_parameter(name, param)
        else:
            self.__dict__.pop(name, None)
            if isinstance(param, _StandsForParameter):
                param = check_source(param, name).param
            current = self._parameters.get(name)
            value = param_value_of(current) if isinstance(current, WatchedShard) else None
            self._parameters[name] = _shard_assigned(param, spec, value)

    def __delattr__(self, name: str) -> None:
        param = self._parameters.get(name) if name in self._zpasses_specs else None
        if param is not None and compat.is_called_by(parametrize.register_parametrization):
            place = getattr(param, _NEW_PLACE, None)
            if place is None or not isinstance(place(), parametrize.ParametrizationList):
                label = f"parameter {name!r} of a {type(self).__name__}"
                raise ShardingError(_late_registration(parametrize.__name__, label))
        super().__delattr__(name)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Shard full tensors in the state dict before they are loaded.

        Raises:
            ShardingError: for shards of another rank.
        """
        for name, spec in self._zpasses_specs.items():
            value = state_dict.get(prefix + name)
            current = self._parameters.get(name)
            if not isinstance(value, Tensor) or not isinstance(current, DTensor):
                continue
            if isinstance(value, DTensor):
                check_owner(value, current, f"{prefix}{name} in the state dict")
                if isinstance(value, StateShard):
                    state_dict[prefix + name] = value.data
            elif value.shape == current.shape:
                state_dict[prefix + name] = shard_tensor(value, spec.layout)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._zpasses_specs if not keep_vars else ():
            value = destination.get(prefix + name)
            if isinstance(value, DTensor):
                destination[prefix + name] = as_state_shard(value)

    def apply(self, fn: Callable[[nn.Module], None]) -> ShardedModule:
        """Like nn.Module.apply, but `fn` reads this module's parameters as DTensors, so that
        initialisers work on the shards.
        """
        for child in self.children():
            child.apply(fn)
        with local_shards(self, recurse=False):
            fn(self)
        return self

    def _fqn_modifiers(self) -> dict[str, str]:
        # torch.distributed.checkpoint reads parameters by getattr. With this name as part of the
        # path it finds the DTensors, and does not gather.
        return dict.fromkeys(self._zpasses_specs, "_zpasses_shards")

    def extra_repr(self) -> str:
        """As that of the unsharded module. It reads shards, because one rank alone may print."""
        with local_shards(self, recurse=False):
            return self.extra_repr()  # of the class without gathering reads

    @property
    def _zpasses_shards(self) -> object:
        return _Namespace(self._parameters)


class _ConvertedInPlace(nn.Module):
    """Mixin of sharded modules that follows all other classes, so that it sees the conversions
    that a module's own `_apply` passes on.

    torch swaps a parameter of a tensor subclass with the converted one, which it refuses for
    parameters that weak references exist of. Schedules and guards of compiled code hold such.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> _ConvertedInPlace:
        """Convert the shards and their gradients. Parameters stay the same objects."""
        specs: dict[str, ParamShardSpec] = self._zpasses_specs  # type: ignore[assignment]
        shards: dict[str, Any] = {
            name: param
            for name, param in self._parameters.items()
            if name in specs and isinstance(param, DTensor)
        }
        self._parameters.update(dict.fromkeys(shards))
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._parameters.update(shards)
        for name, param in shards.items():
            with torch.no_grad():
                converted = fn(param)
                grad = fn(param.grad) if param.grad is not None else None
            if not isinstance(converted, DTensor):
                self._parameters[name] = nn.Parameter(converted, param.requires_grad)
            elif converted is not param:
                made = specs[name].layout.wrap(compat.local_of(converted), param.shape)
                replace_shard(param, made)
                drop_cached(param)
                if grad is not None:
                    compat.replace_dtensor(param.grad, grad)
        return self


class _Namespace:
    def __init__(self, values: dict[str, nn.Parameter | None]) -> None:
        self.__dict__.update(values)


_NEW_PLACE = "_zpasses_new_place"


def register_source(module: nn.Module, name: str, source: Source) -> nn.Parameter:
    """Let a module that is not sharded read the parameter of another one under a name.

    Returns:
        The parameter, which is to be registered.
    """
    add_reads(module, [replace(source.spec, name=name)])
    setattr(source.param, _NEW_PLACE, weakref.ref(module))
    return source.param


def _shard_assigned(
    param: nn.Parameter, spec: ParamShardSpec, value: ParamValue | None
) -> nn.Parameter:
    """Args:
    value: of the parameter whose place it takes.
    """
    layout = spec.layout
    if not isinstance(param, DTensor):
        device = layout.mesh.device_type
        if param.device.type not in (device, "meta"):
            raise ShardingError(
                f"assigned to {spec.name!r}: a parameter on {param.device.type}, but the mesh is "
                f"on {device}. "
                f"Move it first: value.to({device!r})."
            )
        made = nn.Parameter(shard_tensor(param, layout), requires_grad=param.requires_grad)
        return as_sharded_parameter(made, layout, value)
    expected = layout.placements(param.dim())
    if param.device_mesh != layout.whole_mesh or param.placements != expected:
        raise ShardingError(
            f"assigned to {spec.name!r}: a DTensor with placements {param.placements} on "
            f"{param.device_mesh}, but the module is "
            f"sharded as {expected} on {layout.whole_mesh}. Assign a full tensor, or redistribute "
            "the DTensor first."
        )
    if is_sharded_parameter(param):
        return param  # tied
    return as_sharded_parameter(param, layout, value)


def _reset_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reset_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with local_shards(self):
            return original(self, *args, **kwargs)

    return reset_parameters


@functools.cache
def sharded_class(base: type[Any], specs: tuple[ParamShardSpec, ...]) -> type[Any]:
    """Create the class of a module of class `base` with these parameters sharded.

    It is a subclass of `base` with the same name. Modules with equal `base` and specs share one
    class, so that code compiled for one block also serves the other blocks.
    """
    members: dict[str, Any] = {spec.name: _gathering_property(spec) for spec in specs}
    members["_zpasses_specs"] = {spec.name: spec for spec in specs}
    members["_zpasses_unsharded_class"] = base
    members["__module__"], members["__qualname__"] = base.__module__, base.__qualname__
    if hasattr(base, "reset_parameters"):
        members["reset_parameters"] = _reset_shards(base.reset_parameters)
    ends = (_ConvertedInPlace, base) if base is nn.Module else (base, _ConvertedInPlace)
    return type(base.__name__, (ShardedModule, *ends), members)


def add_reads(module: nn.Module, added: Sequence[ParamShardSpec]) -> None:
    """Let a module gather these parameters when it reads them, besides those of before."""
    cls: type[Any] = type(module)
    if not issubclass(cls, ShardedModule) and _is_parametrized(module):
        # Below the class that torch removes together with the last parametrization.
        made = _rebased(cls, lambda parent: _with_reads(parent, tuple(added)))
    else:
        made = _with_reads(cls, tuple(added))
    module.__class__ = made


def _is_parametrized(module: nn.Module) -> bool:
    """Whether the class of a module is one that torch's parametrize has derived for it."""
    cls = type(module)
    named = cls.__base__ is not None and cls.__name__ == f"Parametrized{cls.__base__.__name__}"
    return named and isinstance(module._modules.get("parametrizations"), nn.ModuleDict)


def _with_reads(cls: type[Any], added: tuple[ParamShardSpec, ...]) -> type[Any]:
    if not issubclass(cls, ShardedModule):
        return sharded_class(cls, added)  # type: ignore[arg-type]
    base = vars(cls).get("_zpasses_unsharded_class")
    if base is None:
        return _rebased(cls, lambda parent: _with_reads(parent, added))
    return sharded_class(base, (*cls._zpasses_specs.values(), *added))


def unsharded_class(cls: type[Any]) -> type[Any]:
    """Return the class of modules before they were sharded; the class itself if they were not."""
    if not issubclass(cls, ShardedModule):
        return cls
    base: type[Any] | None = vars(cls).get("_zpasses_unsharded_class")
    return base if base is not None else _rebased(cls, unsharded_class)


def _rebased(cls: type[Any], change: Callable[[type[Any]], type[Any]]) -> type[Any]:
    """Return a class that torch's parametrize has derived from a sharded one, with another base."""
    members = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__, tuple(map(change, cls.__bases__)), members)


def mark_ignored(params: Iterable[nn.Parameter]) -> None:
    """Remember that the user left these parameters out of sharding."""
    for param in params:
        param._zpasses_ignored = True  # type: ignore[attr-defined]


def is_ignored(param: Tensor) -> bool:
    """Whether `ignored_params` of a call of `zpasses.shard` named the parameter."""
    return bool(getattr(param, "_zpasses_ignored", False))


def sharded_parameters(model: nn.Module) -> list[DTensor]:
    """Return the sharded parameters of a model, each once, in module order."""
    found: dict[int, DTensor] = {}
    for module in model.modules():
        for name in module._zpasses_specs if isinstance(module, ShardedModule) else ():
            param = module._parameters.get(name)
            if isinstance(param, DTensor):
                found[id(param)] = param
    return list(found.values())


@contextlib.contextmanager
def local_shards(model: nn.Module, *, recurse: bool = True) -> Iterator[nn.Module]:
    """Context manager in which parameter reads return the DTensor shards instead of gathered
    copies.

    Use it for initialisers and other code that writes to parameters. If every rank uses the same
    seed, initialisers give the values of an unsharded model. Random numbers on accelerators are the
    exception: DTensor's generator draws another sequence. Run the block on every rank, because some
    operations communicate.

    Args:
        model: a sharded module, or one that contains sharded modules.
        recurse: whether to include the submodules of `model`.
    """
    original = getattr(model, "_orig_mod", model)
    exposed: list[tuple[nn.Module, Any]] = []
    try:
        for module in original.modules() if recurse else [original]:
            if isinstance(module, ShardedModule):
                exposed.append((module, type(module)))
                module.__class__ = unsharded_class(type(module))
        with contextlib.ExitStack() as stack:
            if exposed:
                stack.enter_context(DTensorInplaceMode())  # type: ignore[no-untyped-call]
            yield model
    finally:
        for module, cls in exposed:
            module.__class__ = cls
