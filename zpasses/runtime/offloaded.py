"""Optimizers whose states rest on the host; `zpasses.offload_optimizer` says how they come back."""

from __future__ import annotations

from torch.optim import Optimizer

OFFLOAD_ATTRIBUTE = "_zpasses_offload"
"""Attribute of such an optimizer."""


def is_offloaded(optimizer: Optimizer) -> bool:
    """Whether states of an optimizer rest on the host. Then whoever loads them must not bring all
    of them to the device.
    """
    return getattr(optimizer, OFFLOAD_ATTRIBUTE, None) is not None
