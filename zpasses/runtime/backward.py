"""Runtime dispatch of backward graphs whose reductions can be deferred.

At each call, `BackwardDispatch` asks the gradient windows of its parameters what to reduce, and
runs the matching variant of the graph (zpasses.runtime.backward_variants).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zpasses import compat
from zpasses.errors import ZpassesError, some_of
from zpasses.runtime.backward_variants import BackwardVariant
from zpasses.runtime.early_steps import brings_all
from zpasses.runtime.grad_slots import GradSlot
from zpasses.runtime.graph_steps import stepping
from zpasses.runtime.layout import layout_of
from zpasses.runtime.param_conversion import local_shards_node
from zpasses.runtime.windows import (
    EngineRun,
    Lowering,
    ParamGradState,
    PendingGrad,
    Window,
    grad_state_of,
    mark_failed,
    windows_of,
)

log = logging.getLogger("zpasses")

_MAX_VARIANTS = 8
"""Number of variants per graph, after which a call that takes pending gradients takes one for every
parameter, with zeros where nothing is pending."""


@dataclass
class _CallPlan:
    """What one call does with the gradient slots of its graph."""

    variant: BackwardVariant
    states: dict[int, ParamGradState]
    """State of the parameters that are in a window, by slot."""
    windows: list[Window]
    device: str = "cpu"
    """Type of the device that computes the gradients."""
    steps: dict[int, Any] = field(default_factory=dict)
    """Parameters that step in the graph, by slot."""


class BackwardDispatch:
    """Runs the variant of a backward graph that the windows of its parameters require.

    Args:
        slots: the graph's deferrable gradients.
        outputs: number of values that the graph returns without variants.
        order: name of a sharded input -> its position among the sharded inputs of the call.
        lowering: how to reduce the gradients that a call of this graph defers.
        compile_variant: generates the code of a variant.
        steps: whether parameters may step in the graph (`zpasses.step_in_backward`).
    """

    def __init__(
        self,
        slots: Sequence[GradSlot],
        outputs: int,
        order: Mapping[str, int],
        lowering: Lowering,
        compile_variant: Callable[[BackwardVariant], Callable[[list[Any]], Any]],
        *,
        steps: bool,
    ) -> None:
        self._slots, self._outputs, self._lowering, self._compile = (
            slots,
            outputs,
            lowering,
            compile_variant,
        )
        self._param_positions = [order[slot.param] for slot in slots]
        times = Counter(slot.param for slot in slots)
        self._may_step = [
            i
            for i, slot in enumerate(slots)
            if steps and times[slot.param] == 1 and slot.reduction and not slot.reduction.to_host
        ]
        self._code: dict[BackwardVariant, Callable[[list[Any]], Any]] = {}
        if not compat.in_backward():
            # The graph is compiled ahead of its first backward, most likely without a window. In a
            # backward, the first call follows at once and compiles the variant that it needs.
            self._code_of(BackwardVariant())

    def __call__(self, args: list[Any]) -> Any:
        plan = self._plan()
        if not plan.states and plan.variant == BackwardVariant():
            return self._code_of(plan.variant)(args)
        code = self._code_for(plan)
        variant = plan.variant
        try:
            args.extend(self._take_pending(plan, i) for i in sorted(variant.given))
            with stepping(plan.steps):
                values = code(args)
        except BaseException as error:
            mark_failed(plan.windows, f"a backward failed with {type(error).__name__}: {error}")
            raise
        new = sorted(variant.deferred - variant.given)
        for i, total in zip(new, values[self._outputs :], strict=True):
            slot = self._slots[i]
            assert slot.reduction is not None
            plan.states[i].pending[slot.key] = PendingGrad(total, slot.reduction, self._lowering)
        return values[: self._outputs]

    # --- planning ---------------------------------------------------------------------------------
    def _plan(self) -> _CallPlan:
        source = local_shards_node()
        plan = _CallPlan(BackwardVariant(), {}, [])
        if source is None:
            return plan
        params = [source.zpasses_params[position] for position in self._param_positions]
        whole = {i for i in self._may_step if brings_all(params[i])}
        has_windows = bool(windows_of(params))
        if not has_windows and not whole:
            return plan
        consumers = compat.grad_consumers(source)
        for i in whole:
            if compat.only_accumulates(consumers, self._param_positions[i], params[i]):
                plan.steps[i] = params[i]
        if not has_windows:
            plan.variant = BackwardVariant(stepped=frozenset(plan.steps))
            return plan
        given, deferred, dropped = set(), set(), set()
        reduces: dict[Window, bool] = {}
        for i, position in enumerate(self._param_positions):
            state = grad_state_of(source.zpasses_params[position])
            window = state.window
            wanted = None if window is None else compat.will_accumulate(consumers[position])
            if window is None or wanted is None:
                continue
            if not wanted:
                dropped.add(i)
                continue
            if window not in reduces:
                reduces[window] = window.join(EngineRun.current())
            plan.states[i] = state
            plan.device = layout_of(source.zpasses_params[position]).mesh.device_type
            if self._slots[i].key in state.pending:
                given.add(i)
            if not reduces[window]:
                deferred.add(i)
        plan.windows = list(reduces)
        plan.steps = {i: param for i, param in plan.steps.items() if i not in deferred | dropped}
        plan.variant = BackwardVariant(
            frozenset(given),
            frozenset(deferred),
            frozenset(dropped),
            frozenset(plan.steps),
            _accum_dtype(plan.windows),
        )
        return plan

    def _code_for(self, plan: _CallPlan) -> Callable[[list[Any]], Any]:
        code = self._code.get(plan.variant)
        if code is not None:
            return code
        if len(self._code) >= _MAX_VARIANTS and plan.variant.given:
            plan.variant = replace(plan.variant, given=frozenset(plan.states))
        return self._code_of(plan.variant)

    def _code_of(self, variant: BackwardVariant) -> Callable[[list[Any]], Any]:
        code = self._code.get(variant)
        if code is None:
            code = self._code[variant] = self._compile(variant)
        return code

    def _take_pending(self, plan: _CallPlan, i: int) -> torch.Tensor:
        """Return the pending gradient of a slot, zeros if there is none.

        If this call reduces the gradient, it is removed from the parameter's state.
        """
        slot, pending = self._slots[i], plan.states[i].pending
        grad = pending.get(slot.key)
        if grad is None:
            assert slot.reduction is not None
            dtype = plan.variant.pending_dtype(slot)
            total = torch.zeros(slot.shape, dtype=dtype, device=plan.device)
            grad = PendingGrad(total, slot.reduction, self._lowering)
            if i in plan.variant.deferred:
                pending[slot.key] = grad
        elif i not in plan.variant.deferred:
            del pending[slot.key]
        elif grad.lowering is None:
            grad.lowering = self._lowering
        return grad.total


def _accum_dtype(windows: Sequence[Window]) -> torch.dtype | None:
    dtypes = {window.accum_dtype for window in windows}
    if len(dtypes) > 1:
        raise ZpassesError(
            f"one compiled graph holds parameters of windows with different grad_accum_dtype: "
            f"{sorted(map(str, dtypes))}. Open one window for all of them, or compile the models "
            "separately."
        )
    return dtypes.pop() if dtypes else None


def warn_if_always_reduced(
    code: Callable[[list[Any]], Any],
    graph_name: str,
    names: Sequence[str],
    order: Mapping[str, int],
) -> Callable[[list[Any]], Any]:
    """Wrap the code of a backward graph that cannot defer the gradients of some parameters.

    The wrapper logs a warning the first time that it runs inside a window of these parameters,
    because every backward reduces their gradients.

    Args:
        names: the parameters.
        order: name of a sharded input -> its position among the sharded inputs of the call.
    """
    warned = False

    def run(args: list[Any]) -> Any:
        nonlocal warned
        if not warned:
            source = local_shards_node()
            if source is not None and windows_of(
                [source.zpasses_params[order[name]] for name in names]
            ):
                warned = True
                log.warning(
                    "graph %s reduces the gradients of %s in every backward, also inside a window. "
                    "The gradients are correct, but each backward communicates. Either the "
                    "pipeline has no pass defer-reduction after the passes that create the "
                    "reductions, or that pass cannot separate these reductions, such as those that "
                    "exchange-rows exchanges.",
                    graph_name,
                    some_of(names, 5),
                )
        return code(args)

    return run
