"""Runtime dispatch of forward graphs.

At each call, DTensor parameters become local shards, and the options for gradient accumulation are
applied to the parameters. `ForwardDispatch` runs the variant of the graph
(zpasses.runtime.forward_variants) that gathers the parameters whose cached copies are stale.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.graph.cached_params import ParamSlot
from zpasses.runtime.backward_checks import ValuesUsed, prepare_backward
from zpasses.runtime.forward_variants import ForwardVariant
from zpasses.runtime.layout import rows_of_all
from zpasses.runtime.param_conversion import (
    CallParams,
    await_backward,
    bound_call,
    to_local_shards,
)
from zpasses.runtime.param_value import (
    ParamValue,
    look_after,
    param_value_of,
)
from zpasses.runtime.start_values import compare_start_values
from zpasses.runtime.step_windows import step_windows
from zpasses.runtime.windows import grad_state_of

_MAX_VARIANTS = 4
"""Number of variants to compile per graph. Further calls gather all parameters."""


@dataclass(frozen=True)
class AccumulationOptions:
    """The options of a compile for gradient accumulation."""

    backwards_per_step: int
    accum_dtype: torch.dtype | None
    timeout_s: float | None
    """Seconds to wait for other ranks; None exchanges nothing with them."""

    def apply(self, params: Sequence[Any]) -> None:
        """Configure the step windows of the parameters of a call, before its backward."""
        if self.backwards_per_step == 1 and self.accum_dtype is None:
            first = grad_state_of(params[0]).step_window
            if first is None or (first.backwards_per_step == 1 and first.accum_dtype is None):
                return
        for window in step_windows(params):
            window.configure(self.backwards_per_step, self.accum_dtype, self.timeout_s)


class BoundParameters(threading.local):
    """The parameters of the current call of a graph, by name.

    The graph's forward looks up their cached copies here.
    """

    def __init__(self) -> None:
        self._bound: dict[str, tuple[ParamValue, DTensor, Tensor]] = {}

    def bind(self, params: Sequence[Any], names: Sequence[str]) -> None:
        # At each call, because `model.to` and similar calls replace a parameter's local tensor.
        self._bound = {
            name: (param_value_of(param), param, compat.local_of(param))
            for name, param in zip(names, params, strict=True)
        }

    def release(self) -> None:
        """Forget the parameters, so that compiled code does not keep the memory of a dead model."""
        self._bound = {}

    def of(self, names: Sequence[str]) -> list[tuple[ParamValue, DTensor, Tensor]]:
        """Returns the cache, the parameter and its local tensor for each name."""
        bound = self._bound
        return [bound[name] for name in names]


def first_variant(slots: Sequence[ParamSlot]) -> ForwardVariant:
    """Return the variant of a forward graph with cached parameters that runs first."""
    if torch.is_inference_mode_enabled():
        return ForwardVariant()
    return ForwardVariant(kept=frozenset(range(len(slots))))


class ForwardDispatch:
    """Runs the variant of a forward graph that gathers stale parameters and takes the others from
    the cache.

    Args:
        slots: the graph's cached parameters.
        gather_ids: for each slot, the number of the collective that gathers it.
        outputs: number of values that the graph returns without variants.
        bound: the parameters of the current call.
        compile_variant: generates the code of a variant.
    """

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        gather_ids: Sequence[int],
        outputs: int,
        bound: BoundParameters,
        compile_variant: Callable[[ForwardVariant], Callable[[list[Any]], Any]],
    ) -> None:
        self._gather_ids = gather_ids
        self._params = [slot.param for slot in slots]
        self._slots, self._outputs, self._bound = slots, outputs, bound
        self._compile, self._first = compile_variant, first_variant(slots)
        # Every rank needs this variant first, so it is compiled with the graph. The others are
        # compiled on first use.
        self._code = {self._first: compile_variant(self._first)}

    def __call__(self, args: list[Any]) -> Any:
        entries = self._bound.of(self._params)
        variant = self._choose(entries)
        code = self._code.get(variant)
        if code is None and len(self._code) < _MAX_VARIANTS:
            code = self._code[variant] = self._compile(variant)
        if code is None:
            variant, code = self._first, self._code[self._first]
        kept = sorted(variant.kept)
        for i in kept:
            if entries[i][0].full is not None:  # before the gather: never two full copies
                entries[i][0].drop()
        given = [entries[i][0].full for i in sorted(variant.given)]
        values = code([*args, *given]) if given else code(args)
        for i, full in zip(kept, values[self._outputs :], strict=True):
            entry, param, shard = entries[i]
            entry.store(full, param, shard, self._slots[i].encoding)
        return values[: self._outputs]

    def _choose(self, entries: Sequence[tuple[ParamValue, DTensor, Tensor]]) -> ForwardVariant:
        given, kept = [], []
        # Autograd does not accept tensors made in inference mode, so do not cache them.
        keeps = not torch.is_inference_mode_enabled()
        fresh = [
            entry.full is not None and entry.is_fresh(param, shard, slot.dtype, slot.encoding)
            for slot, (entry, param, shard) in zip(self._slots, entries, strict=True)
        ]
        stale = {gather for gather, each in zip(self._gather_ids, fresh, strict=True) if not each}
        for i in range(len(entries)):
            if self._gather_ids[i] not in stale:
                given.append(i)
            elif keeps:
                kept.append(i)
        return ForwardVariant(frozenset(given), frozenset(kept))


class _KnownCalls:
    """The parameters of the calls of one graph, which are most often those of an earlier call.

    Ranks compare start values before the first call with gradients. Evaluations may run on one
    replica only, and change nothing.
    """

    def __init__(
        self,
        names: Sequence[str],
        timeout_s: float | None,
        compiling: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._names, self._timeout_s, self._compiling = names, timeout_s, compiling
        self._known: dict[tuple[int, ...], tuple[str, CallParams | None]] = {}
        self._compared: set[tuple[int, ...]] = set()

    def of(self, params: Sequence[Any]) -> CallParams | None:
        key = tuple(map(id, params))
        # An object that is gone may have had the same id.
        first = param_value_of(params[0]).identity
        found = self._known.get(key)
        if found is None or found[0] != first:
            if len(self._known) >= _MAX_CALLS:
                self._known.clear()
                self._compared.clear()
            self._compared.discard(key)
            call = CallParams.of([param_value_of(param).identity for param in params])
            found = self._known[key] = first, call
        if self._timeout_s is not None and key not in self._compared and torch.is_grad_enabled():
            with self._compiling():
                compare_start_values(params, self._names, self._timeout_s)
            self._compared.add(key)
        return found[1]


_MAX_CALLS = 1 << 10
"""Parameter lists of one graph that are remembered."""


def with_local_shards(
    compiled: Callable[..., Any],
    positions: Sequence[int],
    names: Sequence[str],
    bound: BoundParameters | None,
    accumulation: AccumulationOptions,
    compiling: Callable[[], AbstractContextManager[None]],
) -> Callable[..., Any]:
    """Wrap compiled code that takes local shards, so that it is called with DTensor parameters.

    Args:
        positions: positions of the parameters among the arguments.
        names: names of the parameters.
        bound: where to bind the parameters of a call; None if the graph caches none.
        compiling: context in which votes are about the compile of the graph.
    """
    if not positions:
        return compiled

    calls = _KnownCalls(names, accumulation.timeout_s, compiling)

    def run(*args: Any) -> Any:
        values = list(args)
        params = [values[i] for i in positions]
        look_after(params)
        if bound is not None:
            bound.bind(params, names)
        with bound_call(calls.of(params), params):
            values_used = first_node = None
            if torch.is_grad_enabled():
                accumulation.apply(params)
                shards: Sequence[Tensor] = to_local_shards(params)
                values_used, first_node = ValuesUsed(params, names), compat.next_node_number()
                await_backward(values_used)
            else:
                shards = rows_of_all(params)
            for i, shard in zip(positions, shards, strict=True):
                values[i] = shard
            _refuse_forward_mode(values)
            try:
                outputs = compiled(*values)
            finally:
                if bound is not None:
                    bound.release()
            if values_used is not None and first_node is not None:
                prepare_backward(outputs, values_used, first_node)
            return outputs

    return compat.dynamo_disable(run)


def _refuse_forward_mode(values: Sequence[Any]) -> None:
    """Raise an error for an input with a tangent of forward-mode AD, for which compiled code has no
    formulas.
    """
    if compat.has_tangents(values):
        raise ShardingError(
            "an input of a graph that zpasses compiled has a tangent of forward-mode AD "
            "(torch.autograd.forward_ad): compiled code computes none. Compute this with the "
            "sharded model itself instead of its compiled form, or call torch.func.jvp in the "
            "forward that is compiled."
        )
