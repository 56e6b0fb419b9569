"""Tests of gathers through the fake mori on real gloo ranks. Many cases share one call of the
ranks.
"""

import pytest
import torch
import torch.distributed as dist

import zpasses
from tests.fake_mori import Settings, installed
from tests.on_ranks import on_ranks
from zpasses import compat
from zpasses.sdma import mori_route

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]
CAPACITY = 1 << 20
sdma = torch.ops.zpasses
wait = torch.ops._c10d_functional.wait_tensor


def drawn(count, dtype, rank, seed=0):
    """Random bytes, which include NaN payloads and negative zeros; 0 and 1 for a bool."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype)


def bits(tensor):
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def expected(parts):
    return b"".join(bits(part) for part in parts)


def world():
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name


@on_ranks(2)
def test_every_dtype_arrives_bit_for_bit_without_blocking():
    rank, size, group = world()
    with installed(Settings(latency_s=0)) as fake:
        assert zpasses.sdma.init(capacity_mib=1).route == "mori"
        trial = len(fake.calls)
        for seed, dtype in enumerate(DTYPES):
            for count in (1, 3, 64, 1000):
                parts = [drawn(count, dtype, each, seed) for each in range(size)]
                full = wait(sdma.sdma_all_gather(parts[rank], size, group))
                assert full.dtype == dtype
                assert bits(full) == expected(parts), (dtype, count)
        assert fake.blocking == 0
        assert zpasses.sdma.shutdown() is None
        assert len(fake.calls) - trial == 4 * len(DTYPES)


@on_ranks(2)
def test_tensor_that_does_not_fit_is_padded_cloned_or_split():
    rank, size, group = world()
    byte = torch.uint8
    forms = {
        "odd bytes": (lambda each: drawn(7, byte, each), [8]),
        "one element": (lambda each: drawn(1, byte, each), [4]),
        "a scalar": (lambda each: drawn(1, torch.float32, each).reshape(()), [4]),
        "nothing": (lambda each: drawn(0, byte, each), []),
        "no columns": (lambda each: drawn(0, byte, each).reshape(3, 0), []),
        "misaligned": (lambda each: drawn(65, byte, each)[1:], [64]),
        "not contiguous": (lambda each: drawn(64, torch.int32, each).reshape(8, 8).t(), [256]),
        "conjugate": (
            lambda each: drawn(8, torch.float32, each).nan_to_num().view(torch.complex64).conj(),
            [32],
        ),
        "capacity": (lambda each: drawn(CAPACITY, byte, each), [CAPACITY]),
        "one over": (lambda each: drawn(CAPACITY + 1, byte, each), [CAPACITY, 4]),
        "two and a half": (
            lambda each: drawn(CAPACITY * 5 // 2, byte, each).reshape(-1, 4),
            [CAPACITY, CAPACITY, CAPACITY // 2],
        ),
    }
    with installed() as fake:
        zpasses.sdma.init(capacity_mib=1)
        for name, (make, calls) in forms.items():
            parts, before = [make(each) for each in range(size)], len(fake.calls)
            full = wait(sdma.sdma_all_gather(parts[rank], size, group))
            assert bits(full) == expected(parts), name
            assert full.shape[0] == (parts[rank].shape[0] if parts[rank].dim() else 1) * size, name
            assert fake.calls[before:] == calls, name


@on_ranks(2)
def test_a_call_never_exceeds_moris_limit_whatever_its_buffers_hold():
    rank, size, group = world()
    assert mori_route.MAX_BYTES == 1 << 30
    with pytest.MonkeyPatch.context() as patch, installed() as fake:
        patch.setattr(mori_route, "MAX_BYTES", 64)
        zpasses.sdma.init(capacity_mib=1)
        parts = [drawn(100, torch.uint8, each) for each in range(size)]
        assert bits(wait(sdma.sdma_all_gather(parts[rank], size, group))) == expected(parts)
        assert fake.calls[2:] == [64, 36]  # without the trial


@on_ranks(2)
def test_outputs_may_contain_their_inputs_and_several_tensors_share_a_call():
    rank, size, group = world()
    with installed() as fake:
        zpasses.sdma.init(capacity_mib=1)
        for count in (16, 5, CAPACITY + 3):
            parts = [drawn(count, torch.uint8, each) for each in range(size)]
            out = torch.zeros(count * size, dtype=torch.uint8)
            out[rank * count : (rank + 1) * count] = parts[rank]
            mine = out[rank * count : (rank + 1) * count]
            returned = sdma.sdma_all_gather_out(mine, size, group, out=out)
            assert returned.data_ptr() == out.data_ptr()
            wait(returned)
            assert bits(out) == expected(parts), count
        before = len(fake.calls)
        sizes = (8, 5, CAPACITY // 2, 0, CAPACITY // 2 - 16, 3, CAPACITY + 4)
        parts = [
            [drawn(count, torch.uint8, each, count) for count in sizes] for each in range(size)
        ]
        for place, full in enumerate(sdma.sdma_all_gather_coalesced(parts[rank], size, group)):
            assert bits(wait(full)) == expected([each[place] for each in parts])
        # Neighbours share a call as long as they fit; the last tensor is split.
        assert fake.calls[before:] == [8 + 8 + CAPACITY // 2, CAPACITY // 2 - 16 + 4, CAPACITY, 4]
        with pytest.raises(
            ValueError,
            match=r"out is torch.uint8 \[3\] on cpu, contiguous; expected torch.uint8, 8 elements",
        ):
            sdma.sdma_all_gather_out(
                torch.zeros(4, dtype=torch.uint8),
                size,
                group,
                out=torch.zeros(3, dtype=torch.uint8),
            )


@on_ranks(2)
def test_waits_may_come_in_any_order_or_never_and_results_arrive_with_them():
    rank, size, group = world()
    with installed(Settings(latency_s=0.01)):
        zpasses.sdma.init(capacity_mib=1)
        parts = [[drawn(64, torch.uint8, each, call) for each in range(size)] for call in range(4)]
        started = [
            sdma.sdma_all_gather(each[rank].clone(), size, group) for each in parts
        ]  # nobody else holds the inputs
        assert bits(started[0]) != expected(parts[0])
        for call in (2, 0):
            assert bits(wait(started[call])) == expected(parts[call])
        del started[1]  # never awaited
        torch.full((64 * size,), 7, dtype=torch.uint8)
        assert bits(wait(started.pop())) == expected(parts[3])


@on_ranks(2)
def test_a_call_that_fails_raises_and_does_not_fall_back():
    rank, size, group = world()
    said = "hangs" if rank else "mori refused to gather 16 bytes per rank"
    with installed(Settings(fail="call" if rank == 0 else "", time_limit_s=1)):
        zpasses.sdma.init(capacity_mib=1)
        with pytest.raises(RuntimeError, match=said):
            wait(sdma.sdma_all_gather(torch.ones(4), size, group))


def test_pieces_are_views_of_bytes():
    assert mori_route._as_bytes(torch.ones(2, 3, dtype=torch.complex128)).shape == (96,)
    assert compat.Work is torch._C._distributed_c10d.Work
