"""Gathers and reductions through symmetric memory, with torch's own low-contention collectives:
copy engines pull from the other ranks.

The route runs on NVIDIA devices, and on AMD devices as far as torch's symmetric memory does. A
trial gather tests that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zpasses import compat
from zpasses.runtime.gloo import gathered_shape
from zpasses.runtime.platform import Platform, SymmMemory
from zpasses.sdma.refusals import attempt
from zpasses.sdma.routes import (
    Route,
    raise_if_capturing,
    resolve_contiguous,
    start_delivery,
    trial_gather,
)


def local_obstacle(group: str, platform: Platform, capacity_bytes: int) -> str | None:
    """What this rank can tell before symmetric memory is touched."""
    if not torch.cuda.is_available():
        return "symmetric memory needs an accelerator"
    if "nccl" not in compat.group_backend(group):
        backend = compat.group_backend(group)
        return f"symmetric memory needs a group of backend nccl; this one is {backend}"
    try:
        compat.symm_mem_module()
    except ImportError as error:
        return f"this torch has no symmetric memory ({error})"
    return None


def start(group: str, platform: Platform, capacity_bytes: int, timeout_s: float) -> SymmRoute | str:
    """Try the route, and vote on the result. Returns a reason if it cannot be taken."""
    route = SymmRoute(platform.symm_memory())
    trial = functools.partial(trial_gather, route, group, torch.device("cuda"))
    refusal = attempt(group, "sdma: the trial of symmetric memory", trial, platform, timeout_s)
    return route if refusal is None else f"trial gather: {refusal}"


class SymmRoute(Route):
    """Collectives of one group through symmetric memory."""

    name = "symm_mem"

    def __init__(self, memory: SymmMemory) -> None:
        self._memory = memory

    def all_gather(self, inputs: Sequence[Tensor], group_size: int, group: str) -> list[Tensor]:
        outputs = []
        for source in inputs:
            shape = gathered_shape(source.shape, group_size)
            full = (
                self._gather(resolve_contiguous(source), group)
                if source.numel()
                else source.new_empty(shape)
            )
            outputs.append(full.view(source.dtype).view(shape))
        return outputs

    def all_gather_out(self, source: Tensor, group_size: int, group: str, out: Tensor) -> Tensor:
        if source.numel():
            full = self._gather(resolve_contiguous(source), group)
            start_delivery(full, source, out, self._memory.stream)
        return out

    def reduce_scatter(self, source: Tensor, reduce_op: str, group_size: int, group: str) -> Tensor:
        raise_if_capturing(source.device)
        if reduce_op not in ("sum", "avg") or not source.numel():
            return super().reduce_scatter(source, reduce_op, group_size, group)
        given = resolve_contiguous(source)
        reduced = self._memory.reduce_scatter(given, reduce_op, group)
        self._memory.stream.keep(given)
        return reduced

    def _gather(self, source: Tensor, group: str) -> Tensor:
        """Start a gather; uint8[bytes of all ranks], not yet awaited."""
        raise_if_capturing(source.device)
        full = self._memory.all_gather(source.reshape(-1).view(torch.uint8), group)
        # The caller may free the source before the copies have read it.
        self._memory.stream.keep(source)
        return full
