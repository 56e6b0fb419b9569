"""The device under the routes: what it is, and streams on which work is put in order.

Device types are looked up by name, so that a test can stand in for one (`zpasses.testing.fake_mori`
does for "cpu")."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "CudaPlatform",
    "Platform",
    "SideStream",
    "node_name",
    "platform_of",
    "register_platform",
]


class SideStream(Protocol):
    """An order of work beside the current stream. Nothing here makes the CPU wait but
    `synchronize`."""

    handle: int
    """What C++ calls it; never 0, which means the default stream."""

    def follow_current(self) -> None:
        """Start nothing from now on before all that the current stream holds is done."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory for use here, uint8[nbytes]."""

    def run(self, work: Callable[[], Any]) -> None:
        """Put torch calls in order here."""

    def record(self) -> Any:
        """An event; its `wait()` lets the current stream wait for all that was put in order here
        before."""

    def synchronize(self) -> None:
        """Let the CPU wait until nothing is left."""


class Platform(Protocol):
    """One type of device, as this process sees it."""

    def architecture(self) -> str:
        """What the compiler calls it: "gfx942", "sm90", ..."""

    def device_id(self) -> str:
        """Names the physical device within its node."""

    def free_bytes(self) -> int: ...

    def side_stream(self) -> SideStream: ...

    def bind_thread(self) -> Callable[[], None]:
        """To be called in another thread, so that it works on this thread's device."""


class CudaPlatform:
    """NVIDIA's devices, and AMD's, which torch calls the same."""

    def _properties(self) -> Any:
        return torch.cuda.get_device_properties(torch.cuda.current_device())

    def architecture(self) -> str:
        properties = self._properties()
        name = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
        return name if torch.version.hip else f"sm{properties.major}{properties.minor}"

    def device_id(self) -> str:
        return str(getattr(self._properties(), "uuid", torch.cuda.current_device()))

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def side_stream(self) -> SideStream:
        return _CudaStream()

    def bind_thread(self) -> Callable[[], None]:
        device = torch.cuda.current_device()
        return lambda: torch.cuda.set_device(device)


class _CudaStream:
    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self.handle = int(self._stream.cuda_stream)

    def follow_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def run(self, work: Callable[[], Any]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Any:
        return self._stream.record_event()

    def synchronize(self) -> None:
        self._stream.synchronize()


_platforms: dict[str, Platform] = {"cuda": CudaPlatform()}


def platform_of(device_type: str) -> Platform | None:
    """What stands for a type of device; None where copy engines are not to be had."""
    return _platforms.get(device_type)


def register_platform(device_type: str, platform: Platform | None) -> None:
    """Let a platform stand for a type of device; None takes it away."""
    if platform is None:
        _platforms.pop(device_type, None)
    else:
        _platforms[device_type] = platform


def node_name() -> str:
    """The same for processes on one machine and no others, also across containers where the kernel
    tells."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else gethostname()
