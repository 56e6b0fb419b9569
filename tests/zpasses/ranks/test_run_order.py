"""Ranks that run different graphs, or a different number of them, get an error."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from zpasses import AgreementError, compat
from zpasses.ranks.run_order import RunEvent, check_run_event
from zpasses.ranks.vote import group_state, report_failure
from zpasses.runtime.edits import EditLog
from zpasses.runtime.local_shards import CallParams
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh

pytestmark = pytest.mark.processes

LIMIT_S = 5.0
SLACK_S = 120.0
"""How much longer than the limit an error may take on a loaded machine; 10 s on an idle one."""


class EitherLayer(nn.Module):
    """Reads parameters of equal shape, chosen by the data."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


def compiled(model, **options):
    zpasses.shard(model, mesh=world_mesh())
    options = {"codegen": "eager", "agreement_timeout_s": LIMIT_S, **options}
    return torch.compile(model, backend="zpasses", options=options)


def outcome_of(fn):
    """Seconds until the error, and its text."""
    started = time.monotonic()
    try:
        fn()
    except Exception as error:
        return time.monotonic() - started, f"{type(error).__name__}: {error}"
    return time.monotonic() - started, None


# --- branches ------------------------------------------------------------------------------------
def _branch_by_rank(stage, agreed_before, agreement, **options):
    model = EitherLayer()
    step = compiled(model, zero_stage=stage, agreement=agreement, **options)
    ones = torch.ones(2, 4)
    if agreed_before:
        for x in (ones, -ones, ones, -ones):
            step(x).sum().backward()
    return outcome_of(lambda: step(ones if dist.get_rank() == 0 else -ones))


@pytest.mark.parametrize("stage", some_quick([1, 2, 3], [3]))
def test_ranks_that_gather_other_parameters_of_equal_shape_get_an_error(stage):
    results = [each.result for each in run_in_fresh_ranks(_branch_by_rank, stage, False, True)]
    for seconds, error in results:
        assert "AgreementError: ranks would run different collectives" in error
        assert re.search(r"of a\.(weight|bias).* at", error)
        assert re.search(r"of b\.(weight|bias).* at", error)
        assert "self.a(x) if x.sum() > 0 else self.b(x)" in error
        assert seconds < LIMIT_S + SLACK_S


def assert_different_graphs(results):
    for seconds, error in results:
        assert "AgreementError: ranks of group '0' are about to do different things" in error
        assert "the first of a.weight" in error
        assert "the first of b.weight" in error
        assert seconds < LIMIT_S + SLACK_S


@pytest.mark.parametrize("stage", some_quick([1, 2, 3], [2]))
def test_ranks_that_choose_different_agreed_graphs_get_an_error(stage):
    outcomes = run_in_fresh_ranks(_branch_by_rank, stage, True, True)
    assert_different_graphs(each.result for each in outcomes)


def _branch_by_rank_from_the_cache(compile_cache):
    seen = _branch_by_rank(3, True, True, codegen="inductor", cache=compile_cache)
    looked_up = counters["inductor"]
    return seen, (looked_up["fxgraph_cache_hit"], looked_up["fxgraph_cache_miss"])


