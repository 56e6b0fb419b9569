"""Tests of the suites `faults` and `caches` of `python -m zpasses.tools.stress`."""

import dataclasses
import json

import pytest

from tests.tools.stressing import stress
from zpasses.testing.ranks import Outcome
from zpasses.tools.stress import caches, faults
from zpasses.tools.stress.caches import CacheResult
from zpasses.tools.stress.cases import StressConfig
from zpasses.tools.stress.faults import COMPILE_PLACES, ENDINGS, PLACES, RankResult

AT = 1000.0
"""When the fault of the made-up results happens."""


def drawn(kind, rank=1, **wanted):
    """The first program with this fault."""
    programs = (faults.draw(seed, (2,), 5.0) for seed in range(10_000))
    return next(
        each
        for each in programs
        if (each.fault.kind, each.fault.rank) == (kind, rank)
        and each.window
        and all(getattr(each.fault, name) == value for name, value in wanted.items())
    )


def survivor(program, **result):
    given = {"error": "", "right": True, "steps": program.steps, "at": AT + 1, **result}
    return Outcome(0, result=RankResult(**given), reported=True)


# --- faults ---------------------------------------------------------------------------------------
def test_seed_determines_the_program_and_all_kinds_and_places_are_drawn():
    programs = [faults.draw(seed, (2, 3), 5.0) for seed in range(2000)]
    assert programs == [faults.draw(seed, (2, 3), 5.0) for seed in range(2000)]
    kinds = {each.fault.kind for each in programs}
    assert kinds > {*ENDINGS, "reads another layer", "another batch size"}
    assert {each.fault.place for each in programs} == {"", *PLACES}
    assert {each.ranks for each in programs} == {2, 3}
    assert {each.stage for each in programs} == {1, 2, 3}
    assert all(each.fault.step == 0 for each in programs if each.fault.place in COMPILE_PLACES)


@pytest.mark.parametrize(
    ("kind", "result", "expected"),
    [
        ("kill", {}, "equal"),
        ("kill", {"right": False}, "wrong"),
        ("kill", {"error": "AgreementError: Rank 1 is dead"}, "refused"),
        ("kill", {"error": "AgreementError: somebody is dead"}, "crash"),
        ("kill", {"error": "AgreementError: rank 1", "at": AT + 16}, "hang"),
        ("reads another layer", {}, "equal"),
        ("reads another layer", {"right": False}, "wrong"),
        ("reads another layer", {"error": "AgreementError: rank 1 reads c"}, "refused"),
        ("another batch size", {}, "equal"),
        ("another batch size", {"error": "AgreementError: rank 1"}, "wrong"),
        ("ends after fewer steps", {"right": False}, "wrong"),
    ],
)
def test_outcome_of_a_rank_that_is_not_at_fault(kind, result, expected):
    program = drawn(kind)
    assert faults._judge(program, survivor(program, **result), AT)[0] == expected


def test_ranks_that_do_not_answer_hang_or_crash():
    program = drawn("kill")
    assert faults._judge(program, Outcome(0), AT)[0] == "hang"
    assert faults._judge(program, Outcome(0, exit_code=-11), AT)[0] == "crash"


def test_rank_at_fault_may_end_early_with_the_right_numbers():
    program = drawn("ends after fewer steps", rank=0)
    outcome = survivor(program, steps=program.fault.step)
    assert faults._judge(program, outcome, AT)[0] == "equal"
    outcome = survivor(program, steps=program.fault.step, right=False)
    assert faults._judge(program, outcome, AT)[0] == "wrong"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "place", "outcome"),
    [
        pytest.param(
            "raise and exit", "before forward", "refused", marks=pytest.mark.slow(quick="sleep")
        ),
        ("sleep within the limit", "before backward", "equal"),
    ],
)
@pytest.mark.slow(quick="the other tests of test_stress_ranks.py")
def test_real_ranks(kind, place, outcome, tmp_path):
    program = drawn(kind, place=place)
    assert program.window or outcome == "equal"  # a window reports the exception at once
    seed = next(n for n in range(10_000) if faults.draw(n, (2,), 5.0) == program)
    options = ["--ranks", "2", "--vote-limit", "5", "--jobs", "1", "--json", str(tmp_path / "f")]
    done = stress("--only", f"faults:{seed}", *options)
    assert done.exit_code == 0, done.output
    (result,) = json.loads((tmp_path / "f").read_text())["results"]
    assert (result["kind"], result["outcome"]) == (kind, outcome)


# --- caches ---------------------------------------------------------------------------------------
RESULT = CacheResult((1.0,), (1.0,), {"all_reduce_": 2})


@pytest.mark.parametrize(
    ("warm", "outcome"),
    [
        ([RESULT, RESULT], "equal"),
        ([RESULT, dataclasses.replace(RESULT, losses=(1.5,))], "wrong"),
        ([RESULT, dataclasses.replace(RESULT, ran={"all_reduce_": 3})], "wrong"),
        ("rank 1 died", "crash"),
    ],
)
def test_warm_runs_are_compared_with_cold_ones(monkeypatch, tmp_path, warm, outcome):
    def train(choice, folder, limit_s):
        return warm if folder.name == "warm" else [RESULT, RESULT]

    monkeypatch.setattr(caches, "_train", train)
    (result,) = caches.run([7], StressConfig(tmp_path))
    assert result.outcome == outcome


@pytest.mark.slow(quick="tests/zpasses/backend/test_warm_cache.py")
@pytest.mark.processes
@pytest.mark.inductor
def test_real_caches():
    done = stress("caches", "--count", "1")
    assert done.exit_code == 0, done.output
