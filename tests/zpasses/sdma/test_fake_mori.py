"""Tests that the fake mori has mori's hazards, in one process with one PE."""

import sys
import time

import pytest
import torch

from tests.fake_mori import DeviceFaultError, HostStream, Settings, installed


def filled(count, value=1):
    return torch.full((count,), value, dtype=torch.uint8)


@pytest.fixture
def fake():
    with installed(Settings(latency_s=0.02, time_limit_s=2)) as settings:
        yield settings


def handle_of(capacity=64, pes=1, **options):
    import os

    import mori.ccl
    import mori.shmem

    os.environ["MORI_ENABLE_SDMA"] = "1"
    unique_id = mori.shmem.shmem_get_unique_id()
    assert len(unique_id) == 128
    by_id = mori.shmem.MORI_SHMEM_INIT_WITH_UNIQUEID
    assert mori.shmem.shmem_init_attr(by_id, 0, 1, unique_id) == 0
    sizes = {"input_buffer_size": capacity, "output_buffer_size": pes * capacity}
    return mori.ccl.AllgatherSdma(0, pes, **(options or sizes))


def call(handle, source, target, stream, count=None):
    count = source.numel() if count is None else count
    return handle(source, target, count, stream=stream.handle, capturing=True)


def test_output_is_poison_until_a_call_delivers(fake):
    handle, stream = handle_of(), HostStream(2)
    source, target = torch.arange(8, dtype=torch.uint8), filled(8, 0)
    assert call(handle, source, target, stream)
    assert target.tolist() == [0xA5] * 8
    stream.record().wait()
    assert torch.equal(source, target)
    assert fake.calls == [8]
    assert fake.blocking == 0


def test_default_buffers_are_halves(fake):
    handle = handle_of(transit_buffer_size=64)
    stream = HostStream(2)
    tensors = [filled(count) for count in (32, 32, 36, 36)]
    call(handle, *tensors[:2], stream)
    stream.synchronize()
    call(handle, *tensors[2:], stream)
    with pytest.raises(DeviceFaultError, match="1 x 36 bytes do not fit into buffers of 32 and 32"):
        stream.synchronize()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (68, 68, "1 x 68 bytes do not fit into buffers of 64 and 64"),
        (7, 8, "reads 8 bytes of a tensor of 7"),
        (8, 7, "writes 8 bytes into a tensor of 7"),
    ],
)
def test_unchecked_arguments_fault(fake, source, target, message):
    handle, stream = handle_of(), HostStream(2)
    tensors = [filled(count) for count in (source, target)]
    assert call(handle, *tensors, stream)
    with pytest.raises(DeviceFaultError, match=message):
        stream.synchronize()


def test_freed_input_is_read_as_poison(fake):
    handle, stream, target = handle_of(), HostStream(2), filled(8, 0)
    call(handle, filled(8), target, stream)
    stream.synchronize()
    assert target.tolist() == [0xA5] * 8


def test_more_than_eight_ranks_hang(fake):
    fake.time_limit_s = 0.2
    handle, stream = handle_of(pes=9), HostStream(2)
    handle._peers = dict.fromkeys(range(9), handle._mine)
    target = filled(72, 0)
    call(handle, filled(8), target, stream)
    with pytest.raises(DeviceFaultError, match="hangs"):
        stream.synchronize()


def test_errors_do_not_raise_and_the_default_stream_blocks(fake):
    handle = handle_of()
    with pytest.raises(ValueError, match="count is 0"):
        call(handle, filled(0), filled(0), HostStream(2))
    target = filled(8, 0)
    handle(source := filled(8), target, 8, stream=0, capturing=True)
    assert torch.equal(source, target)
    assert fake.blocking == 1


def test_handles_are_not_reentrant(fake):
    handle, streams = handle_of(), [HostStream(2), HostStream(2)]
    tensors = [(filled(8), filled(8, 0)) for _ in streams]
    for stream, (source, target) in zip(streams, tensors, strict=True):
        call(handle, source, target, stream)
    time.sleep(0.1)
    assert [("entered twice" in stream.fault) for stream in streams].count(True) == 1


def test_a_second_init_is_silently_skipped(fake):
    handle_of()
    import mori.shmem

    assert mori.shmem.shmem_init_attr(1, 3, 8, b"other") == 0
    assert (mori.shmem.shmem_mype(), mori.shmem.shmem_npes()) == (0, 1)


def test_older_releases_do_not_take_capturing():
    with installed(Settings(capturing=False)) as fake:
        handle, stream = handle_of(), HostStream(2)
        source, target = filled(8), filled(8, 0)
        with pytest.raises(TypeError, match="capturing"):
            handle(source, target, 8, stream=stream.handle, capturing=True)
        assert handle(source, target, 8, stream=stream.handle)
        assert torch.equal(source, target)
        assert fake.blocking == 1


def test_modules_and_environment_are_restored():
    with installed():
        import mori

        assert mori.__version__ == "1.2.4"
    assert "mori" not in sys.modules