# --- modules that share a graph -------------------------------------------------------------------
class Blocks(nn.Module):
    """A graph break after each block, so that all blocks share one graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

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


def compiled_part(module):
    options = {"codegen": "eager", "agreement_timeout_s": LIMIT_S}
    return torch.compile(module, backend="zpasses", options=options)


@pytest.mark.parametrize(
    "one_by_one", [True, pytest.param(False, marks=pytest.mark.slow(quick="one by one"))]
)
@pytest.mark.parametrize("agreed_before", some_quick([False, True], [True]))
@pytest.mark.slow(quick="test_ranks_that_choose_different_agreed_graphs_get_an_error")
def test_ranks_that_run_different_blocks_of_one_graph_get_an_error(one_by_one, agreed_before):
    results = [each.result for each in run_in_fresh_ranks(_drop_a_layer, one_by_one, agreed_before)]
    for seconds, error in results:
        assert "AgreementError" in error
        assert seconds < LIMIT_S + SLACK_S
    both = " ".join(error for _, error in results)
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
        assert_different_graphs(each.result[0] for each in outcomes)
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
    for seconds, error in (each.result for each in run_in_fresh_ranks(_micro_batches_by_rank, 0)):
        assert "rank 0 comes to graph 0/0 forward" in error
        assert "rank 1 to SGD.step()" in error
        assert seconds < SLACK_S + LIMIT_S


@pytest.mark.slow(quick="test_another_number_of_micro_batches_is_an_error_in_the_first_step")
def test_another_number_of_micro_batches_is_an_error_in_later_steps():
    """Rank 0 does what was predicted, and waits in a collective; rank 1 votes, and waits there."""
    first, second = (each.result for each in run_in_fresh_ranks(_micro_batches_by_rank, 5))
    assert "rank 0 waited in a collective while running graph 0/0 forward" in first[1]
    assert "Rank 1 is alive" in first[1]
    assert "waiting for other ranks at the next graph or optimizer step (group '0', to " in first[1]
    assert "rank 0 of group '0' did not come to SGD.step()" in second[1]
    assert "agreement_timeout_s" in first[1]
    assert "agreement_timeout_s" in second[1]
    assert max(first[0], second[0]) < LIMIT_S + SLACK_S


def _steps_before_the_first_graph():
    """Rank 1 has no micro-batch in its first step."""
    model = nn.Linear(4, 4)
    step = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = optimizer.step if dist.get_rank() == 1 else lambda: step(torch.ones(2, 4))
    return outcome_of(first)


def test_a_step_of_one_rank_before_the_first_graph_is_an_error():
    """Otherwise its second step would meet the first of the others, and its learning rates too."""
    for seconds, error in (
        each.result for each in run_in_fresh_ranks(_steps_before_the_first_graph)
    ):
        assert "rank 1 at the next graph or optimizer step" in error
        assert "run the same backwards and optimizer steps" in error
        assert seconds < LIMIT_S + SLACK_S


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
    from zpasses.ranks import vote

    model = nn.Linear(4, 4)
    step = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    votes = []
    for _ in range(24):
        before = group_state("0").votes
        step(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        votes.append(group_state("0").votes - before)
    assert vote.has_other_ranks("0")
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
    def results():
        return [each.result for each in run_in_fresh_ranks(_mismatch_then_same)]

    assert results() == [("different things", 3)] * 2


def _mismatch_then_same():
    with pytest.raises(AgreementError, match="about to do different things") as caught:
        check_run_event("0", RunEvent.of(f"rank {dist.get_rank()}"), LIMIT_S, edits=EditLog())
    for _ in range(2):
        check_run_event("0", RunEvent.of("the same"), LIMIT_S, edits=EditLog())
    assert "rank 0 comes to rank 0, but rank 1 to rank 1" in str(caught.value)
    return "different things", group_state("0").votes


# --- unsharded modules ----------------------------------------------------------------------------
def _trains_unsharded():
    step = torch.compile(nn.Linear(4, 4), backend="zpasses", options={"codegen": "eager"})
    trained = outcome_of(lambda: step(torch.ones(2, 4)))
    with torch.no_grad():
        evaluated = step(torch.ones(2, 4))
    return trained[1], tuple(evaluated.shape)


@on_ranks(2)
def test_module_without_sharded_parameters_is_refused_where_ranks_train():
    error, evaluated = _trains_unsharded()
    assert "ShardingError: nothing in this compiled module is sharded" in error
    assert "trains weight, bias on 2 ranks" in error
    assert evaluated == (2, 4)  # without gradients there is nothing to average


def _edits_before_a_failure():
    """Rank 0 fails before the event to which rank 1 comes, and both go on."""
    log, told = EditLog(), ""
    log.add_step("a completed SGD.step()", 1, 2)
    if dist.get_rank() == 0:
        report_failure(["0"], "0/0", ValueError("injected"))
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
