"""Tests of the benchmarks, as real processes on tiny models."""

import copy
import importlib.util
import json
import subprocess

import pytest
import torch
from torch import nn

from tests.programs import ForkedPython, forked_subprocess, start_python
from zpasses.errors import OptionError
from zpasses.tools.bench import predicted_schedules as schedule_suite
from zpasses.tools.bench.__main__ import SUITES, main
from zpasses.tools.bench.measure import ResidentMemory
from zpasses.tools.bench.model import Block, ModelSize, ParallelBlock, batches, build_model
from zpasses.tools.bench.peers import check_peers
from zpasses.tools.bench.predicted_schedules import ScheduleConfig, ScheduleReport, schedule_table
from zpasses.tools.bench.schedule_models import ModelShape
from zpasses.tools.bench.train import PeerResult, TrainConfig, TrainReport, _difference, _relate

SIZES = {"width": 32, "layers": 1, "heads": 2, "seq": 16, "batch": 1, "steps": 2, "warmup": 1}
TINY = [f"--{name}={value}" for name, value in SIZES.items()]
PARAMETERS = 17
"""Number of parameters of the tiny model."""
DEEPSPEED = importlib.util.find_spec("deepspeed") is not None

pytestmark = pytest.mark.processes


def bench(*arguments):
    return start_python("-m", "zpasses.tools.bench", *arguments)


class forked_except_for_memory(forked_subprocess):
    """Forks, and new processes where resident memory is measured: malloc reads its environment
    variables when a process starts.
    """

    @staticmethod
    def Popen(command, *, env, **options):  # noqa: N802
        new = ResidentMemory.ENVIRONMENT.items() <= env.items()
        return (subprocess.Popen if new else ForkedPython)(command, env=env, **options)


@pytest.fixture
def measured(tmp_path, monkeypatch, capsys):
    """A function that runs a benchmark in this process, with forks as ranks. It returns the table
    and the JSON.
    """

    def run(*arguments, ranks=forked_subprocess):
        file = tmp_path / "result.json"
        with monkeypatch.context() as patched:
            patched.setattr("zpasses.tools.bench.launch.subprocess", ranks)
            status = main([*arguments, "--json", str(file)])
        said = capsys.readouterr()
        assert not status, said.out + said.err
        return said.out, json.loads(file.read_text())

    return run


# --- train ----------------------------------------------------------------------------------------
@pytest.mark.slow(quick="test_time_limit_ends_a_run_and_is_reported")
@pytest.mark.inductor
def test_train_measures_each_peer_and_compares_it_to_the_baseline(measured):
    peers = "fsdp2-eager,zpasses:zero_stage=3" + (",deepspeed-3" if not DEEPSPEED else "")
    table, result = measured(*TINY, "--peers", peers)
    assert result["suite"] == "train"
    assert {"torch", "zpasses", "python", "cores"} == set(result["versions"])
    assert result["config"]["baseline"] == "fsdp2-eager"
    assert not result["failed"]
    fsdp2, zpasses = result["peers"]
    assert fsdp2["peer"] == "fsdp2-eager"
    assert fsdp2["ratio"] == 1.0
    assert zpasses["ratio"] == pytest.approx(zpasses["step_s"] / fsdp2["step_s"])
    for peer in (fsdp2, zpasses):
        assert peer["step_s"] > 0
        assert len(peer["losses"]) == 3
        assert peer["losses"][-1] == pytest.approx(fsdp2["losses"][-1], rel=1e-4)
        assert peer["gradient_norm"] == pytest.approx(fsdp2["gradient_norm"], rel=1e-4)
        assert peer["peer"] in table
    assert 0 < zpasses["passes_s"] + zpasses["checks_s"] < zpasses["compile_s"]
    assert fsdp2["passes_s"] == fsdp2["checks_s"] == 0
    _check_traffic(result, fsdp2, zpasses)
    _check_memory(result, fsdp2, zpasses)
    if not DEEPSPEED:
        assert "pip install" in result["skipped"]["deepspeed-3"]
        assert "skipped deepspeed-3: not installed" in table


