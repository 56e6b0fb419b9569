"""Ranks that run different graphs, or a different number of them, get an error."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from tests.on_ranks import on_ranks
from tests.zpasses.ranks.outcomes import (
    LIMIT_S,
    compiled,
    compiled_part,
    in_time,
    outcome_of,
)
from zpasses import AgreementError, compat
from zpasses.ranks.edit_log import EditLog
from zpasses.ranks.failures import report_failure
from zpasses.ranks.run_order import RunEvent, check_run_event
from zpasses.ranks.vote import group_state
from zpasses.runtime.param_conversion import CallParams
from zpasses.testing import run_in_fresh_ranks, run_on_ranks

pytestmark = pytest.mark.processes


class EitherLayer(nn.Module):
    """Reads parameters of equal shape, chosen by the data."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


# --- branches ------------------------------------------------------------------------------------
def _branch_by_rank(stage, agreed_before, agreement, **options):
    model = EitherLayer()
    step = compiled(model, zero_stage=stage, agreement=agreement, **options)
    ones = torch.ones(2, 4)
    if agreed_before:
        for x in (ones, -ones, ones, -ones):
            step(x).sum().backward()
    return outcome_of(lambda: step(ones if dist.get_rank() == 0 else -ones))


def test_ranks_that_gather_other_parameters_of_equal_shape_get_an_error():
    for each in run_in_fresh_ranks(_branch_by_rank, 3, False, True):
        error = in_time(each)
        assert "AgreementError: ranks would run different collectives" in error
        assert re.search(r"of a\.(weight|bias).* at", error)
        assert re.search(r"of b\.(weight|bias).* at", error)
        assert "self.a(x) if x.sum() > 0 else self.b(x)" in error


def assert_different_graphs(errors):
    for error in errors:
        assert "AgreementError: ranks of group '0' are about to do different things" in error
        assert "the first of a.weight" in error
        assert "the first of b.weight" in error


def test_ranks_that_choose_different_agreed_graphs_get_an_error():
    outcomes = run_in_fresh_ranks(_branch_by_rank, 2, True, True)
    assert_different_graphs(map(in_time, outcomes))


def _branch_by_rank_from_the_cache(compile_cache):
    seen = _branch_by_rank(3, True, True, codegen="inductor", cache=compile_cache)
    looked_up = counters["inductor"]
    return seen, (looked_up["fxgraph_cache_hit"], looked_up["fxgraph_cache_miss"])


# --- modules that share a graph -------------------------------------------------------------------
class Block(nn.Module):
    """Dynamo compiles its forward by itself; it does not begin with one of `torch.nn`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return x @ self.weight


class Blocks(nn.Module):
    """A graph break after each block, so that all blocks share one graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, order):
        for number in order:
            x = self.layers[number](x)
            torch._dynamo.graph_break()
        return x


def _drop_a_layer(one_by_one, agreed_before):
    model = Blocks()
    if one_by_one:
        compiled(model)
        blocks = [compiled_part(layer) for layer in model.layers]

        def step(x, order):
            for number in order:
                x = blocks[number](x)
            return x
    else:
        step = compiled(model)
    x = torch.ones(2, 4)
    for _ in range(4 if agreed_before else 0):
        step(x, [0, 1, 2]).sum().backward()
    orders = [0, 1], [2, 1]
    return outcome_of(lambda: step(x, orders[dist.get_rank()]).sum().backward())


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("agreed_before", [True, False])
@pytest.mark.slow(quick="test_ranks_that_choose_different_agreed_graphs_get_an_error")
def test_ranks_that_run_different_blocks_of_one_graph_get_an_error(one_by_one, agreed_before):
    errors = [*map(in_time, run_in_fresh_ranks(_drop_a_layer, one_by_one, agreed_before))]
    assert all("AgreementError" in error for error in errors)
    both = " ".join(errors)
    assert "'layers.2.weight', sharded in call 1 of zpasses.shard" in both


def _two_models_in_another_order():
    steps = [compiled(nn.Linear(4, 4)) for _ in range(2)]
    x = torch.ones(2, 4)
    ordered = steps if dist.get_rank() == 0 else steps[::-1]
    return outcome_of(lambda: [step(x) for step in ordered])


