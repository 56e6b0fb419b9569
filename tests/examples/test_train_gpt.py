"""Tests of the training example as a user runs it: real processes, a tiny model, eager codegen."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import zpasses.inspect
from tests.programs import forked_or_started, run_program
from zpasses import Pipeline
from zpasses.tools.cli.main import cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SIZES = {"steps": 2, "layers": 1, "width": 32, "heads": 2, "seq": 16, "batch": 4, "timeout": 60}
TINY = ["--codegen", "eager", *(f"--{name}={value}" for name, value in SIZES.items())]


def run(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {key: value for key, value in os.environ.items() if key not in ranks}
    env = {**clean, "OMP_NUM_THREADS": "1", **(env or {})}
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=900, env=env)


def train(
    out: Path, *options: object, forked: bool = True
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Train on two ranks: forks without the launcher, or the command of a user, which takes longer.

    Returns the result of rank 0, or of the command, and the JSON file.
    """
    command = (EXAMPLE, *TINY, "--json", out, *options)
    done = run_program(*command, ranks=2)[0] if forked else run(*command, "--ranks", 2)
    return done, json.loads(out.read_text()) if out.exists() else {}


@pytest.mark.processes
@forked_or_started
def test_sharded_training_equals_unsharded(tmp_path: Path, forked: bool) -> None:
    options = ("--zero-stage", 3, "--steps", 4)
    done, result = train(tmp_path / "out.json", *options, forked=forked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["largest_difference"] <= 1e-5
    assert result["losses"] == pytest.approx(result["reference"]["losses"], abs=1e-5)
    assert result["losses"][-1] < result["losses"][0]
    assert "The curves differ by at most" in done.stdout


@pytest.mark.processes
@pytest.mark.slow(quick="test_sharded_training_equals_unsharded")
def test_report_is_complete_and_counts_what_ran(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    done, result = train(
        tmp_path / "out.json", "--no-compare", "--steps", 3, "--dump", dump, "--pipeline", PIPELINE
    )
    assert done.returncode == 0, done.stdout
    check_dump(dump, done.stdout)
    assert result["options"]["ranks"] == 2
    assert result["tokens_per_s"] > 0
    assert result["compile_s"] > 0
    assert len(result["usage"]) == 2
    parameters = 256 * 32 * 2 + 16 * 32 + 12 * 32 * 32 + 3 * 32
    for usage in result["usage"]:
        # shards and two AdamW moments
        assert usage["resting_bytes"] == pytest.approx(3 * 4 * parameters / 2, rel=0.01)
        assert usage["peak_bytes"] > 0
        planned = sum(each["calls"] for each in result["collectives"])
        assert sum(usage["counted"].values()) == planned + 1  # and the norm of the gradient
    gathers = [each for each in result["collectives"] if "all_gather" in each["op"]]
    gathered = sum(each["calls"] * each["nbytes"] for each in gathers)
    # in forward, and most again in backward
    assert parameters * 4 / 2 <= gathered <= 2 * parameters * 4 / 2
    for heading in ("tokens/s", "peak of a step", "all_gather_into_tensor", "together"):
        assert heading in done.stdout


PIPELINE = "merge-reads,gather-params,reduce-grads,reshard-after-forward,schedule{plan=one-ahead,cap_mb=1},defer-reduction"  # noqa: E501


def check_dump(dump: Path, said: str) -> None:
    """The dump holds the passes of the pipeline, the page exists, and the commands of
    docs/inspecting.md run on it.
    """
    opened = zpasses.inspect.open(dump)
    assert sorted(opened.dump.ranks) == [0]
    assert opened.dump.ranks[0].compiles[0].info.pipeline == str(Pipeline.parse(PIPELINE))
    assert f"is in {dump / 'report.html'}" in said
    assert (dump / "report.html").read_text().startswith("<!doctype html>")
    text = (EXAMPLE.parents[1] / "docs" / "inspecting.md").read_text()
    commands = [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if re.match(r"zpasses .*build/(demo|plain)\b", line)  # the others need no such dump
        and " fr/" not in line  # files that only NCCL writes
    ]
    assert len(commands) > 10
    for command in commands:
        words = shlex.split(
            re.sub(r"build/(demo|plain)\b", str(dump), command).replace(
                "build/", f"{dump.parent}/"
            ),
            comments=True,
        )
        ran = CliRunner().invoke(cli, words[1:])
        assert ran.exit_code == (1 if "--pass" in words else 0), (command, ran.output)


@pytest.mark.slow(quick="test_sharded_training_equals_unsharded")
@pytest.mark.processes
def test_tied_head_and_bfloat16_compute_agree_within_their_rounding(tmp_path: Path) -> None:
    done, result = train(tmp_path / "out.json", "--tied", "--param-dtype", "bfloat16", "--batch", 6)
    assert done.returncode == 0, done.stdout
    assert result["tolerance"] == pytest.approx(5e-2)
    assert result["largest_difference"] <= 1e-2


@pytest.mark.slow(quick="test_sharded_training_equals_unsharded")
@pytest.mark.processes
def test_different_training_fails_the_comparison(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    (done,) = run_program(EXAMPLE, *TINY, "--json", out, "--reference-seed", 1, ranks=1)
    result = json.loads(out.read_text())
    assert done.returncode == 3
    assert "They are not the same training." in done.stdout
    assert result["largest_difference"] > result["tolerance"]


@pytest.mark.processes
@forked_or_started
def test_text_file_under_plain_torchrun(tmp_path: Path, forked: bool) -> None:
    text = tmp_path / "a text.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 20)
    command = (EXAMPLE, *TINY, "--no-compare", "--text", text)
    done = run_program(*command, ranks=2, forked=forked)[0]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "880 bytes of text, 2 ranks on cpu" in done.stdout


@pytest.mark.slow(quick="test_failing_rank_is_shown_and_waiting_ranks_are_killed")
@pytest.mark.processes
def test_failing_rank_ends_the_run(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(
        textwrap.dedent(f"""
            import os, sys
            sys.path.insert(0, {str(EXAMPLE.parent)!r})
            import train_gpt

            if os.environ.get("RANK") == "1":
                def draw(self, *_):
                    raise RuntimeError("no such batch")
                train_gpt.Batches.__call__ = draw
            train_gpt.__file__ = __file__
            sys.exit(train_gpt.main())
        """)
    )
    done = run(program, *TINY, "--ranks", 2)
    assert done.returncode == 1
    assert "RuntimeError: no such batch" in done.stderr
    assert "rank 1 failed first, with exit status 1; the others were stopped." in done.stderr


REFUSED = {
    "--width 30 --heads 4": "--width 30 is not divisible by --heads 4; use --width 28 or 32.",
    "--steps 0": "--steps 0; expected 1 or more.",
    "--lr nan": "--lr nan; expected a number above 0.",
    "--ranks 8 --batch 4": "--batch 4 is not divisible by the number of ranks, 8; use --batch 8.",
    "--text missing.txt": "--text missing.txt: there is no such file.",
    "--seq 9999999": "--seq 9999999 needs 10000000 or more. Use a longer text or a smaller --seq.",
    "--json missing/out.json": "there is no folder missing to write it to.",
    "--zero-stage 4": "invalid choice: 4",
}


def test_bad_options_are_refused_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    import train_gpt

    monkeypatch.setattr(train_gpt, "launch", lambda args: pytest.fail("started processes"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for options, message in REFUSED.items():
        monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options.split()])
        with pytest.raises(SystemExit) as stop:
            train_gpt.main()
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        train_gpt.parse_args(["--ranks", "2"])
    said = "--ranks 2, but torchrun started 4; leave --ranks out under torchrun."
    assert said in capsys.readouterr().err
