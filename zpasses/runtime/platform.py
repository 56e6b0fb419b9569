"""The device that routes run on: its properties, and side streams to enqueue work on.

Device types are looked up by name, so a test can replace one, as `tests/fake_mori.py` does
for "cpu".
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from socket import gethostname
from typing import Any, Protocol

import torch
from torch import Tensor

from zpasses import compat


class SideStream(Protocol):
    """A stream in addition to the current one. Only `synchronize` makes the CPU wait."""

    handle: int
    """Raw stream pointer for C++; never 0, which means the default stream."""

    def follow_current(self) -> None:
        """Make this stream wait for all work that is now on the current stream."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Returns memory for use on this stream, uint8[nbytes]."""

    def run(self, work: Callable[[], Any]) -> None:
        """Enqueue torch calls on this stream."""

    def record(self) -> Any:
        """Returns an event. Its `wait()` makes the current stream wait for all work enqueued here
        so far.
        """

    def keep(self, tensor: Tensor) -> None:
        """Once the tensor is freed, do not reuse its memory before this stream has done the work
        that it has by then.
        """

    def synchronize(self) -> None:
        """Make the CPU wait until all work on this stream is done."""


class SymmMemory:
    """torch's collectives by copy engines through symmetric memory. They return at once,
    `wait_tensor` awaits them, and their inputs must live until then.
    """

    @property
    def stream(self) -> SideStream:
        """The stream on which they run."""
        return _CudaStream(compat.symm_mem_stream())

    def all_gather(self, source: Tensor, group: str) -> Tensor:
        """Returns the parts of all ranks, [group size * rows, ...]."""
        return compat.low_contention_all_gather(source, group)

    def reduce_scatter(self, source: Tensor, reduce_op: str, group: str) -> Tensor:
        """Returns this rank's rows of the "sum" or "avg"."""
        return compat.low_contention_reduce_scatter(source, reduce_op, group)


class ZeroSmGathers:
    """NCCL's gathers by copy engines on a process group of their own, and memory that its ranks
    have registered.
    """

    def __init__(self, group: str, name: str, limit_s: float) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        members, limit = compat.group_ranks(group), timedelta(seconds=limit_s)
        what = f"zpasses: gathers of group {group}"
        compat.make_group(group, name, members, what, limit, zero_sm=True)
        # NCCL connects a group in its first collective, and registers only with those connected.
        given = torch.ones(1, device=self.device)
        compat.start_all_gather(given, given.new_empty(len(members)), name).wait()
        torch.cuda.synchronize()
        self._name, self._nccl = name, compat.registered_memory(name, self.device)
        self.stream: SideStream = _CudaStream(torch.cuda.Stream())
        """A stream for copies of outputs."""
        self._pools = list[torch.cuda.MemPool]()

    def allocate(self, nbytes: int) -> Tensor:
        """Returns memory that is not registered yet, uint8[nbytes]."""
        # A pool for each buffer: torch >= 2.15 registers only what a pool has at that time, and
        # torch 2.13 would register more from the allocator, on some ranks only.
        self._pools.append(torch.cuda.MemPool(self._nccl.mem_allocator))
        with torch.cuda.use_mem_pool(self._pools[-1]):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def register(self) -> None:
        """Registers what was allocated last. All ranks must call it together."""
        self._nccl.register_mem_pool(self._pools[-1], symm=True)

    def start(self, source: Tensor, out: Tensor) -> Any:
        """Starts a gather into registered memory, at the same place of it on all ranks. Returns a
        handle: its `wait()` makes the current stream wait.
        """
        return compat.start_all_gather(source, out, self._name)

    def deregister(self) -> None:
        """Undoes `register`, for all memory. All ranks must call it together."""
        torch.cuda.synchronize()
        while self._pools:
            self._nccl.deregister_mem_pool(self._pools.pop())


class Platform:
    """A device type, as this process sees it: "cuda" of torch, for NVIDIA and AMD devices. Tests
    register others, with the same methods.
    """

    def _properties(self) -> Any:
        return torch.cuda.get_device_properties(torch.cuda.current_device())

    def architecture(self) -> str:
        """The compiler's name of the architecture: "gfx942", "sm90", ..."""
        properties = self._properties()
        name = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
        return name if torch.version.hip else f"sm{properties.major}{properties.minor}"

    def device_id(self) -> str:
        """Identifies the physical device within its node."""
        return str(getattr(self._properties(), "uuid", torch.cuda.current_device()))

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def side_stream(self) -> SideStream:
        return _CudaStream(torch.cuda.Stream())

    def symm_memory(self) -> SymmMemory:
        return SymmMemory()

    def zero_sm_obstacle(self) -> str | None:
        """Why no process group of this torch has zero-SM gathers; None if they can be tried."""
        return compat.zero_sm_obstacle()

    def zero_sm_gathers(self, group: str, name: str, limit_s: float) -> ZeroSmGathers:
        """Makes a process group `name` of the ranks of a group and connects it. All of them must
        call this together; it raises RuntimeError if they do not connect within `limit_s` seconds.
        """
        return ZeroSmGathers(group, name, limit_s)

    def bind_thread(self) -> Callable[[], None]:
        """Returns a function that makes another thread use this thread's device."""
        device = torch.cuda.current_device()
        return lambda: torch.cuda.set_device(device)


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self.handle = stream, int(stream.cuda_stream)

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

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


_platforms: dict[str, Platform] = {"cuda": Platform()}


def platform_of(device_type: str) -> Platform | None:
    """The platform of a device type; None if it has no copy engines."""
    return _platforms.get(device_type)


def register_platform(device_type: str, platform: Platform | None) -> None:
    """Register the platform of a device type; None removes it."""
    if platform is None:
        _platforms.pop(device_type, None)
    else:
        _platforms[device_type] = platform


def node_name() -> str:
    """Identifies this machine: equal for all processes on it, and across containers if the kernel
    exposes its boot id.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else gethostname()
