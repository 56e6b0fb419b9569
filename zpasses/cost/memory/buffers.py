"""Allocations of a graph, and layouts of what they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from zpasses import compat


@dataclass(eq=False)
class Buffer:
    """One allocation."""

    node: fx.Node
    """The node that allocates it."""
    nbytes: int
    first: int
    """Index of the node that allocates it."""
    last: int
    """Index of the last node that needs it."""
    scratch: bool = False
    """Whether it holds no value of the graph: scratch memory of a collective's backend, or what a
    subgraph needs besides its inputs and outputs."""
    output: int = 0
    """Which of the node's outputs it holds, if the node has several."""


def planned_sizes(sizes: Iterable[int]) -> list[int]:
    return [compat.planned_size(size) for size in sizes]


def layout_of(value: Tensor) -> tuple[Any, ...]:
    """Dtype, sizes and strides, with dimensions merged that one index goes through. Symbols count
    by their hints.
    """
    merged: list[tuple[int, int]] = []
    for size, stride in zip(value.shape, value.stride(), strict=True):
        size, stride = compat.planned_size(size), compat.planned_size(stride)
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    return value.dtype, *merged
