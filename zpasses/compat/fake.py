"""Fake tensors and symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "ambient_fake_mode",
    "as_fake",
    "fake_mode_of",
    "has_unbacked_size",
    "size_hint",
    "statically_known_true",
    "trace_aten",
]


def trace_aten(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The aten graph of a function, traced on fakes of its inputs; runs without autograd and reads
    nothing."""
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = (
        next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)
        or FakeTensorMode()
    )
    with torch.no_grad(), mode:
        return make_fx(fn, tracing_mode="real")(*[as_fake(value, mode) for value in inputs])


def size_hint(size: Any) -> int:
    """A size as a number; a dynamic one as it is at hand, 1 where it depends on data."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if isinstance(hint, int) else 1


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode that these values (or the compile under way) belong to."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    context = TracingContext.try_get()
    return context.fake_mode if context is not None else None


def as_fake(value: Tensor, mode: FakeTensorMode | None) -> Tensor:
    """A fake of fixed shape: shards never have a dynamic one."""
    if mode is None or isinstance(value, FakeTensor):
        return value
    return mode.from_tensor(value, static_shapes=True)


def has_unbacked_size(value: object) -> bool:
    """Whether a fake value has a size that depends on data."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(cast(Any, value)))


def ambient_fake_mode() -> FakeTensorMode | None:
    """The fake mode that is active right now, if any."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = [
        mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)
    ]
    return modes[-1] if modes else None
