"""Tests of `python -m zpasses.tools.stress`: it finds what is broken, and says how to repeat it."""

import itertools
import json
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import fx

from tests.tools.stressing import stress
from zpasses.errors import OptionError
from zpasses.pipeline import pipeline as pipelines
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.testing import drawing
from zpasses.tools.stress import suites as stress_suites
from zpasses.tools.stress.cases import CaseResult, StressConfig
from zpasses.tools.stress.suites import SUITES, run_suites


# --- the command ----------------------------------------------------------------------------------
@dataclass
class Recorded:
    """A suite that reports one outcome per seed."""

    outcomes: tuple[str, ...] = ("equal",)
    config: StressConfig | None = None

    def __call__(self, seeds, config):
        self.config = config
        for seed in seeds:
            outcome = self.outcomes[seed % len(self.outcomes)]
            yield CaseResult("mine", f"kind {seed % 2}", seed, outcome, f"case {seed}", 0.5)


@pytest.fixture
def mine(monkeypatch):
    suite = Recorded()
    monkeypatch.setitem(SUITES, "mine", suite)
    return suite


def test_table_counts_outcomes_per_kind(mine):
    mine.outcomes = ("equal", "refused")
    done = stress("mine", "--count", "5", "--seed", "10")
    assert done.exit_code == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["mine", "kind", "0", "3", "3", "0.50", "s", "(10)"] in rows
    assert ["mine", "kind", "1", "2", "2", "0.50", "s", "(11)"] in rows


@pytest.mark.parametrize("outcome", ["wrong", "hang", "crash"])
def test_bad_cases_fail_and_name_the_command_that_repeats_them(mine, outcome):
    mine.outcomes = ("equal", outcome)
    done = stress("mine", "--count", "2")
    assert done.exit_code == 1
    assert "repeat it: python -m zpasses.tools.stress --only mine:1" in done.stdout
    assert "mine:0" not in done.stdout
    assert stress("--only", "mine:1").exit_code == 1
    assert stress("--only", "mine:0", "--only", "mine:2").exit_code == 0


def test_options_reach_the_suite_and_the_file(mine, tmp_path):
    path = tmp_path / "results.json"
    given = ("--ranks", "4,5", "--case-limit", "7", "--json", str(path))
    done = stress("mine", "--count", "2", *given)
    assert done.exit_code == 0
    assert (mine.config.ranks, mine.config.case_limit_s) == ((4, 5), 7.0)
    assert [each["seed"] for each in json.loads(path.read_text())["results"]] == [0, 1]


def test_time_limit_ends_the_run_and_says_what_is_left(mine):
    done = stress("mine", "--count", "1000000", "--time-limit", "0.3")
    assert done.exit_code == 0
    assert "the time limit left out" in done.stdout


def test_time_limit_is_shared_by_the_suites(tmp_path, monkeypatch):
    clock = itertools.count()  # seconds; each look at it takes one
    monkeypatch.setattr(stress_suites.time, "monotonic", lambda: float(next(clock)))
    seeds = dict.fromkeys("ab", range(1000))
    suites = {"a": Recorded(), "b": Recorded()}
    report = run_suites(suites, seeds, StressConfig(tmp_path), 100)
    left = report.unfinished
    assert 940 < left["a"] < 960
    assert 940 < left["b"] < 960


def test_a_suite_that_raises_is_reported(monkeypatch):
    def broken(seeds, config):
        for seed in seeds:
            raise ValueError(f"no {seed}")
        yield

    monkeypatch.setitem(SUITES, "broken", broken)
    done = stress("broken")
    assert done.exit_code == 1
    assert "ValueError: no 0" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grafs"], 'Did you mean "graphs"?'),
        (["--only", "graphs"], "expected SUITE:SEED"),
        (["--only", "grafs:1"], 'Did you mean "graphs"?'),
        (["graphs", "--only", "graphs:1"], "omit the SUITE arguments"),
        (["--ranks", "two"], "--ranks: got 'two'"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    done = stress(*arguments)
    assert done.exit_code == 2
    assert message in done.output


# --- graphs ---------------------------------------------------------------------------------------
def test_pipelines_keep_results():
    done = stress("graphs", "--count", "4", "--seed", "8")
    assert done.exit_code == 0, done.output


def test_a_case_is_determined_by_its_seed():
    def details(*arguments):
        # It writes no files.
        return [each.detail for each in SUITES["graphs"](arguments, StressConfig(None))]

    assert details(9, 17)[-1] == details(17)[0]


@dataclass(frozen=True)
class Negate(Pass):
    """Negates the first output: a wrong pass that no static check can notice."""

    name: ClassVar[str] = "negate"
    level: ClassVar[Level] = Level.JOINT

    def rewrite(self, graph: fx.Graph) -> int:
        output = graph.output_node()
        first = output.args[0][0]
        with graph.inserting_before(output):
            wrong = graph.call_function(torch.ops.aten.neg.default, (first,))
        wrong.meta = dict(first.meta)
        output.args = ([wrong, *output.args[0][1:]],)
        return 1


def install(monkeypatch, kind):
    known = {**pipelines.catalogue(), kind.name: kind}
    for module in (pipelines, drawing):
        monkeypatch.setattr(module, "catalogue", lambda: known)


def test_a_wrong_pass_is_found_with_the_command_that_repeats_it(monkeypatch):
    install(monkeypatch, Negate)
    done = stress("graphs", "--count", "8", "--seed", "8")
    assert done.exit_code == 1
    assert "'negate" in done.stdout or ",negate" in done.stdout
    assert "but the reference gives" in done.stdout
    assert "repeat it: python -m zpasses.tools.stress --only graphs:" in done.stdout
    seed = done.stdout.partition("--only graphs:")[2].split()[0]
    assert stress("--only", f"graphs:{seed}").exit_code


@dataclass(frozen=True)
class Refuses(Negate):
    """Has an option of which the generator draws a value that the pass refuses."""

    name: ClassVar[str] = "refuses"

    size: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        if self.size == 2:
            raise OptionError("size=2")


@pytest.mark.slow(quick="test_a_wrong_pass_is_found_with_the_command_that_repeats_it")
def test_a_drawn_pipeline_that_is_not_valid_is_a_failure(monkeypatch):
    install(monkeypatch, Refuses)
    done = stress("graphs", "--count", "8", "--seed", "8")
    assert done.exit_code == 1
    assert "the drawn pipeline is not valid: size=2" in done.stdout
