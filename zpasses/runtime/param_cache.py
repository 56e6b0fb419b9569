"""The parameter cache: full parameters that stages 1 and 2 keep between calls of compiled graphs.

Each sharded parameter has one `ParamCache`, stored as an attribute of the parameter. All graphs
that read the parameter (training, evaluation, both halves of a graph break) share its copy, and the
copy does not outlive the parameter.

A cached copy is fresh until the parameter's gradient is reduced, an optimizer steps, or its shard
changes. Ranks that run the same program see these three events identically, also if a rank holds an
empty shard. They have to, because ranks that disagree on whether to gather would wait for each
other.

Changes of a shard are detected by version counters. An operation on the DTensor increments the
DTensor's counter, and an operation on its local tensor increments that tensor's counter. Operations
on lists of DTensors (`torch._foreach_*`, fused optimizers) increment neither. For torch's
optimizers, a post-step hook invalidates the cache. For other code, such as weight averaging, there
is no hook, so runs without gradients cache only parameters that a torch optimizer has stepped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = [
    "ParamCache",
    "drop_cached",
    "drop_cached_params",
    "install_step_invalidation",
    "param_cache_of",
    "version_of",
]

_CACHE_ATTRIBUTE = "_zpasses_param_cache"


class ParamCache:
    """The gathered copy of one parameter, or nothing."""

    __slots__ = ("full", "shard", "stepped", "version")

    def __init__(self) -> None:
        self.stepped = False
        """Whether a torch optimizer has stepped the parameter."""
        self.full: Tensor | None = None
        self.shard: Tensor | None = None
        self.version = -1

    def __reduce__(self) -> tuple[type[ParamCache], tuple[()]]:
        return ParamCache, ()  # a copied parameter gets an empty cache; no optimizer stepped it yet

    def is_fresh(self, param: DTensor, shard: Tensor, dtype: torch.dtype) -> bool:
        """Whether the copy was gathered in this dtype from this shard, which has not changed
        since.
        """
        full, seen = self.full, self.shard
        return (
            full is not None
            and seen is not None
            and full.dtype == dtype
            and seen.data_ptr() == shard.data_ptr()
            and 0 <= version_of(param, shard) == self.version
        )

    def store(self, full: Tensor, param: DTensor, shard: Tensor) -> None:
        # The reference to the shard prevents another tensor from reusing its address.
        self.full, self.shard, self.version = full, shard, version_of(param, shard)

    def drop(self) -> None:
        self.full = self.shard = None


def version_of(param: DTensor, shard: Tensor) -> int:
    """The sum of both version counters, which only grow.

    -1, which is never fresh, for tensors made in inference mode, which have no counter.
    """
    try:
        return param._version + shard._version
    except RuntimeError:  # made in inference mode
        return -1


def param_cache_of(param: Any) -> ParamCache:
    """Return the cache of a parameter; the first call creates it."""
    entry = getattr(param, _CACHE_ATTRIBUTE, None)
    if entry is None:
        entry = ParamCache()
        setattr(param, _CACHE_ATTRIBUTE, entry)
    return entry


@functools.cache
def install_step_invalidation() -> None:
    """Install a hook that drops the cached copies of an optimizer's parameters after each step.

    It applies to every torch optimizer of this process. Further calls do nothing.
    """
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            entry = getattr(param, _CACHE_ATTRIBUTE, None)
            if entry is not None:
                entry.stepped = True
                if param.requires_grad or param.grad is not None:  # optimizers skip the others
                    entry.drop()


def drop_cached(param: Any) -> None:
    """Drop the cached copy of a parameter, if there is one."""
    entry = getattr(param, _CACHE_ATTRIBUTE, None)
    if entry is not None:
        entry.drop()


def drop_cached_params(params: Iterable[Tensor]) -> None:
    """Drop the cached copies of these parameters."""
    for param in params:
        drop_cached(param)
