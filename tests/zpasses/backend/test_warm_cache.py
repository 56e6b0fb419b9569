"""Inductor's caches on disk, below the compile cache of zpasses, which is off here: a program that
runs again in new processes, also with other options, never gets wrong code.
"""

from collections import Counter

import pytest
import torch

import zpasses
from tests.zpasses.backend.cache.starts import Net
from zpasses.dumps import read
from zpasses.testing import run_in_fresh_ranks, world_mesh

pytestmark = [pytest.mark.processes, pytest.mark.inductor]


def _train(options):
    """Return losses, the collectives of one step, and the number of cache hits."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = zpasses.shard(Net(), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"cache": False, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        with torch.profiler.profile() as profile:
            loss = step(torch.linspace(-1, 1, 24).reshape(4, 6))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    names = [event.name.partition("::") for event in profile.events()]
    ran = Counter(
        name for namespace, _, name in names if namespace in ("_c10d_functional", "zpasses")
    )
    del ran["wait_tensor"]
    return losses, dict(ran), counters["inductor"]["fxgraph_cache_hit"]


REGATHERS = "gather-params,reduce-grads{form=reduce_scatter},reshard-after-forward{keep=nothing}"


def run(options, cache):
    outcomes = run_in_fresh_ranks(
        _train, options, env={"TORCHINDUCTOR_CACHE_DIR": str(cache)}, timeout_s=200
    )
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    return outcomes[0].result


@pytest.mark.slow(quick="test_ranks_that_choose_different_agreed_graphs_get_an_error")
def test_warm_caches_give_the_code_of_the_options_at_hand(tmp_path):
    losses, ran, hits = run({"zero_stage": 3}, tmp_path)
    assert hits == 0
    reductions = {"gloo_reduce_scatter": 2, "gloo_reduce_scatter_coalesced": 1}
    assert ran == {"gloo_all_gather": 1, "gloo_all_gather_coalesced": 1, **reductions}

    dump = tmp_path / "dump"
    again, ran_again, hits = run({"zero_stage": 3, "dump": dump, "dump_ranks": "all"}, tmp_path)
    assert hits == 2, "the second run must come from the cache, or this test shows nothing"
    for rank in (0, 1):  # passes run before the cache lookup, so cache hits are dumped too
        (compiled,) = read(dump).ranks[rank].compiles
        assert compiled.graphs["backward"].last.after == "defer-reduction"
        assert {each.result for graph in compiled.graphs.values() for each in graph.agreements} == {
            "agreed"
        }
    assert (again, ran_again) == (losses, ran)

    for options, expected in [
        (
            {"zero_stage": 2},
            {
                "gloo_all_gather": 1,
                "gloo_all_gather_coalesced": 1,
                "gloo_reduce_scatter": 1,
                "gloo_reduce_scatter_coalesced": 1,
            },
        ),
        (
            {"pipeline": REGATHERS},
            {"gloo_all_gather": 5, "gloo_reduce_scatter": 4},
        ),
    ]:
        other, ran, _ = run(options, tmp_path)
        assert other == pytest.approx(losses, rel=1e-5)
        assert ran == expected
