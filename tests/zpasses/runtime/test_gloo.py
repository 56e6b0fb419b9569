"""Collectives over gloo by exchange: their bits, and what may run at the same time."""

import time
from collections import deque
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
import zpasses.runtime.gloo  # the operators
from tests.on_ranks import on_ranks
from zpasses import compat
from zpasses.testing import fake_world, run_in_fresh_ranks, run_on_ranks, world_mesh

pytestmark = pytest.mark.processes

SHAPES = ((), (0, 3), (5,), (3, 2), (1, 4, 2))
SIZES = (64, 4096, 4096, 200, 33)
ROUNDS = 5000
"""One of two runs of 8000 rounds aborted with torch's functional all-gathers."""


def _sources(dtype):
    offset = 100 * dist.get_rank()
    return [
        (torch.arange(offset, offset + torch.Size(shape).numel()) % 7).reshape(shape).to(dtype)
        for shape in SHAPES
    ]


def _bits(gathered):
    return [
        compat.functional.wait_tensor(each).view(torch.uint8).tolist()
        for each in gathered
        if each.dim()
    ]


@on_ranks(2)
def test_gloo_all_gathers_give_the_bits_of_the_functional_ones():
    ours, torchs, name = torch.ops.zpasses, compat.functional, dist.group.WORLD.group_name
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for dtype in (*floats, torch.int64, torch.bool, torch.uint8):
        sources = _sources(dtype)
        expected = _bits(torchs.all_gather_into_tensor_coalesced(sources[1:], 2, name))
        assert _bits(ours.gloo_all_gather_coalesced(sources[1:], 2, name)) == expected
        single = [ours.gloo_all_gather(source, 2, name) for source in sources[2:]]
        assert _bits(single) == expected[1:]
    mixed = [torch.ones(2, 2), torch.ones(3, dtype=torch.int64)]
    expected = _bits([torchs.all_gather_into_tensor(each, 2, name) for each in mixed])
    assert _bits(ours.gloo_all_gather_coalesced(mixed, 2, name)) == expected
    turned = torch.arange(6.0).reshape(2, 3).t()
    expected = _bits([torchs.all_gather_into_tensor(turned.contiguous(), 2, name)])
    assert _bits([ours.gloo_all_gather(turned, 2, name)]) == expected


def _reduced(dtypes):
    ours, torchs, name = torch.ops.zpasses, compat.functional, dist.group.WORLD.group_name
    ranks, wait = dist.get_world_size(), compat.functional.wait_tensor
    shapes = ((0, 3), (ranks,), (3 * ranks, 2), (ranks, 4, 2), (20000 * ranks,), (ranks, 17000))
    for dtype, op in dtypes:
        generator = torch.Generator().manual_seed(dist.get_rank())
        sources = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        sources.append(sources[2].t().contiguous().t())  # not contiguous
        expected = [
            _sum_in_order([part[dist.get_rank()] for part in _on_all_ranks(source, ranks)])
            for source in sources
        ]
        if op == "avg":
            expected = [total.div_(ranks) for total in expected]
        merged = ours.gloo_reduce_scatter_coalesced(sources, op, ranks, name)
        single = [ours.gloo_reduce_scatter(source, op, ranks, name) for source in sources]
        for source, total, *found in zip(sources, expected, merged, single, strict=True):
            for result in map(wait, found):
                assert result.shape == (source.shape[0] // ranks, *source.shape[1:])
                assert torch.equal(result.reshape(-1), total)
        if ranks == 2:  # the order of two summands does not matter
            torchs_sum = wait(torchs.reduce_scatter_tensor(sources[4], op, ranks, name))
            assert torch.equal(torchs_sum, wait(single[4]))
    mixed = [torch.ones(ranks, 2), torch.ones(ranks, dtype=torch.int64), torch.ones(ranks, 3)]
    found = [wait(each) for each in ours.gloo_reduce_scatter_coalesced(mixed, "sum", ranks, name)]
    assert [each.dtype for each in found] == [torch.float32, torch.int64, torch.float32]
    assert all((each == ranks).all() for each in found)


def _on_all_ranks(source, ranks):
    """Returns the tensor of each rank, with one row per rank."""
    rows = source.contiguous().view(ranks, source.numel() // ranks)
    parts = [torch.empty_like(rows) for _ in range(ranks)]
    if rows.numel():
        dist.all_gather(parts, rows)
    return parts


def _sum_in_order(parts):
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("ranks", [2, 3])  # the order of two summands does not matter
def test_gloo_reduce_scatters_sum_in_the_order_of_ranks(ranks):
    dtypes = [(torch.float32, "avg"), (torch.bfloat16, "sum"), (torch.float64, "avg")]
    run_on_ranks(_reduced, dtypes, ranks=ranks)


def test_reductions_that_gloo_cannot_exchange_stay_as_they_are():
    with fake_world(2):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        with compat.FakeTensorMode():
            x.meta["val"] = torch.ones(4, 2)
        for op in ("max", "sum"):
            graph.call_function(
                compat.functional.reduce_scatter_tensor.default, (x, op, 2, compat.group_names()[0])
            )
        graph.output(())
        gm = torch.fx.GraphModule({}, graph)
        with mock.patch("zpasses.compat.is_gloo", return_value=True):
            replaced = zpasses.runtime.gloo.replace_gloo_collectives(gm)
    names = [str(node.target) for node in replaced.graph.nodes if node.op == "call_function"]
    assert names == [
        "_c10d_functional.reduce_scatter_tensor.default",
        "zpasses.gloo_reduce_scatter.default",
    ]


def _late():
    name = dist.group.WORLD.group_name
    store = compat.default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 gave up"])
        return None
    with compat.limited_timeouts([name], 1.0):
        parts = [torch.ones(4), torch.ones(5)]
        started = torch.ops.zpasses.gloo_all_gather_coalesced(parts, 2, name)
    began = time.monotonic()
    for output in started:
        with pytest.raises(RuntimeError) as error:
            compat.functional.wait_tensor(output)
        assert compat.is_collective_timeout(error.value)
    seconds = time.monotonic() - began
    store.set("rank 0 gave up", "")
    return seconds


def test_an_exchange_gives_up_after_the_time_limit():
    first, _ = run_in_fresh_ranks(_late)
    assert first.ok, first
    assert 0.9 < first.result < 4


def _concurrent_reductions():
    ours, name, rank = torch.ops.zpasses, dist.group.WORLD.group_name, dist.get_rank()
    gathers, reductions = deque(), deque()

    def arrive(flying, least, most):
        for result in flying.popleft() if flying else ():
            values = compat.functional.wait_tensor(result)
            if number % 50 == 0:
                assert (values[0], values[-1]) == (least, most)

    for number in range(ROUNDS):
        source = torch.full((SIZES[number % len(SIZES)],), float(rank + 1))
        arrive(gathers, 1.0, 2.0)
        gathers.append(ours.gloo_all_gather_coalesced([source, source], 2, name))
        arrive(reductions, 3.0, 3.0)
        both = source.repeat(2)
        reductions.append(
            [compat.functional.all_reduce(source, "sum", name)]
            if number % 2
            else ours.gloo_reduce_scatter_coalesced([both, both], "sum", 2, name)
        )
    arrive(gathers, 1.0, 2.0)
    arrive(reductions, 3.0, 3.0)


@pytest.mark.slow(quick="test_gloo_reduce_scatters_sum_in_the_order_of_ranks")
def test_gloo_all_gathers_run_concurrently_with_reductions():
    outcomes = run_in_fresh_ranks(_concurrent_reductions, timeout_s=120)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))


