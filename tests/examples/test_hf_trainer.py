"""Tests of the example with Hugging Face's Trainer: it resumes, and trains like without zpasses."""

import json

import pytest

from tests.examples.resumable import EXAMPLES, kill_example, run_example, unsharded

pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.0")

PROGRAM = EXAMPLES / "hf_trainer.py"
TINY = ("--codegen", "eager", "--width", 32, "--layers", 1, "--steps", 5, "--save-steps", 2)
KILL = """
import transformers
class Kill(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == step:
            kill()
transformers.trainer.DEFAULT_CALLBACKS.append(Kill)
"""
pytestmark = pytest.mark.processes


def _losses(folder):
    state = json.loads((folder / "checkpoint-5" / "trainer_state.json").read_text())
    return [entry[name] for entry in state["log_history"] for name in ("loss",) if name in entry]


QUICK = "test_checkpoints_resume_on_another_number_of_ranks"


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
    assert _losses(killed) == _losses(whole)
    assert len(_losses(whole)) == 5


@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize("flags", [(), ("--lora",)])
def test_trains_like_the_script_without_zpasses(tmp_path, flags):
    run_example(PROGRAM, *TINY, *flags, "--out", tmp_path / "ours")
    plain, lines = unsharded(PROGRAM, tmp_path)
    plain.write_text(plain.read_text().replace("last_checkpoint(options.out)", "None"))
    assert lines <= 10
    run_example(plain, *TINY[2:], *flags, "--out", tmp_path / "plain")
    assert _losses(tmp_path / "ours") == pytest.approx(_losses(tmp_path / "plain"), rel=1e-6)
