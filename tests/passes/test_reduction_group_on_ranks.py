"""Reductions on a second process group of real gloo ranks."""

import contextlib
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.graph.queries import collectives
from zpasses.pipeline.events import observe_graphs
from zpasses.ranks.new_groups import reduction_group
from zpasses.ranks.vote import vote_timeout
from zpasses.runtime.gloo import replace_gloo_collectives
from zpasses.testing import fake_world, run_in_fresh_ranks, run_on_ranks, world_mesh

processes = pytest.mark.processes

STAGE3 = "merge-reads,gather-params,reduce-grads,reshard-after-forward"


def trained(backwards, group, codegen="eager"):
    """Returns the parameters after two steps, and the groups that reductions of backwards and of
    windows ran on.

    Args:
        backwards: number of backwards per step; more than one share a window.
        group: value of `reduction_group`.
        codegen: value of the option.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zpasses.shard(nn.Sequential(*(nn.Linear(9, 9) for _ in range(3))), mesh=world_mesh())
    pipeline = f"{STAGE3},schedule{{reduction_group={group}}},defer-reduction"
    options = {"pipeline": pipeline, "codegen": codegen}
    step = torch.compile(model, backend="zpasses", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    graphs = []

    def flushed(gm):
        graphs.append(("flush", gm.graph))
        return replace_gloo_collectives(gm)

    with (
        observe_graphs(lambda observed: graphs.append((observed.kind, observed.graph))),
        mock.patch("zpasses.runtime.flush.replace_gloo_collectives", flushed),
    ):
        for _ in range(2):
            window = zpasses.coalesce_grad_reduction(model)
            with window if backwards > 1 else contextlib.nullcontext():
                for _ in range(backwards):
                    step(torch.randn(4, 9, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    used = {
        (kind, each.group)
        for kind, graph in graphs
        for _, each in collectives(graph)
        if each.reduce_op and kind in ("backward", "flush")
    }
    return [param.full_tensor() for param in model.parameters()], used


def compare_groups(codegen="eager"):
    for backwards, kinds in ((1, ["backward"]), (2, ["backward", "flush"])):
        shared, on_first = trained(backwards, "shared", codegen)
        own, on_second = trained(backwards, "own", codegen)
        assert on_first == {(kind, "0") for kind in kinds}
        assert on_second == {(kind, "0.reductions") for kind in kinds}
        assert all(torch.equal(a, b) for a, b in zip(shared, own, strict=True))


def exchange_in_another_order():
    """Messages of the two groups would mix if they shared connections."""
    first = dist.group.WORLD.group_name
    second, ours, rank = reduction_group(first), torch.ops.zpasses, dist.get_rank()
    for number in range(20):
        source = torch.full((2, 100 + number), float(rank + 1))
        starts = [
            lambda source=source: ours.gloo_all_gather(source, 2, first),
            lambda source=source: ours.gloo_reduce_scatter(source, "sum", 2, second),
        ]
        results = {at: starts[at]() for at in ((0, 1) if rank else (1, 0))}
        gathered, reduced = (compat.functional.wait_tensor(results[at]) for at in (0, 1))
        assert gathered[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
        assert (reduced == 3.0).all()


def group_of_ranks_with_other_groups():
    """Returns names and ranks of a group of which one rank is in more groups than the other."""
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)
    name = dist.group.WORLD.group_name
    with compat.limited_timeouts([name], 5.0):
        second = reduction_group(name)
        inside = compat.collective_timeout(compat.process_group(second)).total_seconds()
    groups = [compat.process_group(each) for each in (name, second)]
    usual = [compat.collective_timeout(group) for group in groups]
    with compat.limited_timeouts([name], 5.0):
        again = compat.collective_timeout(groups[1]).total_seconds()
    return second, compat.group_ranks(second), inside, again, usual[0] == usual[1]


def on_ranks():
    found = group_of_ranks_with_other_groups()
    exchange_in_another_order()
    compare_groups()
    compare_groups("inductor")
    return found


@processes
@pytest.mark.slow(quick="test_later_passes_recognise_reductions_on_their_own_group")
def test_reductions_on_their_own_group_give_the_same_bits():
    first, second = run_on_ranks(on_ranks)
    assert first == second == ("0.reductions", [0, 1], 5.0, 5.0, True)


def one_rank_is_missing():
    """Rank 1 does not come for the first group, and fails between the vote and the connection for
    another one.
    """
    world, other = dist.group.WORLD.group_name, dist.new_group([0, 1]).group_name
    if dist.get_rank() == 1:
        failing = mock.patch("zpasses.compat.make_group", side_effect=RuntimeError("lost"))
        with failing, vote_timeout(300), pytest.raises(AgreementError, match="lost"):
            reduction_group(other)
        compat.default_store().wait(["finished"])
        return None
    errors = []
    for name in (world, other):
        started = time.monotonic()
        with vote_timeout(1), pytest.raises(AgreementError) as error:
            reduction_group(name)
        errors.append((time.monotonic() - started, str(error.value)))
    compat.default_store().set("finished", "1")
    return errors


@processes
def test_a_missing_rank_is_an_error_within_the_limit():
    outcomes = run_in_fresh_ranks(one_rank_is_missing)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    (voting_s, missing), (connecting_s, lost) = outcomes[0].result
    assert "rank 1 of group '0' did not reach the second process group of group '0'" in missing
    assert "could not connect process group" in lost
    assert "agreement_timeout_s" in missing
    assert "agreement_timeout_s" in lost
    assert max(voting_s, connecting_s) < 100


def test_a_second_group_that_was_destroyed_is_made_again():
    for _ in range(2):  # another world has no group of the one before it
        with fake_world(4, rank=2):
            name = dist.group.WORLD.group_name
            assert compat.second_group(name) is None
            assert reduction_group(name) == reduction_group(name) == "0.reductions"
            assert compat.group_ranks("0.reductions") == [0, 1, 2, 3]
            assert compat.group_backend("0.reductions") == "fake"
            dist.destroy_process_group(compat.process_group("0.reductions"))
            assert compat.second_group(name) is None
            again = reduction_group(name)
            assert again == "0.reductions-1"
            assert {compat.parent_group(each) for each in (again, "0.reductions", name)} == {"0"}


def test_a_second_group_keeps_the_order_of_ranks():
    with fake_world(4, rank=2):
        part = dist.new_group([3, 0, 2], sort_ranks=False).group_name
        assert compat.group_ranks(part) == [3, 0, 2]
        second = reduction_group(part)
        assert compat.group_ranks(second) == [3, 0, 2]
        assert compat.process_group(second).rank() == compat.process_group(part).rank() == 2
