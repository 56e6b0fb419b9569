"""Several backwards, one reduction: `zpasses.coalesce_grad_reduction`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zpasses.errors import OptionError, ZpassesError
from zpasses.ranks.vote import is_reported, reported_failure, store_barrier
from zpasses.runtime.barrier import barriers_enabled
from zpasses.runtime.flush import flush, groups_of
from zpasses.runtime.windows import EngineRun, Window, install_step_guard, pending_of
from zpasses.sharding.module import sharded_parameters

__all__ = ["GradientWindow", "coalesce_grad_reduction"]

log = logging.getLogger("zpasses")


class coalesce_grad_reduction:  # noqa: N801 - used as a context manager, like torch.no_grad
    """Inside, backwards add up full gradients on each rank; they are averaged over the ranks once.

        with zpasses.coalesce_grad_reduction(model, backwards=len(chunks)):
            for chunk in chunks:
                loss_of(step(chunk)).backward()
        optimizer.step()

    Backwards that are not the last issue no reduction and leave `param.grad` alone. After the block
    `param.grad` holds the average over the ranks of the sum over the window, added to what it held
    before. Which backward is the last:

    - `backwards=N`: the Nth. It reduces while it computes. Leaving early reduces what there is; one
      more backward raises.
    - `window.last()`, called before the last backward, for loops of unknown length.
    - neither: leaving the block reduces, in a small graph of its own. All ways give the same bits.

    A backward is one run of the autograd engine that gives a gradient to a parameter of the model.
    `torch.autograd.grad` is none: it reduces and returns its own gradients and leaves pending ones
    alone. Ranks agree on what is reduced when they leave: a parameter that got its gradient on some
    ranks only is reduced with zeros from the others. Where the last backward reduces, all ranks
    must run the same graphs in it. When the block raises on any rank, pending gradients are dropped
    on all, and all of them raise; nothing is reduced.

    Hooks of parameters are called by every backward, as autograd does also where a parameter has no
    gradient: with None where it is deferred, and once with the whole gradient.

    One full gradient per trained parameter stays on each rank from the first backward to the
    reduction: see docs/design.md.

    Args:
        model: a sharded module, one that contains sharded modules, or what torch.compile made of
            either.
        backwards: number of backwards in the window, if known.
        grad_accum_dtype: add up in this dtype, e.g. torch.float32 for gradients in bfloat16. None
            takes the option of the compile; without that, the dtype in which gradients are
            computed.
        timeout_s: seconds to wait for other ranks: before each compiled graph that communicates, in
            collectives, and on leaving.

    Raises:
        ZpassesError: for a model without sharded parameters; when entered inside another window of
            the same parameters, entered twice, or in the middle of `backwards_per_step`; for an
            optimizer step inside, and for a backward after the last.
        AgreementError: on leaving (or before a graph that communicates), when another rank failed
            or did not come in time.
    """

    def __init__(
        self,
        model: nn.Module,
        backwards: int | None = None,
        *,
        grad_accum_dtype: torch.dtype | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if backwards is not None and (
            isinstance(backwards, bool) or not isinstance(backwards, int) or backwards < 1
        ):
            raise OptionError(
                f"backwards={backwards!r}; expected how many backwards the window has, >= 1, or "
                "None if that is not known."
            )
        if grad_accum_dtype is not None and not (
            isinstance(grad_accum_dtype, torch.dtype) and grad_accum_dtype.is_floating_point
        ):
            raise OptionError(
                f"grad_accum_dtype={grad_accum_dtype!r}; expected a floating-point torch.dtype "
                "such as torch.float32, or None."
            )
        if timeout_s <= 0:
            raise OptionError(f"timeout_s={timeout_s}; expected seconds > 0.")
        self._params = _sharded_parameters(model)
        self._backwards, self._dtype, self._timeout_s = backwards, grad_accum_dtype, timeout_s
        self._window: GradientWindow | None = None
        self._gates: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> GradientWindow:
        _refuse_nesting(self._params)
        install_step_guard()
        window = GradientWindow(self._params, self._backwards, self._dtype, self._timeout_s)
        self._gates = barriers_enabled(groups_of(window), self._timeout_s)
        self._gates.__enter__()
        for param in self._params:
            pending_of(param).opened = window
        self._window = window
        return window

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        window, self._window = self._window, None
        assert window is not None
        try:
            window.close(error)
        finally:
            self._gates.__exit__(None, None, None)
            for entry in window.entries():
                if entry.opened is window:
                    entry.opened = None
            window.drop()


class GradientWindow(Window):
    """An open window; `with coalesce_grad_reduction(model) as window` gives it."""

    def __init__(
        self,
        params: Sequence[Any],
        backwards: int | None,
        accum_dtype: torch.dtype | None,
        timeout_s: float,
    ) -> None:
        super().__init__(lambda: list(params), accum_dtype)
        self._backwards, self._timeout_s = backwards, timeout_s
        self._announced = self._reduced = False

    def last(self) -> None:
        """Say that the next backward is the last one: it reduces, overlapped with its own compute.

        Raises:
            ZpassesError: when the window knows already.
        """
        if self._backwards is not None or self._announced:
            known = (
                f"backwards={self._backwards}"
                if self._backwards is not None
                else "an earlier last()"
            )
            raise ZpassesError(
                f"window.last(): {known} says which backward is the last. Say it in one way, once."
            )
        self._announced = True

    def begin(self, run: EngineRun) -> bool:
        if self.accum_dtype is None:
            self.accum_dtype = _default_dtype(self.params)  # which the first forward tells
        if self._reduced:
            raise ZpassesError(
                f"backward number {self.count} in a window whose last was number {self.count - 1}: "
                "its gradients are reduced already. "
                + (
                    "Give the right number of backwards=, "
                    if self._backwards
                    else "Call last() right before the last backward, "
                )
                + "or neither, and leaving the block reduces."
            )
        if not self._announced and self.count != self._backwards:
            return False
        for group in groups_of(self):
            # Reductions follow: a rank that has failed already must not be waited for in them.
            store_barrier(group, "the last backward of a window", self._timeout_s)
        self._reduced = True
        return True

    def close(self, error: BaseException | None) -> None:
        """Reduce what is pending, together with all ranks, or tell them why not."""
        if error is None:
            flush(self, self._timeout_s, self.broken)
            if self.broken is not None:
                raise ZpassesError(
                    f"{self.broken}; what was pending is dropped on all ranks. Let it leave the "
                    "block, or do not go on."
                )
        elif not is_reported(error):
            for group in groups_of(self):
                if reason := reported_failure(group):
                    log.error(
                        "%s; the %s of this rank may follow from it", reason, type(error).__name__
                    )
            flush(
                self,
                self._timeout_s,
                f"left a window with {type(error).__name__}: {str(error)[:500]}",
            )


def _sharded_parameters(model: nn.Module) -> list[DTensor]:
    original = getattr(model, "_orig_mod", model)
    found = sharded_parameters(original) if isinstance(original, nn.Module) else []
    if not found:
        raise ZpassesError(
            f"coalesce_grad_reduction: {type(original).__name__} has no sharded parameters. Call "
            "zpasses.shard(model, mesh=...) first, and "
            "pass the model or what torch.compile made of it. (The gradients of an unsharded model "
            "are not reduced.)"
        )
    return found


def _refuse_nesting(params: Sequence[Any]) -> None:
    for param in params:
        entry = pending_of(param)
        if entry.opened is not None:
            raise ZpassesError(
                "coalesce_grad_reduction: a window of these parameters is open already. Windows do "
                "not nest; leave it first."
            )
        if entry.steps is not None and entry.steps.count:
            raise ZpassesError(
                f"coalesce_grad_reduction: entered after {entry.steps.count} of "
                f"backwards_per_step={entry.steps.per_step} backwards, whose "
                "gradients are pending. Enter between optimizer steps, or use one of the two."
            )


def _default_dtype(params: Sequence[Any]) -> torch.dtype | None:
    steps = (pending_of(param).steps for param in params if param is not None)
    return next(
        (each.accum_dtype for each in steps if each is not None and each.accum_dtype is not None),
        None,
    )
