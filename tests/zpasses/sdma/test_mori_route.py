"""Tests of gathers through the fake mori on real gloo ranks. Many cases share one call of the
ranks.
"""

import pytest
import torch

from tests.fake_mori import Settings, installed
from tests.on_ranks import on_ranks
from zpasses import compat
from zpasses.testing import run_on_ranks

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
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
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name


def gathered_in_every_dtype():
    import zpasses

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
        return len(fake.calls) - trial


@pytest.mark.processes
def test_every_dtype_arrives_bit_for_bit_without_blocking():
    assert run_on_ranks(gathered_in_every_dtype) == [4 * len(DTYPES)] * 2


def gathered_in_odd_forms():
    import zpasses

    rank, size, group = world()
    sizes = {}
    with installed() as fake:
        zpasses.sdma.init(capacity_mib=1)

        def check(name, make):
            parts = [make(each) for each in range(size)]
            before = len(fake.calls)
            full = wait(sdma.sdma_all_gather(parts[rank], size, group))
            assert bits(full) == expected(parts), name
            assert full.shape[0] == (parts[rank].shape[0] if parts[rank].dim() else 1) * size, name
            sizes[name] = fake.calls[before:]

        byte = torch.uint8
        check("odd bytes", lambda each: drawn(7, byte, each))
        check("one element", lambda each: drawn(1, byte, each))
        check("a scalar", lambda each: drawn(1, torch.float32, each).reshape(()))
        check("nothing", lambda each: drawn(0, byte, each))
        check("no columns", lambda each: drawn(0, byte, each).reshape(3, 0))
        check("misaligned", lambda each: drawn(65, byte, each)[1:])
        check("not contiguous", lambda each: drawn(64, torch.int32, each).reshape(8, 8).t())
        check(
            "conjugate",
            lambda each: drawn(8, torch.float32, each).nan_to_num().view(torch.complex64).conj(),
        )
        check("capacity", lambda each: drawn(CAPACITY, byte, each))
        check("one over", lambda each: drawn(CAPACITY + 1, byte, each))
        check("two and a half", lambda each: drawn(CAPACITY * 5 // 2, byte, each).reshape(-1, 4))
    return sizes


def gathered_above_the_most_of_a_call():
    """The same with a limit of 64 bytes per rank instead of 1 GiB."""
    import zpasses
    from zpasses.sdma import mori_route

    rank, size, group = world()
    most, mori_route.MAX_BYTES = mori_route.MAX_BYTES, 64
    try:
        with installed() as fake:
            zpasses.sdma.init(capacity_mib=1)
            parts = [drawn(100, torch.uint8, each) for each in range(size)]
            assert bits(wait(sdma.sdma_all_gather(parts[rank], size, group))) == expected(parts)
            return most, fake.calls[2:]  # without the trial
    finally:
        mori_route.MAX_BYTES = most


@pytest.mark.processes
def test_a_call_never_exceeds_moris_limit_whatever_its_buffers_hold():
    assert run_on_ranks(gathered_above_the_most_of_a_call) == [(1 << 30, [64, 36])] * 2


@pytest.mark.processes
def test_tensor_that_does_not_fit_is_padded_cloned_or_split():
    for sizes in run_on_ranks(gathered_in_odd_forms):
        assert sizes == {
            "odd bytes": [8],
            "one element": [4],
            "a scalar": [4],
            "nothing": [],
            "no columns": [],
            "misaligned": [64],
            "not contiguous": [256],
            "conjugate": [32],
            "capacity": [CAPACITY],
            "one over": [CAPACITY, 4],
            "two and a half": [CAPACITY, CAPACITY, CAPACITY // 2],
        }


@pytest.mark.processes
@on_ranks(2)
def test_outputs_may_contain_their_inputs_and_several_tensors_share_a_call():
    import zpasses

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


def gathered_back_to_back(handles, calls=8):
    """Returns how many of `calls` gathers had wrong results if rank 1 copies out slowly."""
    import zpasses
    from zpasses.sdma import mori_route

    rank, size, group = world()
    mori_route._NUM_HANDLES = handles
    try:
        with installed(Settings(copy_out_s=0.03 * rank, latency_s=0)):
            zpasses.sdma.init(capacity_mib=1)
            started = []
            for call in range(calls):
                parts = [drawn(64, torch.uint8, each, call) for each in range(size)]
                started.append((parts, sdma.sdma_all_gather(parts[rank], size, group)))
            return sum(bits(wait(full)) != expected(parts) for parts, full in started)
    finally:
        mori_route._NUM_HANDLES = 2


@pytest.mark.processes
def test_two_handles_survive_a_slow_rank_and_one_does_not():
    assert run_on_ranks(gathered_back_to_back, 2) == [0, 0]
    first, second = run_on_ranks(gathered_back_to_back, 1)
    assert (first, second > 0) == (0, True)


def awaited_in_any_order():
    import zpasses

    rank, size, group = world()
    with installed(Settings(latency_s=0.01)):
        zpasses.sdma.init(capacity_mib=1)
        parts = [[drawn(64, torch.uint8, each, call) for each in range(size)] for call in range(4)]
        started = [
            sdma.sdma_all_gather(each[rank].clone(), size, group) for each in parts
        ]  # nobody else holds the inputs
        early = bits(started[0]) == expected(parts[0])
        for call in (2, 0):
            assert bits(wait(started[call])) == expected(parts[call])
        del started[1]  # never awaited
        torch.full((64 * size,), 7, dtype=torch.uint8)
        assert bits(wait(started.pop())) == expected(parts[3])
        return early


@pytest.mark.processes
def test_waits_may_come_in_any_order_or_never_and_results_arrive_with_them():
    assert run_on_ranks(awaited_in_any_order) == [False, False]


def failing_call():
    import zpasses

    rank, size, group = world()
    with installed(Settings(fail="call" if rank == 0 else "", time_limit_s=1)):
        zpasses.sdma.init(capacity_mib=1)
        try:
            wait(sdma.sdma_all_gather(torch.ones(4), size, group))
        except RuntimeError as error:
            return str(error)
    return None


@pytest.mark.processes
def test_a_call_that_fails_raises_and_does_not_fall_back():
    refused, hung = run_on_ranks(failing_call)
    assert "mori refused to gather 16 bytes per rank" in refused
    assert "hangs" in hung


def test_pieces_are_views_of_bytes():
    from zpasses.sdma.mori_route import _as_bytes

    assert _as_bytes(torch.ones(2, 3, dtype=torch.complex128)).shape == (96,)
    assert compat.Work is torch._C._distributed_c10d.Work
