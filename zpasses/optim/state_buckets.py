"""What an optimizer holds for its parameters, where it rests, and in which order it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zpasses import compat
from zpasses.graph.padding import rounded_up

_ALIGN = 64
"""Values start at multiples of so many bytes, which suits the vector instructions of any kernel."""


@dataclass(frozen=True)
class ValueLayout:
    """A value that an optimizer holds for a parameter: a tensor without gaps, on this rank."""

    key: Any
    """Its key in `optimizer.state[param]`."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes, up to where the next value may start."""
        return rounded_up(math.prod(self.shape) * self.dtype.itemsize, _ALIGN)


def layout_of_value(key: Any, value: Any) -> ValueLayout | None:
    """Returns the layout of a value; None for what stays where it is: numbers, counts of steps,
    lists, and tensors that have gaps or are of a subclass, such as quantized ones.
    """
    local = compat.local_part(value)
    if type(local) not in (Tensor, nn.Parameter, compat.FakeTensor):
        return None
    if local.layout is not torch.strided or not local.dim():
        return None
    shape, stride = tuple(local.shape), tuple(local.stride())
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    dense = not local.numel() or extent == local.numel()
    return ValueLayout(key, local.dtype, shape, stride) if dense else None


def layouts_of(entries: Mapping[Any, Any]) -> tuple[ValueLayout, ...]:
    """Returns the layouts of the values that an optimizer holds for a parameter."""
    found = (layout_of_value(key, value) for key, value in entries.items())
    return tuple(each for each in found if each is not None)


def nbytes_of(layouts: Sequence[ValueLayout]) -> int:
    """Returns the bytes of all values together."""
    return sum(each.nbytes for each in layouts)


DEFAULT_BUCKET = "256MiB"
"""Of the option `bucket_bytes`."""


@dataclass(frozen=True)
class StatePlan:
    """Where the states of an optimizer rest. Bytes are those of the rank that holds most."""

    total_bytes: int
    """Of all states."""
    device_bytes: int
    """Of the states that stay on the device between steps."""
    host_bytes: int
    """Of those that rest on the host."""
    in_flight_bytes: int
    """The most that a step holds on the device beside `device_bytes`: two buckets. The step that
    makes the states holds those of a third one."""
    resident: tuple[int, ...]
    """Positions of the parameters whose states stay, in the order of the optimizer."""
    buckets: tuple[tuple[int, ...], ...]
    """Positions of the other parameters, bucket by bucket."""


def in_parts(sizes: Sequence[int], positions: Sequence[int], most_bytes: int) -> list[list[int]]:
    """Cuts positions into parts of at most so many bytes. One with more is a part by itself."""
    parts, left = list[list[int]](), -1
    for at in positions:
        if sizes[at] <= left:
            parts[-1].append(at)
            left -= sizes[at]
        else:
            parts.append([at])
            left = most_bytes - sizes[at]
    return parts


def plan_states(
    sizes: Sequence[int],
    device_bytes: int,
    bucket_bytes: int,
    more: Sequence[int] = (),
) -> StatePlan:
    """Returns which states stay on the device, and the buckets of the others.

    Those stay that fit, in the order of the parameters. They step first, while the first bucket
    comes in.

    Args:
        sizes: bytes of the states of each parameter.
        device_bytes: the most that may stay.
        bucket_bytes: the most of a bucket. A parameter with more has a bucket of its own.
        more: bytes that come with the states of each parameter, because it rests on the host with
            its gradient. Such states do not stay. Empty if there is nothing.
    """
    more = more or [0] * len(sizes)
    resident, leaving, room = list[int](), list[int](), device_bytes
    for at, size in enumerate(sizes):
        stays = size <= room and not more[at]
        (resident if stays else leaving).append(at)
        room -= size if stays else 0
    buckets = in_parts(sizes, leaving, bucket_bytes)
    come = [sum(sizes[at] + more[at] for at in bucket) for bucket in buckets]
    slots = (max(come[0::2], default=0), max(come[1::2], default=0))
    return StatePlan(
        total_bytes=sum(sizes),
        device_bytes=device_bytes - room,
        host_bytes=sum(sizes[at] for at in leaving),
        in_flight_bytes=sum(slots),
        resident=tuple(resident),
        buckets=tuple(map(tuple, buckets)),
    )


def plan_states_beside(
    sizes: Sequence[int],
    room_bytes: int,
    usable_bytes: int,
    bucket_bytes: int,
    more: Sequence[int] = (),
) -> StatePlan | None:
    """Returns the plan in which as many states stay as fit beside forward, backward and step; None
    if not even the buckets fit.

    Forward runs while the last two buckets of the step before go out. A step takes as much again
    for the bucket that it makes, and for values of its own.

    Args:
        sizes, bucket_bytes, more: as for `plan_states`.
        room_bytes: what states may take beside forward and backward.
        usable_bytes: the same beside nothing else, as in a step.
    """
    device_bytes = room_bytes
    while True:
        plan = plan_states(sizes, max(0, device_bytes), bucket_bytes, more)
        held = plan.device_bytes + plan.in_flight_bytes
        excess = max(held - room_bytes, held + plan.in_flight_bytes - usable_bytes)
        if excess <= 0:
            return plan
        if not plan.device_bytes:
            return None
        device_bytes = plan.device_bytes - excess
