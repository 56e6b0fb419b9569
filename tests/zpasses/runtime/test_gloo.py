"""All-gathers over gloo that may run concurrently with other collectives, unlike torch's functional
ones.
"""

from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
import zpasses.runtime.gloo  # the operators
from zpasses import compat
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh

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


def _gathered(dtypes):
    ours, torchs, name = torch.ops.zpasses, compat.functional, dist.group.WORLD.group_name
    for dtype in dtypes:
        sources = _sources(dtype)
        expected = _bits(torchs.all_gather_into_tensor_coalesced(sources[1:], 2, name))
        assert _bits(ours.gloo_all_gather_coalesced(sources[1:], 2, name)) == expected
        assert (
            _bits([ours.gloo_all_gather(source, 2, name) for source in sources[2:]]) == expected[1:]
        )
    mixed = [torch.ones(2, 2), torch.ones(3, dtype=torch.int64)]
    assert _bits(ours.gloo_all_gather_coalesced(mixed, 2, name)) == _bits(
        [torchs.all_gather_into_tensor(each, 2, name) for each in mixed]
    )
    turned = torch.arange(6.0).reshape(2, 3).t()
    assert _bits([ours.gloo_all_gather(turned, 2, name)]) == _bits(
        [torchs.all_gather_into_tensor(turned.contiguous(), 2, name)]
    )


def test_gloo_all_gathers_give_the_bits_of_the_functional_ones():
    run_on_ranks(
        _gathered,
        (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int64,
            torch.bool,
            torch.uint8,
        ),
    )


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
        reductions.append([compat.functional.all_reduce(source, "sum", name)])
    arrive(gathers, 1.0, 2.0)
    arrive(reductions, 3.0, 3.0)


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
    model = zpasses.shard(
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), mesh=world_mesh()
    )
    step = torch.compile(
        model, backend="zpasses", options={"pipeline": pipeline, "codegen": codegen}
    )
    step(torch.ones(2, 4)).sum().backward()
    with torch.profiler.profile() as profile:
        step(torch.ones(2, 4)).sum().backward()
    return sorted(
        {
            event.name
            for event in profile.events()
            if "all_gather" in event.name and "::" in event.name
        }
    )


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_compiled_code_calls_gloo_all_gathers(codegen):
    single, merged = (
        f"gather-params,reduce-grads,reshard-after-forward,bucket{{cap_mb={mb},mode=coalesced,memory_budget=1GiB}}"
        for mb in (0, 25)
    )
    for pipeline, op in (
        (single, "zpasses::gloo_all_gather"),
        (merged, "zpasses::gloo_all_gather_coalesced"),
    ):
        called, _ = run_on_ranks(_called, pipeline, codegen)
        assert op in called
        assert not any(
            "all_gather_into_tensor" in name and not name.endswith("_out") for name in called
        )
