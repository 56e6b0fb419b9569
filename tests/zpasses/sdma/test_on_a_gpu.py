"""Tests that need a GPU: streams, and symmetric memory between two processes that share one device.

torch refuses symmetric memory between processes on one device unless an environment variable allows
it, and so does the vote. These tests set the variable and call the route directly. NCCL does not
accept two ranks on one device, so the group uses gloo, which gathers no tensors of a GPU, and its
zero-SM gathers need two devices. Those of two processes have not run yet.
"""

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from zpasses import compat
from zpasses.runtime.platform import platform_of
from zpasses.sdma.routes import C10dRoute, SideStreamWork, raise_if_capturing
from zpasses.testing import run_in_fresh_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

sdma = torch.ops.zpasses
wait = torch.ops._c10d_functional.wait_tensor
LONG = 1 << 31
"""Cycles that keep a stream busy for about a second."""
DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.float8_e4m3fn]


# --- one process ----------------------------------------------------------------------------------
@pytest.fixture
def single_rank():
    """A group of one rank on NCCL; yields its name."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_ops_and_fallback_equal_the_functional_collectives(single_rank):
    x = torch.randn(6, 5, device="cuda")
    functional, fallback = torch.ops._c10d_functional, C10dRoute()
    expected = wait(functional.all_gather_into_tensor(x.t().contiguous(), 1, single_rank))
    out = torch.empty_like(expected)
    gathered = [
        sdma.sdma_all_gather(x.t(), 1, single_rank),
        sdma.sdma_all_gather_coalesced([x.t(), x], 1, single_rank)[0],
        sdma.sdma_all_gather_out(x.t(), 1, single_rank, out=out),
        fallback.all_gather([x.t()], 1, single_rank)[0],
        *map(wait, fallback.all_gather([x.t(), x.t()], 1, single_rank)),
        fallback.all_gather_out(x.t(), 1, single_rank, torch.empty_like(expected)),
    ]
    assert all(torch.equal(wait(each), expected) for each in gathered)
    reduced = wait(functional.reduce_scatter_tensor(x, "sum", 1, single_rank))
    assert torch.equal(wait(sdma.sdma_reduce_scatter(x, "sum", 1, single_rank)), reduced)
    assert torch.equal(wait(fallback.reduce_scatter(x, "sum", 1, single_rank)), reduced)


def test_a_side_stream_is_awaited_by_the_current_stream_and_not_by_the_cpu():
    platform = platform_of("cuda")
    stream = platform.side_stream()
    assert stream.handle != 0
    assert platform.free_bytes() > 0
    assert platform.architecture().startswith(("sm", "gfx"))
    for cycles in (1, LONG):  # the first turn loads the kernels, which may make the CPU wait
        source, target = (
            torch.arange(1 << 20, device="cuda"),
            torch.zeros(1 << 20, dtype=torch.int64, device="cuda"),
        )
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        source.add_(1)
        stream.follow_current()
        stream.run(lambda source=source, target=target: target.copy_(source))
        compat.register_work(target, SideStreamWork(stream.record(), (source, target)))
        result = wait(target) * 2
        busy = not torch.cuda.current_stream().query()
    assert busy, "the wait returned when the stream was done"
    assert torch.equal(result.cpu(), torch.arange(1, (1 << 20) + 1) * 2)


def test_capture_in_a_cuda_graph_raises():
    x = torch.ones(4, device="cuda")
    graph, doubled = torch.cuda.CUDAGraph(), x * 2  # loads the kernel
    with torch.cuda.graph(graph):
        doubled = x * 2
        with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
            raise_if_capturing(x.device)
    graph.replay()
    assert doubled.tolist() == [2.0] * 4


# --- two processes on one device ------------------------------------------------------------------
def drawn(dtype, each):
    raw = torch.randint(
        0, 2, (7 * 24,), generator=torch.Generator().manual_seed(each), dtype=torch.uint8
    )
    return (
        raw.view(dtype).reshape(7, -1).cuda()
        if dtype.itemsize > 1 or dtype is torch.bool
        else raw.view(dtype).cuda()
    )


def wrong_values(gather, rank, size, dtypes):
    """Returns the dtypes whose gather differs from the concatenated parts of all ranks."""
    wrong = []
    for dtype in dtypes:
        parts = [drawn(dtype, each) for each in range(size)]
        expected = torch.cat([part.view(torch.uint8) for part in parts])
        if not torch.equal(wait(gather(parts[rank])).view(torch.uint8), expected):
            wrong.append(str(dtype))
    return wrong


def stays_busy(gather, part):
    """Whether the stream still computes after a gather has been started, and after it has been
    awaited.
    """
    busy = []
    for cycles in (1, LONG):
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        started = gather(part)
        busy = [not torch.cuda.current_stream().query()]
        wait(started)
        busy.append(not torch.cuda.current_stream().query())
        torch.cuda.synchronize()
        del started  # the next one takes its memory, and asks the device for none
    return busy


def spans_beside_products(gather, part):
    """Returns the copies and matrix products in a trace: [(start, end), ...] of each, in
    microseconds.
    """
    x = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)

    def step():
        started = gather(part)
        for _ in range(200):  # tens of milliseconds: two processes take turns on the device
            torch.mm(x, x, out=y)
        wait(started)
        torch.cuda.synchronize()

    step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    spans = {"copies": [], "products": []}
    for event in profile.events():
        if (
            event.device_type == DeviceType.CUDA
            and "barrier" not in event.name
            and "Memset" not in event.name
        ):
            kind = "copies" if "Memcpy" in event.name else "products"
            spans[kind].append((event.time_range.start, event.time_range.end))
    return spans


def on_one_device():
    import zpasses
    from zpasses.ranks.agree import exchange
    from zpasses.runtime.platform import Platform
    from zpasses.sdma.lifecycle import _answer
    from zpasses.sdma.refusals import unavailable_reason
    from zpasses.sdma.symm_route import SymmRoute

    torch.cuda.set_device(0)
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    answers = exchange(group, "the device", _answer(group, platform_of("cuda"), 1), 60)
    found = {"voted": unavailable_reason(group, [{**each, "refusal": None} for each in answers])}
    choice = zpasses.sdma.init(timeout_s=60)
    found["choice"] = choice.route, choice.reason
    route = SymmRoute(Platform().symm_memory())

    def gather(part):
        return route.all_gather([part], size, group)[0]

    try:
        wait(gather(torch.ones(4, device="cuda")))
        torch.cuda.synchronize()
    except RuntimeError as error:
        return {**found, "refused": str(error)}
    found["symm_mem"] = wrong_values(gather, rank, size, DTYPES)
    grads = torch.arange(4.0, device="cuda") * (rank + 1)
    found["reduced"] = wait(route.reduce_scatter(grads, "sum", size, group)).tolist()
    part = torch.full((64 << 20,), rank, dtype=torch.uint8, device="cuda")
    given = torch.empty(size * part.numel(), dtype=torch.uint8, device="cuda")
    found["given"] = (
        wait(route.all_gather_out(part, size, group, given))
        .view(size, -1)
        .float()
        .mean(dim=1)
        .tolist()
    )
    found["busy"] = stays_busy(gather, part)
    found["spans"] = spans_beside_products(gather, part)
    return found


@pytest.fixture(scope="module")
def found():
    """Returns the results of two processes on one device, by rank."""
    outcomes = run_in_fresh_ranks(
        on_one_device, env={"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}, timeout_s=240
    )
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    return [outcome.result for outcome in outcomes]


@pytest.fixture
def allowed(found):
    if "refused" in found[0]:
        pytest.skip(f"this torch has no symmetric memory on one device: {found[0]['refused']}")
    return found


@pytest.mark.processes
def test_ranks_that_share_a_device_take_the_functional_collective(found):
    for each in found:
        assert each["voted"] == "ranks of the group share a device"
        assert each["choice"][0] == "c10d"
        assert (
            "symm_mem: rank 0: symmetric memory needs a group of backend nccl; this one is gloo"
            in each["choice"][1]
        )


@pytest.mark.processes
def test_symmetric_memory_works_on_one_device_or_has_a_reason(found):
    for rank, each in enumerate(found):
        if "refused" in each:
            assert "overlapping devices" in each["refused"]
        else:
            assert each["symm_mem"] == []
            assert each["reduced"] == [[0.0, 3.0], [6.0, 9.0]][rank]
            assert each["given"] == [0.0, 1.0]


@pytest.mark.processes
def test_symmetric_memory_does_not_make_the_cpu_wait(allowed):
    assert [each["busy"] for each in allowed] == [[True, True]] * 2


@pytest.mark.processes
def test_copies_overlap_with_products(allowed):
    for each in allowed:
        copies, products = each["spans"]["copies"], each["spans"]["products"]
        if not copies or not products:
            pytest.skip("the profiler records nothing of this device")
        assert any(
            start < other_end and other_start < end
            for start, end in copies
            for other_start, other_end in products
        )


# --- two devices ----------------------------------------------------------------------------------
def on_two_devices():
    import zpasses
    from zpasses.sdma.lifecycle import available_routes

    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = compat.group_name(dist.new_group(backend="nccl"))
    route = available_routes(group, device, 60).get("nccl_zero")
    if route is None:
        return {"refused": zpasses.sdma.init(group, timeout_s=60).reason}

    def gather(part):
        return route.all_gather([part], size, group)[0]

    part = torch.full((64 << 20,), rank, dtype=torch.uint8, device=device)
    out = torch.empty(size * part.numel(), dtype=torch.uint8, device=device)
    wait(route.all_gather_out(part, size, group, out))
    found = {
        "wrong": wrong_values(gather, rank, size, DTYPES),
        "given": out.view(size, -1).float().mean(dim=1).tolist(),
        "busy": stays_busy(gather, part),
        "spans": spans_beside_products(gather, part),
    }
    torch.cuda.synchronize()
    return {**found, "left": route.leave(group, 60, platform_of("cuda"))}


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_zero_sm_gathers_run_on_copy_engines_beside_products():
    outcomes = run_in_fresh_ranks(on_two_devices, timeout_s=240)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    for each in (outcome.result for outcome in outcomes):
        if "refused" in each:
            pytest.skip(each["refused"])
        assert each["wrong"] == []
        assert each["given"] == [0.0, 1.0]
        assert each["busy"] == [True, True]
        assert each["left"] is None
        copies, products = each["spans"]["copies"], each["spans"]["products"]
        if not copies and not products:
            pytest.skip("the profiler records nothing of this device")
        assert copies, "NCCL gathered by a kernel"
        assert any(
            start < other_end and other_start < end
            for start, end in copies
            for other_start, other_end in products
        )