def test_ranks_that_run_equal_models_in_another_order_get_an_error():
    for each in run_in_fresh_ranks(_two_models_in_another_order):
        _, error = each.result
        assert "'weight' to 'bias', sharded in call 1 of zpasses.shard" in error
        assert "'weight' to 'bias', sharded in call 2 of zpasses.shard" in error


def test_calls_without_known_parameters_are_not_compared():
    assert CallParams.of([]) is None
    assert CallParams.of(["1:weight", ""]) is None
    assert CallParams.of(["1:weight"]) != CallParams.of(["2:weight"])


@pytest.mark.inductor
@pytest.mark.slow(quick="test_ranks_that_choose_different_agreed_graphs_get_an_error")
@pytest.mark.parametrize("compile_cache", [False, True])
def test_graphs_from_a_warm_cache_are_told_apart_too(tmp_path, compile_cache):
    for run in ("cold", "warm"):
        outcomes = run_in_fresh_ranks(
            _branch_by_rank_from_the_cache,
            compile_cache,
            env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            timeout_s=200,
        )
        assert_different_graphs(each.result[0][1] for each in outcomes)
        for hits, misses in (each.result[1] for each in outcomes if not compile_cache):
            assert hits + misses >= 4  # forward and backward of both branches
            assert misses == 0 or run == "cold"


@pytest.mark.slow(quick="test_ranks_that_choose_different_agreed_graphs_get_an_error")
def test_agreement_first_compares_first_runs_only():
    results = [each.result for each in run_in_fresh_ranks(_branch_by_rank, 3, True, "first")]
    assert [error for _, error in results] == [None, None]
    results = [each.result for each in run_in_fresh_ranks(_branch_by_rank, 3, False, "first")]
    assert all("ranks would run different collectives" in error for _, error in results)


# --- counts --------------------------------------------------------------------------------------
def _micro_batches_by_rank(steps_before):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    step = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(micro_batches):
        for _ in range(micro_batches):
            step(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps_before):
        train(4)
    return outcome_of(lambda: train(4 if dist.get_rank() == 0 else 3))


def test_another_number_of_micro_batches_is_an_error_in_the_first_step():
    for error in map(in_time, run_in_fresh_ranks(_micro_batches_by_rank, 0)):
        assert "rank 0 comes to graph 0/0 forward" in error
        assert "rank 1 to SGD.step()" in error


@pytest.mark.slow(quick="test_another_number_of_micro_batches_is_an_error_in_the_first_step")
def test_another_number_of_micro_batches_is_an_error_in_later_steps():
    """Rank 0 does what was predicted, and waits in a collective; rank 1 votes, and waits there."""
    first, second = map(in_time, run_in_fresh_ranks(_micro_batches_by_rank, 5))
    assert "rank 0 waited in a collective while running graph 0/0 forward" in first
    assert "Rank 1 is alive" in first
    assert "waiting for other ranks at the next graph or optimizer step (group '0', to " in first
    assert "rank 0 of group '0' did not come to SGD.step()" in second
    assert "agreement_timeout_s" in first
    assert "agreement_timeout_s" in second


def _steps_before_the_first_graph():
    """Rank 1 has no micro-batch in its first step."""
    model = nn.Linear(4, 4)
    step = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = optimizer.step if dist.get_rank() == 1 else lambda: step(torch.ones(2, 4))
    return outcome_of(first)


def test_a_step_of_one_rank_before_the_first_graph_is_an_error():
    """Otherwise its second step would meet the first of the others, and its learning rates too."""
    for error in map(in_time, run_in_fresh_ranks(_steps_before_the_first_graph)):
        assert "rank 1 at the next graph or optimizer step" in error
        assert "run the same backwards and optimizer steps" in error


def _optimizers_by_rank():
    """A generator and a discriminator of one class, of which each rank steps another."""
    nets = [nn.Linear(4, 4) for _ in range(2)]
    steps = [compiled(net) for net in nets]
    optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
    for step in steps:
        step(torch.ones(2, 4)).sum().backward()
    return outcome_of(optimizers[dist.get_rank()].step)