def _check_traffic(result, fsdp2, zpasses):
    nbytes = result["bounds"]["bytes"]
    # Root and block are gathered in forward, and the block again in backward. gloo runs a
    # reduce-scatter as an all-reduce, and zpasses exchanges parts of gradients.
    assert fsdp2["collectives"] == {"all_gather": 3, "all_reduce": 2}
    assert 1 <= zpasses["collectives"]["reduce_scatter"] < PARAMETERS  # merged
    assert 1 <= zpasses["collectives"]["all_gather"] < PARAMETERS
    assert fsdp2["sent_bytes"]["all_reduce"] == nbytes  # 2 (n - 1) / n of the bytes, with n = 2
    assert zpasses["sent_bytes"]["reduce_scatter"] == nbytes / 2
    for peer in (fsdp2, zpasses):
        # Stage 3 gathers this small model only once, because keeping it does not raise the peak.
        assert nbytes / 2 <= peer["sent_bytes"]["all_gather"] <= nbytes
    assert set(result["bounds"]["time_s"]) == {"all_gather", "reduce_scatter", "all_reduce"}


def _check_memory(result, fsdp2, zpasses):
    shards = result["bounds"]["bytes"] / 2
    for peer in (fsdp2, zpasses):
        # Shards, two moments of AdamW, and small tensors.
        assert 3 * shards <= peer["resting_bytes"] < 3 * shards + (1 << 20)
        assert 0 <= peer["backward_peak_bytes"] <= peer["peak_bytes"]


@pytest.mark.slow(quick="test_time_limit_ends_a_run_and_is_reported")
@pytest.mark.inductor
def test_compute_does_not_communicate_and_rounds_repeat_it(measured):
    table, result = measured(*TINY, "--peers", "compute", "--baseline", "compute", "--rounds", "2")
    (compute,) = result["peers"]
    assert (compute["peer"], len(compute["rounds_s"])) == ("compute", 2)
    assert compute["collectives"] == {}
    assert result["compute_s"] == compute["step_s"]
    assert "compute without communication" in table


@pytest.mark.slow(quick="test_parts_of_a_block_add_up_to_the_block")
@pytest.mark.parametrize(
    ("mesh", "block", "parts"),
    [("dp=2,tp=2", ParallelBlock, 2), ("replicate=2,shard=2", Block, 4)],
)
def test_train_compares_peers_on_a_mesh(measured, mesh, block, parts):
    peers = "fsdp2-eager,zpasses:zero_stage=3:codegen=eager"
    table, result = measured(*TINY, "--mesh", mesh, "--peers", peers)
    assert result["config"]["ranks"] == 4
    assert not result["failed"]
    fsdp2, zpasses = result["peers"]
    assert (fsdp2["ratio"], fsdp2["peak_ratio"]) == (1.0, 1.0)
    assert zpasses["peak_ratio"] == pytest.approx(zpasses["peak_bytes"] / fsdp2["peak_bytes"])
    assert zpasses["losses"] == pytest.approx(fsdp2["losses"], rel=1e-4)
    assert zpasses["gradient_norm"] == pytest.approx(fsdp2["gradient_norm"], rel=1e-4)
    assert zpasses["communication_s"] is None
    assert "peak ratio" in table
    size = ModelSize(**result["config"]["size"])
    model = build_model(size, block)
    first = [model(*batches(size, 1, part)[0]).item() for part in range(parts)]
    assert zpasses["losses"][0] == pytest.approx(sum(first) / parts, rel=1e-5)


@pytest.mark.slow(quick="the tests of windows count collectives")
@pytest.mark.inductor
def test_backwards_of_a_step_reduce_once_or_each_time(measured):
    several = [*TINY, "--peers", "fsdp2-eager,zpasses-3", "--backwards", "3"]
    table, result = measured(*several, ranks=forked_except_for_memory)
    assert not result["failed"]
    full = result["bounds"]["bytes"]
    fsdp2, ours = result["peers"]
    assert ours["gradient_norm"] == pytest.approx(fsdp2["gradient_norm"], rel=1e-4)
    for each in (fsdp2, ours):
        assert each["window_bytes"] >= full
        assert each["window_bytes"] > each["after_bytes"] >= full / 2
    # Once for three backwards: gloo all-reduces, and zpasses exchanges halves.
    assert fsdp2["sent_bytes"]["all_reduce"] == full
    assert ours["sent_bytes"]["reduce_scatter"] == full / 2
    assert "in window MiB" in table
    _, result = measured(*several, "--reduce", "backward", ranks=forked_except_for_memory)
    assert not result["failed"]
    fsdp2, ours = result["peers"]
    assert fsdp2["sent_bytes"]["all_reduce"] == 3 * full
    assert ours["sent_bytes"]["reduce_scatter"] == 3 * full / 2
    assert max(fsdp2["window_bytes"], ours["window_bytes"]) < full


