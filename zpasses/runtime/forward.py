"""What runs at each call: shards in, full parameters kept, gradients out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.runtime.forward_variants import ForwardVariant, ParamSlot
from zpasses.runtime.local_shards import local_shards
from zpasses.runtime.param_cache import ParamCache, install_step_invalidation, param_cache_of
from zpasses.runtime.windows import StepWindow, pending_of, step_windows

__all__ = ["Accumulation", "BoundParameters", "ForwardDispatch", "with_local_shards"]

_MAX_VARIANTS = 4
"""Patterns of fresh and stale parameters that get a variant of their own; further ones run as the
first call did."""


@dataclass(frozen=True)
class Accumulation:
    """What the options of a compile say about several backwards in one step."""

    per_step: int
    accum_dtype: torch.dtype | None
    timeout_s: float | None
    """Seconds to wait for other ranks; None does not ask them."""
    close: Callable[[StepWindow], None]

    def apply(self, params: Sequence[Any]) -> None:
        """Tell the parameters of a call, whose backward is to follow."""
        if self.per_step == 1 and self.accum_dtype is None:
            first = pending_of(params[0]).steps
            if first is None or (first.per_step == 1 and first.accum_dtype is None):
                return
        for window in step_windows(params):
            window.configure(self.per_step, self.accum_dtype, self.timeout_s, self.close)


class BoundParameters(threading.local):
    """The parameters that the current call of a graph was given, for the graph's forward to look up
    what is kept of them."""

    def __init__(self) -> None:
        self._bound: dict[str, tuple[ParamCache, DTensor, Tensor]] = {}

    def bind(self, params: Sequence[Any], names: Sequence[str]) -> None:
        # Anew at each call: `model.to` and its kin give the same parameter another local tensor.
        self._bound = {
            name: (param_cache_of(param), param, compat.local_of(param))
            for name, param in zip(names, params, strict=True)
        }

    def release(self) -> None:
        """Forget the parameters, so that compiled code does not outlive a model with all its
        memory."""
        self._bound = {}

    def __getitem__(self, name: str) -> tuple[ParamCache, DTensor, Tensor]:
        return self._bound[name]


class ForwardDispatch:
    """Runs the variant of a forward graph that gathers what is stale and takes the rest from what
    was kept.

    Args:
        slots: the graph's cached parameters.
        launches: for each of them, the number of the collective that gathers it.
        outputs: how many values the graph itself returns.
        bound: where to find the parameters of the call.
        inference: keep only what is sure to be refreshed (see zpasses.runtime.param_cache).
        compile_variant: makes the code of a variant.
    """

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        launches: Sequence[int],
        outputs: int,
        bound: BoundParameters,
        inference: bool,
        compile_variant: Callable[[ForwardVariant], Callable[[list[Any]], Any]],
    ) -> None:
        self._launches = launches
        self._slots, self._outputs, self._bound, self._inference, self._compile = (
            slots,
            outputs,
            bound,
            inference,
            compile_variant,
        )
        self._first = ForwardVariant(
            kept=frozenset() if inference else frozenset(range(len(slots)))
        )
        # The variant that every rank needs first is compiled with the graph; the others when they
        # are first needed.
        self._code = {self._first: compile_variant(self._first)}
        install_step_invalidation()

    def __call__(self, args: list[Any]) -> Any:
        entries = [self._bound[slot.param] for slot in self._slots]
        variant = self._choose(entries)
        code = self._code.get(variant)
        if code is None and len(self._code) < _MAX_VARIANTS:
            code = self._code[variant] = self._compile(variant)
        if code is None:
            variant, code = self._first, self._code[self._first]
        kept = sorted(variant.kept)
        for i in kept:
            entries[i][0].drop()  # before the gather: never two full copies
        given = [entries[i][0].full for i in sorted(variant.given)]
        values = code([*args, *given]) if given else code(args)
        for i, full in zip(kept, values[self._outputs :], strict=True):
            entry, param, shard = entries[i]
            entry.keep(full, param, shard)
        return values[: self._outputs]

    def _choose(self, entries: Sequence[tuple[ParamCache, DTensor, Tensor]]) -> ForwardVariant:
        given, kept = [], []
        keeps = not torch.is_inference_mode_enabled()  # autograd refuses what is made there
        fresh = [
            entry.is_fresh(param, shard, self._slots[i].dtype)
            for i, (entry, param, shard) in enumerate(entries)
        ]
        stale = {launch for launch, each in zip(self._launches, fresh, strict=True) if not each}
        for i, (entry, _, _) in enumerate(entries):
            if self._launches[i] not in stale:
                given.append(i)
            elif keeps and (entry.stepped or not self._inference):
                kept.append(i)
        return ForwardVariant(frozenset(given), frozenset(kept))


def with_local_shards(
    compiled: Callable[..., Any],
    positions: Sequence[int],
    names: Sequence[str],
    bound: BoundParameters | None,
    accumulation: Accumulation,
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
            accumulation.apply(params)
            shards: Sequence[Tensor] = local_shards(params)
        else:
            shards = [compat.local_of(param) for param in params]
        for i, shard in zip(positions, shards, strict=True):
            values[i] = shard
        if bound is None:
            return compiled(*values)
        try:
            return compiled(*values)
        finally:
            bound.release()

    return compat.dynamo_disable(run)
