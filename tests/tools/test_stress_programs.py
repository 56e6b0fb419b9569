"""Tests of the suite `programs` of `python -m zpasses.tools.stress`."""

import dataclasses
import functools
from collections import defaultdict
from unittest import mock

import pytest
import torch

import zpasses
from tests.tools.stressing import stress
from zpasses.option_values import field_types
from zpasses.pipeline.options import Options
from zpasses.testing.ranks import Outcome
from zpasses.tools.stress import compared_programs
from zpasses.tools.stress.compared_programs import RankReport, run_program
from zpasses.tools.stress.drawn_models import BLOCKS
from zpasses.tools.stress.drawn_programs import (
    OPTIMIZERS,
    OPTIONS_NOT_DRAWN,
    draw,
)
from zpasses.tools.stress.training_actions import ACTIONS, EDITS


# --- drawing --------------------------------------------------------------------------------------
def test_seed_determines_the_program_and_its_listing():
    assert draw(3) == draw(3) != draw(4)
    assert str(draw(3)) == str(draw(3)) != str(draw(4))


@pytest.mark.slow(quick="test_programs_are_equal_or_refused")
def test_everything_is_drawn():
    seen = defaultdict(set)
    for program in map(draw, range(1500)):
        for name, value in program.options.items():
            seen[name].add(str(value))
        seen["optimizer"].add(program.optimizer[0])
        seen["block"] |= {*program.model.blocks}
        shard = program.shard.get("param_dtype"), program.shard.get("reduce_dtype")
        seen["bfloat16"].add((program.dtype, *shard, program.autocast))
        seen["offloads"].add((program.offloads or {}).get("device_bytes"))
        seen["rests"].add(program.rests and program.rests.get("trained", False))
        for action in program.actions:
            seen["action"].add(action.name)
            seen["edit"].add(action.arguments.get("way"))
    assert seen["optimizer"] == {name for name, _ in OPTIMIZERS}
    assert seen["block"] == {*BLOCKS}
    low, full = torch.bfloat16, torch.float32
    for reduced in (None, full):
        assert seen["bfloat16"] >= {
            (low, None, reduced, False),
            (full, low, reduced, False),
            (full, None, reduced, True),
        }
    assert seen["offloads"] == {None, "0B", "512B", "2KiB", "auto"}
    assert seen["rests"] == {None, False, True}
    assert seen["action"] == {*ACTIONS}
    assert seen["edit"] >= {*EDITS}
    for option in field_types(Options):
        assert (option in OPTIONS_NOT_DRAWN) != bool(seen[option] - {"eager", "30.0"}), option


def test_programs_in_bfloat16_have_twins_in_stage_1_and_round_after_each_operator():
    programs = [each for each in map(draw, range(200)) if each.rounds]
    twins = [(each, twin) for each in programs if (twin := each.twin()) is not None]
    stages = {tuple(each.options.get("zero_stage") for each in both) for both in twins}
    assert stages == {(None, None), (1, 1), (2, 1), (3, 1)}
    for each, twin in twins:
        Options.parse(twin.options)
        assert not {"memory_budget", "host_memory"} & {*twin.options}
        assert (twin.offloads, twin.rests, twin.actions) == (None, None, each.actions)
        assert "inductor" not in each.options
    for each in programs[:20]:
        options = draw(each.seed, "inductor").options
        assert options["inductor"] == {"emulate_precision_casts": True}


def test_drawn_options_are_valid():
    for program in map(draw, range(300)):
        Options.parse(program.options)


