"""Tests of the calibration: the fit, the file, and the command."""

import json

import pytest
import torch
import torch.distributed as dist

from tests import fake_zero_sm
from tests.fake_mori import Settings, installed
from tests.programs import forked_or_started, run_program
from zpasses.cost.time.route_figures import calibrated_figures, route_figures
from zpasses.cost.time.target import TARGETS
from zpasses.testing import run_on_ranks
from zpasses.tools.calibrate import Sample, _versions, fit, main, measure, write

MIB = 1 << 20


def sample(full_bytes, latency=50.0, gb_s=100.0, lost=0.0, slowed=1.0):
    """A sample. Compute slows the gather down by the factor `slowed`. The gather delays compute by
    `lost` times the gather's time.
    """
    gather_us = latency + full_bytes * 7 / 8 / (gb_s * 1e3)
    compute = (2 * gather_us, 2 * gather_us + lost * gather_us)
    beside = (gather_us / 2, gather_us / 2 + gather_us - gather_us / 2 / slowed)
    return Sample("mori", full_bytes, 8, gather_us, *compute, *beside)


def test_fit_recovers_the_figures_of_exact_times():
    figures = fit([sample(64 << 10 << shift, lost=0.2, slowed=1.5) for shift in range(0, 14, 2)])
    assert figures["latency_us"] == pytest.approx(50, rel=1e-3)
    assert figures["gb_s"] == pytest.approx(100, rel=1e-3)
    assert figures["compute_slowdown"] == pytest.approx(1 / 0.8, rel=1e-3)
    assert figures["collective_slowdown"] == pytest.approx(1.5, rel=1e-3)


def test_small_and_large_gathers_have_equal_weight():
    """An error of a tenth in one time must not change the latency much."""
    samples = [sample(64 << 10 << shift) for shift in range(0, 14, 2)]
    off = Sample("mori", samples[-1].full_bytes, 8, samples[-1].gather_us * 1.1, 0.0, 0.0, 1.0, 1.0)
    assert fit([*samples[:-1], off])["latency_us"] == pytest.approx(50, rel=0.1)


def test_slowdowns_are_at_least_one():
    assert sample(MIB, lost=-0.3).slowdown == 1
    assert sample(MIB, lost=5.0).slowdown == pytest.approx(10)
    assert sample(MIB, slowed=0.5).collective_slowdown == 1
    assert sample(MIB, slowed=50.0).collective_slowdown == pytest.approx(10)


def test_fit_needs_two_sizes():
    with pytest.raises(ValueError, match="got samples of 1 size; expected at least two"):
        fit([sample(MIB), sample(MIB)])


def test_machines_are_stored_by_architecture_and_versions(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    samples = [sample(MIB), sample(64 * MIB)]
    for machine in ("gfx942 1", "gfx950 1", "gfx942 2", "gfx942 2"):
        architecture, version = machine.split()
        write(path, samples, architecture, {"torch": version})
    content = json.loads(path.read_text())
    assert list(content["machines"]) == ["gfx942 torch=1", "gfx950 torch=1", "gfx942 torch=2"]
    assert len(content["machines"]["gfx942 torch=1"]["samples"]) == 2
    monkeypatch.setenv("ZPASSES_CALIBRATION", str(path))
    assert route_figures(TARGETS["mi300x"]).get("mori").gb_s == pytest.approx(100, rel=1e-3)
    assert route_figures(TARGETS["mi355x"]).get("mori").latency_us == pytest.approx(50, rel=1e-2)


def measured():
    group = dist.group.WORLD.group_name
    with installed(Settings(latency_s=0.02)):
        return measure(group, torch.device("cpu"), [64 << 10, 4 * MIB], repeat=2, matrix=64)


def test_figures_belong_to_the_versions_that_a_route_depends_on(monkeypatch):
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 30, 7))
    assert _versions(["c10d", "symm_mem"]) == {"torch": str(torch.__version__)}
    assert _versions(["c10d", "nccl_zero"])["nccl"] == "2.30.7"


def measured_with_nccl():
    with fake_zero_sm.installed():
        return measure("0", torch.device("cpu"), [64 << 10, 4 * MIB], repeat=1, matrix=64)


@pytest.mark.processes
def test_zero_sm_gathers_of_real_ranks_are_measured():
    first, _ = run_on_ranks(measured_with_nccl)
    found = {each.full_bytes for each in first if each.route == "nccl_zero"}
    assert found == {64 << 10, 4 * MIB}


@pytest.mark.processes
def test_every_route_of_real_ranks_is_measured():
    first, second = run_on_ranks(measured)
    assert first == second  # all ranks have the slowest rank's times
    assert [(each.route, each.full_bytes) for each in first] == [
        (route, size) for route in ("c10d", "mori") for size in (64 << 10, 4 * MIB)
    ]
    assert all(each.gather_us > 20_000 for each in first if each.route == "mori")
    assert all(
        each.gather_us > 0
        and each.compute_us > 0
        and each.overlapped_compute_us > 0
        and each.overlapped_gather_us > 0
        for each in first
    )


@pytest.mark.processes
@forked_or_started
def test_the_command_writes_a_file_that_the_cost_model_reads(tmp_path, forked):
    out = tmp_path / "c.json"
    size = ["--largest-mib", "1", "--repeat", "2", "--matrix", "64"]
    command = ["-m", "zpasses.tools.calibrate", "--out", str(out), *size]
    done = run_program(*command, ranks=2, forked=forked)[0]
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert set(calibrated_figures(out, "cpu")) == {"c10d"}
    assert '"gb_s"' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "torchrun --nproc-per-node 8"),
        (["--repeat", "0"], "--repeat: got 0; expected at least 1"),
        (["--largest-mib", "x"], "--largest-mib: got 'x' (str); expected int"),
    ],
)
def test_wrong_usage_is_refused_with_advice(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
