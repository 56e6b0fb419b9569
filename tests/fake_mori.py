"""A fake of mori and of a device with SDMA engines, for real processes on CPU tensors.

It reproduces the hazards of amd-mori. It takes raw addresses and keeps nothing alive. It moves
whole 4-byte words through buffers that all ranks write to, without checking that they fit. A rank
that is ahead overwrites what a slower rank has not copied out yet. It connects one set of ranks per
process. It returns -1 or ends the process where other libraries raise. Calls run in order on
streams, each of which is a thread, and deliver late. A result that is read before it was awaited is
poison.

    with fake_mori.installed(fake_mori.Settings(copy_out_s=0.05)):  # on every rank
        zpasses.sdma.init()
        ...

A crash or a hang of a real device is a `DeviceFaultError` here, raised when the stream is awaited.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.host_stream import DeviceFaultError, HostStream
from zpasses import compat
from zpasses.runtime.platform import SymmMemory, register_platform
from zpasses.sdma.lifecycle import reset_routes

__all__ = ["DeviceFaultError", "HostPlatform", "HostStream", "Settings", "installed"]

_POISON = 0xA5
_UID_BYTES = 128
_MAX_PES = 8
_DEFAULT_TRANSIT = 512 << 20


@dataclass
class Settings:
    """Settings of the fake on one rank."""

    version: str = "1.2.4"
    capturing: bool = True
    """Whether calls take `capturing`. Without it, they make the CPU wait. 1.2.4 has it, earlier
    releases do not.
    """
    architecture: str = "gfx942"
    free_bytes: int = 192 << 30
    device_id: str | None = None
    """Identifies the device; None gives each process its own device."""
    latency_s: float = 0.002
    """Seconds from the start of a call until this rank sends."""
    copy_out_s: float = 0.0
    """Seconds from the arrival of all parts until this rank copies them out."""
    fail: str = ""
    """Where this rank fails: "import", "unique_id", "init", "init_raises", "exit", "init_hangs",
    "handle", "wrong_bytes" or "call"."""
    time_limit_s: float = 20.0
    """Seconds after which a device that waits for another counts as hung."""
    calls: list[int] = field(default_factory=list)
    """Bytes per rank of each call, in order; filled as calls are made."""
    blocking: int = 0
    """Number of calls that made the CPU wait."""


@contextlib.contextmanager
def installed(settings: Settings | None = None) -> Iterator[Settings]:
    """Inside the context, `import mori` gives the fake, and CPU tensors are on a device with SDMA
    engines.
    """
    given = settings or Settings()
    names = ("mori", "mori.ccl", "mori.shmem")
    before = {name: sys.modules.get(name) for name in names}
    variable = os.environ.pop("MORI_ENABLE_SDMA", None)
    modules = _modules(given)
    sys.modules.update(modules)
    register_platform("cpu", HostPlatform(given))
    reset_routes()
    try:
        yield given
    finally:
        reset_routes()
        register_platform("cpu", None)
        for name in names:
            sys.modules.pop(name, None)
            if before[name] is not None:
                sys.modules[name] = before[name]  # type: ignore[assignment]
        os.environ.pop("MORI_ENABLE_SDMA", None)
        if variable is not None:
            os.environ["MORI_ENABLE_SDMA"] = variable


# --- the device -----------------------------------------------------------------------------------
class HostPlatform:
    """This process as a device."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def architecture(self) -> str:
        return self._settings.architecture

    def device_id(self) -> str:
        return self._settings.device_id or str(os.getpid())

    def free_bytes(self) -> int:
        return self._settings.free_bytes

    def side_stream(self) -> HostStream:
        return HostStream(self._settings.time_limit_s)

    def symm_memory(self) -> SymmMemory:
        raise NotImplementedError("this device has no symmetric memory")

    def bind_thread(self) -> Callable[[], None]:
        return lambda: None


