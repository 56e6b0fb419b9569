"""The last hook before the step of an optimizer: it does the step on the shards of parameters, or
with states that come from the host.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zpasses import compat
from zpasses.runtime.early_steps import SteppedGrad
from zpasses.runtime.offloaded import OFFLOAD_ATTRIBUTE, is_offloaded
from zpasses.runtime.partial_step import PartialStep
from zpasses.runtime.shard_step import steps_by_element


@functools.cache
def install_step_hook() -> None:
    """Install the global hook that does the step of optimizers whose states rest on the host, and
    on the shards of parameters where that is possible (on_shards). Further calls do nothing.
    """
    register_optimizer_step_pre_hook(compat.dynamo_disable(_step_last))


def _step_last(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Move the hook that does the step behind the optimizer's other hooks, before which global
    hooks run.
    """
    if is_offloaded(optimizer):
        step = _offloaded_step
    elif _has_shards(optimizer) and steps_by_element(optimizer):
        step = _whole_step
    else:
        return
    handle = getattr(optimizer, _HANDLE, None)
    if handle is not None:
        handle.remove()
    setattr(optimizer, _HANDLE, optimizer.register_step_pre_hook(step))


def _has_shards(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(isinstance(param, DTensor) for group in groups for param in group["params"])


_HANDLE = "_zpasses_last_hook"

EARLY_ATTRIBUTE = "_zpasses_early_steps"
"""Attribute of an optimizer that has stepped on a part of its parameters in backward. Its `finish`
returns the partial step of the rest (zpasses.runtime.early_steps)."""


@compat.dynamo_disable
def _offloaded_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Nothing but the optimizer holds what is offloaded, so the host memory goes when it does.
    return getattr(optimizer, OFFLOAD_ATTRIBUTE).step(optimizer, args, kwargs)


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
