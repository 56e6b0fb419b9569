"""The window of the option `backwards_per_step`, and the hook that compares and ends windows before
an optimizer steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zpasses import compat
from zpasses.errors import OptionError, ZpassesError
from zpasses.runtime.flush import flush
from zpasses.runtime.layout import layout_of
from zpasses.runtime.param_value import (
    identify,
    is_sharded_parameter,
    param_value_of,
)
from zpasses.runtime.run_checks import check_optimizer_step
from zpasses.runtime.windows import (
    GRAD_STATE_ATTRIBUTE,
    EngineRun,
    Window,
    grad_state_of,
    scale_pending,
)


class StepWindow(Window):
    """The window of the option `backwards_per_step`, for parameters that were sharded together.

    Every `backwards_per_step` backwards reduce once, without a `with` statement.
    """

    def __init__(self, params: Callable[[], list[Any]] = list) -> None:
        super().__init__(params)
        self.agreement_timeout_s: float | None = None
        """Seconds to wait for other ranks; None exchanges nothing with them."""

    def configure(
        self,
        backwards_per_step: int,
        accum_dtype: torch.dtype | None,
        timeout_s: float | None,
    ) -> None:
        """Apply the options of a compiled graph, at its forward.

        Raises:
            OptionError: if gradients are pending under other options of another graph.
        """
        if (backwards_per_step, accum_dtype) != (
            self.backwards_per_step,
            self.accum_dtype,
        ) and self.count:
            raise OptionError(
                f"this graph has backwards_per_step={backwards_per_step}, "
                f"grad_accum_dtype={accum_dtype}, but other graphs of the model have accumulated "
                f"{self.count} of {self.backwards_per_step} backwards with "
                f"grad_accum_dtype={self.accum_dtype}. Compile all parts of a model with the same "
                "options, and change the options only right after an optimizer step."
            )
        self.backwards_per_step, self.accum_dtype = backwards_per_step, accum_dtype
        self.agreement_timeout_s = timeout_s

    def begin_backward(self, run: EngineRun) -> bool:
        if self.count < self.backwards_per_step:
            compat.call_when_gradients_are_scaled(scale_pending)
            return False
        run.at_end(self.close)
        return True

    def close(self) -> None:
        """Reduce the gradients that are still pending, and start the next window."""
        self.check_last_backward()
        try:
            flush(self, self.agreement_timeout_s, self.failure)
            if self.failure is not None:
                raise ZpassesError(f"{self.failure}; pending gradients are dropped on all ranks.")
        finally:
            self.discard_pending()
            self.count, self.failure = 0, None


_shard_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Process group -> calls of `zpasses.shard` for it that sharded parameters."""


def register_step_window(
    holders: Sequence[tuple[nn.Module, str]], paths: Mapping[nn.Module, str]
) -> None:
    """Give parameters a common step window, and identities.

    Parameters that have a step window already keep theirs.

    Args:
        holders: module and name of each parameter. Steps of their optimizers count from now on.
        paths: names of the modules in the model.
    """
    refs = [(weakref.ref(module), name) for module, name in holders]
    identities: list[str] = []

    def find() -> list[Any]:
        known = identities or [""] * len(refs)
        return [_held(ref(), name, own) for (ref, name), own in zip(refs, known, strict=True)]

    params = find()
    _join_step_window(params, StepWindow(find))
    groups = [layout_of(param).mesh.get_group() for param in params]
    for group in dict.fromkeys(groups):
        number = _shard_calls[group] = _shard_calls.get(group, 0) + 1
        for (module, name), param, own in zip(holders, params, groups, strict=True):
            if own is group:
                path = f"{paths[module]}.{name}".lstrip(".")
                value = param_value_of(param)
                value.identity = f"{number}:{path}"
                identify(param, value)
    identities += [param_value_of(param).identity for param in params]


def _held(module: nn.Module | None, name: str, identity: str) -> Any:
    """Return the parameter of a module, also after torch's parametrizations or pruning have given
    it another name or to a submodule; None if it no longer exists.
    """
    param = module._parameters.get(name) if module is not None else None
    if param is None and module is not None and identity:
        for each in module.parameters():
            if is_sharded_parameter(each) and param_value_of(each).identity == identity:
                return each
    return param


def _join_step_window(params: Sequence[Any], window: StepWindow) -> None:
    for param in params:
        if grad_state_of(param).step_window is None:
            grad_state_of(param).step_window = window


def step_windows(params: Sequence[Any]) -> list[StepWindow]:
    """Return the step windows of these parameters, each once.

    Parameters without one, such as those of a copied model, get a common step window.
    """
    without = [param for param in params if grad_state_of(param).step_window is None]
    if without:
        _join_step_window(without, StepWindow(lambda: without))
    return list(
        dict.fromkeys(
            steps
            for param in params
            if isinstance(steps := grad_state_of(param).step_window, StepWindow)
        )
    )


# --- optimizers -----------------------------------------------------------------------------------
def end_windows_before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Check the windows of an optimizer's parameters. A hook before steps.

    A step inside a `with` block raises. A step before the last of `backwards_per_step` backwards
    reduces the gradients that are pending. Ranks whose graphs are compared on every run compare
    their steps, too.
    """
    early: dict[StepWindow, None] = {}
    params: dict[str, list[str]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = getattr(param, GRAD_STATE_ATTRIBUTE, None)
            if state is None:
                continue
            if state.explicit_window is not None:
                raise ZpassesError(
                    f"{type(optimizer).__name__}.step() inside coalesce_grad_reduction: gradients "
                    "of its parameters are not reduced yet. Step after the block."
                )
            if isinstance(state.step_window, StepWindow) and state.step_window.count:
                early[state.step_window] = None
            for name in layout_of(param).sharding_groups:
                params.setdefault(name, []).append(param_value_of(param).identity)
    check_optimizer_step(params, type(optimizer).__name__)
    for window in early:
        window.close()  # the step comes before the Nth backward: reduce the gradients so far
