"""Local shards of DTensor parameters, and their gradients on the way back.

A compiled graph takes local shards instead of DTensors. One autograd node converts all parameters
of a call, and turns the gradients of their shards into DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.runtime.param_cache import drop_cached

__all__ = ["ArrivingGradient", "arriving_gradient", "local_shard", "local_shards", "sharded_inputs"]


class _LocalShards(torch.autograd.Function):
    """All DTensor parameters of a call to their local shards, in one autograd node."""

    @staticmethod
    def forward(ctx: Any, *params: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a missing gradient must stay missing
        ctx.zpasses_params = params  # backward graphs look here for what they work for
        # Views: an autograd function must not return, and so mark as its output, the parameter's
        # own tensor.
        return tuple([compat.local_of(param).view_as(compat.local_of(param)) for param in params])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        result: list[DTensor | None] = []
        for param, grad in zip(ctx.zpasses_params, grads, strict=True):
            if grad is None:
                result.append(None)
                continue
            drop_cached(
                param
            )  # a step is due: what was gathered is about to be stale, on every rank
            result.append(arriving_gradient(grad, compat.spec_of(param)))
        return tuple(result)


def local_shard(param: DTensor) -> Tensor:
    """The local shard of a parameter that eager code reads; its gradient may be reduced later."""
    if not (torch.is_grad_enabled() and param.requires_grad):
        return compat.local_of(param)
    (shard,) = _LocalShards.apply(param)  # type: ignore[no-untyped-call]
    return cast(Tensor, shard)


def local_shards(params: Sequence[DTensor]) -> tuple[Tensor, ...]:
    """The local shards of the parameters of a compiled call, through one autograd node."""
    return cast("tuple[Tensor, ...]", _LocalShards.apply(*params))  # type: ignore[no-untyped-call]


def sharded_inputs() -> Any:
    """The autograd node that gave local shards to the autograd node that runs right now; None if
    there is none.

    Its attribute `zpasses_params` holds the parameters.
    """
    node = compat.current_autograd_node()
    for source, _ in node.next_functions if node is not None else ():
        if hasattr(source, "zpasses_params"):
            return source
    return None


class ArrivingGradient(DTensor):
    """A gradient on its way to `param.grad`, where it is a plain DTensor.

    Autograd detaches every gradient that it stores, which through DTensor's dispatch costs more
    than all else that happens to a small gradient. A gradient that nobody else holds need not be
    copied: it is handed on as it is."""

    @classmethod
    # of what DTensor's stub says, a disabled C function
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in compat.pytree.tree_leaves((args, kwargs)) if func is not _DETACH else args:
            if type(value) is ArrivingGradient:
                cast(Any, value).__class__ = DTensor
        return args[0] if func is _DETACH else func(*args, **(kwargs or {}))


_DETACH = torch.ops.aten.detach.default


def arriving_gradient(local: Tensor, spec: compat.DTensorSpec) -> DTensor:
    """A gradient of `spec` around a local one that nobody else holds; one that autograd follows
    (create_graph) stays in its graph."""
    if local.requires_grad:
        meta = cast(Any, spec.tensor_meta)
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride
        )
    build = cast(Callable[..., DTensor], ArrivingGradient)
    return build(local, spec, requires_grad=False)
