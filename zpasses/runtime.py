"""What runs at each call: shards in, full parameters kept, gradients out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.retained import Retained, retained_of
from zpasses.variants import Slot

__all__ = ["BoundParameters", "ForwardDispatch", "boxed", "with_local_shards"]

_MAX_VARIANTS = 4
"""Patterns of fresh and stale parameters that get a variant of their own; further ones gather everything."""


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A function that torch knows to take one list of inputs, which it may empty."""

    def run(args: list[Any]) -> Any:
        return fn(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class BoundParameters(threading.local):
    """The parameters that the current call of a graph was given, for the graph's forward to look up what is kept of them."""

    def __init__(self) -> None:
        self._given: Sequence[Any] = ()
        self._bound: dict[str, tuple[Retained, DTensor, Tensor]] = {}

    def bind(self, params: Sequence[Any], names: Sequence[str]) -> None:
        if len(params) != len(self._given) or any(a is not b for a, b in zip(params, self._given, strict=True)):
            self._given = params
            self._bound = {name: (retained_of(param), param, compat.local_of(param)) for name, param in zip(names, params, strict=True)}

    def __getitem__(self, name: str) -> tuple[Retained, DTensor, Tensor]:
        return self._bound[name]


class ForwardDispatch:
    """Runs the variant of a forward graph that gathers what is stale and takes the rest from what was kept."""

    def __init__(
        self,
        slots: Sequence[Slot],
        outputs: int,
        bound: BoundParameters,
        compile_variant: Callable[[frozenset[int]], Callable[[list[Any]], Any]],
    ) -> None:
        self._slots, self._outputs, self._bound, self._compile = slots, outputs, bound, compile_variant
        self._all = frozenset(range(len(slots)))
        # Ranks may differ in when they first need another variant, so the one that every rank needs first is compiled ahead.
        self._variants = {self._all: compile_variant(self._all)}

    def __call__(self, args: list[Any]) -> Any:
        kept = [self._bound[slot.param] for slot in self._slots]
        stale = frozenset(i for i, (entry, param, shard) in enumerate(kept) if not entry.is_fresh(param, shard, self._slots[i].dtype))
        variant = self._variants.get(stale)
        if variant is None and len(self._variants) < _MAX_VARIANTS:
            variant = self._variants[stale] = self._compile(stale)
        if variant is None:
            stale, variant = self._all, self._variants[self._all]
        gathered = sorted(stale)
        for i in gathered:
            kept[i][0].drop()  # before the gather: never two full copies
        given = [kept[i][0].full for i in range(len(kept)) if i not in stale]
        values = variant([*args, *given]) if given else variant(args)
        for i, full in zip(gathered, values[self._outputs :], strict=True):
            entry, param, shard = kept[i]
            entry.keep(full, param, shard)
        return values[: self._outputs]


class _LocalShards(torch.autograd.Function):
    """All DTensor parameters of a call to their local shards, in one autograd node."""

    @staticmethod
    def forward(ctx: Any, *params: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a missing gradient must stay missing
        ctx.params = params
        # Views: an autograd function must not return, and so mark as its output, the parameter's own tensor.
        return tuple([compat.local_of(param).view_as(compat.local_of(param)) for param in params])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        result: list[DTensor | None] = []
        for param, grad in zip(ctx.params, grads, strict=True):
            if grad is None:
                result.append(None)
                continue
            entry = getattr(param, "_zpasses_retained", None)
            if entry is not None:
                entry.drop()  # a step is due: what was gathered is about to be stale, on every rank
            result.append(compat.wrap_local(grad, compat.spec_of(param)))
        return tuple(result)


def with_local_shards(
    compiled: Callable[..., Any], positions: Sequence[int], names: Sequence[str], bound: BoundParameters | None
) -> Callable[..., Any]:
    """`compiled`, called with DTensor parameters at `positions` instead of their shards."""
    if not positions:
        return compiled

    def run(*args: Any) -> Any:
        values = list(args)
        params = [values[i] for i in positions]
        if bound is not None:
            bound.bind(params, names)
        if torch.is_grad_enabled():
            shards: Sequence[Tensor] = _LocalShards.apply(*params)  # type: ignore[no-untyped-call]
        else:
            shards = [compat.local_of(param) for param in params]
        for i, shard in zip(positions, shards, strict=True):
            values[i] = shard
        return compiled(*values)

    return compat.undynamo(run)
