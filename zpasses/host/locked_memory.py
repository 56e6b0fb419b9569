"""Host memory of an exact size whose pages can be locked for an accelerator.

torch's own pinned memory comes from an allocator that rounds each block up to a power of two, so an
optimizer's 36 GiB would take 64. It also asks the driver once per tensor, which waits for the
device each time. Here, the process maps memory by itself and registers the whole of it once. The
pages come from the NUMA node of the process that first touches them, which is the rank.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch

from zpasses.errors import ZpassesError
from zpasses.option_values import format_size


class LockedMemory(mmap.mmap):
    """Anonymous memory, locked for a device until nothing uses it any more."""

    _locked: tuple[int, torch.device] | None = None

    def lock(self, device: torch.device) -> None:
        """Locks all pages.

        Raises:
            ZpassesError: if the driver refuses to lock so much.
        """
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        with torch.cuda.device(device):
            code = int(_runtime().cudaHostRegister(address, len(self), 0))
        if code:
            raise ZpassesError(
                f"the driver does not lock {format_size(len(self))} of host memory for {device} "
                f"(error {code}). Leave more on the device (device_bytes of what offloads it, or "
                "a smaller host_memory), or raise the limit of locked memory (ulimit -l)."
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