@pytest.mark.parametrize(
    ("given", "backend", "on_cpu"),
    [(None, "undefined", True), ("gloo", "gloo", True), ("fake", "fake", False)],
)
def test_gloo_is_detected_by_the_backend_that_runs(given, backend, on_cpu):
    store = compat.fake_store() if given == "fake" else dist.HashStore()
    dist.init_process_group(given, store=store, rank=0, world_size=1)
    try:
        (name,) = compat.group_names()
        assert compat.group_backend(name) == backend
        assert compat.is_gloo(name) == compat.is_gloo(name, torch.device("cpu")) == on_cpu
    finally:
        dist.destroy_process_group()


def test_only_cpu_tensors_of_a_mixed_group_use_gloo(monkeypatch):
    monkeypatch.setattr("zpasses.compat.c10d.group_backend", lambda name: "cpu:gloo,cuda:nccl")
    assert compat.is_gloo("0", torch.device("cpu"))
    assert not compat.is_gloo("0", torch.device("cuda"))
    assert not compat.is_gloo("0")


def _called(pipeline, codegen):
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    model = zpasses.shard(nn.Sequential(*layers), mesh=world_mesh())
    options = {"pipeline": pipeline, "codegen": codegen}
    step = torch.compile(model, backend="zpasses", options=options)
    step(torch.ones(2, 4)).sum().backward()
    with torch.profiler.profile() as profile:
        step(torch.ones(2, 4)).sum().backward()
    names = {event.name for event in profile.events()}
    return sorted(name for name in names if "all_gather" in name and "::" in name)


@pytest.mark.parametrize(
    "codegen",
    [
        "eager",
        pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow(quick="eager")]),
    ],
)
def test_compiled_code_calls_gloo_all_gathers(codegen):
    for mb, op in ((0, "gloo_all_gather"), (25, "gloo_all_gather_coalesced")):
        schedule = f"schedule{{plan=single,cap_mb={mb},mode=coalesced,memory_budget=1GiB}}"
        pipeline = f"gather-params,reduce-grads,reshard-after-forward,{schedule}"
        called, _ = run_on_ranks(_called, pipeline, codegen)
        assert f"zpasses::{op}" in called
        names = [name for name in called if not name.endswith("_out")]
        assert not any("all_gather_into_tensor" in name for name in names)
