"""Whether an optimizer steps each parameter by itself."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zpasses import compat
from zpasses.errors import ZpassesError
from zpasses.runtime.partial_step import PartialStep
from zpasses.runtime.shard_step import steps_by_element

_MOST_SIZE = 4
"""Of each dimension of what steps on trial."""


def check_steps_apart(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step of a parameter depends on those that step with it, such as one
    that scales gradients by the norm of all of them.

    Two small parameters step on trial, together and one after the other, for each parameter group.
    Nothing is known of an optimizer that cannot step them.

    Raises:
        ZpassesError: if results, states or settings differ, or if it cannot step one after the
            other, and then none.
    """
    if steps_by_element(optimizer):
        return
    for number, group in enumerate(optimizer.param_groups):
        trained = (param for param in group["params"] if param.requires_grad)
        param = next(trained, None)
        if param is not None:
            _check_group(optimizer, number, compat.local_part(param.detach()))


def _check_group(optimizer: Optimizer, number: int, like: Tensor) -> None:
    try:
        values, settings = _stepped(optimizer, number, like, [(0, 1)])
    except Exception:  # as of one that wants other sizes; its own first step shows it
        return
    name, found = type(optimizer).__name__, "gives other results"
    try:
        # After the parts of a step, torch calls `step` once more, with no parameter left.
        apart, each_settings = _stepped(optimizer, number, like, [(0,), (1,), ()])
    except Exception as error:
        found = f"fails ({type(error).__name__}: {error})"
    else:
        alike = len(values) == len(apart) and all(map(_is_close, values, apart))
        if alike and all(_are_equal(settings[0], each) for each in each_settings[:2]):
            return
    raise ZpassesError(
        f"{name} steps parameters together: if two small ones step one after the other, it {found}."
        " States that rest on the host come for a few parameters at a time. Use an optimizer that "
        "steps each parameter by itself, such as AdamW, or leave the states of this one on the "
        "device."
    )


def _stepped(
    optimizer: Optimizer, number: int, like: Tensor, parts: Sequence[Sequence[int]]
) -> tuple[list[Tensor], list[dict[Any, Any]]]:
    """Returns two parameters and their states after a step in parts, and what each part wrote to
    the settings.
    """
    device = torch.device("cpu") if like.is_meta else like.device
    shape = [min(max(size, 1), _MOST_SIZE) for size in like.shape]
    ramp = torch.arange(1, math.prod(shape) + 1, device=device).view(shape) / 8
    params = [nn.Parameter((ramp + at).to(like.dtype)) for at in range(2)]
    for param, factor in zip(params, (1.0, -3.0), strict=True):
        param.grad = (factor * ramp).to(like.dtype)
    state: dict[Any, Any] = defaultdict(dict)
    step, settings = PartialStep(optimizer), []
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        for part in parts:
            made = step.on({number: [params[at] for at in part]}, state)
            compat.step_without_hooks(made)
            settings.append({k: v for k, v in step.changes(made).items() if v is not state})
    held = (value for param in params for value in state[param].values())
    return [*params, *(each for each in held if isinstance(each, Tensor))], settings


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape and torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-4, equal_nan=True)


def _are_equal(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(
        isinstance(value, Tensor) or value == other[key] for key, value in one.items()
    )
