"""Tests of the MI300X example, as far as it runs without an MI300X."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fake_mori import installed
from tests.programs import run_program
from zpasses.testing import run_on_ranks

FOLDER = Path(__file__).parents[2] / "examples" / "sdma_mi300"


def test_the_dry_run_says_which_gathers_would_be_swapped_and_what_that_gains():
    program = FOLDER / "dry_run.py"
    (done,) = run_program(program, "--model", "gpt-7b", "--layers", "1", "--gathers")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "literature, uncalibrated" in done.stdout
    assert ": by mori: " in done.stdout
    assert ": not by mori: " in done.stdout
    assert done.stdout.count("predicted gain") == 3  # at three speeds
    assert "reported" not in done.stdout  # one layer is not the model that was measured


def trained():
    sys.path.insert(0, str(FOLDER))
    try:
        example, model = runpy.run_path(str(FOLDER / "train.py")), __import__("model")
    finally:
        sys.path.remove(str(FOLDER))
    losses = []
    try:
        shape = model.Shape(1, 32, 4, 2, 64, 50, 12, gated=True, head_width=8)
        for target in ("mi300x", "mi300x,launch_us=0.01,hop_us=0.01,link_gb_s=0.001"):
            os.environ["ZPASSES_TARGET"] = target
            torch._dynamo.reset()
            with installed() as fake:
                losses.append(
                    example["train"](shape, "zero3", 3, torch.device("cpu"), codegen="eager")[0]
                )
                assert bool(fake.calls) == ("," in target)
    finally:
        del os.environ["ZPASSES_TARGET"]
    return losses


@pytest.mark.slow(quick="test_swapped_training_equals_the_functional_one_bit_for_bit")
@pytest.mark.processes
def test_model_trains_identically_with_and_without_the_swap():
    for plain, replaced in run_on_ranks(trained):
        assert len(plain) == 3
        assert plain == replaced


def test_the_script_is_a_shell_script():
    assert subprocess.run(["sh", "-n", str(FOLDER / "run.sh")], check=False).returncode == 0
