"""Memory that a training step may use (`memory_budget="auto"`, the option `host_memory`), and what
the compiled graphs of this process need of it.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from zpasses.cost.memory import device_memory
from zpasses.errors import MemoryBudgetError, OptionError
from zpasses.option_values import format_size, parse_size
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


class HostPool(ABC):
    """Host memory of this process for one purpose, which is taken when it is needed."""

    def __init__(self) -> None:
        self.reserved = 0
        """Bytes that it has taken."""
        _pools.append(self)

    @property
    @abstractmethod
    def promised(self) -> int:
        """The most bytes that it may take: no other purpose gets them."""


_pools: list[HostPool] = []


def available_host_bytes() -> int | None:
    """Returns what this rank may still take of the host: its share of what is free, without what is
    promised; None if that cannot be told.
    """
    free = own_free_bytes(torch.device("cpu"))
    to_come = sum(max(0, each.promised - each.reserved) for each in _pools)
    return None if free is None else max(0, free - to_come)


def agreed_host_bytes(groups: Sequence[str], text: str | None, pool: HostPool) -> int:
    """Returns the bytes of the option `host_memory`; 0 without it. The ranks vote once per group.

    Args:
        pool: what takes them.

    Raises:
        MemoryBudgetError: on all ranks, if the machine of one of them had less for its ranks at the
            vote; on this rank, if it has less now, and the pool was not promised as much before.
    """
    if text is None:
        return 0
    given = parse_size(text, "option 'host_memory'")
    available = available_host_bytes()
    if available is not None:
        available += max(pool.promised, pool.reserved)
    usable = available
    for group in groups:
        # What is free does not depend on the option, which ranks may give differently.
        usable = exchange(group, "free host memory", usable, remember="host_memory", merge=_least)
    if given > pool.promised:  # what was free at the vote may be taken by now
        usable = _least([usable, available])
    if usable is not None and given > usable:
        raise MemoryBudgetError(
            f"host_memory={text!r} is for each rank, and one of them has {format_size(usable)} "
            f"available: this machine, with {local_ranks()} ranks, has "
            f"{format_size(available or 0)} for each. Give less, or run fewer ranks on a machine."
        )
    return given


def _least(sizes: Sequence[int | None]) -> int | None:
    return min((each for each in sizes if each is not None), default=None)


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
