"""Simple plans on real gloo ranks. All cases share one start of processes."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh

LAYERS = 4
UNMERGED = {
    1: "merge-reads,gather-params,reduce-grads,cache-params",
    3: "merge-reads,gather-params,reduce-grads,reshard-after-forward",
}
UNMERGED[2] = UNMERGED[1]


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(9, 9) for _ in range(LAYERS)))


def collectives():
    """Returns the numbers of gathers and reductions that process groups have run so far."""
    from zpasses.tools.bench.measure import traffic

    counts = traffic().counts
    return tuple(
        sum(count for kind, count in counts.items() if word in kind)
        for word in ("gather", "reduce")
    )


def train(options):
    """Returns the collectives of the last of three steps. Each step is compared with the unsharded
    model on the batches of all ranks.
    """
    torch._dynamo.reset()
    reference, sharded = model(), model()
    zpasses.shard(sharded, mesh=world_mesh())
    step = torch.compile(sharded, backend="zpasses", fullgraph=True, options=options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, sharded)]
    for number in range(3):
        torch.manual_seed(number)
        data = [torch.randn(4, 9) for _ in range(dist.get_world_size())]
        before = collectives()
        step(data[dist.get_rank()]).square().sum().backward()
        ran = [now - then for now, then in zip(collectives(), before, strict=True)]
        for batch in data:
            (reference(batch).square().sum() / len(data)).backward()
        for ours, theirs in zip(sharded.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return ran


def gathers_after_edits():
    """Returns the gathers of consecutive forwards: the first, the second, and one after an edit of
    one shard.
    """
    torch._dynamo.reset()
    reference = model()
    sharded = copy.deepcopy(reference)
    zpasses.shard(sharded, mesh=world_mesh())
    options = {
        "pipeline": f"{UNMERGED[2]},schedule{{plan=single,mode=coalesced,memory_budget=1GiB}}",
        "codegen": "eager",
    }
    step = torch.compile(sharded, backend="zpasses", fullgraph=True, options=options)
    x, counts = torch.ones(2, 9), []
    for edit in (False, False, True, False):
        if edit:
            with torch.no_grad():
                for each in (sharded, reference):
                    each.get_parameter("2.weight").mul_(2)
        before = collectives()[0]
        torch.testing.assert_close(step(x), reference(x))
        counts.append(collectives()[0] - before)
    return counts


def all_cases():
    found = {"edits": gathers_after_edits()}
    for stage in (1, 2, 3):
        pipeline = f"{UNMERGED[stage]},schedule{{plan=one-ahead,cap_mb=1,memory_budget=1GiB}}"
        found[stage] = (
            train({"pipeline": UNMERGED[stage], "codegen": "eager"}),
            # Stage 1 consists of the passes of stage 2, so Inductor would get the same graphs.
            train({"pipeline": pipeline, "codegen": "eager" if stage == 1 else "inductor"}),
        )
    return found


@pytest.mark.slow(quick="tests/passes/test_pipelines.py")
@pytest.mark.processes
@pytest.mark.inductor
def test_stages_train_like_the_unsharded_model_with_fewer_collectives():
    outcomes = run_in_fresh_ranks(all_cases, timeout_s=280, env={"TORCH_FR_BUFFER_SIZE": "20000"})
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    first, second = (outcome.result for outcome in outcomes)
    assert first == second
    for stage in (1, 2, 3):
        (gathers, reductions), (fewer_gathers, fewer_reductions) = first[stage]
        assert reductions == 2 * LAYERS, stage
        assert gathers >= 2 * LAYERS
        assert fewer_reductions <= reductions / 3, first
        assert fewer_gathers <= gathers / 2, first
    # A fresh parameter is not gathered again. A bucket with one stale member is gathered as a
    # whole.
    assert first["edits"] == [1, 0, 1, 0]


def backward_code():
    """Returns the code that Inductor generates for a backward whose three gradients share a flat
    all-reduce.
    """
    from torch._inductor.utils import run_and_get_code

    squares = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    zpasses.shard(squares, mesh=world_mesh())
    flat = "schedule{plan=single,mode=flat,memory_budget=1GiB}"
    pipeline = f"gather-params,reduce-grads{{form=all_reduce}},{flat}"
    step = torch.compile(squares, backend="zpasses", options={"pipeline": pipeline})
    _, codes = run_and_get_code(lambda: step(torch.ones(8, 16)).tanh().sum().backward())
    return codes[-1]


@pytest.mark.processes
@pytest.mark.inductor
def test_inductor_computes_gradients_into_their_slices_of_a_flat_bucket():
    code = run_on_ranks(backward_code)[0]
    (bucket,) = re.findall(r"_c10d_functional\.all_reduce_\.default\((\w+),", code)
    alias = rf"(\w+) = reinterpret_tensor\({bucket}, \(16, 16\), \(16, 1\), (\d+)\)  # alias"
    slots = dict(re.findall(alias, code))
    assert sorted(map(int, slots.values())) == [0, 256, 512]
    for slot in slots:
        assert re.search(rf"extern_kernels\.mm\(.*out={slot}\)", code), code
    assert "cat" not in code.partition("def call")[2]
