"""Host memory of an exact size, from which an accelerator copies without the CPU.

torch's own pinned memory comes from an allocator that rounds each block up to a power of two, so an
optimizer's 36 GiB would take 64. It also asks the driver once per tensor, which waits for the
device each time. Here, the process maps the memory by itself and registers the whole of it once.
The pages come from the NUMA node of the process that first touches them, which is the rank. The
mapping is shared with forked processes, such as data loaders: after a fork, writes to a private one
would go to other pages than those that the device reads.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zpasses.option_values import format_size


class HostArena:
    """One block of host memory.

    Args:
        nbytes: its size.
        device: the device that copies from and to it. For "cuda", its pages are locked.

    Raises:
        RuntimeError: if the driver refuses to lock so much.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = _Mapping(-1, max(nbytes, 1))  # anonymous and shared, Python's default
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8, count=max(nbytes, 1))
        if device.type == "cuda" and nbytes:
            self._memory.lock(self.bytes.data_ptr(), device)

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


class _Mapping(mmap.mmap):
    """Anonymous memory, locked for a device until nothing uses it any more."""

    _locked: tuple[int, torch.device] | None = None

    def lock(self, address: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            code = _runtime().cudaHostRegister(address, len(self), 0)
        if int(code):
            raise RuntimeError(
                f"the driver does not lock {format_size(len(self))} of host memory for {device} "
                f"({code}). Keep more of the state on the device (device_bytes), or raise the "
                "limit of locked memory (ulimit -l)."
            )
        self._locked = address, device

    def __del__(self) -> None:
        if self._locked is not None:
            with contextlib.suppress(Exception):  # the driver is gone when the process ends
                address, device = self._locked
                torch.cuda.synchronize(device)  # a copy may still be running
                _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()
