"""What ranks agree on before they offload: sizes, and host memory that all of them have."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses.errors import MemoryBudgetError, OptionError, ZpassesError
from zpasses.host.host_pool import available_host_bytes
from zpasses.option_values import format_size, parse_size
from zpasses.ranks.agree import exchange
from zpasses.runtime.layout import layout_of
from zpasses.runtime.param_value import is_sharded_parameter
from zpasses.runtime.run_checks import timeout_of


@dataclass(frozen=True)
class OffloadOptions:
    """The options of a function that offloads something, in bytes."""

    function: str
    """Its name."""
    things: str
    """What it offloads, such as "states"."""
    device_bytes: int | Literal["auto"]
    host_bytes: int | None
    bucket_bytes: int = 0
    trained: bool = False
    """Whether trained parameters move, too."""

    @classmethod
    def parse(
        cls,
        function: str,
        things: str,
        device_bytes: str,
        host_bytes: str | None,
        bucket_bytes: str = "0B",
        *,
        may_be_auto: bool = False,
        trained: bool = False,
    ) -> OffloadOptions:
        """Raises OptionError for an option that is no size, nor the "auto" that `device_bytes` may
        be, or not True or False.
        """
        if not isinstance(trained, bool):
            raise OptionError(f"{function}, trained: got {trained!r}; expected True or False.")

        def parsed(name: str, text: str) -> int:
            return parse_size(text, f"{function}, {name}")

        is_auto = may_be_auto and device_bytes == "auto"
        return cls(
            function,
            things,
            "auto" if is_auto else parsed("device_bytes", device_bytes),
            None if host_bytes is None else parsed("host_bytes", host_bytes),
            parsed("bucket_bytes", bucket_bytes),
            trained,
        )

    def texts(self) -> dict[str, str]:
        """Returns what ranks must give alike."""
        given = asdict(self)
        return {
            name: format_size(given[name]) if type(given[name]) is int else str(given[name])
            for name in ("trained", "device_bytes", "host_bytes", "bucket_bytes")
        }


def sharding_groups_of(params: Iterable[Tensor]) -> list[str]:
    """Returns the process groups of parameters, in the order of these: a rank of several groups
    comes to them in the same order as the others.
    """
    sharded = [each for each in params if isinstance(each, DTensor) and is_sharded_parameter(each)]
    names = (name for param in sharded for name in layout_of(param).sharding_groups)
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class AgreedSizes:
    """What all ranks decide from."""

    sizes: list[int]
    """Bytes per parameter on the rank that holds most of them."""
    more: list[int]
    """The same of what comes with each."""
    available_bytes: int
    """The least share of a rank in the memory of its machine."""
    room_bytes: int
    """The least that what may stay can take beside a rank's forward and backward."""
    usable_bytes: int
    """The same beside nothing else."""


def agreed_sizes(
    groups: Sequence[str],
    options: OffloadOptions,
    owner: str,
    sizes: Sequence[int],
    error: str | None,
    more: Sequence[int],
    room_bytes: int = 0,
    usable_bytes: int = 0,
    held_host_bytes: int = 0,
) -> AgreedSizes:
    """Returns what all ranks decide from.

    Args:
        groups: names of the process groups.
        owner: the type of what is offloaded.
        sizes: the bytes per parameter on this rank.
        error: why this rank cannot offload them; None if it can.
        more, room_bytes, usable_bytes: of this rank, as in `AgreedSizes`.
        held_host_bytes: host memory of what is offloaded already, which counts as available.

    Raises:
        ZpassesError: on every rank, if one of them cannot, or gives other options.
    """
    free = available_host_bytes()
    agreed: dict[str, Any] = {
        "what": options.texts() | {"what is offloaded": f"{owner}, {len(sizes):,} parameters"},
        "sizes": list(sizes),
        "more": list(more),
        "available": sys.maxsize if free is None else free + held_host_bytes,
        "room": room_bytes,
        "usable": usable_bytes,
        "error": error,
    }
    question, limit = f"the {options.things} to offload", timeout_of(groups)
    for group in groups:
        agreed = exchange(group, question, agreed, limit, merge=_merged)
    if agreed["error"] is not None:
        raise ZpassesError(f"{options.function}: {agreed['error']}")
    keys = ("sizes", "more", "available", "room", "usable")
    return AgreedSizes(*(agreed[key] for key in keys))


def _merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = answers[0]
    error = next((each["error"] for each in answers if each["error"] is not None), None)
    other = next((each["what"] for each in answers if each["what"] != first["what"]), None)
    if error is None and other is not None:
        differ = (
            f"{name} is {text} on one rank and {other[name]} on another"
            for name, text in first["what"].items()
            if text != other[name]
        )
        error = f"{'; '.join(differ)}. Call it alike on every rank."
    if error is not None:
        return {**first, "error": error}
    most = {
        key: [max(each) for each in zip(*(each[key] for each in answers), strict=True)]
        for key in ("sizes", "more")
    }
    least = {key: min(each[key] for each in answers) for key in ("available", "room", "usable")}
    return {**first, **most, **least}


def check_host_memory(
    options: OffloadOptions, needed: int, available: int, of_grads: int = 0
) -> None:
    """Raise MemoryBudgetError if a rank lacks host memory, or the budget is beyond what it has. All
    arguments are equal on all ranks, so all of them raise it.

    Args:
        needed: bytes on the host.
        available: the least share of a rank in what its machine has free.
        of_grads: the part of what is needed that gradients take.
    """
    given = options.host_bytes
    least = available if given is None else min(given, available)
    if needed and (needed > least or (given is not None and given > available)):
        close = format_size(needed) == format_size(least)  # rounding would hide the difference

        def text(size: int) -> str:
            return f"{size:,} bytes" if close else format_size(size)

        grads = f", of which {text(of_grads)} are for their gradients" if of_grads else ""
        raise MemoryBudgetError(
            f"{options.function}: the {options.things} that do not stay on the device need "
            f"{text(needed)} of host memory on a rank{grads}. Given: host_bytes="
            f"{'None' if given is None else text(given)}. Available: {text(available)}, the "
            "least share of a rank in what its machine has free, without what host_memory and "
            "gradients of parameters on the host may still take. "
            f"{_ways_out(options, needed, available)}"
        )


def _ways_out(options: OffloadOptions, needed: int, available: int) -> str:
    given = options.host_bytes
    if needed > available:
        return f"Let more {options.things} stay (device_bytes), or shard over more ranks."
    if given is not None and given > available:
        return "There is room for them: give host_bytes that the machine has, or leave it out."
    return f"Raise host_bytes, let more {options.things} stay (device_bytes), or use more ranks."
