"""Gradients that wait for their reduction, and the windows that say how long.

One `Pending` belongs to one sharded parameter and lives as an attribute of it, so every graph that
gives the parameter a gradient (both halves of a graph break, recompilations, eager code) adds to
the same buffers: one a dtype of gradient, full-size, written in place.

A window is a run of backwards whose gradients are reduced once. A backward is one run of the
autograd engine that gives a gradient to at least one parameter of the window; runs inside such a
run (reentrant checkpoints) are part of it. Windows belong to parameters and not to threads, because
autograd runs backward of accelerators in threads of its own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zpasses import compat
from zpasses.errors import OptionError, ZpassesError
from zpasses.graph.ops import set_grad_hook
from zpasses.graph.tags import Reduction
from zpasses.runtime.local_shards import sharded_inputs

__all__ = [
    "PENDING_ATTRIBUTE",
    "EngineRun",
    "Lowering",
    "Pending",
    "PendingGrad",
    "StepWindow",
    "Window",
    "install_step_guard",
    "pending_of",
    "windows_of",
]

PENDING_ATTRIBUTE = "_zpasses_pending"


class Lowering(Protocol):
    """How the backend that compiled a graph lowers reductions which that graph left to a later
    call."""

    @property
    def text(self) -> str:
        """The pipeline as text, for ranks without such a graph; "" if other ranks cannot build it
        from text."""

    def code(
        self,
        entries: Sequence[Any],
        totals: Sequence[Tensor],
        shard_rows: Sequence[int],
        timeout_s: float | None,
    ) -> Callable[[list[Any]], Any]:
        """Compile a graph that reduces these pending gradients. It takes one list, `totals`."""


@dataclass
class PendingGrad:
    """The pending gradient of one parameter in one dtype."""

    total: Tensor
    """[rows, ...], contiguous, in the accumulation dtype; nobody else holds it."""
    reduction: Reduction
    lowering: Lowering | None
    """How the graph that made it lowers reductions; None for eager code."""


class Pending:
    """What waits for its reduction of one parameter, and in which window."""

    __slots__ = ("opened", "parts", "steps")

    def __init__(self) -> None:
        self.parts: dict[torch.dtype, PendingGrad] = {}
        """By dtype of the gradient."""
        self.opened: Window | None = None
        """The window that a `with` statement opened."""
        self.steps: StepWindow | None = None
        """The one that `backwards_per_step` makes."""

    def __reduce__(self) -> tuple[type[Pending], tuple[()]]:
        return Pending, ()  # a copy of the parameter starts anew

    @property
    def window(self) -> Window | None:
        """The window that decides about the next gradient."""
        if self.opened is not None:
            return self.opened
        return self.steps if self.steps is not None and self.steps.per_step > 1 else None

    def add(self, grad: Tensor, reduction: Reduction, accum_dtype: torch.dtype | None) -> None:
        """Add a full gradient, which stays the caller's."""
        part = self.parts.get(grad.dtype)
        if part is not None:
            part.total.add_(grad)
            return
        dtype = accum_dtype if accum_dtype is not None and grad.is_floating_point() else grad.dtype
        total = grad.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        self.parts[grad.dtype] = PendingGrad(total, reduction, None)


def pending_of(param: Any) -> Pending:
    """The parameter's entry, made at the first call."""
    entry = getattr(param, PENDING_ATTRIBUTE, None)
    if entry is None:
        entry = Pending()
        setattr(param, PENDING_ATTRIBUTE, entry)
    return entry


# --- engine runs ----------------------------------------------------------------------------------
class EngineRun:
    """One run of the autograd engine, alive as long as it goes on, also where it ends in an
    exception."""

    def __init__(self) -> None:
        self._at_end: list[Callable[[], None]] = []
        compat.queue_engine_callback(self._finish)  # which holds the run, and dies with it

    @staticmethod
    def current() -> EngineRun:
        """The innermost run that calls this; raises RuntimeError outside a backward."""
        number = compat.current_engine_run()
        run = _runs.get(number)
        if run is None:
            run = _runs[number] = EngineRun()
        return run

    def at_end(self, fn: Callable[[], None]) -> None:
        """Call `fn` when the run has succeeded."""
        self._at_end.append(fn)

    def _finish(self) -> None:
        for fn in self._at_end:
            fn()


# State belongs to a run of the engine, which offers no place for it.
_runs: weakref.WeakValueDictionary[int, EngineRun] = weakref.WeakValueDictionary()


# --- windows --------------------------------------------------------------------------------------
class Window:
    """A run of backwards that reduce gradients together."""

    def __init__(
        self, params: Callable[[], list[Any]], accum_dtype: torch.dtype | None = None
    ) -> None:
        self._find = params
        self.accum_dtype = accum_dtype
        """Dtype of pending gradients; None is that of the gradient."""
        self.count = 0
        """Backwards so far."""
        self.broken: str | None = None
        """Why what is pending is not to be trusted: a backward failed in the middle."""
        self._run: weakref.ref[EngineRun] | None = None
        self._last = False

    @property
    def params(self) -> list[Any]:
        """The parameters, in an order that ranks share; None for those that are gone."""
        return self._find()

    def entries(self) -> Iterator[Pending]:
        for param in self.params:
            if param is not None:
                yield pending_of(param)

    def reduces(self, run: EngineRun) -> bool:
        """Whether gradients are reduced in this run; counts it if it is new."""
        current = self._run() if self._run is not None else None
        if current is None:
            self._run = weakref.ref(run)
            self.count += 1
            self._last = self.begin(run)
        return self._last

    def begin(self, run: EngineRun) -> bool:
        """Whether the backward that begins is the last."""
        raise NotImplementedError

    def drop(self) -> None:
        """Forget what is pending."""
        for entry in self.entries():
            entry.parts.clear()


