"""The examples with Trainer and Lightning resume after a kill, and train like without zpasses."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.programs import run_program

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers", minversion="5.0")

FOLDER = Path(__file__).parents[2] / "examples"
TINY = ("--codegen", "eager", "--width", 32, "--layers", 1, "--steps", 5, "--save-steps", 2)
VARIABLES = {"HF_HUB_OFFLINE": "1", "TORCHELASTIC_RUN_ID": "tests"}
QUICK = "test_lightning_trains_like_ddp_and_resumes_on_another_number_of_ranks"
pytestmark = [pytest.mark.processes, pytest.mark.slow(quick=QUICK)]

KILLER = """
import os, runpy, signal, sys

step, program = int(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]

def kill():
    os.kill(os.getpid(), signal.SIGKILL)
{install}
runpy.run_path(program, run_name="__main__")
"""


@dataclass(frozen=True)
class Example:
    name: str
    install: str
    """Lines of Python that call `kill()` after `step`."""

    @property
    def program(self):
        return FOLDER / self.name

    def run(self, *options, program=None):
        """Run in processes like those of torchrun."""
        given = (program or self.program, *map(str, options))
        runs = run_program(*given, ranks=2, variables=VARIABLES)
        assert [each.returncode for each in runs] == [0, 0], runs[0].stdout[-3000:]

    def losses(self, folder):
        """Number of a step -> its loss."""
        if self is TRAINER:
            state = json.loads((folder / "checkpoint-5" / "trainer_state.json").read_text())
            found = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
            return dict(enumerate(found))
        with open(folder / "log" / "metrics.csv") as file:
            return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


TRAINER = Example(
    "hf_trainer.py",
    """
import transformers
class Kill(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == step:
            kill()
transformers.trainer.DEFAULT_CALLBACKS.append(Kill)
""",
)
LIGHTNING = Example(
    "lightning_gpt.py",
    """
from lightning.pytorch.callbacks import ModelCheckpoint
original = ModelCheckpoint.on_train_batch_end
def on_train_batch_end(self, trainer, *args):
    original(self, trainer, *args)
    if trainer.global_step == step:
        kill()
ModelCheckpoint.on_train_batch_end = on_train_batch_end
""",
)


@pytest.mark.parametrize("example", [TRAINER, LIGHTNING], ids=["trainer", "lightning"])
def test_resumes_with_identical_losses_after_being_killed(tmp_path, example):
    """Before the first checkpoint, at one, and after one."""
    whole = tmp_path / "whole"
    example.run(*TINY, "--out", whole)
    expected = example.losses(whole)
    assert len(expected) == 5
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER.format(install=example.install))
    for step in (1, 2, 3):
        killed = tmp_path / f"killed {step}"
        given = (killer, step, example.program, *TINY, "--out", killed)
        runs = run_program(*given, ranks=2, variables=VARIABLES)
        assert [each.returncode for each in runs] == [-9, -9], runs[0].stdout[-3000:]
        example.run(*TINY, "--out", killed)
        losses = example.losses(killed)
        first = step // 2 * 2 if example is LIGHTNING else 0  # Trainer's checkpoint has the others
        assert list(losses) == list(range(first, 5))
        assert losses == {number: expected[number] for number in losses}


@pytest.mark.parametrize(
    ("example", "flags"), [(TRAINER, ()), (TRAINER, ("--lora",)), (LIGHTNING, ())]
)
def test_trains_like_the_script_without_zpasses(tmp_path, example, flags):
    example.run(*TINY, *flags, "--out", tmp_path / "ours")
    lines = example.program.read_text().split("\n")
    kept = [line for line in lines if not line.endswith("# zpasses")]
    assert len(lines) - len(kept) <= 10
    plain = tmp_path / f"plain_{example.name}"
    plain.write_text("\n".join(kept).replace("last_checkpoint(options.out)", "None"))
    example.run(*TINY[2:], *flags, "--out", tmp_path / "plain", program=plain)
    ours, theirs = (example.losses(tmp_path / each) for each in ("ours", "plain"))
    assert ours == pytest.approx(theirs, rel=1e-6)
