"""What an optimizer will hold for its parameters, before there is any."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zpasses import compat
from zpasses.errors import ZpassesError
from zpasses.optim.separate_steps import check_steps_apart
from zpasses.optim.state_buckets import ValueLayout, layouts_of
from zpasses.runtime.partial_step import PartialStep


def expected_layouts(optimizer: Optimizer) -> dict[Tensor, tuple[ValueLayout, ...]]:
    """Returns the layouts of what the optimizer holds, or will hold, for each of its parameters
    that is trained or has state.

    Only the optimizer knows what it makes. So it steps a parameter of zeros, once for each shape:
    one on meta, or on the device of the parameter (of one on meta, the CPU) if the step fails on
    meta, as one that reads values does.

    Raises:
        ZpassesError: if it cannot step a parameter by itself, does so otherwise than with others,
            or lacks memory for it.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ZpassesError(
            f"{type(optimizer).__name__} steps all parameters as one vector, so it holds nothing "
            "for each of them that could rest on the host. Leave its states on the device, or use "
            "an optimizer that steps each parameter by itself, such as AdamW."
        )
    check_steps_apart(optimizer)
    found: dict[Tensor, tuple[ValueLayout, ...]] = {}
    tried: dict[Any, tuple[ValueLayout, ...]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            entries = optimizer.state.get(param)
            if entries:
                found[param] = layouts_of(entries)
            elif param.requires_grad or param.grad is not None:
                local = compat.local_part(param.detach())
                key = (number, local.shape, local.stride(), local.dtype)
                if key not in tried:
                    tried[key] = _layouts_after_step(optimizer, number, local)
                found[param] = tried[key]
    return found


def _layouts_after_step(
    optimizer: Optimizer, number: int, local: Tensor
) -> tuple[ValueLayout, ...]:
    real = torch.device("cpu") if local.is_meta else local.device
    # Meta takes no memory. Fused kernels do not run there, and hold the same as others.
    with contextlib.suppress(Exception):
        return _step_alone(optimizer, number, local, torch.device("meta"), fused=False)
    try:
        return _step_alone(optimizer, number, local, real, fused=True)
    except Exception as error:
        name = type(optimizer).__name__
        if _is_out_of_memory(error):
            raise ZpassesError(
                f"{name} runs out of memory while it steps a parameter of zeros of "
                f"{list(local.shape)} on {real}, to show which states it will hold ({error}). Call "
                "this function while the memory for a step of the largest parameter is free, such "
                "as before the first forward."
            ) from error
        raise ZpassesError(
            f"{name} cannot step a parameter by itself, which offloading its "
            f"states needs ({type(error).__name__}: {error}). Offload the states of optimizers "
            "whose state is per parameter, such as AdamW."
        ) from error


def _step_alone(
    optimizer: Optimizer, number: int, local: Tensor, device: torch.device, *, fused: bool
) -> tuple[ValueLayout, ...]:
    param = nn.Parameter(torch.zeros_like(local, device=device))
    param.grad = torch.zeros_like(param)
    alone = PartialStep(optimizer).on({number: [param]}, defaultdict(dict))
    if not fused:
        for group in alone.param_groups:
            group.update({"fused": False} if group.get("fused") else {})
    kind = "cpu" if device.type == "meta" else device.type
    with torch.random.fork_rng([] if kind == "cpu" else [device], device_type=kind):
        compat.step_without_hooks(alone)
    return layouts_of(alone.state[param])


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        "can't allocate memory" in str(error)  # of torch on the CPU
    )
