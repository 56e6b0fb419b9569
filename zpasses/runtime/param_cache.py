"""Full parameters that stages 1 and 2 keep between the calls of compiled graphs.

One `Retained` belongs to one sharded parameter and lives as an attribute of it: every graph that
reads the parameter (training, evaluation, both halves of a graph break) shares the one copy, and
nothing outlives the parameter.

A kept value is fresh until its gradient is reduced, an optimizer steps, or its shard changes. All
three are events that ranks which run the same program share, also where a rank holds an empty
shard: ranks must decide alike, or they would wait for each other. Change is seen by version
counters. There are two: an operation on the DTensor moves the DTensor's, one on its local tensor
the local tensor's. Operations on lists of DTensors (`torch._foreach_*`, fused optimizers) move
neither; torch's optimizers are seen by the hook that torch offers. Other such edits exist (averages
of weights, say), so runs without gradients keep only parameters that an optimizer of torch has been
seen to step."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["ParamCache", "drop_cached", "forget", "install_step_invalidation", "param_cache_of"]

_ATTRIBUTE = "_zpasses_retained"


class ParamCache:
    """The gathered copy of one parameter, or nothing."""

    __slots__ = ("full", "shard", "stepped", "version")

    def __init__(self) -> None:
        self.stepped = False
        """Whether an optimizer that reports its steps updates the parameter."""
        self.full: Tensor | None = None
        self.shard: Tensor | None = None
        self.version = -1

    def __reduce__(self) -> tuple[type[ParamCache], tuple[()]]:
        return ParamCache, ()  # a copy of the parameter starts anew: nobody has stepped it yet

    def is_fresh(self, param: DTensor, shard: Tensor, dtype: torch.dtype) -> bool:
        """Whether the copy was gathered from this parameter's shard, in this dtype, since it last
        changed."""
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
    """Both counters, which only grow; -1 (never fresh) for tensors made in inference mode, which
    have none."""
    if param.is_inference() or shard.is_inference():
        return -1
    return param._version + shard._version


def param_cache_of(param: Any) -> ParamCache:
    """The parameter's entry, made at the first call."""
    entry = getattr(param, _ATTRIBUTE, None)
    if entry is None:
        entry = ParamCache()
        setattr(param, _ATTRIBUTE, entry)
    return entry


@functools.cache
def install_step_invalidation() -> None:
    """Drop the cached copies of the parameters of an optimizer after each of its steps: all torch
    optimizers. Installed once."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry = getattr(param, _ATTRIBUTE, None)
            if entry is not None:
                entry.stepped = True
                entry.drop()


def drop_cached(param: Any) -> None:
    """Drop the gathered copy of a parameter, if there is one."""
    entry = getattr(param, _ATTRIBUTE, None)
    if entry is not None:
        entry.drop()


def forget(params: Iterable[Tensor]) -> None:
    """Drop the gathered copies of these parameters."""
    for param in params:
        drop_cached(param)
