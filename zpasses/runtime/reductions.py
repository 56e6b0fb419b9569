"""Reductions of tensors of which a rank has no element, such as a norm of a bias with one element.

A maximum of nothing is an error. So on that rank an operator raises before the communication that
the other ranks wait for. Such operators get the full tensor instead, on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from zpasses import compat
from zpasses.runtime.inplace import is_sharded

aten = torch.ops.aten
NEED_ELEMENTS = frozenset(
    getattr(packet, name)
    for packet in (
        *(aten.linalg_vector_norm, aten.norm, aten._foreach_norm, aten._foreach_max),
        *(aten.max, aten.min, aten.amax, aten.amin, aten.aminmax, aten.argmax, aten.argmin),
    )
    for name in packet.overloads()
)
"""Operators that raise, at least with some arguments, for a tensor without elements."""


def has_empty_part(value: object) -> bool:
    """Whether a value is a sharded DTensor with elements, of which a rank has none. Equal on all
    ranks.
    """
    return is_sharded(value) and compat.has_empty_part(compat.spec_of(value))


def with_full_inputs(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with full tensors in place of those of which a rank has no element."""
    return tuple(list(map(_full, arg)) if isinstance(arg, list) else _full(arg) for arg in args)


def _full(value: Any) -> Any:
    if not has_empty_part(value):
        return value
    made: DTensor = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return made