def test_parts_of_a_block_add_up_to_the_block():
    torch.manual_seed(0)
    whole, x = ParallelBlock(16, 4), torch.randn(2, 3, 16)
    nn.init.zeros_(whole.down.weight)
    nn.init.zeros_(whole.down.bias)
    nn.init.zeros_(whole.project.bias)
    total = torch.zeros_like(x)
    for rank in range(2):
        part = copy.deepcopy(whole)
        for name, dim in (("qkv", 0), ("project", 1)):
            layer = getattr(part, name)
            layer.weight = nn.Parameter(layer.weight.chunk(2, dim)[rank])
        part.qkv.bias = nn.Parameter(part.qkv.bias.chunk(2)[rank])
        total += part(x) - x
    torch.testing.assert_close(total, whole(x) - x)


def test_peak_ratios_are_those_of_the_peaks():
    config = TrainConfig(ModelSize(), ("fsdp2-eager", "zpasses-3"), "fsdp2-eager")
    peaks = {"fsdp2-eager": 40, "zpasses-3": 30}
    results = [
        PeerResult(name, "", rounds_s=[1.0], losses=[6.0], peak_bytes=peak)
        for name, peak in peaks.items()
    ]
    _relate(TrainReport(config, {}, None, results, {}, {}))
    assert [each.peak_ratio for each in results] == [1.0, 0.75]


def test_time_limit_ends_a_run_and_is_reported(capsys):
    # Its ranks are no forks, so they import torch for longer than that.
    assert main([*TINY, "--peers", "fsdp2-eager", "--timeout", "1"]) == 1
    said = capsys.readouterr()
    assert "time limit 1 s" in said.out + said.err


def result_with(losses, gradient_norm):
    return PeerResult("zpasses-3", "", rounds_s=[1.0], losses=losses, gradient_norm=gradient_norm)


@pytest.mark.parametrize(
    ("losses", "norm", "message"),
    [
        ([6.0, 5.9], 2.0, None),
        ([6.0, 5.8], 2.0, "at step 1"),
        ([6.0, float("nan")], 2.0, "nan"),
        ([6.0, 5.9], 1.0, "gradient norm"),
    ],
)
def test_peer_whose_training_differs_is_found(losses, norm, message):
    reference = PeerResult("fsdp2-eager", "", rounds_s=[2.0], losses=[6.0, 5.9], gradient_norm=2.0)
    assert (message or "None") in str(_difference(result_with(losses, norm), reference))


def test_step_time_is_split_into_compute_communication_and_waste():
    bounds = {"bytes": 100, "time_s": {"all_gather": 0.5}, "sent_bytes": {"all_gather": 50}}
    compute = PeerResult("compute", "", rounds_s=[1.0], losses=[1.0])
    ours = PeerResult("zpasses-3", "", rounds_s=[3.0], losses=[6.0], sent_bytes={"all_gather": 100})
    report = TrainReport(
        TrainConfig(ModelSize(), (), "compute"), bounds, None, [compute, ours], {}, {}
    )
    _relate(report)
    assert (ours.communication_s, ours.waste_s, ours.ratio) == (1.0, 1.0, 3.0)
    assert (
        not report.failed
    )  # losses of compute are not compared, because it trains on one rank's data


# --- the model and its data -----------------------------------------------------------------------
def test_default_model_has_20_million_parameters():
    assert sum(param.numel() for param in build_model(ModelSize()).parameters()) == pytest.approx(
        20e6, rel=0.05
    )


def test_data_differ_between_ranks_and_are_reproducible():
    size = ModelSize()
    ((first, targets),), ((again, _),), ((other, _),) = (
        batches(size, 1, 0),
        batches(size, 1, 0),
        batches(size, 1, 1),
    )
    assert first.equal(again)
    assert not first.equal(other)
    assert first[:, 1:].equal(targets[:, :-1])


# --- trainers -------------------------------------------------------------------------------------
@pytest.mark.inductor
@pytest.mark.slow(quick="test_losses_are_compared_between_peers_with_the_same_loop")
def test_train_measures_hugging_face_trainers_beside_each_other(tmp_path):
    """Started as a user does, with new processes as ranks."""
    pytest.importorskip("transformers")
    names = ["trainer-ddp", "trainer-fsdp2", "trainer-zpasses-3"]
    peers = ["--peers", ",".join(names), "--baseline", "trainer-fsdp2", "--backwards", "2"]
    run = bench("train", *TINY, *peers, "--json", str(tmp_path / "result.json"))
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    ddp, fsdp2, zpasses = result["peers"]
    full = result["bounds"]["bytes"]
    for peer in (ddp, fsdp2, zpasses):
        assert peer["ratio"] == pytest.approx(peer["step_s"] / fsdp2["step_s"])
        assert peer["losses"] == pytest.approx(ddp["losses"], rel=1e-4)
        assert len(peer["losses"]) == 3
        assert peer["peer"] in run.stdout
    for peer in (fsdp2, zpasses):  # shards, and two moments of AdamW
        assert peer["resting_bytes"] < 0.9 * ddp["resting_bytes"]
        assert peer["window_bytes"] >= peer["after_bytes"] >= full / 2
    assert zpasses["passes_s"] > 0


