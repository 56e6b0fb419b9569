"""Routes, which implement a group's collectives, and the default route by functional
collectives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zpasses import compat
from zpasses.runtime.gloo import all_gather
from zpasses.runtime.platform import Platform, SideStream


def resolve_contiguous(tensor: Tensor) -> Tensor:
    """The tensor as contiguous memory, with lazy conjugation and negation applied."""
    return tensor.resolve_conj().resolve_neg().contiguous()


class Route(ABC):
    """Runs the collectives of one group. Every call returns at once, and `wait_tensor` awaits its
    result.
    """

    name: str

    @abstractmethod
    def all_gather(self, inputs: Sequence[Tensor], group_size: int, group: str) -> list[Tensor]:
        """Returns one output per input, with the parts in the order of the group's ranks."""

    @abstractmethod
    def all_gather_out(self, source: Tensor, group_size: int, group: str, out: Tensor) -> Tensor:
        """Gather into `out`, which may contain `source`. Returns `out`."""

    def reduce_scatter(self, source: Tensor, reduce_op: str, group_size: int, group: str) -> Tensor:
        """Reduce by the functional collective, unless the route overrides this method."""
        result: Tensor = compat.functional.reduce_scatter_tensor(
            resolve_contiguous(source), reduce_op, group_size, group
        )
        return result

    def leave(self, group: str, timeout_s: float, platform: Platform) -> str | None:
        """Give back what the route shares with other ranks, which all call this together. Returns a
        reason if that was not possible.
        """
        return None


class C10dRoute(Route):
    """The functional collectives: RCCL, NCCL or gloo."""

    name = "c10d"

    def all_gather(self, inputs: Sequence[Tensor], group_size: int, group: str) -> list[Tensor]:
        sources = [resolve_contiguous(source) for source in inputs]
        if compat.is_gloo(group, sources[0].device):
            return all_gather(sources, group_size, group)
        if len(sources) == 1:
            return [compat.functional.all_gather_into_tensor(sources[0], group_size, group)]
        return list(compat.functional.all_gather_into_tensor_coalesced(sources, group_size, group))

    def all_gather_out(self, source: Tensor, group_size: int, group: str, out: Tensor) -> Tensor:
        result: Tensor = compat.functional.all_gather_into_tensor_out(
            resolve_contiguous(source), group_size, group, out=out
        )
        return result


class SideStreamWork(compat.Work):  # type: ignore[misc]  # torch's Work is an Any here
    """A collective in flight on a side stream. `wait` makes the current stream wait for it, and
    releases the tensors that it needed.

    If nobody waits, the memory that it reads and writes is never freed, so no other tensor can be
    corrupted.
    """

    def __init__(self, event: Any, needs: Sequence[Tensor]) -> None:
        super().__init__()
        self._event, self._needs = event, tuple(needs)

    def wait(self, timeout: Any = None) -> bool:
        self._event.wait()
        self._needs = ()
        return True


def start_delivery(full: Tensor, source: Tensor, out: Tensor, stream: SideStream) -> None:
    """Copy a gather that runs, uint8[bytes], into `out` on a stream. `wait_tensor` of `out` awaits
    both.
    """

    def deliver() -> None:
        # The stream waits for the gather, which removes it from the registry.
        compat.functional.wait_tensor(full)
        out.reshape(-1).view(torch.uint8).copy_(full)

    stream.run(deliver)
    compat.register_work(out, SideStreamWork(stream.record(), (full, source, out)))


TRIAL_BYTES = 4096
"""Bytes that a trial gathers from all ranks."""


def trial_gather(route: Route, group: str, device: torch.device) -> str | None:
    """Gather once, and check the result. Returns what is wrong with it."""
    rank, size = compat.process_group(group).rank(), compat.process_group(group).size()
    mine = torch.full((TRIAL_BYTES // size,), rank, dtype=torch.uint8, device=device)
    (full,) = route.all_gather([mine], size, group)
    got = compat.functional.wait_tensor(full).view(size, -1).cpu()
    expected = torch.arange(size, dtype=torch.uint8).unsqueeze(1).expand_as(got)
    return None if torch.equal(got, expected) else f"got wrong bytes: {got[:, 0].tolist()}"


def raise_if_capturing(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph is captured, because a replay would neither alternate
    buffers nor vote.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "zpasses::sdma ops on a copy engine cannot be captured in a CUDA graph: a replay would "
            "reuse buffers that other ranks may still read. "
            "Leave the pass 'sdma' out of the pipeline, or disable CUDA graphs."
        )
