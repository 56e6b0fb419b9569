"""The last hook before the step of an optimizer: it does the step on the shards of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zpasses import compat
from zpasses.runtime.early_steps import SteppedGrad
from zpasses.runtime.offloaded import is_offloaded
from zpasses.runtime.partial_step import PartialStep
from zpasses.runtime.shard_step import steps_by_element


def let_step_run_on_shards(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Let the step of an optimizer run on the shards of its parameters, if it can (on_shards).

    A global hook before steps. Those of offloaded optimizers are partial steps already.
    """
    if is_offloaded(optimizer) or not steps_by_element(optimizer):
        return
    groups = optimizer.param_groups
    if any(isinstance(param, DTensor) for group in groups for param in group["params"]):
        run_last(optimizer, _whole_step)


def run_last(optimizer: Optimizer, hook: Callable[..., Any]) -> None:
    """Move a hook before the steps of an optimizer behind its others. For global hooks, which run
    before those.
    """
    handle = getattr(optimizer, _HANDLE, None)
    if handle is not None:
        handle.remove()
    setattr(optimizer, _HANDLE, optimizer.register_step_pre_hook(hook))


_HANDLE = "_zpasses_last_hook"

EARLY_ATTRIBUTE = "_zpasses_early_steps"
"""Attribute of an optimizer that has stepped on a part of its parameters in backward. Its `finish`
returns the partial step of the rest (zpasses.runtime.early_steps)."""


@compat.dynamo_disable
def _whole_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do the whole step.

    Returns:
        Arguments with which the `step` of its class has nothing left to do.
    """
    args, kwargs = with_evaluated_closure(args, kwargs)
    early: Any = getattr(optimizer, EARLY_ATTRIBUTE, None)
    stepped = PartialStep(optimizer) if early is None else early.finish(optimizer)
    part = {
        number: [
            param
            for param in group["params"]
            if param.grad is not None and type(param.grad) is not SteppedGrad
        ]
        for number, group in enumerate(optimizer.param_groups)
    }
    stepped.run(part, args[1:], kwargs)
    stepped.finish()
    return (PartialStep(optimizer).on({}), *args[1:]), kwargs


def with_evaluated_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure of a step once, and hand on what it returned."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return args, kwargs
    with torch.enable_grad():
        loss = closure()

    def known() -> Any:
        return loss

    if len(args) > 1:
        return (args[0], known, *args[2:]), kwargs
    return args, {**kwargs, "closure": known}
