"""Tests of the example with Lightning: it resumes, and trains like without zpasses."""

import csv

import pytest

from tests.examples.resumable import EXAMPLES, kill_example, run_example, unsharded

pytest.importorskip("lightning")

PROGRAM = EXAMPLES / "lightning_gpt.py"
TINY = ("--codegen", "eager", "--width", 32, "--layers", 1, "--steps", 5, "--save-steps", 2)
KILL = """
from lightning.pytorch.callbacks import ModelCheckpoint
original = ModelCheckpoint.on_train_batch_end
def on_train_batch_end(self, trainer, *args):
    original(self, trainer, *args)
    if trainer.global_step == step:
        kill()
ModelCheckpoint.on_train_batch_end = on_train_batch_end
"""
QUICK = "test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks"
pytestmark = pytest.mark.processes


def _losses(folder):
    with open(folder / "log" / "metrics.csv") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was not killed."""
    folder = tmp_path_factory.mktemp("whole")
    run_example(PROGRAM, *TINY, "--out", folder)
    return folder


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_resumes_with_identical_losses_after_being_killed(tmp_path, whole, step):
    killed = tmp_path / "killed"
    kill_example(tmp_path, KILL, step, PROGRAM, *TINY, "--out", killed)
    run_example(PROGRAM, *TINY, "--out", killed)
    expected, resumed = _losses(whole), _losses(killed)
    assert list(resumed) == list(range(step // 2 * 2, 5))
    assert resumed == {number: expected[number] for number in resumed}


@pytest.mark.slow(quick=QUICK)
def test_trains_like_the_script_without_zpasses(tmp_path):
    run_example(PROGRAM, *TINY, "--out", tmp_path / "ours")
    plain, lines = unsharded(PROGRAM, tmp_path)
    assert lines <= 10
    run_example(plain, *TINY[2:], "--out", tmp_path / "plain")
    assert _losses(tmp_path / "ours") == pytest.approx(_losses(tmp_path / "plain"), rel=1e-6)
