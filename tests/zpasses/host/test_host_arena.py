"""Host memory of an exact size, whose parts are tensors of their own."""

import contextlib
import gc
import io
import os

import pytest
import torch

from zpasses.host.host_arena import HostArena

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_parts_share_the_memory_of_the_arena_and_nothing_else():
    arena = HostArena(256, CPU)
    first = arena.tensor(0, torch.float32, (2, 3), (1, 2))
    second = arena.tensor(64, torch.bfloat16, (5,), (1,))
    assert arena.bytes.numel() == 256
    assert first.stride() == (1, 2)
    first.fill_(1.0)
    second.fill_(2.0)
    assert arena.bytes[:24].view(torch.float32).tolist() == [1.0] * 6
    assert arena.bytes[64:74].view(torch.bfloat16).tolist() == [2.0] * 5
    written = io.BytesIO()
    torch.save(first, written)
    assert written.tell() < 2048
    assert first.untyped_storage().nbytes() == 24


def _resident_bytes():
    with open("/proc/self/statm") as fields:
        return int(fields.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_free_on_the_machine_does_not_count_the_memory_any_more():
    before = _resident_bytes()
    arena = HostArena(64 << 20, CPU)
    assert _resident_bytes() - before > 48 << 20
    assert arena.bytes.numel() == 64 << 20


def test_parts_outlive_the_arena():
    part = HostArena(1 << 20, CPU).tensor(64, torch.int64, (100,), (1,))
    gc.collect()
    part.copy_(torch.arange(100))
    assert int(part.sum()) == 4950


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_a_part_may_be_empty(shape):
    assert HostArena(0, CPU).tensor(0, torch.float32, shape, (1,) * len(shape)).shape == shape


class Runtime:
    """CUDA's functions for locked memory."""

    def __init__(self, code=0):
        self.code, self.locked, self.calls = code, {}, []

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append("unlock")
        del self.locked[address]


def with_runtime(monkeypatch, runtime):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: runtime.calls.append("wait"))
    return runtime


def test_memory_of_an_accelerator_is_locked_once_until_its_last_part_goes(monkeypatch):
    runtime = with_runtime(monkeypatch, Runtime())
    arena = HostArena(3 * 4096 + 5, CUDA)
    assert runtime.locked == {arena.bytes.data_ptr(): 3 * 4096 + 5}
    part = arena.tensor(64, torch.float32, (4,), (1,))
    del arena
    assert runtime.locked
    del part
    assert not runtime.locked
    assert runtime.calls == ["wait", "unlock"]  # a copy may still run


def test_memory_that_the_driver_does_not_lock_is_an_error(monkeypatch):
    with_runtime(monkeypatch, Runtime(code=2))
    with pytest.raises(RuntimeError, match=r"does not lock 1 MiB .*device_bytes.*ulimit"):
        HostArena(1 << 20, CUDA)
