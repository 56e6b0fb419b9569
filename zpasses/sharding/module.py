"""Sharded modules: the class that `zpasses.shard` gives to a module, whose parameter reads gather
(zpasses.sharding.reads). `get_parameter` returns the parameter.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from zpasses import compat
from zpasses.errors import ShardingError, ZpassesError
from zpasses.runtime.edits import count_edit
from zpasses.runtime.layout import layout_of
from zpasses.runtime.param_conversion import (
    watch_gradients,
)
from zpasses.runtime.param_value import (
    ParamValue,
    as_sharded_parameter,
    drop_cached,
    is_sharded_parameter,
    param_value_of,
)
from zpasses.runtime.watched import DTensorInplaceMode, WatchedShard, replace_shard
from zpasses.sharding.guard import (
    Source,
    StandsForParameter,
    check_source,
    late_registration,
)
from zpasses.sharding.param_spec import (
    ParamShardSpec,
    RestingCodes,
    check_may_replace,
    shard_tensor,
)
from zpasses.sharding.reads import gathering_property
from zpasses.sharding.rnn import ShardedRNN
from zpasses.sharding.saved_shards import StateShard, as_state_shard, check_owner


class _NotPickledError(ShardingError, pickle.PicklingError):
    """Both, because code that pickles whatever it can expects the second."""


class ShardedModule(nn.Module):
    """Mixin of modules with sharded parameters. `_zpasses_specs` says how each is sharded."""

    _zpasses_specs: dict[str, ParamShardSpec]
    _zpasses_unsharded_class: type[nn.Module]

    def __init_subclass__(cls) -> None:
        # Not that of the user's class, such as one that lists its subclasses: this is none of them.
        pass

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Shard a full parameter that is assigned to a sharded name.

        A DTensor must have the mesh and the placement of the parameter that it replaces, and so
        must a parameter that was read from a sharded module, which ties the two.

        Raises:
            ShardingError: for another mesh, placement or device type.
        """
        spec = self._zpasses_specs.get(name)
        check_may_replace(self, name)
        if spec is None or param is None:
            super().register_parameter(name, param)
            self._read_moved(name)
        else:
            self.__dict__.pop(name, None)
            if isinstance(param, StandsForParameter):
                param = check_source(param, name).param
            current = self._parameters.get(name)
            if spec.device is not None and param is not current:
                raise ShardingError(
                    f"assigned to {name!r}, which rests on the host. Write to it instead: "
                    f"module.get_parameter({name!r}).copy_(value), in torch.no_grad()."
                )
            value = None
            if isinstance(current, WatchedShard):
                value = param_value_of(current)
                count_edit(current, "assignment", param)
            self._parameters[name] = made = _shard_assigned(param, spec, value)
            if made.shape != spec.shape:
                changed = self._zpasses_specs | {name: replace(spec, shape=made.shape)}
                self.__class__ = _with_specs(type(self), tuple(changed.values()))

    def _read_moved(self, name: str) -> None:
        """Gather a parameter of this module that it has got back under another name, as from
        torch.nn.utils.prune.remove.
        """
        param = self._parameters[name]
        if not isinstance(param, DTensor) or not is_sharded_parameter(param):
            return
        if name in self._zpasses_specs:  # since it was registered (zpasses.sharding.registrations)
            return
        cut = param.shape, layout_of(param)
        for before, spec in self._zpasses_specs.items():
            if before not in self._parameters and (spec.shape, spec.layout) == cut:
                add_reads(self, [replace(spec, name=name)])
                return

    def __delattr__(self, name: str) -> None:
        param = self._parameters.get(name) if name in self._zpasses_specs else None
        if param is not None and compat.is_called_by(parametrize.register_parametrization):
            place = getattr(param, _NEW_PLACE, None)
            if place is None or not isinstance(place(), parametrize.ParametrizationList):
                label = f"parameter {name!r} of a {type(self).__name__}"
                raise ShardingError(late_registration(parametrize.__name__, label))
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
            if spec.codes is not None and prefix + spec.attribute in state_dict:
                raise ShardingError(
                    f"the state dict has {prefix + spec.attribute!r}, which rests encoded in the "
                    f"model, as {prefix + name!r}. Load it before zpasses.encode_parameters, or "
                    "load a state dict of a model that was encoded the same way."
                )
            if not isinstance(value, Tensor) or not isinstance(current, DTensor):
                continue
            if isinstance(value, DTensor):
                check_owner(value, current, f"{prefix}{name} in the state dict")
                if isinstance(value, StateShard):
                    state_dict[prefix + name] = value.data
            elif value.shape == current.shape:
                count_edit(current, "load_state_dict", value)
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies as other modules do, and refuses to be pickled."""
        if compat.module_among_callers((copy.__name__,)) is None:
            raise _NotPickledError(
                f"a {type(self).__name__} that is sharded by zpasses cannot be pickled: the file "
                "would hold the rows of one rank. To save the whole model, call "
                "zpasses.save_safetensors(model, path) on every rank, or state = "
                "zpasses.full_state_dict(model) on every rank and torch.save(state, path) on one. "
                "To resume on as many ranks or others, save zpasses.training_state by "
                "torch.distributed.checkpoint."
            )
        return super().__reduce_ex__(protocol)

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
            if (codes := specs[name].codes) is not None:
                _check_decoded_dtype(codes, fn(torch.empty(0, dtype=codes.dtype)).dtype)
            if specs[name].device is not None:
                _check_conversion(name, param, converted)  # it stays on the host
            elif not isinstance(converted, DTensor):
                self._parameters[name] = nn.Parameter(converted, param.requires_grad)
            elif converted is not param:
                made = specs[name].layout.wrap(compat.local_of(converted), param.shape)
                replace_shard(param, made)
                drop_cached(param)
                if grad is not None:
                    compat.replace_dtensor(param.grad, grad)
        return self


def _check_conversion(name: str, param: Tensor, converted: Tensor) -> None:
    if converted.dtype != param.dtype:
        raise ShardingError(
            f"conversion of parameter {name!r}, which rests on the host, from {param.dtype} to "
            f"{converted.dtype}. Convert the model before zpasses.offload_parameters."
        )


def _check_decoded_dtype(codes: RestingCodes, dtype: torch.dtype) -> None:
    if dtype != codes.dtype:
        raise ShardingError(
            f"conversion of parameter {codes.attribute!r}, which rests encoded ({codes.encoding}), "
            f"from {codes.dtype} to {dtype}: codes cannot be rounded. Convert the model before "
            "zpasses.encode_parameters, or give zpasses.shard a param_dtype to decode to."
        )


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
    members: dict[str, Any] = {spec.attribute: gathering_property(spec) for spec in specs}
    members["_zpasses_specs"] = {spec.name: spec for spec in specs}
    members["_zpasses_unsharded_class"] = base
    members["__module__"], members["__qualname__"] = base.__module__, base.__qualname__
    if hasattr(base, "reset_parameters"):
        members["reset_parameters"] = _reset_shards(base.reset_parameters)
    ends = (_ConvertedInPlace, base) if base is nn.Module else (base, _ConvertedInPlace)
    rnn = (ShardedRNN,) if issubclass(base, nn.RNNBase) else ()
    return type(base.__name__, (ShardedModule, *rnn, *ends), members)


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


def change_specs(
    model: nn.Module,
    params: Collection[Tensor],
    change: Callable[[ParamShardSpec], ParamShardSpec],
) -> None:
    """Change how a model reads these parameters, wherever it holds them."""
    for module in model.modules():
        if not isinstance(module, ShardedModule):
            continue
        specs = tuple(
            change(spec) if module._parameters.get(name) in params else spec
            for name, spec in module._zpasses_specs.items()
        )
        module.__class__ = _with_specs(type(module), specs)


def put_in_place(module: nn.Module, name: str, new_name: str, param: nn.Parameter) -> None:
    """Replace a parameter of a module by another one under another name, in the same position."""
    held = list(module._parameters.items())
    module._parameters.clear()
    for each, value in held:
        module._parameters[new_name if each == name else each] = param if each == name else value


def rest_encoded(module: nn.Module, name: str, codes: RestingCodes, param: nn.Parameter) -> None:
    """Replace a sharded parameter of a module by its records.

    Args:
        name: of the parameter, which goes.
        param: the records, a sharded parameter, uint8[rows, bytes].
    """
    put_in_place(module, name, codes.name, param)
    cls: Any = type(module)
    specs = tuple(
        replace(spec, name=codes.name, codes=codes, param_dtype=None, reduce_dtype=None)
        if spec.name == name
        else spec
        for spec in cls._zpasses_specs.values()
    )
    module.__class__ = _with_specs(cls, specs)


def _with_specs(cls: type[Any], specs: tuple[ParamShardSpec, ...]) -> type[Any]:
    if not issubclass(cls, ShardedModule) or specs == tuple(cls._zpasses_specs.values()):
        return cls
    base = vars(cls).get("_zpasses_unsharded_class")
    if base is None:
        return _rebased(cls, lambda parent: _with_specs(parent, specs))
    return sharded_class(base, specs)


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
        watch_gradients()
        param._zpasses_ignored = True  # type: ignore[attr-defined]


def is_ignored(param: Tensor) -> bool:
    """Whether `ignored_params` of a call of `zpasses.shard` named the parameter."""
    return bool(getattr(param, "_zpasses_ignored", False))


def check_is_module(function: str, model: object) -> None:
    """Raise ZpassesError if a function of zpasses got something else than a model or part of it."""
    if not isinstance(model, nn.Module):
        raise ZpassesError(
            f"{function}: got {type(model).__name__}; expected a torch.nn.Module: the sharded "
            "model, or a part of it."
        )


def gathering_reads(model: nn.Module) -> Iterator[tuple[nn.Module, ParamShardSpec, Any]]:
    """Yield each read that gathers: its module, how it is sharded, and the parameter, if it is
    still there.
    """
    for module in model.modules():
        if isinstance(module, ShardedModule):
            for name, spec in module._zpasses_specs.items():
                yield module, spec, module._parameters.get(name)


def sharded_parameters(model: nn.Module) -> list[DTensor]:
    """Return the sharded parameters of a model, each once, in module order."""
    params = (param for *_, param in gathering_reads(model) if isinstance(param, DTensor))
    return list(dict.fromkeys(params))


def parameters_on_host(model: nn.Module) -> dict[DTensor, ParamShardSpec]:
    """Return the sharded parameters of a model whose shards rest on the host, and how one of the
    modules that have it reads each.
    """
    return {
        param: spec
        for _, spec, param in gathering_reads(model)
        if spec.device is not None and isinstance(param, DTensor)
    }


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
