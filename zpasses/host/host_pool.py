"""Host memory that this process may take: one budget for all purposes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from zpasses.errors import MemoryBudgetError
from zpasses.option_values import format_size, parse_size
from zpasses.ranks.agree import exchange
from zpasses.ranks.local_ranks import local_ranks
from zpasses.runtime.free_memory import own_free_bytes


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
        # What is free does not depend on the option, which later compiles may give differently.
        usable = exchange(group, "free host memory", usable, remember="host_memory", merge=_least)
    if given > pool.promised:  # what was free at the vote may be taken by now
        usable = _least([usable, available])
    if usable is not None and given > usable:
        ranks, own = local_ranks(), available or 0
        raise MemoryBudgetError(
            f"host_memory={text!r} is for each rank, and one of them has {format_size(usable)} "
            f"available. The {ranks} ranks of this machine need {format_size(ranks * given)} "
            f"together, and {format_size(ranks * own)} are available, {format_size(own)} for each. "
            "Give less, or run fewer ranks on a machine. How much of it a step takes is not known "
            "before its plan; `zpasses plan --host-memory SIZE` shows it."
        )
    return given


def _least(sizes: Sequence[int | None]) -> int | None:
    return min((each for each in sizes if each is not None), default=None)
