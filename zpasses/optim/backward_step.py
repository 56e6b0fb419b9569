"""Optimizers whose parameters step in backward."""

from __future__ import annotations

from typing import TypeVar

from torch.optim import Optimizer

from zpasses.errors import ZpassesError
from zpasses.runtime.early_steps import EarlyStep, early_step_of, step_early
from zpasses.runtime.offloaded import device_of_shard, is_offloaded
from zpasses.runtime.param_value import is_sharded_parameter
from zpasses.runtime.shard_step import steps_by_element
from zpasses.runtime.step_hook import EARLY_ATTRIBUTE

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def step_in_backward(optimizer: O) -> O:
    """Let parameters of compiled code step as soon as their gradients have arrived, and free these,
    in place; return the optimizer.

    With one graph (`torch.compile`), the steps are part of the backward graph: each runs before
    the graph awaits its next collective. With `zpasses.compile_blocks`, a block's parameters step
    while its predecessors' backward runs. All other parameters step in `optimizer.step()`, which
    the program calls as before, once after each backward that reduces gradients. The results have
    the same bits.

    What needs all gradients before the first parameter steps does not work, and raises an error:
    clipping, gradient scaling, a penalty of parameters that eager code adds to the loss, and
    reading or changing `param.grad` between backward and step.
    There is no way to skip a step. Gradients of several backwards accumulate in windows only
    (`zpasses.coalesce_grad_reduction`, `backwards_per_step`).

    Args:
        optimizer: one of `torch.optim` that steps element by element, such as AdamW, whose
            parameters are sharded.

    Raises:
        ZpassesError: for another optimizer, one whose states or parameters rest on the host, or if
            another optimizer steps one of the parameters in backward.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or not steps_by_element(optimizer):
        raise ZpassesError(
            f"step_in_backward: got {name}; expected an optimizer of torch.optim that steps "
            "element by element, such as AdamW or SGD, without differentiable=True. Others may "
            "need all gradients, or communicate."
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = list(filter(is_sharded_parameter, params))
    if not sharded:
        raise ZpassesError(
            f"step_in_backward: no parameter of this {name} is sharded. Call zpasses.shard first, "
            "and make the optimizer from model.parameters()."
        )
    if is_offloaded(optimizer) or any(device_of_shard(param) is not None for param in sharded):
        raise ZpassesError(
            f"step_in_backward: states or parameters of this {name} rest on the host, from where "
            "they come when step() is called. Use step_in_backward or offload_optimizer and "
            "offload_parameters(trained=True)."
        )
    own: EarlyStep = getattr(optimizer, EARLY_ATTRIBUTE, None) or EarlyStep(optimizer)
    if any(early_step_of(param) not in (None, own) for param in sharded):
        raise ZpassesError(
            "step_in_backward: another optimizer steps one of these parameters in backward. Give "
            "each parameter to one optimizer."
        )
    step_early(sharded, own)
    setattr(optimizer, EARLY_ATTRIBUTE, own)
    return optimizer
