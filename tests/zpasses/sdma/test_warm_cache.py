"""Tests of compile caches on disk with copy engines: new processes that share a cache folder run
code for their own target and route.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._inductor import config

from tests.fake_mori import Settings, installed
from zpasses.testing import run_in_fresh_ranks, world_mesh

pytestmark = [pytest.mark.processes, pytest.mark.inductor]

TORCH = "_c10d_functional::all_gather_into_tensor"
PIPELINE = "merge-reads,gather-params,reduce-grads,reshard-after-forward,overlap,sdma{min_mb=0,min_hidden=0}"  # noqa: E501
MORI, OTHER = Settings(latency_s=0), Settings(architecture="gfx90a")
"""Devices that the vote takes and refuses."""


def gathers_of(profile):
    """Returns which gathers were called, and how often."""
    namespaces = ("_c10d_functional", "zpasses")
    names = [
        event.name for event in profile.events() if event.name.partition("::")[0] in namespaces
    ]
    return dict(Counter(name for name in names if "all_gather" in name))


def stepped(target):
    """Runs one step by zpasses. The model consists only of matrix products, so no kernel is
    compiled. Returns what was trained, and which ops gathered the parameters.
    """
    import zpasses

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zpasses.shard(
        nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)),
        mesh=world_mesh(),
    )
    step = torch.compile(model, backend="zpasses", options={"pipeline": PIPELINE, "target": target})
    for _ in range(2):  # the first step compiles, which calls operators too
        model.zero_grad()
        with torch.profiler.profile() as profile:
            step(torch.linspace(-1, 1, 128).reshape(4, 32)).sum().backward()
    return [param.grad.to_local().clone() for param in model.parameters()], gathers_of(profile)


def hooked(target):
    """A gather in a plain Inductor compile, with the pass in Inductor's hook."""
    import torch.distributed as dist

    from zpasses import Pipeline
    from zpasses.cost.time.target import Target, use_target
    from zpasses.passes import Sdma

    def gathered(x):
        started = torch.ops._c10d_functional.all_gather_into_tensor(
            x, 2, dist.group.WORLD.group_name
        )
        return torch.ops._c10d_functional.wait_tensor(started) @ x

    torch._dynamo.reset()
    part = torch.arange(64.0).reshape(8, 8) + dist.get_rank()
    hook = Pipeline((Sdma(min_mb=0.0, min_hidden=0.0),))
    with (
        use_target(Target.parse(target)),
        config.patch(post_grad_custom_post_pass=hook),
        torch.no_grad(),
    ):
        step = torch.compile(gathered, fullgraph=True)
        step(part)
        with torch.profiler.profile() as profile:
            result = step(part)
    return [result], gathers_of(profile)


def hooked_where_one_cache_is_cold(target):
    """The same, but rank 1 has an empty cache."""
    import os

    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] += "-another"
    return hooked(target)


@dataclass(frozen=True)
class Ran:
    results: list
    gathers: dict
    hits: int
    """Of the caches; ranks share them, so that a rank may find what the other has just written."""
    engines: bool
    """Whether mori gathered."""


def process(cases):
    """Runs the cases in order in one pair of processes."""
    from torch._dynamo.utils import counters

    found = []
    for program, target, settings in cases:
        counters.clear()
        with installed(settings) as fake:
            results, gathers = program(target)
        hits = (
            counters["inductor"]["fxgraph_cache_hit"]
            + counters["aot_autograd"]["autograd_cache_hit"]
        )
        found.append(Ran(results, gathers, hits, len(fake.calls) > 2))  # two calls are the trial
    return found


def in_new_processes(cache, *cases):
    outcomes = run_in_fresh_ranks(
        process, cases, env={"TORCHINDUCTOR_CACHE_DIR": str(cache)}, timeout_s=200
    )
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    first, second = (outcome.result for outcome in outcomes)
    assert [(each.gathers, each.engines) for each in first] == [
        (each.gathers, each.engines) for each in second
    ]
    return first


@pytest.mark.slow(quick="tests/zpasses/backend/test_warm_cache.py")
def test_warm_caches_do_not_serve_another_target_or_route(tmp_path):
    by_us, by_hook = in_new_processes(tmp_path, (stepped, "mi300x", MORI), (hooked, "mi300x", MORI))
    assert (set(by_us.gathers), by_us.engines) == ({"zpasses::sdma_all_gather"}, True)
    assert (by_hook.gathers, by_hook.engines) == ({"zpasses::sdma_all_gather": 1}, True)

    # The hook runs inside the cache and comes first, so nothing that an earlier compile left in the
    # process can help it.
    hook_for_cpu, refused, for_cpu, hook_refused, apart = in_new_processes(
        tmp_path,
        (hooked, "cpu", MORI),
        (stepped, "mi300x", OTHER),
        (stepped, "cpu", MORI),
        (hooked, "mi300x", OTHER),
        (hooked_where_one_cache_is_cold, "mi300x", MORI),
    )
    assert refused.hits > 0, "the same target must come from the cache, or this test shows nothing"
    assert (
        hook_refused.hits == 0
    )  # ranks vote inside the cached compile, so no other process may hit it
    for again, before in ((refused, by_us), (hook_refused, by_hook)):
        assert (
            again.gathers["zpasses::sdma_all_gather"] == before.gathers["zpasses::sdma_all_gather"]
        )
    for other in (for_cpu, hook_for_cpu):
        assert set(other.gathers) <= {TORCH, f"{TORCH}_out", "zpasses::gloo_all_gather"}
    for other, before in (
        (refused, by_us),
        (for_cpu, by_us),
        (hook_refused, by_hook),
        (hook_for_cpu, by_hook),
    ):
        assert not other.engines
        assert all(
            torch.equal(got, wanted)
            for got, wanted in zip(other.results, before.results, strict=True)
        )
    assert (apart.gathers, apart.engines) == (by_hook.gathers, True)
    assert torch.equal(apart.results[0], by_hook.results[0])
