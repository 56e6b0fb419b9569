"""Pending gradients, and the windows that determine when they are reduced.

A pending gradient is a full gradient whose reduction is deferred, or the gradient of a shard that
is still to be averaged over replicas. Each sharded parameter has one
`ParamGradState`, stored as an attribute of the parameter. All code that gives the parameter a
gradient (both halves of a graph break, recompilations, eager code) adds to the same buffers: one
buffer per dtype of the gradient, written in place.

A window is a sequence of backwards whose gradients are reduced once. A backward is one run of the
autograd engine that gives a gradient to at least one parameter of the window. Nested runs
(reentrant checkpoints) belong to the run that contains them. Windows belong to parameters and not
to threads, because autograd runs the backward of accelerators in threads of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zpasses import compat
from zpasses.graph.dialect import set_grad_hook
from zpasses.graph.tags import Reduction
from zpasses.runtime.grad_slots import PendingKey, pending_key
from zpasses.runtime.param_conversion import local_shards_node

GRAD_STATE_ATTRIBUTE = "_zpasses_grad_state"


class Lowering(Protocol):
    """Lowers reductions that a compiled graph has deferred to a later call."""

    @property
    def text(self) -> str:
        """The pipeline as text, for ranks without such a graph; "" if it cannot be built from
        text.
        """

    def code(
        self,
        entries: Sequence[Any],
        totals: Sequence[Tensor],
        shard_rows: Sequence[int],
        params: Sequence[Any],
        *,
        compares: bool,
    ) -> Callable[[list[Any]], Any]:
        """Compile a graph that reduces these pending gradients. It takes one list, `totals`.

        Args:
            params: all parameters of the window.
            compares: whether the ranks compare its collectives.
        """


@dataclass
class PendingGrad:
    """The pending gradient of one parameter in one dtype."""

    total: Tensor
    """[rows, ...] or, for the gradient of the shard, [shard_rows, ...]; contiguous, in the
    accumulation dtype; nothing else shares its memory."""
    reduction: Reduction
    lowering: Lowering | None
    """Lowering of the graph that produced the gradient; None for eager code."""


class ParamGradState:
    """The pending gradients of one parameter, and its windows."""

    __slots__ = ("explicit_window", "pending", "residuals", "step_window", "values_compared")

    def __init__(self) -> None:
        self.pending: dict[PendingKey, PendingGrad] = {}
        """Pending gradients, full ones and those of the shard apart."""
        self.residuals: dict[tuple[tuple[int, ...], int], Tensor] = {}
        """What encoded reductions have lost of the gradient, by its shape and number
        (zpasses.graph.error_feedback). No window reduces or discards it."""
        self.explicit_window: Window | None = None
        """The open window of a `coalesce_grad_reduction` block."""
        self.step_window: Window | None = None
        """The `StepWindow` of the parameter (`zpasses.runtime.step_windows`)."""
        self.values_compared = False
        """Whether ranks that hold the same values have compared them."""

    @property
    def window(self) -> Window | None:
        """The window of the next gradient. An explicit window takes precedence."""
        if self.explicit_window is not None:
            return self.explicit_window
        return (
            self.step_window
            if self.step_window is not None and self.step_window.backwards_per_step > 1
            else None
        )

    def add(self, grad: Tensor, reduction: Reduction, accum_dtype: torch.dtype | None) -> None:
        """Add a full gradient to the pending one. `grad` is copied."""
        key = pending_key(grad.dtype, reduction)
        pending = self.pending.get(key)
        if pending is not None:
            pending.total.add_(grad)
            return
        dtype = accum_dtype if accum_dtype is not None and grad.is_floating_point() else grad.dtype
        total = grad.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        self.pending[key] = PendingGrad(total, reduction, None)


def grad_state_of(param: Any) -> ParamGradState:
    """Return the gradient state of a parameter; the first call creates it."""
    state = getattr(param, GRAD_STATE_ATTRIBUTE, None)
    if state is None:
        state = ParamGradState()
        setattr(param, GRAD_STATE_ATTRIBUTE, state)
    return state


# --- engine runs ----------------------------------------------------------------------------------
class EngineRun:
    """One run of the autograd engine. The object is alive until the run ends, also by an
    exception.
    """

    def __init__(self) -> None:
        self._at_end: list[Callable[[], None]] = []
        # The engine holds the callback, which holds this object, until the run ends.
        compat.queue_engine_callback(self._finish)

    @staticmethod
    def current() -> EngineRun:
        """Return the innermost run that is active in this thread.

        Raises:
            RuntimeError: outside of a backward.
        """
        number = compat.current_graph_task_id()
        run = _runs.get(number)
        if run is None:
            run = _runs[number] = EngineRun()
        return run

    def at_end(self, fn: Callable[[], None]) -> None:
        """Call `fn` when the run ends without an exception."""
        self._at_end.append(fn)

    def _finish(self) -> None:
        for fn in self._at_end:
            fn()


# The engine offers no place to store state per run.
_runs: weakref.WeakValueDictionary[int, EngineRun] = weakref.WeakValueDictionary()


# --- windows --------------------------------------------------------------------------------------
class Window:
    """A sequence of backwards whose gradients are reduced once."""

    def __init__(
        self, params: Callable[[], list[Any]], accum_dtype: torch.dtype | None = None
    ) -> None:
        self._get_params = params
        self.accum_dtype = accum_dtype
        """Dtype of pending gradients; None keeps the gradient's dtype."""
        self.backwards_per_step = 1
        """The option of this name, for step windows. With 1, they take no gradients."""
        self.count = 0
        """Number of backwards that have begun."""
        self.failure: str | None = None
        """Why pending gradients may be incomplete: a backward failed after it had changed them."""
        self._run: weakref.ref[EngineRun] | None = None
        self._has_ended = True
        """Whether the last backward ended without an exception."""
        self._reduces = False

    @property
    def params(self) -> list[Any]:
        """The parameters, in the same order on every rank; None for those that no longer exist."""
        return self._get_params()

    def grad_states(self) -> Iterator[ParamGradState]:
        for param in self.params:
            if param is not None:
                yield grad_state_of(param)

    def join(self, run: EngineRun) -> bool:
        """Counts a run as a backward, once. Returns whether it reduces gradients."""
        current = self._run() if self._run is not None else None
        if current is None:
            self.check_last_backward()
            self._run, self._has_ended = weakref.ref(run), False
            run.at_end(self._end_backward)
            self.count += 1
            self._reduces = self.begin_backward(run)
        return self._reduces

    def _end_backward(self) -> None:
        self._has_ended = True

    def check_last_backward(self) -> None:
        """Called between backwards: one that failed, also outside of compiled code, may have left
        a part of a gradient.
        """
        if not self._has_ended:
            self.failure = self.failure or "a backward ended with an exception"
            self._has_ended = True

    def begin_backward(self, run: EngineRun) -> bool:
        """Called when a backward begins, after it is counted. Returns whether it is the last
        one.
        """
        raise NotImplementedError

    def discard_pending(self) -> None:
        """Discard the pending gradients of all parameters."""
        for entry in self.grad_states():
            entry.pending.clear()