# --- mori -----------------------------------------------------------------------------------------
class _FakeShmem:
    """`mori.shmem` in one process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank, self.size, self.folder = -1, 0, Path()
        self.handles = itertools.count()

    def shmem_get_unique_id(self) -> bytes:
        if self.settings.fail == "unique_id":
            raise RuntimeError("bootstrap: no interface")
        folder = tempfile.mkdtemp(
            prefix="fake-mori-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
        )
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder.encode().ljust(_UID_BYTES, b"\0")

    def shmem_init_attr(self, flags: int, rank: int, size: int, unique_id: bytes) -> int:
        fail = self.settings.fail
        if self.size:
            return 0  # like mori, silently and whatever the arguments
        if fail == "init":
            return -1
        if fail == "init_raises":
            raise RuntimeError("hsa: out of resources")
        if fail == "exit":
            os._exit(255)
        if fail == "init_hangs":
            time.sleep(3600)
        self.rank, self.size, self.folder = rank, size, Path(unique_id.rstrip(b"\0").decode())
        return 0 if self._barrier("init") else -1

    def shmem_mype(self) -> int:
        return self.rank

    def shmem_npes(self) -> int:
        return self.size

    def shmem_finalize(self) -> None:
        if not self._barrier("finalize"):
            raise DeviceFaultError("shmem_finalize hangs: not all ranks arrived")

    def _barrier(self, where: str) -> bool:
        (self.folder / f"{where}-{self.rank}").touch()
        present = [self.folder / f"{where}-{rank}" for rank in range(self.size)]
        return _wait_until(
            lambda: all(each.exists() for each in present),
            time.monotonic() + self.settings.time_limit_s,
        )


def _wait_until(condition: Callable[[], bool], deadline: float) -> bool:
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


class _SharedBuffer:
    """One PE's buffer and flags, in memory that all PEs write to."""

    def __init__(self, path: Path, nbytes: int, pes: int, create: bool) -> None:
        if create:
            partial = path.with_suffix(".new")
            with open(partial, "wb") as new:
                new.truncate(nbytes + 8 * pes)
            partial.rename(path)  # no PE may open it before it has its size
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), nbytes + 8 * pes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.flags = (ctypes.c_uint64 * pes).from_buffer(self._map, nbytes)


