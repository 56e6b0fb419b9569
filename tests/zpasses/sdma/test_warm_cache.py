"""Inductor's cache on disk with the pass `sdma` in Inductor's hook: new processes that share a
folder run code for their own target and route. tests/zpasses/backend/test_warm_cache.py has the
compiles of the backend.
"""

import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config

from tests.fake_mori import Settings, installed
from zpasses import Pipeline
from zpasses.cost.time.target import Target, use_target
from zpasses.passes import Sdma
from zpasses.testing import run_in_fresh_ranks

pytestmark = [pytest.mark.processes, pytest.mark.inductor]

TORCH = "_c10d_functional::all_gather_into_tensor"
SDMA = "zpasses::sdma_all_gather"
MORI, OTHER = Settings(latency_s=0), Settings(architecture="gfx90a")
"""Devices that the vote takes and refuses."""


def gathered(x):
    name = dist.group.WORLD.group_name
    started = torch.ops._c10d_functional.all_gather_into_tensor(x, 2, name)
    return torch.ops._c10d_functional.wait_tensor(started) @ x


def hooked(cases):
    """Compiles for each target and device, in one pair of processes.

    Returns the result, the gathers that ran, how many times the caches hit, and whether mori
    gathered. Ranks share the caches, so that a rank may find what the other has just written.
    """
    found = []
    for target, settings, one_is_cold in cases:
        if one_is_cold and dist.get_rank() == 1:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] += "-another"
        torch._dynamo.reset()
        counters.clear()
        part = torch.arange(64.0).reshape(8, 8) + dist.get_rank()
        hook = Pipeline((Sdma("all"),))
        with (
            installed(settings) as fake,
            use_target(Target.parse(target)),
            config.patch(post_grad_custom_post_pass=hook),
            torch.no_grad(),
        ):
            step = torch.compile(gathered, fullgraph=True)
            step(part)
            with torch.profiler.profile() as profile:
                result = step(part)
        ours = ("_c10d_functional::", "zpasses::")
        names = [each.name for each in profile.events() if each.name.startswith(ours)]
        ran = dict(Counter(name for name in names if "all_gather" in name))
        kinds = (("inductor", "fxgraph_cache_hit"), ("aot_autograd", "autograd_cache_hit"))
        hits = sum(counters[kind][name] for kind, name in kinds)
        found.append((result, ran, hits, len(fake.calls) > 2))  # two calls are the trial
    return found


def in_new_processes(cache, *cases):
    env = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    outcomes = run_in_fresh_ranks(hooked, cases, env=env, timeout_s=200)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    for first, second in zip(*(outcome.result for outcome in outcomes), strict=True):
        assert (first[1], first[3]) == (second[1], second[3])
    return outcomes[0].result


@pytest.mark.slow(quick="test_graphs_of_other_libraries_are_swapped_in_inductors_hook")
def test_warm_caches_do_not_serve_another_target_or_route(tmp_path):
    ((expected, ran, _, engines),) = in_new_processes(tmp_path, ("mi300x", MORI, False))
    assert (ran, engines) == ({SDMA: 1}, True)
    for_cpu, refused, apart = in_new_processes(
        tmp_path, ("cpu", MORI, False), ("mi300x", OTHER, False), ("mi300x", MORI, True)
    )
    assert set(for_cpu[1]) <= {TORCH, f"{TORCH}_out", "zpasses::gloo_all_gather"}
    assert refused[1][SDMA] == 1
    assert apart[1] == {SDMA: 1}
    assert refused[2] == 0, "ranks vote inside the compile, so no other process may hit it"
    assert [each[3] for each in (for_cpu, refused, apart)] == [False, False, True]
    for result, *_ in (for_cpu, refused, apart):
        assert torch.equal(result, expected)
