"""What runs at each call of a backward graph whose reductions can be deferred."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zpasses import compat
from zpasses.errors import ZpassesError
from zpasses.runtime.backward_variants import BackwardVariant
from zpasses.runtime.grad_slots import GradSlot
from zpasses.runtime.local_shards import sharded_inputs
from zpasses.runtime.windows import (
    EngineRun,
    Lowering,
    Pending,
    PendingGrad,
    Window,
    mark_failed,
    pending_of,
    windows_of,
)

__all__ = ["BackwardDispatch", "warn_if_always_reduced"]

log = logging.getLogger("zpasses")

_MAX_VARIANTS = 8
"""Patterns of given gradients that get a variant of their own; further ones are given zeros where
nothing is pending."""


@dataclass
class _Plan:
    """What one call does with its slots."""

    variant: BackwardVariant
    entries: dict[int, Pending]
    """Of the slots that a window decides about."""
    windows: list[Window]


class BackwardDispatch:
    """Runs the variant of a backward graph that the windows of its parameters ask for.

    Args:
        slots: the graph's deferrable gradients.
        outputs: how many values the graph itself returns.
        order: name of a sharded input -> its place among the sharded inputs of the call.
        lowering: how this graph's reductions were lowered, for those that leave it unreduced.
        compile_variant: makes the code of a variant.
    """

    def __init__(
        self,
        slots: Sequence[GradSlot],
        outputs: int,
        order: Mapping[str, int],
        lowering: Lowering,
        compile_variant: Callable[[BackwardVariant], Callable[[list[Any]], Any]],
    ) -> None:
        self._slots, self._outputs, self._lowering, self._compile = (
            slots,
            outputs,
            lowering,
            compile_variant,
        )
        self._places = [order[slot.param] for slot in slots]
        self._code: dict[BackwardVariant, Callable[[list[Any]], Any]] = {}
        if not compat.in_backward():
            # Compiled ahead: most likely without a window. Otherwise the first call, which follows
            # at once, knows what it needs.
            self._code_of(BackwardVariant())

    def __call__(self, args: list[Any]) -> Any:
        plan = self._plan()
        if not plan.entries and not plan.variant.dropped:
            return self._code_of(BackwardVariant())(args)
        code = self._code_for(plan)
        variant = plan.variant
        args.extend(self._take(plan, i) for i in sorted(variant.given))
        try:
            values = code(args)
        except BaseException as error:
            mark_failed(plan.windows, f"a backward failed with {type(error).__name__}: {error}")
            raise
        new = sorted(variant.deferred - variant.given)
        for i, total in zip(new, values[self._outputs :], strict=True):
            slot = self._slots[i]
            assert slot.reduction is not None
            plan.entries[i].parts[slot.dtype] = PendingGrad(total, slot.reduction, self._lowering)
        return values[: self._outputs]

    # --- choosing ---------------------------------------------------------------------------------
    def _plan(self) -> _Plan:
        source = sharded_inputs()
        plan = _Plan(BackwardVariant(), {}, [])
        if source is None or not windows_of(
            [source.zpasses_params[place] for place in self._places]
        ):
            return plan
        takers = compat.grad_consumers(source)
        given, deferred, dropped = set(), set(), set()
        lasts: dict[Window, bool] = {}
        for i, place in enumerate(self._places):
            entry = pending_of(source.zpasses_params[place])
            window = entry.window
            wanted = None if window is None else compat.will_accumulate(takers[place])
            if window is None or wanted is None:
                continue
            if not wanted:
                dropped.add(i)
                continue
            if window not in lasts:
                lasts[window] = window.reduces(EngineRun.current())
            plan.entries[i] = entry
            if self._slots[i].dtype in entry.parts:
                given.add(i)
            if not lasts[window]:
                deferred.add(i)
        plan.windows = list(lasts)
        plan.variant = BackwardVariant(
            frozenset(given), frozenset(deferred), frozenset(dropped), _accum_dtype(plan.windows)
        )
        return plan

    def _code_for(self, plan: _Plan) -> Callable[[list[Any]], Any]:
        code = self._code.get(plan.variant)
        if code is not None:
            return code
        if len(self._code) >= _MAX_VARIANTS and plan.variant.given:
            plan.variant = replace(plan.variant, given=frozenset(plan.entries))
        return self._code_of(plan.variant)

    def _code_of(self, variant: BackwardVariant) -> Callable[[list[Any]], Any]:
        code = self._code.get(variant)
        if code is None:
            code = self._code[variant] = self._compile(variant)
        return code

    def _take(self, plan: _Plan, i: int) -> torch.Tensor:
        """The pending gradient of a slot: out of its entry if it is reduced now."""
        slot, parts = self._slots[i], plan.entries[i].parts
        part = parts.get(slot.dtype)
        if part is None:
            assert slot.reduction is not None
            like = next(iter(plan.entries.values()))
            device = next((part.total.device for part in like.parts.values()), None)
            total = torch.zeros(slot.shape, dtype=plan.variant.pending_dtype(slot), device=device)
            part = PendingGrad(total, slot.reduction, self._lowering)
            if i in plan.variant.deferred:
                parts[slot.dtype] = part
        elif i not in plan.variant.deferred:
            del parts[slot.dtype]
        elif part.lowering is None:
            part.lowering = self._lowering
        return part.total


def _accum_dtype(windows: Sequence[Window]) -> torch.dtype | None:
    dtypes = {window.accum_dtype for window in windows}
    if len(dtypes) > 1:
        raise ZpassesError(
            f"one compiled graph holds parameters of windows with different grad_accum_dtype: "
            f"{sorted(map(str, dtypes))}. Open one window "
            "for all of them, or compile the models one by one."
        )
    return dtypes.pop() if dtypes else None


def warn_if_always_reduced(
    code: Callable[[list[Any]], Any],
    graph_name: str,
    names: Sequence[str],
    order: Mapping[str, int],
) -> Callable[[list[Any]], Any]:
    """`code`, saying once that these parameters' gradients are reduced in each backward, if that is
    not what a window asks for."""
    warned = False

    def run(args: list[Any]) -> Any:
        nonlocal warned
        if not warned:
            source = sharded_inputs()
            if source is not None and windows_of(
                [source.zpasses_params[order[name]] for name in names]
            ):
                warned = True
                log.warning(
                    "graph %s reduces the gradients of %s in every backward, also inside a window: "
                    "they are right, but communicate each "
                    "time. Its pipeline has no pass defer-reduction behind what makes the "
                    "reductions, or that pass cannot tell them apart.",
                    graph_name,
                    ", ".join(names[:5]) + (", ..." if len(names) > 5 else ""),
                )
        return code(args)

    return run
