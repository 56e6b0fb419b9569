"""Tests of captures for other world sizes and targets, from Python and as a command."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.programs import forked_or_started, run_program
from zpasses.dumps import read
from zpasses.errors import OptionError, PassError
from zpasses.tools.capture.run import CaptureError, CaptureRequest, load, run_capture

HERE = "tests.tools.test_capture"
ROOT = Path(__file__).parents[2]


def huge(width=1 << 16, layers=2):
    """A model with gigabytes of parameters."""
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]), (
        torch.ones(4, width),
    )


def with_loss():
    return nn.Linear(6, 5), {"input": torch.ones(2, 6)}, lambda out: out.square().mean()


def without_gradient():
    return nn.Linear(2, 2), torch.ones(1, 2), lambda out: out.detach()


def returns_int():
    return 3


def raises_key_error():
    raise KeyError("nothing here")


def test_a_huge_model_is_captured_for_another_world_size_and_target(tmp_path):
    options = {"zero_stage": 3, "target": "mi300x"}
    report = run_capture(
        CaptureRequest(
            f"{HERE}:huge",
            tmp_path,
            world=512,
            ranks=(0, 511),
            arguments={"layers": 3},
            options=options,
        )
    )
    dump = read(tmp_path)
    assert list(dump.ranks) == [0, 511]
    (compiled,) = dump.ranks[511].compiles
    assert (compiled.info.world, compiled.info.target["name"], compiled.info.codegen) == (
        512,
        "mi300x",
        "eager",
    )
    assert compiled.info.parameters["2.weight"].nbytes == 4 << 32
    assert compiled.info.parameters["2.weight"].shard_bytes == 4 << 23
    gathers = [node for node in compiled.graphs["forward"].last.snapshot.nodes if node.collective]
    assert [node.collective.ranks for node in gathers] == [512] * 3
    assert compiled.graphs["backward"].last.snapshot.peak_bytes > 16 << 30
    assert set(report.seconds) == {"build", "shard", "step"}
    assert report.peak_rss_bytes < 4 << 30


def test_loss_dtypes_and_pipeline_are_applied(tmp_path):
    shard = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    options = {"pipeline": "gather-params"}
    run_capture(
        CaptureRequest(f"{HERE}:with_loss", tmp_path / "a", world=4, shard=shard, options=options)
    )
    (compiled,) = read(tmp_path / "a").ranks[0].compiles
    gathers = [
        node
        for node in compiled.graphs["joint"].last.snapshot.nodes
        if node.collective and "gather" in node.collective.kind
    ]
    assert {value.dtype for node in gathers for value in node.vals} == {"bfloat16"}
    run_capture(
        CaptureRequest(f"{HERE}:with_loss", tmp_path / "b", world=4, options=options, train=False)
    )
    (compiled,) = read(tmp_path / "b").ranks[0].compiles
    assert list(compiled.graphs) == ["captured", "inference"]
    run_capture(CaptureRequest(f"{HERE}:with_loss", tmp_path / "c", world=4, options=options))
    (compiled,) = read(tmp_path / "c").ranks[0].compiles
    assert [step.after for step in compiled.graphs["joint"].steps] == [None, "gather-params"]
    assert any(
        node.target == "zpasses.reduce_grad.default"
        for node in compiled.graphs["backward"].last.snapshot.nodes
    )


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("huge", {}, "expected MODULE:FUNCTION"),
        ("no.such.module:f", {}, "no.such.module cannot be imported"),
        ("no_such_file.py:f", {}, "no file no_such_file.py"),
        (f"{HERE}:hug", {}, 'Did you mean "huge"'),
        (f"{HERE}:returns_int", {}, r"returned int; expected \(model, inputs\)"),
        (f"{HERE}:raises_key_error", {}, "raised KeyError: 'nothing here'"),
        (f"{HERE}:huge", {"arguments": {"wide": 3}}, r"--arg NAME=VALUE"),
        (f"{HERE}:without_gradient", {}, "requires a gradient"),
    ],
)
def test_functions_that_cannot_be_captured_are_refused(tmp_path, name, more, message):
    with pytest.raises(CaptureError, match=message):
        run_capture(CaptureRequest(name, tmp_path / "dump", **more))


def test_wrong_ranks_wrong_options_and_failing_passes_are_errors(tmp_path):
    with pytest.raises(OptionError, match="numbers from 0 to 7"):
        run_capture(CaptureRequest(f"{HERE}:huge", tmp_path / "a", ranks=(8,)))
    with pytest.raises(OptionError, match="mi300x"):
        run_capture(CaptureRequest(f"{HERE}:huge", tmp_path / "a", options={"target": "mi300"}))
    pipeline = "gather-params,flatten-on-device{group=nobody}"
    with pytest.raises(PassError, match="no process group"):
        run_capture(
            CaptureRequest(f"{HERE}:with_loss", tmp_path / "b", options={"pipeline": pipeline})
        )
    assert read(tmp_path / "b").ranks[0].compiles[0].info.state == "failed"


def test_a_file_can_import_its_neighbours(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "model_of_mine.py").write_text(
        "import beside\n\ndef build():\n    return beside.VALUE\n"
    )
    assert load(f"{tmp_path}/model_of_mine.py:build")() == 7


@forked_or_started
def test_the_example_is_captured_from_the_command_line(tmp_path, forked):
    small = [
        "layers=2",
        "hidden=32",
        "intermediate=48",
        "heads=4",
        "kv_heads=2",
        "vocab=64",
        "seq=8",
    ]
    arguments = [word for each in small for word in ("--arg", each)]
    command = [
        "-m",
        "zpasses",
        "capture",
        str(ROOT / "examples/capture_llama.py:llama"),
        *arguments,
    ]
    options = [
        "--world",
        "64",
        "--target",
        "mi300x",
        "--zero-stage",
        "3",
        "--blocks",
        "auto",
        "--no-train",
        "-o",
        str(tmp_path / "dump"),
    ]
    if forked:
        (done,) = run_program(*command, *options)
    else:
        done = subprocess.run(
            [sys.executable, *command, *options],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert f"zpasses html {tmp_path / 'dump'}" in done.stdout
    (compiled,) = read(tmp_path / "dump").ranks[0].compiles
    assert "model.layers.0.mlp.up_proj.weight" in compiled.info.parameters
    assert "inference.block_0" in compiled.graphs