# --- judging --------------------------------------------------------------------------------------
EQUAL = RankReport()
REFUSED = RankReport(error="ShardingError: 'a' has 3 rows (rank 0). Do b", own=True, at="step()")


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ((EQUAL, EQUAL), "equal"),
        ((REFUSED, REFUSED), "refused"),
        ((REFUSED, EQUAL), "crash"),
        ((REFUSED, RankReport(error="RuntimeError: no")), "crash"),
        ((EQUAL, RankReport(wrong="step(): differs")), "wrong"),
        ((REFUSED, RankReport(wrong="step(): differs")), "wrong"),
        ((EQUAL, None), "hang"),
    ],
)
def test_outcome_of_two_ranks(reports, expected):
    outcomes = [
        Outcome(rank) if each is None else Outcome(rank, result=each, reported=True)
        for rank, each in enumerate(reports)
    ]
    assert compared_programs._judge(outcomes)[0] == expected


def test_kinds_of_refusals_are_listed(monkeypatch):
    outcomes = [Outcome(rank, result=REFUSED, reported=True) for rank in range(2)]
    monkeypatch.setattr(compared_programs, "call_on_ranks", lambda *_, **__: outcomes)
    monkeypatch.setattr(compared_programs, "close_pools", lambda: None)
    done = stress("programs", "--count", "3", "--seed", "5")
    assert done.exit_code == 0
    assert "3 refused by programs: ShardingError: * has * rows *. Do b" in done.stdout
    assert "seeds 5, 6, 7" in done.stdout


def test_drawn_options_that_are_not_valid_are_a_failure(monkeypatch):
    invalid = dataclasses.replace(draw(3), options={"prefetch": -1})
    monkeypatch.setattr(compared_programs, "draw", lambda *_: invalid)
    done = stress("--only", "programs:3")
    assert done.exit_code == 1
    assert "the drawn options are not valid: prefetch=-1" in done.stdout


# --- on ranks -------------------------------------------------------------------------------------
ON_HOST = 218
"""A program whose activations, parameters and states rest on the host."""


FROZEN_ON_HOST = 166
"""A program whose frozen parameters rest on the host, and which asks twice how many states do."""


def test_programs_that_offload_are_drawn():
    program = draw(ON_HOST)
    assert "host_memory" in program.options
    assert program.rests == {"trained": True, "device_bytes": "128B"}
    assert program.offloads is not None
    program = draw(FROZEN_ON_HOST)
    assert program.rests == {"device_bytes": "0B"}
    assert (program.offloads or {})["device_bytes"] == "auto"
    assert "offload_again(device_bytes='0B')" in map(str, program.actions)


@pytest.mark.processes
@pytest.mark.parametrize("seed", [ON_HOST, FROZEN_ON_HOST])
def test_programs_are_equal_or_refused(seed):
    done = stress("programs", "--count", "1", "--seed", str(seed))
    assert done.exit_code == 0, done.output
    assert "refused by" not in done.stdout


@pytest.mark.slow(quick="test_programs_are_equal_or_refused")
@pytest.mark.processes
@pytest.mark.inductor
@pytest.mark.parametrize("seed", [20, 21, ON_HOST, FROZEN_ON_HOST])
def test_programs_with_code_from_inductor(seed):
    done = stress("programs", "--count", "1", "--seed", str(seed), "--codegen", "inductor")
    assert done.exit_code == 0, done.output


def _without_averages(program):
    shard = functools.partial(zpasses.shard, grad_divide_factor=1.0)
    with mock.patch.object(zpasses, "shard", shard):
        return run_program(program)


@pytest.mark.processes
@pytest.mark.slow(quick="test_a_wrong_pass_is_found_with_the_command_that_repeats_it")
def test_a_wrong_average_is_found_and_its_listing_runs_again(monkeypatch):
    monkeypatch.setattr(compared_programs, "run_program", _without_averages)
    seed = next(
        seed
        for seed in range(100)
        if "grad_divide_factor" not in draw(seed).shard and draw(seed).how == "parts"
    )
    done = stress("--only", f"programs:{seed}")
    assert done.exit_code == 1
    assert f"wrong: programs:{seed}" in done.stdout
    assert "gradient of" in done.stdout
    assert str(draw(seed)).splitlines()[-1] in done.stdout
    assert f"--only programs:{seed}" in done.stdout
