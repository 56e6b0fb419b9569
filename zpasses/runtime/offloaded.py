"""Optimizers whose states rest on the host, and parameters that do; `zpasses.offload_optimizer` and
`zpasses.offload_parameters` say how they come back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

OFFLOAD_ATTRIBUTE = "_zpasses_offload"
"""Attribute of such an optimizer."""

DEVICE_ATTRIBUTE = "_zpasses_device"
"""Attribute of such a parameter: where its shard comes."""


def device_of_shard(param: Tensor) -> torch.device | None:
    """Returns where a shard that rests on the host comes; None if it does not rest there."""
    found: Any = getattr(param, DEVICE_ATTRIBUTE, None)
    return found  # type: ignore[no-any-return]


def is_offloaded(optimizer: Optimizer) -> bool:
    """Whether states of an optimizer rest on the host. Then whoever loads them must not bring all
    of them to the device.
    """
    return getattr(optimizer, OFFLOAD_ATTRIBUTE, None) is not None
