"""Copies to the host and back on streams of their own, and the memory that they lock."""

import contextlib
import gc
import threading
from types import SimpleNamespace

import pytest
import torch

from tests.host_stream import HostStream
from zpasses.errors import ZpassesError
from zpasses.graph.host_copies import OFFLOAD, OFFLOAD_WAIT, RELOAD, RELOAD_WAIT
from zpasses.sdma import host_memory
from zpasses.sdma.host_memory import HostBlocks, blocks
from zpasses.sdma.platform import register_platform

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
    value, live = torch.randn(64), blocks.live_bytes
    OFFLOAD_WAIT(OFFLOAD(value), value)
    (out,) = streams
    gate = threading.Event()
    out.run(lambda: gate.wait(10))
    ticket = OFFLOAD(value)
    threading.Timer(0.05, gate.set).start()
    del ticket
    gc.collect()
    assert gate.is_set()
    assert (blocks.live_bytes, len(host_memory._started)) == (live, 0)


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
    return fake


def test_blocks_for_accelerators_are_locked_once_and_have_the_exact_size(driver):
    own, device = HostBlocks(), torch.device("cuda", 0)
    value = SimpleNamespace(
        numel=lambda: 1000,
        element_size=lambda: 2,
        device=device,
        dtype=torch.bfloat16,
        shape=(10, 100),
        stride=lambda: (100, 1),
    )
    address = own.like(value).data_ptr()
    assert own.like(value).data_ptr() == address
    assert driver.calls == [("lock", address, 2000)]
    assert (own.live_bytes, own.reserved_bytes) == (0, 2000)
    own.release()
    gc.collect()
    assert driver.calls[1:] == [("wait", device), ("unlock", address)]
    driver.code = 2
    with pytest.raises(ZpassesError, match=r"does not lock 1\.953 KiB of host memory"):
        own.like(value)


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