def windows_of(params: Sequence[Any]) -> list[Window]:
    """Return the windows of these parameters, each once.

    Called in every backward, so it is fast if there are none.
    """
    found: dict[Window, None] = {}
    for param in params:
        entry = getattr(param, GRAD_STATE_ATTRIBUTE, None)
        if entry is not None and (
            entry.explicit_window is not None
            or (entry.step_window is not None and entry.step_window.backwards_per_step > 1)
        ):
            found[entry.window] = None
    return list(found)


# --- eager code -----------------------------------------------------------------------------------
def maybe_defer_grad(grad: Tensor, reduction: Reduction) -> Tensor | None:
    """Defer the gradient of a parameter that eager code has read, if its window says so.

    Runs in the backward of `unshard`, outside of compiled code.

    Returns:
        The gradient to reduce now, which includes the pending one; None if nothing is reduced now.
    """
    if type(grad) is not Tensor:
        return grad  # traced
    found = local_shards_node()
    if found is None or len(found.zpasses_params) != 1:
        return grad  # not a read of `module.weight`
    (param,) = found.zpasses_params
    state = getattr(param, GRAD_STATE_ATTRIBUTE, None)
    window = state.window if state is not None else None
    wanted = compat.will_accumulate(compat.grad_consumers(found)[0]) if window is not None else None
    if window is None or state is None or wanted is None:
        return grad
    if not wanted:
        return None
    if not window.join(EngineRun.current()):
        state.add(grad, reduction, window.accum_dtype)
        return None
    pending = state.pending.pop(pending_key(grad.dtype, reduction), None)
    if pending is None:
        return grad
    total: Tensor = pending.total.add_(grad)
    return total if reduction.reduce_dtype is not None else total.to(grad.dtype)


def scale_pending(params: Iterable[Any], divisor: float) -> None:
    """Divide the pending gradients of parameters, in place, as their gradients are."""
    for param in params:
        state = getattr(param, GRAD_STATE_ATTRIBUTE, None)
        for part in state.pending.values() if state is not None else ():
            part.total.div_(divisor)


def drop_accumulated(params: Iterable[Any]) -> None:
    """Drop the pending gradients of parameters, whose values are replaced by those of a checkpoint.
    The next backward begins a window of `backwards_per_step`. The count of a `with` block goes on.
    """
    windows = dict[Window, None]()
    for param in params:
        state: ParamGradState | None = getattr(param, GRAD_STATE_ATTRIBUTE, None)
        if state is None:
            continue
        state.pending.clear()
        if state.step_window is not None:
            windows[state.step_window] = None
    for window in windows:
        window.discard_pending()
        window.count, window.failure, window._has_ended = 0, None, True


def mark_failed(windows: Sequence[Window], reason: str) -> None:
    """Record that a backward failed, possibly after it had changed pending gradients."""
    for window in windows:
        window.failure = reason


set_grad_hook(maybe_defer_grad)
