"""Host memory of an exact size, whose parts are tensors of their own."""

import contextlib
import gc
import io
import os
from types import SimpleNamespace

import pytest
import torch

from zpasses.errors import MemoryBudgetError
from zpasses.host import locked_memory
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
    monkeypatch.setattr(locked_memory, "_local_processors", lambda device: set())
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


@pytest.mark.parametrize(
    ("listed", "runs_on"),
    [("2-3,6\n", {2, 3}), ("8-9\n", {0, 1, 2, 3}), ("\n", {0, 1, 2, 3}), (None, {0, 1, 2, 3})],
)
def test_pages_are_locked_by_a_processor_near_the_device(listed, runs_on, monkeypatch, tmp_path):
    allowed, seen = {0, 1, 2, 3}, []
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x5E, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(locked_memory, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, to: allowed.intersection_update(to))
    if listed is not None:
        (tmp_path / "0000:5e:01.0").mkdir()
        (tmp_path / "0000:5e:01.0" / "local_cpulist").write_text(listed)
    with locked_memory.near(CUDA):
        seen.append(set(allowed))
        allowed.update(range(4))
    assert seen == [runs_on]
    assert allowed == {0, 1, 2, 3}
    del found.pci_bus_id  # a build of torch that does not know it
    with locked_memory.near(CUDA):
        assert allowed == {0, 1, 2, 3}


def test_memory_that_the_system_does_not_give_is_an_error():
    with pytest.raises(MemoryBudgetError, match=r"does not give 2,147,483,648 GiB.*ulimit -v"):
        HostArena(1 << 61, CPU)


def test_memory_that_the_driver_does_not_lock_is_an_error(monkeypatch):
    with_runtime(monkeypatch, Runtime(code=2))
    with pytest.raises(RuntimeError, match=r"does not lock 1 MiB .*device_bytes.*ulimit"):
        HostArena(1 << 20, CUDA)