class StepWindow(Window):
    """The window of parameters that were sharded together: every `per_step` backwards reduce once,
    without a `with` statement."""

    def __init__(self, params: Callable[[], list[Any]] = list) -> None:
        super().__init__(params)
        self.per_step = 1
        self.agreement_timeout_s: float | None = None
        """Seconds to wait for other ranks; None does not ask them."""
        self._close: Callable[[StepWindow], None] | None = None

    def configure(
        self,
        per_step: int,
        accum_dtype: torch.dtype | None,
        timeout_s: float | None,
        close: Callable[[StepWindow], None],
    ) -> None:
        """Take over the options of a compiled graph, at its forward.

        Raises:
            OptionError: when another graph that began to accumulate says otherwise.
        """
        if (per_step, accum_dtype) != (self.per_step, self.accum_dtype) and self.count:
            raise OptionError(
                f"backwards_per_step={per_step}, grad_accum_dtype={accum_dtype} of this graph, but "
                "other graphs of the model have "
                f"accumulated {self.count} of {self.per_step} backwards with "
                f"grad_accum_dtype={self.accum_dtype}. Compile all parts of a "
                "model with the same options, and change them between steps."
            )
        self.per_step, self.accum_dtype, self.agreement_timeout_s, self._close = (
            per_step,
            accum_dtype,
            timeout_s,
            close,
        )

    def begin(self, run: EngineRun) -> bool:
        if self.count < self.per_step:
            return False
        run.at_end(self.close)
        return True

    def close(self) -> None:
        """Reduce what is left, and begin anew."""
        try:
            if self._close is not None:
                self._close(self)
            if self.broken is not None:
                raise ZpassesError(f"{self.broken}; what was pending is dropped on all ranks.")
        finally:
            self.drop()
            self.count, self.broken = 0, None


def windows_of(params: Sequence[Any]) -> list[Window]:
    """The windows that these parameters are in, each once. Called in every backward: most often
    there is none."""
    found: dict[Window, None] = {}
    for param in params:
        entry = getattr(param, PENDING_ATTRIBUTE, None)
        if entry is not None and (
            entry.opened is not None or (entry.steps is not None and entry.steps.per_step > 1)
        ):
            found[entry.window] = None
    return list(found)


def register_step_window(holders: Sequence[tuple[nn.Module, str]]) -> None:
    """Count the backwards of parameters, given by module and name, together. Those that are counted
    with others already stay so."""
    refs = [(weakref.ref(module), name) for module, name in holders]

    def find() -> list[Any]:
        return [
            module._parameters.get(name) if (module := ref()) is not None else None
            for ref, name in refs
        ]

    _join(find(), StepWindow(find))


def _join(params: Sequence[Any], window: StepWindow) -> None:
    for param in params:
        if pending_of(param).steps is None:
            pending_of(param).steps = window


def step_windows(params: Sequence[Any]) -> list[StepWindow]:
    """The step windows of these parameters; those that have none, as copies of models do, get one
    together."""
    alone = [param for param in params if pending_of(param).steps is None]
    if alone:
        _join(alone, StepWindow(lambda: alone))
    return list(
        dict.fromkeys(steps for param in params if (steps := pending_of(param).steps) is not None)
    )


# --- eager code -----------------------------------------------------------------------------------
def maybe_defer_grad(
    grad: Tensor, rows: int, dtype: torch.dtype, reduce_dtype: torch.dtype | None, group: str
) -> Tensor | None:
    """In the backward of an eager read: what to reduce now instead of `grad`; None for nothing."""
    if type(grad) is not Tensor:
        return grad  # traced
    found = sharded_inputs()
    if found is None or len(found.zpasses_params) != 1:
        return grad  # not a read of `module.weight`
    (param,) = found.zpasses_params
    entry = getattr(param, PENDING_ATTRIBUTE, None)
    window = entry.window if entry is not None else None
    wanted = compat.will_accumulate(compat.grad_consumers(found)[0]) if window is not None else None
    if window is None or entry is None or wanted is None:
        return grad
    if not wanted:
        return None
    if not window.reduces(EngineRun.current()):
        entry.add(grad, Reduction(rows, dtype, reduce_dtype, group), window.accum_dtype)
        return None
    part = entry.parts.pop(grad.dtype, None)
    if part is None:
        return grad
    total: Tensor = part.total.add_(grad)
    return total if reduce_dtype is not None else total.to(grad.dtype)


def mark_failed(windows: Sequence[Window], reason: str) -> None:
    """Say that a backward failed after it had begun to change what is pending."""
    for window in windows:
        window.broken = reason


# --- optimizers -----------------------------------------------------------------------------------
@functools.cache
def install_step_guard() -> None:
    """Check the windows of parameters before every step of every torch optimizer of this process.
    Installed once.

    A step inside a `with` block raises; a step before the last of `backwards_per_step` backwards
    reduces what is pending."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    early: dict[StepWindow, None] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry = getattr(param, PENDING_ATTRIBUTE, None)
            if entry is None:
                continue
            if entry.opened is not None:
                raise ZpassesError(
                    f"{type(optimizer).__name__}.step() inside coalesce_grad_reduction: gradients "
                    "of its parameters are not reduced yet. "
                    "Step after the block."
                )
            if entry.steps is not None and entry.steps.count:
                early[entry.steps] = None
    for window in early:
        window.close()  # a step before the Nth backward: reduce what there is


set_grad_hook(maybe_defer_grad)
