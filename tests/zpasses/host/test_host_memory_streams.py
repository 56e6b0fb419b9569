"""Copies to the host and back on streams of their own, and the memory that they lock."""

import contextlib
import gc
import threading
from types import SimpleNamespace

import pytest
import torch

from tests.host_stream import HostStream
from zpasses.errors import MemoryBudgetError
from zpasses.graph.host_copies import OFFLOAD, OFFLOAD_WAIT, RELOAD, RELOAD_WAIT, aligned
from zpasses.host import host_memory, locked_memory
from zpasses.host.saved_arenas import SavedArenas, host, like_on_host, loose
from zpasses.runtime.platform import register_platform

CPU = torch.device("cpu")


@pytest.fixture
def streams():
    """Makes this process a device whose streams are threads; yields them by order of creation."""
    made = []

    def side_stream():
        made.append(HostStream(10.0))
        return made[-1]

    register_platform("cpu", Device(side_stream))
    yield made
    register_platform("cpu", None)


class Device:
    def __init__(self, side_stream):
        self.side_stream = side_stream


def test_each_direction_has_a_stream_and_a_wait_lets_the_copy_end(streams):
    values = [torch.randn(64) for _ in range(3)]
    first = OFFLOAD(values[0])
    (out,) = streams
    gate = threading.Event()
    out.run(lambda: gate.wait(10))
    tickets = [OFFLOAD(each) for each in values[1:]]
    assert torch.equal(OFFLOAD_WAIT(first, values[0]), values[0])  # not behind the gate
    waits = []
    waiting = threading.Thread(target=lambda: waits.extend(map(OFFLOAD_WAIT, tickets, values[1:])))
    waiting.start()
    waiting.join(0.05)
    assert not waits
    gate.set()
    waiting.join(10)
    assert all(map(torch.equal, waits, values[1:]))
    back = RELOAD_WAIT(RELOAD(waits[0], CPU), waits[0], CPU)
    assert torch.equal(back, values[1])
    assert len(streams) == 2


def test_a_copy_that_a_failed_graph_left_ends_before_its_memory_is_reused(streams):
    value, live = torch.randn(64), host.live
    OFFLOAD_WAIT(OFFLOAD(value), value)
    (out,) = streams
    gate = threading.Event()
    out.run(lambda: gate.wait(10))
    ticket = OFFLOAD(value)
    threading.Timer(0.05, gate.set).start()
    del ticket
    gc.collect()
    assert gate.is_set()
    assert (host.live, len(host_memory._started)) == (live, 0)


@pytest.fixture
def driver(monkeypatch):
    """A driver that locks and unlocks memory, and what it was asked for."""
    calls = []
    fake = SimpleNamespace(
        code=0,
        calls=calls,
        cudaHostRegister=lambda *args: calls.append(("lock", *args[:2])) or fake.code,
        cudaHostUnregister=lambda address: calls.append(("unlock", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("wait", device)))
    monkeypatch.setattr(locked_memory, "_local_processors", lambda device: set())
    return fake


def test_a_run_has_one_arena_of_exact_size_that_is_locked_once(driver):
    own, device, reserved = SavedArenas(), torch.device("cuda", 0), host.reserved
    value = SimpleNamespace(
        numel=lambda: 1000,
        element_size=lambda: 2,
        device=device,
        dtype=torch.bfloat16,
        shape=(10, 100),
        stride=lambda: (100, 1),
    )
    size = 2 * aligned(2000)

    def addresses():
        with own.run(size, device):
            return [each.data_ptr() for each in [like_on_host(value) for _ in range(2)]]

    first, second = addresses()
    assert second - first == aligned(2000)
    assert addresses() == [first, second]
    assert driver.calls == [("lock", first, size)]
    assert host.reserved - reserved == size
    own.release()
    gc.collect()
    assert driver.calls[1:] == [("wait", device), ("unlock", first)]
    assert host.reserved == reserved
    driver.code = 2
    with pytest.raises(MemoryBudgetError, match=r"does not lock 4 KiB of host memory"):
        addresses()


def test_runs_that_overlap_have_arenas_of_their_own_within_one_limit():
    loose.release()
    own, other = SavedArenas(limit_bytes=host.reserved + 300), SavedArenas()
    value = torch.randn(25)
    reserved = host.reserved

    def run(arenas):
        with arenas.run(128, CPU):
            return like_on_host(value).copy_(value)

    idle = run(other)
    del idle
    first, second = run(own), run(own)  # frees the arena that holds nothing
    assert torch.equal(first, second)
    assert host.reserved - reserved == 256
    with pytest.raises(MemoryBudgetError, match="this forward puts 128 B on the host, while"):
        run(own)
    del first
    third = run(own)
    assert torch.equal(third, second)
    assert host.reserved - reserved == 256
    del second, third, own
    gc.collect()
    assert host.reserved == reserved


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_copies_beside_kernels_in_locked_memory():
    device = torch.device("cuda")
    value = torch.randn(1 << 20, device=device)
    expected = value.clone()
    ticket = OFFLOAD(value)
    torch.cuda._sleep(1 << 28)  # the copy does not wait for what the current stream gets later
    host = OFFLOAD_WAIT(ticket, value)
    assert host.is_pinned()
    value.zero_()  # in order after the wait
    back = RELOAD_WAIT(RELOAD(host, device), host, device)
    address = host.data_ptr()
    del host
    again = OFFLOAD_WAIT(OFFLOAD(back), back)
    assert again.data_ptr() == address
    assert torch.equal(back, expected)
    torch.cuda.synchronize()
    assert torch.equal(again, expected.cpu())