class _FakeAllgatherSdma:
    """`mori.ccl.AllgatherSdma`."""

    def __init__(
        self,
        world: _FakeShmem,
        my_pe: int,
        npes: int,
        input_buffer_size: int | None = None,
        output_buffer_size: int | None = None,
        transit_buffer_size: int | None = None,
        copy_output_to_user: bool = True,
    ) -> None:
        if os.environ.get("MORI_ENABLE_SDMA") != "1":
            raise RuntimeError("AllgatherSdma needs MORI_ENABLE_SDMA=1 before shmem is initialised")
        if world.settings.fail == "handle":
            raise RuntimeError("shmem_malloc: out of memory")
        halves = (transit_buffer_size or _DEFAULT_TRANSIT) // 2
        self._in_bytes, self._out_bytes = (
            input_buffer_size or halves,
            (output_buffer_size or halves) // 4 * 4,
        )
        self._world, self._me, self._pes, self._number = world, my_pe, npes, next(world.handles)
        self._mine = _SharedBuffer(self._path(my_pe), self._out_bytes, npes, create=True)
        self._peers: dict[int, _SharedBuffer] = {my_pe: self._mine}
        self._sequence, self._busy = 0, threading.Lock()

    def _path(self, pe: int) -> Path:
        return self._world.folder / f"handle-{self._number}-{pe}"

    def _peer(self, pe: int) -> _SharedBuffer:
        if pe not in self._peers:
            if not _wait_until(
                self._path(pe).exists, time.monotonic() + self._world.settings.time_limit_s
            ):
                raise DeviceFaultError(f"PE {pe} has no handle {self._number}")
            self._peers[pe] = _SharedBuffer(
                self._path(pe), self._out_bytes, self._pes, create=False
            )
        return self._peers[pe]

    def enqueue(
        self, source: Tensor, target: Tensor, count: int, stream: int, *, block: bool
    ) -> bool:
        settings, nbytes = self._world.settings, count * source.element_size()
        if count == 0:
            raise ValueError("AllgatherSdma: count is 0")
        if settings.fail == "call" and len(settings.calls) > 1:
            return False
        settings.calls.append(nbytes)
        self._sequence += 1
        call = (self._sequence, *_raw_memory(source, target), -(-nbytes // 4) * 4)
        order = HostStream.of(stream) if stream else HostStream(settings.time_limit_s)
        order.run(lambda: self._run(*call))
        if block or not stream:
            settings.blocking += 1
            order.synchronize()
        return True

    def _run(self, sequence: int, source: _RawMemory, target: _RawMemory, moved: int) -> None:
        if not self._busy.acquire(blocking=False):
            raise DeviceFaultError(f"handle {self._number} was entered twice")
        try:
            self._put(sequence, source, moved)
            self._take(sequence, target, moved)
        finally:
            self._busy.release()

    def _put(self, sequence: int, source: _RawMemory, moved: int) -> None:
        settings = self._world.settings
        time.sleep(settings.latency_s)
        if source.nbytes < moved:
            raise DeviceFaultError(f"reads {moved} bytes of a tensor of {source.nbytes}")
        if self._pes * moved > self._out_bytes or moved > self._in_bytes:
            raise DeviceFaultError(
                f"{self._pes} x {moved} bytes do not fit into buffers of {self._in_bytes} and "
                f"{self._out_bytes}"
            )
        data = (
            bytes([_POISON]) * moved if source.freed() else ctypes.string_at(source.address, moved)
        )
        if settings.fail == "wrong_bytes":
            data = bytes(moved)
        for pe in range(self._pes):
            peer = self._peer(pe)
            ctypes.memmove(peer.address + self._me * moved, data, moved)
            peer.flags[self._me] = sequence

    def _take(self, sequence: int, target: _RawMemory, moved: int) -> None:
        settings, flags = self._world.settings, self._mine.flags
        deadline = time.monotonic() + settings.time_limit_s
        if self._pes > _MAX_PES or not _wait_until(
            lambda: all(flag >= sequence for flag in flags), deadline
        ):
            raise DeviceFaultError(
                f"call {sequence} of handle {self._number} hangs: flags are {list(flags)}"
            )
        time.sleep(settings.copy_out_s)
        if target.nbytes < self._pes * moved:
            raise DeviceFaultError(
                f"writes {self._pes * moved} bytes into a tensor of {target.nbytes}"
            )
        if target.freed():
            raise DeviceFaultError("writes into a tensor that was freed")
        ctypes.memmove(target.address, self._mine.address, self._pes * moved)


class _RawMemory:
    """An address, and whether its memory has been freed since."""

    def __init__(self, tensor: Tensor) -> None:
        self.address, self.freed = tensor.data_ptr(), compat.storage_freed_check(tensor)
        self.nbytes = (
            tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        )


def _raw_memory(source: Tensor, target: Tensor) -> tuple[_RawMemory, _RawMemory]:
    """Both tensors as raw memory. The target is poisoned until its bytes arrive, unless the source
    is a part of it.
    """
    raw = _RawMemory(source), _RawMemory(target)
    if source.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
        target.fill_(_POISON)
    return raw


def _modules(settings: Settings) -> dict[str, types.ModuleType]:
    world = _FakeShmem(settings)
    package, ccl, shmem = (types.ModuleType(name) for name in ("mori", "mori.ccl", "mori.shmem"))

    class AllgatherSdma(_FakeAllgatherSdma):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(world, *args, **kwargs)

        def __call__(
            self,
            input_data: Tensor,
            output_data: Tensor,
            count: int,
            stream: int | None = None,
            capturing: bool = False,
        ) -> bool:
            return self.enqueue(input_data, output_data, count, stream or 0, block=not capturing)

    class OlderAllgatherSdma(AllgatherSdma):
        def __call__(  # type: ignore[override]
            self, input_data: Tensor, output_data: Tensor, count: int, stream: int | None = None
        ) -> bool:
            return self.enqueue(input_data, output_data, count, stream or 0, block=True)

    contents: dict[types.ModuleType, dict[str, Any]] = {
        package: {"__version__": settings.version, "__path__": [], "ccl": ccl, "shmem": shmem},
        ccl: {}
        if settings.fail == "import"
        else {"AllgatherSdma": AllgatherSdma if settings.capturing else OlderAllgatherSdma},
        shmem: {
            "MORI_SHMEM_INIT_WITH_UNIQUEID": 1,
            **{name: getattr(world, name) for name in dir(world) if name.startswith("shmem_")},
        },
    }
    for module, names in contents.items():
        for name, value in names.items():
            setattr(module, name, value)
    return {module.__name__: module for module in contents}
