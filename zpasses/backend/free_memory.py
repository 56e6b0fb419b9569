"""Memory that a training step may use: the option `memory_budget="auto"`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zpasses.cost.memory import device_memory
from zpasses.errors import OptionError
from zpasses.ranks.agree import exchange
from zpasses.ranks.local_ranks import local_ranks

_USED_SHARE = 0.9
"""Part of the free memory that a step may use. The rest is for fragmentation and kernels' scratch.
"""


def agreed_free_bytes(groups: Sequence[str], device: torch.device) -> int:
    """Return 90 % of the memory that is free on the rank of these groups with the least.

    The ranks vote once per group; later calls return the same answer.

    Raises:
        OptionError: if torch cannot tell how much memory the device has free.
    """
    free = _own_free_bytes(device)
    if free is None:
        raise OptionError(
            f"memory_budget='auto': torch cannot tell how much memory {device} has free. Give a "
            "size such as '60GiB'."
        )
    usable = int(_USED_SHARE * free)
    for group in groups:
        question = "free memory"
        usable = exchange(group, question, usable, remember="memory_budget=auto", merge=min)
    return usable


def _own_free_bytes(device: torch.device) -> int | None:
    """The free memory of this rank. The ranks of a host share its memory equally."""
    free = device_memory.free_bytes(device)
    if free is None or device.type != "cpu":
        return free
    return free // local_ranks()
