"""Fake tensors and symbolic sizes."""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def trace_aten(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Returns the aten graph of a function, traced on fake copies of its inputs.

    Tracing runs without autograd and does not read the inputs' data.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = (
        next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)
        or FakeTensorMode()
    )
    with torch.no_grad(), mode:
        return make_fx(fn, tracing_mode="real")(*[as_fake(value, mode) for value in inputs])


def has_static_bytes(value: Tensor) -> bool:
    """Whether `value.nbytes` is known without symbols. It is found in a tenth of the time of the
    sizes of a fake tensor.
    """
    return value.layout is torch.strided and not value._has_symbolic_sizes_strides


def size_hint(size: Any) -> int:
    """Returns a size as an integer: its hint if it is dynamic, 1 if it depends on data."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if isinstance(hint, int) else 1


def expression(size: Any) -> Any:
    """Returns a size as an integer, or as a sympy expression if it is dynamic. Sets no guard."""
    return size if isinstance(size, int) else size.node.expr.expand()


def symbols_of(size: Any) -> frozenset[Any]:
    """Returns the dynamic sizes in what `expression` returns."""
    return frozenset() if isinstance(size, int) else frozenset(size.free_symbols)


def evaluated(size: Any, known: Mapping[Any, int]) -> int:
    """Returns the value of what `expression` returns.

    Args:
        known: the value of each dynamic size in it.
    """
    return int(size if isinstance(size, int) else size.subs(known))


_upper_ends: weakref.WeakKeyDictionary[ShapeEnv, dict[Any, int | None]] = (
    weakref.WeakKeyDictionary()
)


_planned: contextvars.ContextVar[dict[Any, int] | None]
_planned = contextvars.ContextVar("planned", default=None)


@contextlib.contextmanager
def planned_for(known: Mapping[Any, int]) -> Iterator[None]:
    """Context manager in which these are the dynamic sizes to plan for, and not their hints."""
    token = _planned.set(dict(known))
    try:
        yield
    finally:
        _planned.reset(token)


def planned_size(size: Any) -> int:
    """Returns a size as an integer to plan for: the largest that a dynamic size may become, if its
    range has an end (`torch._dynamo.mark_dynamic(x, dim, max=...)`), else as `planned_for` says,
    else its hint.
    """
    if isinstance(size, int):
        return size
    node: Any = getattr(size, "node", None)
    env = getattr(node, "shape_env", None)
    if env is None:
        return size_hint(size)
    known = _upper_ends.setdefault(env, {})
    if node.expr not in known:
        upper = env.bound_sympy(node.expr).upper
        # Dynamo's default range ends at the largest index of a tensor.
        bounded = getattr(upper, "is_Integer", False) and int(upper) < 1 << 48
        known[node.expr] = int(upper) if bounded else None
    found, sizes = known[node.expr], _planned.get()
    if found is None and sizes:
        if node.expr not in sizes and symbols_of(node.expr) <= sizes.keys():
            sizes[node.expr] = evaluated(node.expr, sizes)
        found = sizes.get(node.expr)
    return size_hint(size) if found is None else found


def size_ranges() -> list[str]:
    """Returns the ranges of the dynamic sizes of the current compile, as text."""
    mode = fake_mode_of([])
    env = mode.shape_env if mode is not None else None
    return sorted(f"{each}: {found}" for each, found in env.var_to_range.items()) if env else []


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode | None:
    """Returns the fake mode of the first fake tensor among the values.

    Without one, returns the mode of the current compile, or None.
    """
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    context = TracingContext.try_get()
    return context.fake_mode if context is not None else None


def as_fake(value: Tensor, mode: FakeTensorMode | None) -> Tensor:
    """Returns a fake copy with static sizes, because shards never have dynamic ones.

    Returns `value` itself if it is fake already or `mode` is None.
    """
    if mode is None or isinstance(value, FakeTensor):
        return value
    return mode.from_tensor(value, static_shapes=True)


def has_unbacked_size(value: object) -> bool:
    """Whether a fake value has a size that depends on data."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(cast(Any, value)))


def ambient_fake_mode() -> FakeTensorMode | None:
    """Returns the innermost active fake mode, or None."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = [
        mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)
    ]
    return modes[-1] if modes else None


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Context manager: fake tensors and other modes of a compile do not apply inside it."""
    from torch.utils._python_dispatch import _disable_current_modes

    return cast(AbstractContextManager[Any], _disable_current_modes())
