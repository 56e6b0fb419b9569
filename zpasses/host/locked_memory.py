"""Host memory of an exact size whose pages can be locked for an accelerator.

torch's own pinned memory comes from an allocator that rounds each block up to a power of two, so an
optimizer's 36 GiB would take 64. It also asks the driver once per tensor, which waits for the
device each time. Here, the process maps memory by itself and registers the whole of it once. The
pages come from the NUMA node of the thread that first touches them. Locking touches them, and runs
on processors near the device.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zpasses.errors import MemoryBudgetError
from zpasses.option_values import format_size

_LESS = (
    "Leave more on the device (device_bytes of what offloads it, or a smaller host_memory), or "
    "raise the limit of"
)


class LockedMemory(mmap.mmap):
    """Anonymous memory, locked for a device until nothing uses it any more."""

    _locked: tuple[int, torch.device] | None = None

    @classmethod
    def of(cls, nbytes: int, device: torch.device) -> LockedMemory:
        """Returns memory that a device copies from and to. For "cuda", its pages are locked.

        Args:
            nbytes: its size. It has one byte at least.

        Raises:
            MemoryBudgetError: if the system or the driver refuses so much.
        """
        try:
            memory = cls(-1, max(nbytes, 1))
        except OSError as error:
            raise MemoryBudgetError(
                f"the system does not give {format_size(nbytes)} of host memory ({error}). "
                f"{_LESS} the process's memory (ulimit -v, or that of its container)."
            ) from error
        if device.type == "cuda":
            with near(device):
                memory._lock(device)
        return memory

    def _lock(self, device: torch.device) -> None:
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        with torch.cuda.device(device):
            code = int(_runtime().cudaHostRegister(address, len(self), 0))
        if code:
            raise MemoryBudgetError(
                f"the driver does not lock {format_size(len(self))} of host memory for {device} "
                f"(error {code}). {_LESS} locked memory (ulimit -l)."
            )
        self._locked = address, device

    def __del__(self) -> None:
        if self._locked is not None:
            with contextlib.suppress(Exception):  # the driver is gone when the process ends
                address, device = self._locked
                torch.cuda.synchronize(device)  # a copy may still be running
                _runtime().cudaHostUnregister(address)


@contextlib.contextmanager
def near(device: torch.device) -> Iterator[None]:
    """Context in which this thread runs on processors of the device's NUMA node, as far as the
    process may use them and Linux knows them.
    """
    local = _local_processors(device)
    if not local:
        yield
        return
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, local)
    try:
        yield
    finally:
        os.sched_setaffinity(0, processors)


def _local_processors(device: torch.device) -> set[int]:
    """Returns the processors of the device's NUMA node that the process may use; none if unknown,
    as in a container that hides its devices, or outside of Linux.
    """
    found: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        listed = (_PCI_DEVICES / address / "local_cpulist").read_text()
        ends = [each.split("-") for each in listed.strip().split(",")]
        node = {at for each in ends for at in range(int(each[0]), int(each[-1]) + 1)}
        return node & os.sched_getaffinity(0)
    except (AttributeError, OSError, ValueError):
        return set()


_PCI_DEVICES = Path("/sys/bus/pci/devices")


def _runtime() -> Any:
    return torch.cuda.cudart()