def test_ranks_that_step_optimizers_of_other_parameters_get_an_error():
    for error in map(in_time, run_in_fresh_ranks(_optimizers_by_rank)):
        for call in (1, 2):
            assert (
                f"Adam.step() with parameters 'bias' to 'weight', sharded in call {call}" in error
            )


def _as_a_plain_loop():
    """Training, evaluation, other shapes on one rank, and a shorter last step on all."""
    model = EitherLayer()
    step = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ones = torch.ones(2, 4)
    for number in range(6):
        for _ in range(3 if number < 5 else 1):
            rows = 2 + number % 3 * dist.get_rank()
            step(torch.ones(rows, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 2:
            with torch.no_grad():
                step(-ones if number == 3 else ones)
    return True


@pytest.mark.slow(quick="test_a_steady_loop_needs_no_votes")
def test_programs_that_ranks_share_run_through():
    assert run_on_ranks(_as_a_plain_loop) == [True, True]


def _votes_of_a_loop():
    model = nn.Linear(4, 4)
    step = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    votes = []
    for _ in range(24):
        before = group_state("0").votes
        step(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        votes.append(group_state("0").votes - before)
    return votes


def test_a_steady_loop_needs_no_votes():
    votes = run_in_fresh_ranks(_votes_of_a_loop)[0].result
    assert votes[0] >= 3
    assert votes[-12:] == [0] * 12


# --- events --------------------------------------------------------------------------------------
def _events(ours, limit_s):
    texts = ours[dist.get_rank()]
    for text in texts:
        check_run_event("0", RunEvent.of(text), limit_s, edits=EditLog())
    return group_state("0").votes


def test_predicted_events_are_not_voted_on():
    cycle = ["f", "b", "step"] * 12
    votes = run_in_fresh_ranks(_events, [cycle, cycle], LIMIT_S)[0].result
    assert 3 <= votes < 24


def test_events_after_a_mismatch_meet_again():
    ranks = run_in_fresh_ranks(_mismatch_then_same)
    assert [rank.result for rank in ranks] == [3, 3]


def _mismatch_then_same():
    with pytest.raises(AgreementError, match="about to do different things") as caught:
        check_run_event("0", RunEvent.of(f"rank {dist.get_rank()}"), LIMIT_S, edits=EditLog())
    for _ in range(2):
        check_run_event("0", RunEvent.of("the same"), LIMIT_S, edits=EditLog())
    assert "rank 0 comes to rank 0, but rank 1 to rank 1" in str(caught.value)
    return group_state("0").votes


# --- unsharded modules ----------------------------------------------------------------------------
@on_ranks(2)
def test_module_without_sharded_parameters_is_refused_where_ranks_train():
    step = compiled_part(nn.Linear(4, 4))
    _, error = outcome_of(lambda: step(torch.ones(2, 4)))
    assert "ShardingError: nothing in this compiled module is sharded" in error
    assert "trains weight, bias on 2 ranks" in error
    with torch.no_grad():  # without gradients there is nothing to average
        assert step(torch.ones(2, 4)).shape == (2, 4)


def _edits_before_a_failure():
    """Rank 0 fails before the event to which rank 1 comes, and both go on."""
    log, told = EditLog(), ""
    log.add_step("a completed SGD.step()", 1, 2)
    if dist.get_rank() == 0:
        report_failure(["0"], ValueError("injected"), "compiling graph 0/0")
        # The vote of the other rank does not wait so long for a rank that continues.
        compat.default_store().wait(["told"])
    else:
        try:
            check_run_event("0", RunEvent.of("a graph"), LIMIT_S, edits=log)
        except AgreementError as error:
            told = str(error)
        compat.default_store().set("told", "1")
    check_run_event("0", RunEvent.of("a graph"), 100.0, edits=log)
    return told, log.count, log.values


def test_edits_before_a_failure_that_was_caught_are_still_the_same_on_all_ranks():
    ranks = run_in_fresh_ranks(_edits_before_a_failure)
    assert all(rank.ok for rank in ranks), "\n".join(map(str, ranks))
    (first, *after), (second, *same) = (rank.result for rank in ranks)
    assert not first
    assert "injected" in second
    assert after == same == [0, 0]
