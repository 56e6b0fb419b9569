"""Ranks that would run different collectives raise, all of them, and in time."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import zpasses
from tests.zpasses.ranks.outcomes import compiled, in_time, outcome_of
from zpasses.graph.queries import Collective
from zpasses.ranks.compared_collectives import digest
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh

pytestmark = pytest.mark.processes


class Branches(nn.Module):
    """Reads `first` and then, if told so, `second` or `third`."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6)
        self.branch = "second"

    def forward(self, x):
        x = self.first(x)
        return x if self.branch == "none" else getattr(self, self.branch)(x)


def branches(model, **options):
    # one collective per parameter, which errors can name
    by_itself = "merge-reads,gather-params,reduce-grads,reshard-after-forward"
    return compiled(model, **{"pipeline": by_itself, "agreement_timeout_s": 8.0, **options})


def _another_branch(branch, **options):
    model = Branches()
    if dist.get_rank() == 1:
        model.branch = branch
    step = branches(model, **options)
    return outcome_of(lambda: step(torch.ones(2, 4)).sum().backward())


def test_one_rank_on_another_branch_raises_on_all_and_names_the_first_difference():
    for each in run_in_fresh_ranks(_another_branch, "third", timeout_s=100):
        message = in_time(each)
        assert "AgreementError" in message
        assert (
            "collective 3 is all_gather_into_tensor(float32[2, 4]) of second.weight "
            "(module second) at " in message
        )
        assert " on rank 0 (graph 0/0" in message
        assert "all_gather_into_tensor(float32[3, 4]) of third.weight (module third) at " in message
        assert "zpasses diff DIR --ranks 0 1" in message


def test_the_first_tensor_of_a_bucket_that_differs_is_named():
    schedule = "schedule{plan=single,mode=coalesced,memory_budget=1GiB}"
    buckets = f"merge-reads,gather-params,reduce-grads,{schedule}"
    outcomes = run_in_fresh_ranks(_another_branch, "third", pipeline=buckets, timeout_s=100)
    for message in map(in_time, outcomes):
        assert (
            "collective 1 is all_gather_into_tensor_coalesced of 4 tensors, of which tensor 3 is "
            "float32[2, 4] of second.weight (module second) at " in message
        )
        assert "tensor 3 is float32[3, 4] of third.weight (module third) at " in message
        assert message.count("else getattr(self, self.branch)(x) on rank") == 2
        assert "self.first(x)" not in message


def _own_options(options):
    return _another_branch("second", **options[dist.get_rank()])


def test_options_that_differ_are_named():
    options = [{"zero_stage": stage, "pipeline": None} for stage in (2, 3)]
    for message in map(in_time, run_in_fresh_ranks(_own_options, options, timeout_s=100)):
        assert "different options: zero_stage is 2 on rank 0 and 3 on rank 1; give all" in message


class Dispatch(nn.Module):
    """Sends some of its rows to each rank, as tokens go to experts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, sent, received):
        sizes = received.tolist(), sent.tolist()
        x = all_to_all_single_autograd(self.first(x), *sizes, dist.group.WORLD)
        return self.second(x).square().mean()


def _dispatches(**options):
    model = zpasses.shard(Dispatch(), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"codegen": "eager", **options})
    for rows in (1, 2, 3):
        rank, matrix = dist.get_rank(), torch.tensor([[rows, 4 - rows], [2, 5]])
        sent, received = matrix[rank], matrix[:, rank]
        x = torch.randn(int(sent.sum()), 4)
        loss = step(x, sent, received)
        loss.backward()
        expected = [param.grad.full_tensor() for param in model.parameters()]
        model.zero_grad()
        other = model(x, sent, received)
        other.backward()
        torch.testing.assert_close(loss, other)
        for param, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), grad)
        model.zero_grad()


@pytest.mark.slow(quick="test_the_same_branch_agrees")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_may_exchange_different_numbers_of_rows(stage):
    run_on_ranks(_dispatches, agreement_timeout_s=30.0, zero_stage=stage)


def test_the_same_branch_agrees():
    for each in run_in_fresh_ranks(_another_branch, "second"):
        assert in_time(each) is None


def _votes_cast(agreement):
    store = dist.distributed_c10d._get_default_store()
    step = branches(Branches(), agreement=agreement)  # shard writes what it was given
    dist.barrier()
    before = store.num_keys()
    step(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    return store.num_keys() - before


@pytest.mark.slow(quick="test_options_that_differ_are_named")
def test_agreement_can_be_turned_off():
    assert run_in_fresh_ranks(_votes_cast, False)[0].result == 0
    assert run_in_fresh_ranks(_votes_cast, True)[0].result > 0


def _joins_twice():
    """A second group of the same name, on the same store, does not read the first one's votes."""
    store = dist.distributed_c10d._get_default_store()
    step = branches(Branches())
    step(torch.ones(2, 4))
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch._dynamo.reset()
    other = Branches()
    other.branch = "third"
    branches(other)(torch.ones(2, 4))
    return True


@pytest.mark.slow(quick="test_the_same_branch_agrees")
def test_a_new_group_of_the_same_name_starts_afresh():
    outcomes = run_in_fresh_ranks(_joins_twice, timeout_s=100)
    assert all(outcome.result for outcome in outcomes), outcomes


def test_digest_depends_on_order_shape_dtype_and_reduction():
    one = Collective("all_reduce", "0", ((2, 3),), ("float32",), "sum", 24)
    others = [
        Collective("all_reduce", "0", ((3, 2),), ("float32",), "sum", 24),
        Collective("all_reduce", "0", ((2, 3),), ("bfloat16",), "sum", 12),
        Collective("all_reduce", "0", ((2, 3),), ("float32",), "avg", 24),
        Collective("all_gather_into_tensor", "0", ((2, 3),), ("float32",), None, 24),
    ]
    assert (
        len({digest([one, other]) for other in others} | {digest([other, one]) for other in others})
        == 8
    )
