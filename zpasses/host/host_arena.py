"""One block of host memory for many tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zpasses.host.locked_memory import LockedMemory


class HostArena:
    """One block of host memory, all of which is taken at once.

    Args:
        nbytes: its size.
        device: the device that copies from and to it. For "cuda", its pages are locked.

    Raises:
        MemoryBudgetError: if the system or the driver refuses so much.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = LockedMemory.of(nbytes, device)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8, count=max(nbytes, 1))
        if device.type != "cuda":  # takes the pages, which then no longer count as free
            self.bytes.zero_()

    def tensor(
        self, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
    ) -> Tensor:
        """Returns a part of the memory as a tensor without gaps.

        It has a storage of its own, which keeps the memory alive: `torch.save` and `copy.deepcopy`
        of a view would write the whole arena.

        Args:
            offset: in bytes, a multiple of the element size.
        """
        count = math.prod(shape)
        if not count:
            return torch.empty_strided(shape, stride, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
        return flat.as_strided(shape, stride).detach()
