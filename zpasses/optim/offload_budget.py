"""What ranks agree on before states are offloaded: sizes, and host memory that all of them have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zpasses.cost.memory import device_memory
from zpasses.errors import MemoryBudgetError, ZpassesError
from zpasses.option_values import format_size
from zpasses.ranks.agree import exchange
from zpasses.ranks.local_ranks import local_ranks
from zpasses.runtime.layout import layout_of
from zpasses.runtime.param_value import is_sharded_parameter


@dataclass(frozen=True)
class OffloadOptions:
    """The options of `zpasses.offload_optimizer`, in bytes."""

    device_bytes: int
    bucket_bytes: int
    host_bytes: int | None


def sharding_groups_of(optimizer: Optimizer) -> list[str]:
    """Returns the process groups of an optimizer's parameters, in the order of these: a rank of
    several groups comes to them in the same order as the others.
    """
    params = (param for group in optimizer.param_groups for param in group["params"])
    return list(
        dict.fromkeys(
            name
            for param in params
            if isinstance(param, DTensor) and is_sharded_parameter(param)
            for name in layout_of(param).sharding_groups
        )
    )


def agreed_sizes(
    optimizer: Optimizer, options: OffloadOptions, sizes: Sequence[int], error: str | None
) -> tuple[list[int], int]:
    """Returns the bytes of each parameter's states on the rank that holds most of them, so that all
    ranks have the same buckets, and the least share of a rank in the memory of its machine.

    Args:
        sizes: the bytes of each parameter's states on this rank.
        error: why this rank cannot offload them; None if it can.

    Raises:
        ZpassesError: on every rank, if one of them cannot, or gives other options.
    """
    free = device_memory.free_bytes(torch.device("cpu"))
    agreed: dict[str, Any] = {
        "what": [type(optimizer).__name__, len(sizes), *astuple(options)],
        "sizes": list(sizes),
        "available": sys.maxsize if free is None else free // local_ranks(),
        "error": error,
    }
    for group in sharding_groups_of(optimizer):
        agreed = exchange(group, "the states of an optimizer to offload", agreed, merge=_merged)
    if agreed["error"] is not None:
        raise ZpassesError(agreed["error"])
    return agreed["sizes"], agreed["available"]


def _merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = answers[0]
    error = next((each["error"] for each in answers if each["error"] is not None), None)
    other = next((each["what"] for each in answers if each["what"] != first["what"]), None)
    if error is None and other is not None:
        error = (
            "offload_optimizer: ranks differ in the optimizer, the number of its parameters, "
            f"device_bytes, bucket_bytes or host_bytes: {first['what']} on one rank, {other} on "
            "another. Call it alike on every rank."
        )
    if error is not None:
        return {**first, "error": error}
    sizes = [max(each) for each in zip(*(each["sizes"] for each in answers), strict=True)]
    return {**first, "sizes": sizes, "available": min(each["available"] for each in answers)}


def check_host_memory(needed: int, available: int, given: int | None) -> None:
    """Raise MemoryBudgetError if a rank lacks host memory for the states, or the budget is beyond
    what it has. All arguments are equal on all ranks, so all of them raise it.

    Args:
        needed: bytes on the host.
        available: the least share of a rank in what its machine has free.
        given: the budget; None if there is none.
    """
    least = available if given is None else min(given, available)
    if needed and (needed > least or (given is not None and given > available)):
        raise MemoryBudgetError(
            "offload_optimizer: the states that do not stay on the device need "
            f"{format_size(needed)} of host memory on a rank. Given: host_bytes="
            f"{'None' if given is None else format_size(given)}. Available: "
            f"{format_size(available)}, the least share of a rank in what its machine has free. "
            "Let more states stay (device_bytes), shard over more ranks, or give a budget that the "
            "machine has."
        )
