"""What a read of a sharded parameter returns in eager code: a full tensor that stands for the
parameter.

A write to the copy would have no effect on the parameter, and a hook on it would not see the
gradient. So these raise an error that says where to write.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.runtime.param_value import mark_edited
from zpasses.sharding.param_spec import ParamShardSpec, own_part


@dataclass(frozen=True)
class Source:
    """The parameter that was gathered."""

    param: nn.Parameter
    """A DTensor."""
    spec: ParamShardSpec


class StandsForParameter:
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

    def __del__(self) -> None:
        # `backward(inputs=[copy])` sets the flag, calls nothing that could raise, and leaves the
        # gradient on the copy, if there is one.
        with compat.DisableTorchFunctionSubclass():
            if _GET_RETAINS_GRAD(self):
                _inputs_of_backward.append(self._label)

    def set_(self, source: Tensor) -> Tensor:
        """Replace the whole value, in the shards. torch's parametrizations do that."""
        copy = cast(Tensor, self)
        if source is not copy:
            _replace_value(copy, self._source, source)
        return copy


class GatheredCopy(StandsForParameter, Tensor):  # type: ignore[misc]  # set_
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
        answer = _answer(func, args, kwargs)
        if answer is not _NO_ANSWER:
            return answer
        with compat.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                hint = _unused_hint(func, args) or _dtype_hint(args, kwargs)
                if hint:
                    raise ShardingError(f"{_name(func)}: {error}. {hint}") from error
                raise
            if func is torch.autograd.grad and any(each is None for each in result):
                hint = _unused_hint(func, args, result)
                if hint:  # allow_unused=True
                    raise ShardingError(f"{_name(func)}: the outputs do not depend on it. {hint}")
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


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Return what a function gives for the parameter; `_NO_ANSWER` if it runs on the copy.

    Raises:
        ShardingError: if it writes to the copy, or is about the gradient.
    """
    if compat.is_tracing():
        return _NO_ANSWER
    target = _written_copy(func, args, kwargs)
    answer = _about_parameter(func, args, kwargs) if func in _ABOUT_PARAMETERS else _NO_ANSWER
    if answer is _NO_ANSWER and target is not None:
        raise ShardingError(_lost_write(func, target, args))
    return answer


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
        if func is Tensor.requires_grad_ and compat.is_called_by(nn.Parameter.__new__, depth=3):
            with compat.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _NO_ANSWER
    if func in (*_HOOKS, _GET_RETAINS_GRAD):
        raise ShardingError(
            f"{_name(func)} on {copy._label}, which is sharded: a read returns a gathered copy. "
            "The gradient is stored with the shards, so a hook on the copy would not see it, and "
            "an optimizer could not step it. Use the parameter itself, whose hooks get DTensors: "
            "model.get_parameter(name) returns it, and so does the attribute inside "
            "`with zpasses.local_shards(model):`."
        )
    if func == _GET_GRAD_FN:
        is_registered = compat.is_called_by(nn.Module.register_parameter, depth=3)
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
        raise ShardingError(_lost_write(Tensor.set_, cast(Any, copy), (copy, value)))
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
    mark_edited(param, "set_")


_SET_DATA: Any = getattr(Tensor, "data").__set__  # noqa: B009
_BASE: Any = getattr(Tensor, "_base").__get__  # noqa: B009
_ITEM_WRITES = frozenset({"__setitem__", "__set__", "__delete__"})


def _lost_write(func: Callable[..., Any], target: Any, args: tuple[Any, ...]) -> str:
    label, value = target._label, args[-1] if args else None
    if _name(func) == ".data" and isinstance(value, Tensor) and value.shape != target.shape:
        return (
            f"assigned {list(value.shape)} to `.data` of {label}, which is sharded and has the "
            f"shape {list(target.shape)}. Change shapes, as resize_token_embeddings does, before "
            "you shard the model: zpasses.shard and the prepare() of a trainer come after it."
        )
    return late_registration_of(label) or (
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


def late_registration(utility: str, label: str) -> str:
    return (
        f"{utility} makes new parameters of {label}, which is sharded already. They would be whole "
        "on every rank, and their gradients would not be averaged. Call it before zpasses.shard, "
        "which then shards the new parameters. If a forward calls it, as with PEFT's "
        "target_parameters, compile the rest of the model only: "
        "module.forward = torch.compiler.disable(module.forward)."
    )


def late_registration_of(label: str) -> str:
    """Returns why a utility of torch among the callers cannot register parameters in place of one
    that is sharded; "" if there is none.
    """
    utility = compat.module_among_callers(_REGISTRARS)
    return "" if utility is None else late_registration(utility, label)


def check_source(copy: Any, name: str) -> Source:
    """Return the parameter that a gathered copy stands for, which is to be registered.

    Raises:
        ShardingError: for a new parameter, or a view, that was made of the copy.
    """
    source: Source | None = copy._source
    if source is None:
        raise ShardingError(
            late_registration_of(copy._label)
            or f"registered as {name!r}: a parameter that shares the memory of {copy._label}, "
            "which is sharded. Register what the read returned, without nn.Parameter, to tie both "
            "names to one parameter; or a copy, nn.Parameter(value.detach().clone()), and call "
            "zpasses.shard on the model again."
        )
    if source.spec.codes is not None:
        raise ShardingError(
            f"registered as {name!r}: {copy._label}, which rests encoded. Tie parameters before "
            "zpasses.encode_parameters."
        )
    return source


def _unused_hint(
    func: Callable[..., Any], args: tuple[Any, ...], grads: Iterable[Any] = itertools.repeat(None)
) -> str:
    """Why torch.autograd.grad has found no path to a gathered copy; "" for other functions, and
    where each copy has a gradient.
    """
    given = args[1] if func is torch.autograd.grad and len(args) > 1 else ()
    given = [given] if isinstance(given, Tensor) else given
    copies = [
        each
        for each, grad in zip(given, grads, strict=False)
        if grad is None and isinstance(each, GatheredCopy)
    ]
    if not copies:
        return ""
    return (
        f"{copies[0]._label} is sharded, and each read of it returns another gathered copy. "
        "Differentiate with respect to the parameter itself: model.get_parameter(name)."
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


_inputs_of_backward: list[str] = []


def check_inputs_of_backward() -> None:
    """Raise ShardingError if `backward(inputs=...)` was given a gathered copy that is gone."""
    if _inputs_of_backward:
        label, *_ = _inputs_of_backward
        _inputs_of_backward.clear()
        raise ShardingError(
            f"backward(inputs=[...]) was given {label}, which is sharded: each read of it returns "
            "another gathered copy, so the parameter got no gradient. Give it the parameter "
            "itself: model.get_parameter(name)."
        )


_last_read: list[str] = []


def last_read() -> str | None:
    """The label of the parameter that uncompiled code has read last; None if it has read none."""
    return _last_read[0] if _last_read else None


def guard(full: Tensor, label: str, source: Source | None = None) -> Tensor:
    """Let a gathered value stand for its parameter: a tensor, or a DTensor under tensor
    parallelism, which it changes in place. Others are returned as they are.

    Args:
        label: the parameter, for errors.
        source: the parameter; None for a view of the copy.
    """
    copy: Any = full
    if type(full) is Tensor:
        _last_read[:] = [label]
        copy = full.as_subclass(GatheredCopy)
    elif type(full) is DTensor:
        copy.__class__ = GatheredPiece
    else:
        return full  # fake, simulated and functional tensors
    copy._label = label
    if source is not None:
        copy._source = source
        copy._is_param = True  # for isinstance(copy, nn.Parameter)
    return cast(Tensor, copy)


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


def with_guarded_outputs(
    compiled: Callable[..., Any], labels: Mapping[int, str]
) -> Callable[..., Any]:
    """Wrap compiled code so that parameters among its outputs are gathered copies.

    The model returns them, or goes on between two graphs, where Dynamo does what it cannot trace,
    such as `module.weight.data = value`.

    Args:
        labels: position of an output -> the parameter that it is, or is a view of.
    """
    if not labels:
        return compiled

    def run(*args: Any) -> Any:
        outputs = list(compiled(*args))
        for i, label in labels.items():
            outputs[i] = guard(outputs[i], label)
        return outputs

    return compat.dynamo_disable(run)


class GatheredPiece(StandsForParameter, DTensor):  # type: ignore[misc]  # set_
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
        answer = _answer(func, args, kwargs)
        if answer is not _NO_ANSWER:
            return answer
        with compat.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


compat.begin_no_compile_at(StandsForParameter.__del__)
for _kind in (GatheredCopy, GatheredPiece):
    compat.begin_no_compile_at(cast(Any, _kind).__torch_function__.__func__)


def _guard_views(result: Any, source: GatheredCopy) -> Any:
    if isinstance(result, (list, tuple)) and type(result) in (list, tuple):
        return type(result)(_guard_views(item, source) for item in result)
    if type(result) is Tensor and compat.storage_id(result) == compat.storage_id(source):
        return guard(result, source._label)
    return result
