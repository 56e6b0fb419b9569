"""Gathers of a graph that start before it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.runtime.edits import memory_of
from zpasses.runtime.layout import rows_of
from zpasses.runtime.param_value import stamp_of


@dataclass
class Gathered:
    """Gathers that have started."""

    values: list[Tensor]
    in_flight: Sequence[int]
    """Positions of the values that must be awaited."""
    sources: list[tuple[int, object]]
    """Address and version of each shard that was read."""

    def wait(self) -> list[Tensor]:
        """Returns the gathered tensors."""
        for position in self.in_flight:
            self.values[position] = compat.functional.wait_tensor(self.values[position])
        return self.values


class Starter:
    """Starts the gathers of one graph for certain parameters.

    Args:
        run: takes the shards of the parameters and a copy-engine route, "" for compute units, and
            starts the gathers.
        in_flight: positions of the results that must be awaited.
        params: the parameters, which are held by weak references.
    """

    def __init__(
        self,
        run: Callable[[list[Any], str], Any],
        in_flight: Sequence[int],
        params: Sequence[DTensor],
    ) -> None:
        self._run, self._in_flight = run, in_flight
        self._params = [weakref.ref(param) for param in params]

    def start(self, route: str) -> Gathered | None:
        """Starts the gathers by a route. Returns None if a parameter no longer exists."""
        params = [ref() for ref in self._params]
        alive = [param for param in params if param is not None]
        if len(alive) < len(params):
            return None
        with torch.no_grad():
            shards = [rows_of(param).detach() for param in alive]
            sources = list(map(_source, alive, shards))
            for param in alive:
                if (memory := memory_of(param)) is not None:
                    memory.copied = True
            return Gathered(list(self._run(list(shards), route)), self._in_flight, sources)

    def is_fresh(self, gathered: Gathered) -> bool:
        """Whether the parameters have not changed since their gathers started."""
        params = [ref() for ref in self._params]
        return gathered.sources == [
            _source(param, rows_of(param)) if param is not None else None for param in params
        ]


def _source(param: DTensor, shard: Tensor) -> tuple[int, object]:
    # A shard without a version counter equals nothing.
    return compat.address(shard), stamp_of(param, shard) or object()
