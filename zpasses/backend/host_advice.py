"""What errors of steps that do not fit their memory budget say about the option `host_memory`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zpasses.option_values import format_size, parse_size

ANY_BYTES = 1 << 60
"""More than a host has."""


@dataclass(frozen=True)
class LeanestPlan:
    """What the plan of a step that exceeds its budget least needs."""

    peak_bytes: int
    host_bytes: int
    """What rests on the host."""


def host_advice(
    needed: LeanestPlan, given_bytes: int, limit_bytes: int, plan: Callable[[int], LeanestPlan]
) -> str:
    """Returns a sentence about the `host_memory` with which a step needs less of the device; "" if
    none helps. It ends with a space.

    Args:
        needed: what the step needs with the option as it was given.
        given_bytes: the option; 0 without it.
        limit_bytes: what the step may take of the device.
        plan: plans the step with another number of bytes for the option.
    """
    best = plan(ANY_BYTES)
    if best.peak_bytes >= needed.peak_bytes or best.host_bytes <= given_bytes:
        return ""
    text = format_size(best.host_bytes, up=True)
    fits = best.peak_bytes <= limit_bytes
    # A plan with just so much of the host may weigh what leaves otherwise.
    if fits and plan(parse_size(text, "host_memory")).peak_bytes > limit_bytes:
        text = format_size(2 * best.host_bytes, up=True)
    other = f" in place of {format_size(given_bytes)!r}" if given_bytes else ""
    moves = f"host_memory={text!r}{other}, {'more' if given_bytes else 'some'} of what forward"
    then = "a plan fits" if fits else f"the leanest needs {format_size(best.peak_bytes, up=True)}"
    return f"With {moves} saves rests on the host, and {then}. "
