"""Gathers and reductions through symmetric memory, with torch's own low-contention collectives:
copy engines pull from the other ranks.

The route runs on NVIDIA devices, and on AMD devices as far as torch's symmetric memory does. A
trial gather tests that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zpasses import compat
from zpasses.runtime.gloo import gathered_shape
from zpasses.sdma.platform import Platform, SymmMemory, node_name
from zpasses.sdma.refusals import (
    Answer,
    first_refusal,
    placement_obstacle,
    refusal_in,
    run_with_timeout,
)
from zpasses.sdma.routes import (
    Route,
    raise_if_capturing,
    resolve_contiguous,
    start_delivery,
)

_TRIAL_BYTES = 4096


def probe(group: str, platform: Platform, capacity_bytes: int) -> Answer:
    """Returns what this rank can tell before symmetric memory is touched."""
    return {"refusal": _local_obstacle(group), "node": node_name(), "device": platform.device_id()}


def _local_obstacle(group: str) -> str | None:
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


def unavailable_reason(group: str, answers: Sequence[Answer]) -> str | None:
    """Why the route cannot be started for the group; None if it can. The same on every rank."""
    return refusal_in(group, answers) or placement_obstacle(answers)


def start(group: str, platform: Platform, capacity_bytes: int, timeout_s: float) -> SymmRoute | str:
    """Try the route, and vote on the result. Returns a reason if it cannot be taken."""
    route = SymmRoute(platform.symm_memory())
    trial = run_with_timeout(timeout_s, lambda: _trial_gather(route, group), platform)
    refusal = first_refusal(group, "sdma: the trial of symmetric memory", trial, timeout_s)
    return route if refusal is None else f"trial gather: {refusal}"


def _trial_gather(route: SymmRoute, group: str) -> str | None:
    members = compat.process_group(group)
    mine = torch.full((_TRIAL_BYTES,), members.rank(), dtype=torch.uint8, device="cuda")
    (full,) = route.all_gather([mine], members.size(), group)
    got = compat.functional.wait_tensor(full).view(members.size(), -1).cpu()
    expected = torch.arange(members.size(), dtype=torch.uint8).unsqueeze(1).expand_as(got)
    return None if torch.equal(got, expected) else f"got wrong bytes: {got[:, 0].tolist()}"


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
