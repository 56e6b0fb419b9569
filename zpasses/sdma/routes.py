"""Ways for the bytes of a collective to take, and the one that is always there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zpasses import compat
from zpasses.runtime.gloo import all_gather

__all__ = ["C10dRoute", "Pending", "Route", "gathered_shape", "plain", "refuse_capture"]


def gathered_shape(shape: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Shape of what a gather returns: as many rows as all ranks have together; [group_size] for a
    scalar."""
    return (shape[0] * group_size, *shape[1:]) if len(shape) else (group_size,)


def plain(tensor: Tensor) -> Tensor:
    """The tensor as its memory says it: contiguous, no conjugate or negative that is yet to be
    taken."""
    return tensor.resolve_conj().resolve_neg().contiguous()


class Route(ABC):
    """Carries out the collectives of one group. Every call returns at once; `wait_tensor` awaits
    what it returned."""

    name: str

    @abstractmethod
    def all_gather(self, inputs: Sequence[Tensor], group_size: int, group: str) -> list[Tensor]:
        """One output an input, the parts in the order of the group's ranks."""

    @abstractmethod
    def all_gather_out(self, source: Tensor, group_size: int, group: str, out: Tensor) -> Tensor:
        """Gather into `out`, of which `source` may be a part; returns `out`."""

    def reduce_scatter(self, source: Tensor, reduce_op: str, group_size: int, group: str) -> Tensor:
        """Routes that cannot reduce leave it to the functional collective."""
        result: Tensor = compat.functional.reduce_scatter_tensor(
            plain(source), reduce_op, group_size, group
        )
        return result


class C10dRoute(Route):
    """The functional collectives: RCCL, NCCL or gloo."""

    name = "c10d"

    def all_gather(self, inputs: Sequence[Tensor], group_size: int, group: str) -> list[Tensor]:
        sources = [plain(source) for source in inputs]
        if compat.is_gloo(group, sources[0].device):
            return all_gather(sources, group_size, group)
        if len(sources) == 1:
            return [compat.functional.all_gather_into_tensor(sources[0], group_size, group)]
        return list(compat.functional.all_gather_into_tensor_coalesced(sources, group_size, group))

    def all_gather_out(self, source: Tensor, group_size: int, group: str, out: Tensor) -> Tensor:
        result: Tensor = compat.functional.all_gather_into_tensor_out(
            plain(source), group_size, group, out=out
        )
        return result


class Pending(compat.Work):  # type: ignore[misc]  # of what torch calls it, an Any
    """A collective under way on a side stream. `wait` lets the current stream wait for it, and lets
    go of what it needed.

    If nobody waits, memory that it reads and writes is never freed, which is what keeps it from
    corrupting somebody else's."""

    def __init__(self, event: Any, needs: Sequence[Tensor]) -> None:
        super().__init__()
        self._event, self._needs = event, tuple(needs)

    def wait(self, timeout: Any = None) -> bool:
        self._event.wait()
        self._needs = ()
        return True


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph is captured: a replay would neither alternate buffers
    nor vote."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "zpasses::sdma ops on a copy engine cannot be captured in a CUDA graph: a replay would "
            "reuse buffers that other ranks may "
            "still read. Leave the pass 'sdma' out of the pipeline of a graph that is captured, or "
            "turn CUDA graphs off."
        )
