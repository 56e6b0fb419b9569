"""What an optimizer will hold for its parameters, before there is any."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zpasses import compat
from zpasses.errors import ZpassesError
from zpasses.optim.state_buckets import ValueLayout, layouts_of
from zpasses.runtime.partial_step import PartialStep


def expected_layouts(optimizer: Optimizer) -> dict[Tensor, tuple[ValueLayout, ...]]:
    """Returns the layouts of what the optimizer holds, or will hold, for each of its parameters
    that is trained or has state.

    Only the optimizer knows what it makes. So it steps a parameter of zeros, once for each shape. A
    parameter on meta is one on meta, or on the CPU if the step reads values.

    Raises:
        ZpassesError: if it cannot step a parameter by itself.
    """
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
    param = nn.Parameter(torch.zeros_like(local))
    param.grad = torch.zeros_like(local)
    alone = PartialStep(optimizer).on({number: [param]}, defaultdict(dict))
    devices = [local.device] if local.device.type != "cpu" else []
    try:
        with torch.random.fork_rng(devices, device_type=local.device.type):
            compat.step_without_hooks(alone)
    except Exception as error:
        if local.is_meta:
            return _layouts_after_step(optimizer, number, torch.zeros_like(local, device="cpu"))
        raise ZpassesError(
            f"{type(optimizer).__name__} cannot step a parameter by itself, which offloading its "
            f"states needs ({type(error).__name__}: {error}). Offload the states of optimizers "
            "whose state is per parameter, such as AdamW."
        ) from error
    return layouts_of(alone.state[param])
