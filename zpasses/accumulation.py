"""Gradient accumulation: `zpasses.coalesce_grad_reduction` reduces the gradients of several
backwards once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import AgreementError, OptionError, ZpassesError
from zpasses.ranks.failures import is_reported, pass_on_failure, reported_failure
from zpasses.ranks.vote import WINDOW_TIMEOUT, TimeLimit, store_barrier
from zpasses.runtime.flush import flush, groups_of
from zpasses.runtime.run_checks import timeout_of, voting_before_each_graph
from zpasses.runtime.windows import (
    EngineRun,
    Window,
    grad_state_of,
    scale_pending,
)
from zpasses.sharding.module import sharded_parameters

log = logging.getLogger("zpasses")


class coalesce_grad_reduction:  # noqa: N801 - used as a context manager, like torch.no_grad
    """Accumulate full gradients on each rank over several backwards, and reduce them over ranks
    once.

        with zpasses.coalesce_grad_reduction(model, backwards=len(chunks)):
            for chunk in chunks:
                loss_of(step(chunk)).backward()
        optimizer.step()

    The block is a gradient window. Backwards before the last one issue no reduction and do not
    change `param.grad`. After the block, `param.grad` holds its previous value plus the average
    over ranks of the window's sum. The last backward is determined in one of three ways, which give
    bit-identical gradients:

    - `backwards=N`: the Nth backward reduces, overlapped with its own compute. If the block is left
      earlier, the gradients so far are reduced on exit. One more backward raises.
    - `window.last()`, called before the last backward, for loops of unknown length.
    - neither: the gradients are reduced on exit, in a separate small graph.

    A backward is one run of the autograd engine that gives a gradient to a parameter of the model.
    `torch.autograd.grad` does not count as one. It returns its own, reduced gradients and leaves
    pending gradients untouched. On exit, ranks agree on the set of gradients to reduce: if a
    parameter received a gradient on some ranks only, the other ranks contribute zeros. If the last
    backward reduces, all ranks must run the same graphs in it. If the block raises on any rank,
    every rank raises and drops its pending gradients, and nothing is reduced.

    Every backward calls the hooks of parameters, because autograd also calls them for parameters
    without a gradient. A hook receives None when the gradient is deferred, and the whole gradient
    once, when it is reduced.

    From the first backward to the reduction, each rank holds one full gradient per trained
    parameter: see docs/accumulation.md.

    Args:
        model: a sharded module, a module that contains sharded modules, or the result of
            torch.compile on either.
        backwards: number of backwards in the window, if known.
        grad_accum_dtype: accumulate in this dtype, e.g. torch.float32 for bfloat16 gradients. None
            takes the compile option of the same name; if that is None too, gradients accumulate in
            the dtype in which they are computed.
        timeout_s: seconds to wait for other ranks before each compiled graph that communicates, in
            collectives, and on exit. None takes the option `agreement_timeout_s` of the compiled
            model.

    Raises:
        ZpassesError: if the model has no sharded parameters; if the window is entered inside
            another window of the same parameters, twice, or in the middle of `backwards_per_step`;
            if an optimizer steps inside it; or if a backward follows the last one.
        AgreementError: on exit, or before a graph that communicates, if another rank failed or did
            not respond in time.
        OptionError: for a bad value of `backwards`, `grad_accum_dtype` or `timeout_s`.
    """

    def __init__(
        self,
        model: nn.Module,
        backwards: int | None = None,
        *,
        grad_accum_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> None:
        if backwards is not None and (
            isinstance(backwards, bool) or not isinstance(backwards, int) or backwards < 1
        ):
            raise OptionError(
                f"backwards={backwards!r}; expected the number of backwards in the window, >= 1, "
                "or "
                "None if it is not known."
            )
        if grad_accum_dtype is not None and not (
            isinstance(grad_accum_dtype, torch.dtype) and grad_accum_dtype.is_floating_point
        ):
            raise OptionError(
                f"grad_accum_dtype={grad_accum_dtype!r}; expected a floating-point torch.dtype "
                "such as torch.float32, or None."
            )
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise OptionError(f"timeout_s={timeout_s}; expected seconds > 0, not inf, or None.")
        self._params = _require_sharded_parameters(model)
        self._backwards, self._dtype, self._timeout_s = backwards, grad_accum_dtype, timeout_s
        self._window: GradientWindow | None = None
        self._barriers: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> GradientWindow:
        _check_not_nested(self._params)
        compat.call_when_gradients_are_scaled(scale_pending)
        window = GradientWindow(self._params, self._backwards, self._dtype, self._timeout_s)
        self._barriers = voting_before_each_graph(groups_of(window), self._timeout_s)
        self._barriers.__enter__()
        for param in self._params:
            grad_state_of(param).explicit_window = window
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
            self._barriers.__exit__(None, None, None)
            for state in window.grad_states():
                if state.explicit_window is window:
                    state.explicit_window = None
            window.discard_pending()


class GradientWindow(Window):
    """An open gradient window, as returned by `with coalesce_grad_reduction(model) as window`."""

    def __init__(
        self,
        params: Sequence[Any],
        backwards: int | None,
        accum_dtype: torch.dtype | None,
        timeout_s: float | None,
    ) -> None:
        super().__init__(lambda: list(params), accum_dtype)
        self._backwards, self._timeout_s = backwards, timeout_s
        self._last_announced = self._reduced = False

    def last(self) -> None:
        """Announce that the next backward is the last one of the window. It reduces the window's
        gradients, overlapped with its own compute.

        Raises:
            ZpassesError: if `backwards=` or an earlier call determines the last backward.
        """
        if self._backwards is not None or self._last_announced:
            known = (
                f"backwards={self._backwards}"
                if self._backwards is not None
                else "an earlier last()"
            )
            raise ZpassesError(
                f"window.last(): {known} already determines the last backward. Use one of the two, "
                "once."
            )
        self._last_announced = True

    def begin_backward(self, run: EngineRun) -> bool:
        if self.accum_dtype is None:
            # Known since the first forward, which applies the compile options to the parameters.
            self.accum_dtype = _default_dtype(self.params)
        if self._reduced:
            raise ZpassesError(
                f"backward number {self.count} in a window whose last backward was number "
                f"{self.count - 1}: the window's gradients are reduced already. "
                + (
                    "Pass the right number as backwards=, "
                    if self._backwards
                    else "Call last() right before the last backward, "
                )
                + "or use neither; the gradients are then reduced at the end of the block."
            )
        if not self._last_announced and self.count != self._backwards:
            return False
        for group in groups_of(self):
            # Reductions follow, and a rank that has failed would never join them.
            limit = TimeLimit(timeout_of([group], self._timeout_s), WINDOW_TIMEOUT)
            store_barrier(group, "the last backward of a window", limit)
        self._reduced = True
        return True

    def close(self, error: BaseException | None) -> None:
        """Reduce the pending gradients together with the other ranks, or report to them why this
        rank cannot.

        Args:
            error: the exception with which the `with` block ends, if any.
        """
        self.check_last_backward()
        if error is None:
            flush(self, timeout_of(groups_of(self), self._timeout_s), self.failure)
            if self.failure is not None:
                raise ZpassesError(
                    f"{self.failure}; pending gradients are dropped on all ranks. Let the original "
                    "exception leave the `with` block instead of catching it inside."
                )
        elif isinstance(error, AgreementError) and is_reported(error):
            pass_on_failure(groups_of(self), error)  # the ranks of one group know of it
        elif not is_reported(error):  # or a collective that this rank gave up
            for group in groups_of(self):
                if reason := reported_failure(group):
                    log.error(
                        "%s; the %s of this rank may be a consequence", reason, type(error).__name__
                    )
            flush(
                self,
                timeout_of(groups_of(self), self._timeout_s),
                f"left a window with {type(error).__name__}: {str(error)[:500]}",
            )


def _require_sharded_parameters(model: nn.Module) -> list[DTensor]:
    original = getattr(model, "_orig_mod", model)
    found = sharded_parameters(original) if isinstance(original, nn.Module) else []
    if not found:
        raise ZpassesError(
            f"coalesce_grad_reduction: {type(original).__name__} has no sharded parameters. Call "
            "zpasses.shard(model, mesh=...) first, and "
            "pass the model or the result of torch.compile on it. (zpasses does not reduce the "
            "gradients of an unsharded model.)"
        )
    return found


def _check_not_nested(params: Sequence[Any]) -> None:
    for param in params:
        state = grad_state_of(param)
        if state.explicit_window is not None:
            raise ZpassesError(
                "coalesce_grad_reduction: a window of these parameters is open already. Windows do "
                "not nest; leave it first."
            )
        if state.step_window is not None and state.step_window.count:
            raise ZpassesError(
                f"coalesce_grad_reduction: entered after {state.step_window.count} of "
                f"backwards_per_step={state.step_window.backwards_per_step} backwards, whose "
                "gradients are pending. Enter the window right after an optimizer step, or use "
                "only one of the two."
            )


def _default_dtype(params: Sequence[Any]) -> torch.dtype | None:
    windows = (grad_state_of(param).step_window for param in params if param is not None)
    return next(
        (each.accum_dtype for each in windows if each is not None and each.accum_dtype is not None),
        None,
    )