def test_losses_are_compared_between_peers_with_the_same_loop():
    losses = {
        "fsdp2-eager": [6.0, 5.9],
        "trainer-fsdp2": [6.5, 6.4],
        "trainer-zpasses-3": [6.5, 6.2],
    }
    results = [PeerResult(name, "", rounds_s=[1.0], losses=each) for name, each in losses.items()]
    report = TrainReport(
        TrainConfig(ModelSize(), tuple(losses), "fsdp2-eager"), {}, None, results, {}, {}
    )
    _relate(report)
    assert list(report.failed) == ["trainer-zpasses-3"]
    assert "differs from trainer-fsdp2" in report.failed["trainer-zpasses-3"]
    assert "at step 1" in report.failed["trainer-zpasses-3"]


# --- overhead -------------------------------------------------------------------------------------
@pytest.mark.slow(quick="test_a_steady_loop_needs_no_votes")
def test_overhead_reports_microseconds_per_parameter(tmp_path):
    """Started as a user does, with new processes as ranks."""
    size = ["--params", "8", "--steps", "5", "--blocks", "2", "--codegens", "eager"]
    run = bench("overhead", *size, "--json", str(tmp_path / "result.json"))
    assert run.returncode == 0, run.stdout + run.stderr
    table, result = run.stdout, json.loads((tmp_path / "result.json").read_text())
    assert [entry["stage"] for entry in result["results"]] == [2, 3]
    for entry in result["results"]:
        assert entry["codegen"] == "eager"
        assert entry["step_us"] > 0
        assert set(entry["parts_us"]) == {
            "Dynamo guards",
            "shards in",
            "gradients out",
            "gradient stored",
        }
    assert "overhead us/param" in table


# --- optimizer ------------------------------------------------------------------------------------
@pytest.mark.slow(quick="test_a_step_has_the_bits_of_dtensors_and_dispatches_none")
def test_optimizer_counts_operators_of_steps(measured):
    size = ["--width", "16", "--layers", "1", "--steps", "1"]
    table, result = measured("optimizer", *size, "--modes", "loop,fused")
    found = {(each["mode"], each["model"]): each for each in result["results"]}
    assert len(found) == 6
    for (mode, model), each in found.items():
        assert each["first_ms"] > 0
        assert each["operators"] == found[mode, "plain"]["operators"]
        assert (each["of_dtensors"] > 0) == (model == "fsdp2")
        assert (each["operators"] >= each["params"]) == (mode == "loop")
    assert "later ms" in table


def test_options_of_a_peer_may_contain_commas():
    name = "zpasses:pipeline=chunk-loss{chunks=4};zero3"
    check_peers((name,))
    with pytest.raises(OptionError, match="no pass is called 'zero4'"):
        check_peers((name.replace("zero3", "zero4"),))


# --- device ---------------------------------------------------------------------------------------
@pytest.mark.slow(quick="test_time_limit_ends_a_run_and_is_reported")
def test_device_measures_one_rank_of_a_larger_group(measured):
    size = ["--width", "16", "--layers", "1", "--heads", "2", "--seq", "8", "--batch", "1"]
    steps = ["--steps", "2", "--warmup", "1", "--rounds", "2"]
    table, result = measured(
        "device", "--device", "cpu", "--ranks", "4", "--peers", "fsdp2-eager", *size, *steps
    )
    assert not result["failed"]
    (peer,) = result["results"]
    assert len(peer["rounds_s"]) == 2
    assert min(peer["rounds_s"]) > 0
    assert peer["peak_bytes"] is None  # of an accelerator only
    assert "one rank of 4 on the CPU, which communicates nothing" in table
    assert "1.00" in table  # of itself


# --- compile --------------------------------------------------------------------------------------
SHARDED = "zpasses:zero_stage=3"


