"""Full parameters that stages 1 and 2 keep between the calls of compiled graphs.

One `Retained` belongs to one sharded parameter and lives as an attribute of it: every graph that reads the parameter (training,
evaluation, both halves of a graph break) shares the one copy, and nothing outlives the parameter.

A retained value counts as fresh until its gradient is reduced (an event that all ranks share) or its shard changes. Change is seen by
version counters, which every in-place operation moves, also on a rank whose shard is empty; so ranks that run the same program decide
alike. There are two: an operation on the DTensor moves the DTensor's, one on its local tensor the local tensor's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["Retained", "forget", "retained_of"]

_ATTRIBUTE = "_zpasses_retained"


class Retained:
    """The gathered copy of one parameter, or nothing."""

    __slots__ = ("full", "shard", "version")

    def __init__(self) -> None:
        self.full: Tensor | None = None
        self.shard: Tensor | None = None
        self.version = -1

    def is_fresh(self, param: DTensor, shard: Tensor, dtype: torch.dtype) -> bool:
        """Whether the copy was gathered from this parameter's shard, in this dtype, since it last changed."""
        full, seen = self.full, self.shard
        return (
            full is not None
            and seen is not None
            and full.dtype == dtype
            and seen.data_ptr() == shard.data_ptr()
            and 0 <= _version(param, shard) == self.version
        )

    def keep(self, full: Tensor, param: DTensor, shard: Tensor) -> None:
        # Holding the shard keeps its address from being reused by another tensor.
        self.full, self.shard, self.version = full, shard, _version(param, shard)

    def drop(self) -> None:
        self.full = self.shard = None


def _version(param: DTensor, shard: Tensor) -> int:
    """Both counters, which only grow; -1 (never fresh) for tensors made in inference mode, which have none."""
    if param.is_inference() or shard.is_inference():
        return -1
    return param._version + shard._version


def retained_of(param: Any) -> Retained:
    """The parameter's entry, made at the first call."""
    entry = getattr(param, _ATTRIBUTE, None)
    if entry is None:
        entry = Retained()
        setattr(param, _ATTRIBUTE, entry)
    return entry


def forget(params: Iterable[nn.Parameter]) -> None:
    """Drop the gathered copies of these parameters."""
    for param in params:
        entry = getattr(param, _ATTRIBUTE, None)
        if isinstance(param, DTensor) and entry is not None:
            entry.drop()
