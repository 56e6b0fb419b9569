"""Device memory that a training step may use (`memory_budget="auto"`), and what the compiled graphs
of this process need of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

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
    usable = usable_bytes(device, "memory_budget")
    for group in groups:
        question = "free memory"
        usable = exchange(group, question, usable, remember="memory_budget=auto", merge=min)
    return usable


def own_free_bytes(device: torch.device) -> int | None:
    """Returns the free memory of this rank; None if torch cannot tell. The ranks of a host share
    its memory equally.
    """
    free = device_memory.free_bytes(device)
    if free is None or device.type != "cpu":
        return free
    return free // local_ranks()


def usable_bytes(device: torch.device, option: str, held_bytes: int = 0) -> int:
    """Returns 90 % of the memory that this rank has free.

    Args:
        option: which is "auto", for the error.
        held_bytes: allocated memory that counts as free.

    Raises:
        OptionError: if torch cannot tell how much memory the device has free.
    """
    free = own_free_bytes(device)
    if free is None:
        raise OptionError(
            f"{option}='auto': torch cannot tell how much memory {device} has free. Give a size "
            "such as '60GiB'."
        )
    return int(_USED_SHARE * (free + held_bytes))


# --- what the step needs --------------------------------------------------------------------------
_peaks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Compiled code -> its planned peak. Weak, so that graphs that are gone need nothing."""


def note_planned_peak(code: Any, peak_bytes: int) -> None:
    """Say how much memory compiled code takes while it runs, above what rests.

    Args:
        code: what lives as long as it.
    """
    _peaks[code] = max(peak_bytes, _peaks.get(code, 0))


def planned_peak_bytes() -> int:
    """Returns the largest planned peak of the compiled graphs of this process; 0 without any."""
    return max(tuple(_peaks.values()), default=0)
