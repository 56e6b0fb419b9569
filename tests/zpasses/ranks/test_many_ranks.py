"""Votes, notes and checks of 1,024 ranks: what each rank asks of the store, and that all ranks get
the same answer or error.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.cases import some_quick
from tests.zpasses.ranks.many_ranks import (
    ALL,
    FEW,
    LIMIT_S,
    MANY,
    PLAN,
    adopts_plans_of_two_kinds,
    barrier,
    checks_a_run,
    compares_collectives_of_two_kinds,
    measured,
    measured_once,
    merges_numbers,
    mesh,
    rank_3_fails,
)
from tests.zpasses.ranks.simulated_world import GROUP, SimulatedWorld
from zpasses.errors import AgreementError
from zpasses.ranks.agree import exchange
from zpasses.ranks.compared_options import compare_options
from zpasses.ranks.current_compile import compiling
from zpasses.ranks.failures import report_failure
from zpasses.ranks.mesh_comparison import compare_shard_calls
from zpasses.ranks.tally import ranks_below

# --- growth ---------------------------------------------------------------------------------------
QUICK = [compares_collectives_of_two_kinds, checks_a_run]


@pytest.mark.parametrize("program", some_quick(ALL, QUICK), ids=lambda program: program.__name__)
def test_a_rank_of_a_thousand_asks_little_more_of_the_store_than_one_of_eight(program):
    few, many = measured_once(program, FEW), measured_once(program, MANY)
    assert many.most_round_trips <= 2 * few.most_round_trips
    assert many.total_round_trips / MANY <= 1.25 * few.total_round_trips / FEW
    assert many.total_bytes / MANY <= 2 * few.total_bytes / FEW
    # The first rank hears of all: that is 128 times as many ranks.
    assert many.most_bytes <= 32 * few.most_bytes
    assert max(each.most_keys for each in many.traffic) <= 64


def test_ranks_that_wait_leave_the_store_time():
    """All ranks wait for the last one."""
    rates = {}
    for ranks in (256, MANY):
        waited = measured(barrier, ranks, late_s=lambda rank, last=ranks - 1: 9.0 * (rank == last))
        assert set(waited.outcomes) == {None}
        rates[ranks] = waited.total_round_trips / waited.elapsed_s
    assert rates[MANY] <= 1.5 * rates[256] <= 20_000


def test_votes_leave_nothing_behind_in_the_store():
    world = SimulatedWorld(70)
    keys = [world.run(adopts_plans_of_two_kinds).keys]
    for program in (barrier, merges_numbers, checks_a_run, barrier):
        keys.append(world.run(program).keys)
    assert keys[-1] == keys[1] < keys[0] + 70


# --- answers --------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 64, 65, 1024, 1025, 2081, 33000])
def test_the_ballot_of_every_rank_goes_up_one_way(size):
    below = [ranks_below(rank, size) for rank in range(size)]
    assert sorted(each for ranks in below for each in ranks) == list(range(1, size))
    assert all(rank < each for rank, ranks in enumerate(below) for each in ranks)
    assert all(len(ranks) <= 31 * 4 for ranks in below)


@pytest.mark.parametrize("extended", [True, False], ids=["all stores", "a file store"])
@pytest.mark.parametrize("ranks", [2, 32, 33, 1057])
def test_all_ranks_get_the_answers_of_all_in_order(ranks, extended):
    def ask(rank):
        short = exchange(GROUP, "short", rank % 50, LIMIT_S)
        long = exchange(GROUP, "long", [rank % 3] * 200, LIMIT_S, merge=lambda all: all[-2:])
        return short, long

    found = SimulatedWorld(ranks, extended=extended).run(ask).outcomes
    short = [rank % 50 for rank in range(ranks)]
    long = [[rank % 3] * 200 for rank in (ranks - 2, ranks - 1)]
    assert all(each == (short, long) for each in found)


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_votes_go_through_every_store_of_torch(kind, tmp_path):
    ranks = 40
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = dist.HashStore()
    stores = {
        "tcp": lambda rank: dist.TCPStore("127.0.0.1", server.port),
        "hash": lambda rank: shared,
        "file": lambda rank: dist.FileStore(str(tmp_path / "store"), ranks),
    }

    def program(rank):
        plan = adopts_plans_of_two_kinds(rank)
        barrier(rank)
        return plan, merges_numbers(rank)

    found = SimulatedWorld(ranks, store=lambda rank: dist.PrefixStore("a", stores[kind](rank)))
    outcomes = found.run(program).outcomes
    assert all(each == ((PLAN[1:], [GROUP]), 10**10 - ranks + 1) for each in outcomes), outcomes[:2]


# --- errors ---------------------------------------------------------------------------------------
def error_of_all(found, absent=()):
    """The text of the error, which all ranks have."""
    errors = [each for rank, each in enumerate(found.outcomes) if rank not in absent]
    assert all(isinstance(each, AgreementError) for each in errors), errors[:2]
    (text,) = {str(each) for each in errors}
    return text


@pytest.mark.parametrize("ranks", [FEW, MANY])
def test_the_first_rank_that_differs_is_named_on_all(ranks):
    text = error_of_all(measured_once(compares_collectives_of_two_kinds, ranks))
    assert "collective 80 is all_gather(bfloat16[8192, 8]) of layers.19.o.weight" in text
    assert "nothing more on rank 5 " in text


def test_ranks_at_different_votes_hear_what_both_compile():
    def program(rank):
        if rank < 50:
            return merges_numbers(rank)
        with compiling("0/0", ["other.weight"]):
            return barrier(rank)

    text = error_of_all(measured(program, 100))
    assert "rank 0 is at free memory, but rank 50 at a barrier" in text
    assert "Only rank 50 reads other.weight (module other) in graph 0/0." in text


LARGE, SMALL = (
    {"memory_budget": (text, text), "host_memory": ("not given", "None")}
    for text in ("2MiB", "1MiB")
)
OPTIONS_DIFFER = (
    "ranks compile with different options: memory_budget is 2MiB on rank 0 and 1MiB on rank 50; "
    "give all ranks the same."
)


def _compiles(rank, *, votes, params=("a.weight",)):
    """Ranks 50 and later have another budget."""
    options = LARGE if rank < 50 else SMALL
    with compiling("0/0", params, compared=options):
        compare_options([GROUP], "0/0", options, votes=votes)
        return exchange(GROUP, "free memory", rank, LIMIT_S, merge=min)


def test_ranks_compare_options_once():
    def program(rank):
        for _ in range(3):
            compare_options([GROUP], "0/0", LARGE, votes=True)
        return merges_numbers(rank)

    assert set(measured(program, 100).outcomes) == {10**10 - 99}


def test_options_that_differ_are_named_before_ranks_plan():
    found = measured(lambda rank: _compiles(rank, votes=True), 100)
    assert error_of_all(found) == OPTIONS_DIFFER


@pytest.mark.parametrize("first_votes", [True, False])
def test_ranks_of_which_some_have_no_budget_hear_of_it_in_their_next_vote(first_votes):
    found = measured(lambda rank: _compiles(rank, votes=(rank < 50) == first_votes), 100)
    assert error_of_all(found) == OPTIONS_DIFFER


def test_ranks_that_compile_other_graphs_hear_of_that_first():
    def program(rank):
        return _compiles(rank, votes=rank < 50, params=("a.weight", "b.weight")[: 1 + rank // 50])

    text = error_of_all(measured(program, 100))
    assert text.startswith("on group '0', rank 0 is at comparing options, but rank 50 at free mem")
    assert "Only rank 50 reads b.weight (module b) in graph 0/0." in text


def test_a_rank_that_has_compiled_without_a_vote_is_told_its_options():
    def program(rank):
        if rank < 50:
            return _compiles(rank, votes=True)
        compare_options([GROUP], "0/0", SMALL, votes=False)
        return barrier(rank)

    text = error_of_all(measured(program, 100))
    assert "rank 0 is at comparing options, but rank 50 at a barrier" in text
    assert f"In their last compiles, {OPTIONS_DIFFER}" in text


@pytest.mark.parametrize("absent", [[0], [31], [32], [33], [99], [0, 32, 40], list(range(20, 100))])
def test_missing_ranks_are_named_on_all_others_in_time(absent):
    found = measured(barrier, 100, absent=absent)
    text = error_of_all(found, absent)
    named = ", ".join(map(str, absent[:16])) + (", ..." if len(absent) > 16 else "")
    assert text.startswith(f"rank {named} of group '0' did not reach a barrier within 10 s")
    assert f"Rank {absent[0]} " in text
    assert found.elapsed_s < LIMIT_S + 10


def test_a_missing_rank_of_a_thousand_is_searched_for_by_one():
    found = measured(barrier, MANY, absent=[900])
    assert error_of_all(found, [900]).startswith("rank 900 of group '0' did not reach a barrier")
    trips = sorted(each.round_trips for each in found.traffic)
    assert trips[-2] <= 2 * trips[MANY // 2]
    assert trips[-1] <= 3 * trips[MANY // 2]


def test_the_last_rank_may_come_late_and_the_first_even_later():
    late_s = {0: LIMIT_S + 2, 99: LIMIT_S - 1}
    found = measured(barrier, 100, late_s=lambda rank: late_s.get(rank, 3.0))
    assert set(found.outcomes) == {None}


def test_a_failed_rank_is_heard_of_within_a_second():
    found = measured(rank_3_fails, MANY, late_s=lambda rank: 5.0 * (rank == 3))
    assert isinstance(found.outcomes[3], ValueError)
    assert "rank 3 failed while compiling graph 0/0: ValueError: told to fail" in error_of_all(
        found, [3]
    )
    assert found.elapsed_s < 6.0


def test_votes_meet_again_after_a_failure_that_one_rank_caught():
    def program(rank):
        if rank == 3:
            report_failure([GROUP], ValueError("told to fail"), "compiling graph 0/0")
        return merges_numbers(rank)

    found = measured(program, 100, late_s=lambda rank: 5.0 * (rank == 3))
    assert set(found.outcomes) == {10**10 - 99}


def test_notes_of_a_rank_that_differ_are_an_error_on_all():
    def program(rank):
        try:
            compare_shard_calls(mesh(8 if rank != 70 else 4), {})
        except AgreementError as error:
            return str(error)
        barrier(rank)
        return None

    found = measured(program, 100).outcomes
    assert "ranks shard differently over group '0'" in found[70]
    assert {str(each) for each in found} == {found[70]}
