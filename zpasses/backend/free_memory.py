"""Memory that a training step may use: `memory_budget="auto"`, and the option `host_memory`."""

from __future__ import annotations

from collections.abc import Sequence

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


def agreed_host_bytes(groups: Sequence[str], text: str | None) -> int:
    """Returns the bytes of the option `host_memory`; 0 without it. The ranks vote once per group.

    Raises:
        MemoryBudgetError: on all ranks, if the machine of one of them has less for its ranks.
    """
    if text is None:
        return 0
    given = parse_size(text, "option 'host_memory'")
    available = usable = _own_free_bytes(torch.device("cpu"))
    for group in groups:
        # What is free does not depend on the option, which ranks may give differently.
        usable = exchange(group, "free host memory", usable, remember="host_memory", merge=_least)
    if usable is not None and given > usable:
        raise MemoryBudgetError(
            f"host_memory={text!r} is for each rank, and one of them has {format_size(usable)} "
            f"available: this machine, with {local_ranks()} ranks, has "
            f"{format_size(available or 0)} for each. Give less, or run fewer ranks on a machine."
        )
    return given


def _least(sizes: Sequence[int | None]) -> int | None:
    return min((each for each in sizes if each is not None), default=None)


def _own_free_bytes(device: torch.device) -> int | None:
    """The free memory of this rank. The ranks of a host share its memory equally."""
    free = device_memory.free_bytes(device)
    if free is None or device.type != "cpu":
        return free
    return free // local_ranks()