@pytest.mark.slow(quick="test_the_second_start_takes_the_graph_from_the_cache")
def test_compile_compares_cold_and_warm_starts(measured):
    table, result = measured(
        *("compile", "--layers", "2", "--peers", f"compute-all,{SHARDED}"),
        *("--rounds", "1", "--cold-rounds", "2"),
        *("--width", "16", "--heads", "2", "--seq", "8", "--vocab", "256", "--batch", "1"),
    )
    plain, sharded = result["results"]
    assert [each["peer"] for each in (plain, sharded)] == ["compute-all", SHARDED]
    for each in (plain, sharded):
        assert each["graphs"] == 1
        assert each["generated"] > 0 == each["generated_warm"]
        assert each["cache_bytes"] > 1e4
        assert len(each["warm_s"]) == 1
        assert len(each["cold_s"]) == 2
        assert min(each["cold_s"]) > 0
    assert "warm, ratio" in table
    wrong = bench("compile", "--width", "15")
    assert wrong.returncode == 2
    assert "--width" in wrong.stderr


# --- options --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "fsdp2"], "got the peer 'fsdp2'"),
        (["--peers", "zpasses:memory_budget"], "got the peer 'zpasses:memory_budget'"),
        (["--peers", "zpasses:zero_stage=4"], "zero_stage"),
        (["--baseline", "zero"], "got the peer 'zero'"),
        (["--width", "30", "--heads", "4"], "--width 30 is not divisible by --heads 4"),
        (["--vocab", "100"], "at least 256"),
        (["--steps", "0"], "--steps: got 0; expected at least 1"),
        (["--stepz", "3"], "--stepz"),
        (["--mesh", "dp"], "cannot read 'dp'"),
        (["--mesh", "dp=2,tp=2", "--ranks", "2"], "dp=2,tp=2 has 4 ranks; expected 2"),
        (["--mesh", "dp=2,ep=2"], "the model has no use for dimension ep"),
        (["--mesh", "dp=1,tp=3"], "--heads 8 is not divisible by the 3 ranks of dimension tp"),
        (["--mesh", "dp=2,tp=2", "--peers", "ddp,zpasses-3"], "ddp takes no such mesh"),
        (["--mesh", "dp=2,tp=2", "--baseline", "ddp"], "ddp takes no such mesh"),
        (["--reduce", "backward", "--peers", "trainer-ddp"], "decides by itself when it reduces"),
        (["--steps", "some"], "--steps: got 'some'"),
        (["overhead", "--codegens", "inductr"], "--codegens: got 'inductr'"),
        (["overhead", "--stages", "2,4"], "--stages: got '4'"),
        (["compile", "--layers", "2,x"], "--layers: got 'x'"),
        (["compile", "--peers", "trainer-ddp"], "trainer-ddp owns its training loop"),
        (["schedule", "--models", "llama8b"], 'Did you mean "llama-8b"?'),
        (["schedule", "--targets", "h1"], "h1"),
        (["device", "--heads", "3"], "--width 512 is not divisible by --heads 3"),
    ],
)
def test_wrong_options_are_refused_with_a_clear_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_the_suites_and_describes_their_options(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(suite in said for suite in SUITES)
    with pytest.raises(SystemExit, match="0"):
        main(["compile", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Numbers of layers. Default: 6,24" in said
    assert "Layers of the model." not in said
    assert "Warm starts of every peer" in said


# --- schedule -------------------------------------------------------------------------------------
TINY_LLAMA = ModelShape("llama", 64, 128, 4, 2, 256, 2)


@pytest.mark.slow(quick="plans and budgets in tests of the pass `schedule` and of `zpasses plan`")
def test_schedulers_are_compared_on_one_step(monkeypatch):
    monkeypatch.setattr(schedule_suite, "MODELS", {"tiny": TINY_LLAMA})
    names = ("single", "one ahead", "blocks", "zero3", "budget 10%")
    task = {"model": "tiny", "ranks": 8, "tokens": 32, "layers": None}
    engines = "mi300x,launch_us=0.01,hop_us=0.01,link_gb_s=0.02"  # gain whatever the size
    task |= {"targets": ["h100", engines], "schedulers": list(names)}
    row, swapped = schedule_suite.measure(task)
    points = {point.scheduler: point for point in row.points}
    assert tuple(points) == names
    assert not row.failed
    assert points["blocks"].collectives < points["single"].collectives / 2
    assert points["zero3"].total_ms <= points["one ahead"].total_ms < points["single"].total_ms
    assert sum(row.bound_ms) <= points["zero3"].total_ms
    budgeted = points["budget 10%"]
    assert budgeted.bound_ms <= budgeted.total_ms
    assert not any(point.on_engines for point in row.points)
    on_engines = {point.scheduler: point.on_engines for point in swapped.points}
    assert on_engines["zero3"] > on_engines["one ahead"] == 0
    report = schedule_table(ScheduleReport(ScheduleConfig(models=("tiny",)), [row, swapped]))
    header = next(line for line in report.splitlines() if "model" in line)
    assert "budget 10% / bound" in header
    assert "zero3: on engines" in header
