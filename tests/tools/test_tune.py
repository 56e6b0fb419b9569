"""Tests of `zpasses tune`, with programs that only write reports and with a real one."""

import json
import textwrap

import pytest
from click.testing import CliRunner

from zpasses.tools.cli.main import cli
from zpasses.tools.programs import run_probed
from zpasses.tools.tune import tune_run

FAKE_PROGRAM = """
import json, os, sys, time
folder = os.environ["ZPASSES_PROBE"]
request = json.load(open(folder + "/TuningRequest.json"))
options = request["options"]
speeds = json.loads(sys.argv[1])
took = speeds[next(iter(options.values())) if options else "given"]
if took is None:
    raise MemoryError("out of memory")
if took == "hang":
    time.sleep(600)
candidates = [
    {"budget": f"{size}MiB", "total_us": 1000.0 / size, "peak_bytes": size << 20}
    for size in (1, 2, 3)
]
for rank in range(2):
    report = {
        "rank": rank, "world": 2, "target": "h100", "stage": 3,
        "step_us": took + rank, "spread_us": [took, took + 2],
        "peak_bytes": None, "candidates": candidates if request["budgets"] else [],
    }
    with open(f"{folder}/.rank{rank}", "w") as file:
        json.dump(report, file)
    os.rename(f"{folder}/.rank{rank}", f"{folder}/rank{rank}.json")
time.sleep(600)  # `zpasses tune` ends the program
"""

SPEEDS = {"given": 100.0, "zero3-one-ahead": 90.0, "2MiB": 80.0, "3MiB": 85.0, "1MiB": 10.0}


@pytest.fixture
def tune(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FAKE_PROGRAM)

    def run(speeds, *arguments, plans=2):
        command = ["tune", "--plans", plans, *arguments, program]
        if "--text" in command:
            command.remove("--text")
        else:
            command.insert(1, "--json")
        return CliRunner().invoke(cli, [*map(str, command), json.dumps({**SPEEDS, **speeds})])

    return run


def names(result):
    content = json.loads(result.stdout)
    return [next(iter((each["options"] or {"": "given"}).values())) for each in content["plans"]]


def chosen(result):
    (plan,) = (each for each in json.loads(result.stdout)["plans"] if each["chosen"])
    return plan["options"]


def test_the_best_budgets_are_run_and_the_fastest_plan_is_chosen(tune):
    result = tune({})
    assert result.exit_code == 0, result.output
    assert names(result) == ["given", "zero3-one-ahead", "3MiB", "2MiB"]
    assert chosen(result) == {"memory_budget": "2MiB"}
    plans = json.loads(result.stdout)["plans"]
    assert [each["step_us"] for each in plans] == [101.0, 91.0, 86.0, 81.0]  # the slowest rank


def test_given_options_stay_if_nothing_is_notably_faster(tune):
    result = tune({"given": 81.0})
    assert "no other plan is at least 2% faster" in json.loads(result.stdout)["reason"]
    assert chosen(result) is None


@pytest.mark.parametrize(
    ("speeds", "advice"),
    [
        ({"given": 81.0}, "Keep the options of the program."),
        ({}, 'Add to the options of the program: {"memory_budget": "2MiB"}'),
        ({"zero3-one-ahead": 70.0}, 'in place of zero_stage: {"pipeline": "zero3-one-ahead"}'),
    ],
)
def test_the_table_says_which_options_to_use(tune, speeds, advice):
    result = tune(speeds, "--text")
    assert advice in result.stdout
    assert "as given" in result.stdout


def test_plans_that_fail_or_do_not_fit_are_not_chosen(tune, monkeypatch):
    def run_with_time_to_start(command, request, folder, timeout_s):
        hangs = "zero3-one-ahead" in (request.options or {}).values()
        return run_probed(command, request, folder, timeout_s if hangs else 100 * timeout_s)

    monkeypatch.setattr(tune_run, "run_probed", run_with_time_to_start)
    result = tune({"2MiB": None, "zero3-one-ahead": "hang"}, "--timeout", "2")
    failures = [each["failure"] for each in json.loads(result.stdout)["plans"]]
    assert failures == [None, "did not end within 2 s", None, "ended with status 1"]
    assert chosen(result) == {"memory_budget": "3MiB"}
    result = tune({"given": 300.0, "zero3-one-ahead": 200.0}, "--memory", "2MiB")
    assert names(result) == ["given", "zero3-one-ahead", "2MiB", "1MiB"]
    assert chosen(result) == {"memory_budget": "1MiB"}


@pytest.mark.parametrize(
    ("speeds", "arguments", "message"),
    [
        ({"given": None}, (), "The program ended with status 1. The end of its output:"),
        ({}, ("--memory", "10%"), "--memory: got '10%'; expected a size such as '60GiB'"),
    ],
)
def test_what_cannot_be_tuned_is_an_error(tune, speeds, arguments, message):
    result = tune(speeds, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_program_that_does_not_train_with_zpasses_is_named(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("print('done')")
    result = CliRunner().invoke(cli, ["tune", str(program)])
    assert result.exit_code == 2
    assert "ended before 13 optimizer steps of graphs that zpasses compiles" in result.stderr
    assert "done" in result.stderr


PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import zpasses

dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = zpasses.shard(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), mesh=mesh)
options = {"codegen": "eager"}
step = torch.compile(model, backend="zpasses", options=options)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    step(torch.ones(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("ended")
"""


@pytest.mark.processes
@pytest.mark.slow(quick="test_tune_measures_a_run_on_all_ranks")
def test_two_ranks_are_tuned(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM))
    torchrun = ["torchrun", "--standalone", "--nproc-per-node=2", str(program)]
    arguments = ["--plans", "1", "--steps", "3", "--warmup", "1"]
    result = CliRunner().invoke(cli, ["tune", *arguments, *torchrun])
    assert result.exit_code == 0, result.output
    assert "as given" in result.stdout
