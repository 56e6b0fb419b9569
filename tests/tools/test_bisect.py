"""Tests of bisection, with programs that only write journals and with a real one."""

import textwrap
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import zpasses
from tests.cases import some_quick
from tests.programs import forked_or_started, forked_subprocess, start_python
from zpasses.dumps import read
from zpasses.pipeline.bisection import Trial
from zpasses.probe import BisectTrial, write_request
from zpasses.testing import fake_world
from zpasses.tools.bisect.bisect_run import BisectError, BisectRequest, run_bisect
from zpasses.tools.bisect.compare import first_difference, read_journals
from zpasses.tools.cli.main import cli
from zpasses.tools.new_folder import FolderError
from zpasses.tools.programs import ProgramError

FAKE_PROGRAM = """
import json, os, sys, time
folder = os.environ["ZPASSES_PROBE"]
trial = json.load(open(folder + "/BisectTrial.json"))
passes = ["one", "two{x=1}", "three", "four"]
ran = passes if trial["passes"] is None else passes[: trial["passes"]]
with open(folder + "/rank0.jsonl", "w") as out:
    def call(name, *norms):
        values = [{"shape": [2], "dtype": "float32", "norm": norm, "weighted": norm / 3, "not_finite": 0} for norm in norms]
        out.write(json.dumps({"call": name, "values": values}) + chr(10))
        out.flush()
    out.write(json.dumps({"compile": "0/0", "pipeline": passes}) + chr(10))
    call("0/0 outputs", 1.0)
"""  # noqa: E501


NONDETERMINISTIC = "with open(__file__ + '.n', 'a') as runs: runs.write('x')\ncall('0/0 outputs', float(os.path.getsize(__file__ + '.n')))"  # noqa: E501


def bisect(tmp_path, program, *arguments, **options):
    script = tmp_path / "script.py"
    script.write_text(FAKE_PROGRAM + textwrap.indent(program, "    "))
    progress, asked = [], BisectRequest((str(script), *arguments), **{"timeout_s": 300.0} | options)
    return run_bisect(asked, progress.append), progress


CHANGED = "call('0/0 gradients', 3.0, 5.0 if 'three' in ran else 5.1)"
RENAMED = "call('1/0 outputs' if 'three' in ran else '0/0 outputs', 1.0)"
FAULTS = [
    ("if 'three' in ran: raise ValueError('no')", "the program ended with status 1"),
    ("if 'three' in ran: os.kill(os.getpid(), 11)", "the program died of SIGSEGV"),
    ("if 'three' in ran: time.sleep(600)", "the program did not end within 40 s"),
    (CHANGED, "rank0, call 2 (0/0 gradients), value 1 (float32[2])"),
    ("if 'three' not in ran: call('0/0 outputs', 1.0)", "rank0 made 1 compiled calls; expected 2"),
    (RENAMED, "rank0, call 2: is 1/0 outputs; expected 0/0 outputs"),
]


@pytest.mark.parametrize(
    ("program", "reason"), some_quick(FAULTS, [FAULTS[0], FAULTS[3], FAULTS[4]])
)
def test_the_first_pass_that_breaks_a_run_is_found(tmp_path, program, reason):
    # A busy machine takes seconds to start the program.
    report, progress = bisect(tmp_path, program, timeout_s=40.0 if "sleep" in program else 300.0)
    assert (report.culprit, report.passes[report.culprit]) == (2, "three")
    assert report.reason.startswith(reason)
    runs = [line.partition(": ")[2] for line in progress if line.startswith("run")]
    assert runs[:3] == ["all passes", "no passes", "no passes, repeated"]
    assert runs[3:] == ["and one", "and two{x=1}", "and three"]
    assert ("ValueError: no" in report.tail) == ("raise" in program)


def test_a_fault_that_a_later_pass_hides_is_found(tmp_path):
    report, _ = bisect(tmp_path, "call('0/0 outputs', 2.0 if 'two{x=1}' in ran else 1.0)")
    assert report.culprit == 1


def test_a_correct_run_takes_two_runs(tmp_path):
    program = "call('0/0 outputs', 1.0 + len(ran) * 1e-5)\nassert sys.argv[1:] == ['--lr', '3']"
    report, progress = bisect(tmp_path, program, "--lr", "3")
    assert (report.culprit, report.runs, len(progress)) == (None, 2, 4)
    assert bisect(tmp_path, program, "--lr", "3", tolerance=1e-6)[0].culprit == 0


def test_pending_gradients_and_rounding_errors_are_no_difference(tmp_path):
    program = "call('0/0 gradients', 1e6, len(ran) * 1e-4)\nout.write(json.dumps({'call': 'x', 'values': [None]}) + chr(10))"  # noqa: E501
    assert bisect(tmp_path, program)[0].culprit is None


ALWAYS = (
    r"ended with status 1 without passes too, so no pass is the cause:(.|\n)*ValueError: always"
)


def test_failures_without_passes_are_reported(tmp_path):
    with pytest.raises(BisectError, match=ALWAYS):
        bisect(tmp_path, "raise ValueError('always')")
    said = r"two runs without passes differ .*Seed all random numbers"
    with pytest.raises(BisectError, match=said):
        bisect(tmp_path, NONDETERMINISTIC)


def test_unusable_programs_and_folders_are_refused(tmp_path):
    (tmp_path / "other.py").write_text("print('hello')")
    with pytest.raises(BisectError, match=r'nothing with torch.compile\(..., backend="zpasses"\)'):
        run_bisect(BisectRequest((str(tmp_path / "other.py"),)))
    with pytest.raises(ProgramError, match="cannot be run: No such file"):
        run_bisect(BisectRequest((str(tmp_path / "nothing"),)))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "old").write_text("")
    with pytest.raises(FolderError, match="contains 'old'; expected an empty folder"):
        run_bisect(BisectRequest(("x.py",), out=tmp_path / "kept"))


# --- in the program -------------------------------------------------------------------------------
@pytest.fixture
def start_trial(tmp_path, monkeypatch):
    def start(passes, calls=32):
        folder = tmp_path / f"trial{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for name, value in write_request(folder, BisectTrial(passes, calls)).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("zpasses.pipeline.bisection._written", [0])
        return folder

    return start


def train(dump, steps=2):
    torch._dynamo.reset()
    torch.manual_seed(0)
    with fake_world(1) as mesh:
        model = zpasses.shard(nn.Linear(4, 3), mesh=mesh)
        options = {"codegen": "eager", "zero_stage": 3, "dump": dump}
        step = torch.compile(model, backend="zpasses", options=options)
        for _ in range(steps):
            step(torch.ones(2, 4)).sum().backward()


FIRST = ["merge-reads", "exchange-rows", "gather-params"]
LAST = ["schedule", "average-replicas", "defer-reduction"]


def test_a_trial_runs_only_the_first_passes_and_records_results(tmp_path, start_trial):
    folder = start_trial(3, calls=3)
    train(tmp_path / "dump")
    (journal,) = read_journals(folder).values()
    names = [text.partition("{")[0] for text in journal.pipelines["0/0"]]
    assert names == [*FIRST, "reduce-grads", "reshard-after-forward", *LAST]
    outputs, gradients = "0/0 outputs", "0/0 gradients"
    assert [call["call"] for call in journal.calls] == [outputs, gradients, outputs]
    assert [value["shape"] for value in journal.calls[0]["values"]] == [[2, 3]]
    assert [value and value["shape"] for value in journal.calls[1]["values"]] == [[3, 4], [3], None]
    assert journal.calls[1]["values"][1]["norm"] == pytest.approx(2 * 3**0.5)
    (compiled,) = read(tmp_path / "dump").ranks[0].compiles
    steps = [step for graph in compiled.graphs.values() for step in graph.steps]
    assert [step.run.name for step in steps if step.run] == FIRST


OTHER = {
    "differs by": ([0.0, 1.01, 2.02], [0.0, -1.0, -2.0], [2.0, 1.0, 0.0]),
    "has 1 infinities": ([0.0, 1.0, float("inf")],),
    "is float64[3]; expected float32[3]": (torch.arange(3.0).double(),),
    "": ([0.0, 1.0, 2.0],),
}


@pytest.mark.parametrize(
    ("other", "said"), [(each, said) for said, others in OTHER.items() for each in others]
)
def test_journals_tell_different_tensors_apart(start_trial, other, said):
    journals = []
    for value in (torch.arange(3.0), torch.as_tensor(other)):
        folder = start_trial(None)
        Trial.current().record_results(lambda value=value: (value, 3, None), "outputs")()
        journals.append(read_journals(folder))
    found = first_difference(*journals, 1e-3) or ""
    assert (said in found) if said else not found


def test_an_invalid_environment_variable_is_refused(start_trial, monkeypatch):
    monkeypatch.setenv("ZPASSES_PROBE", "yes")
    with pytest.raises(zpasses.OptionError, match="unset it"):
        Trial.current()


REAL = '''
from dataclasses import dataclass
from typing import ClassVar
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import zpasses

@dataclass(frozen=True)
class ReplaceTanhBySin(zpasses.Pass):
    """Replaces tanh by sin."""

    name: ClassVar[str] = "replace-tanh-by-sin"
    level: ClassVar[zpasses.Level] = zpasses.Level.JOINT

    def rewrite(self, graph):
        found = [node for node in graph.nodes if node.target is torch.ops.aten.tanh.default]
        for node in found:
            node.target = torch.ops.aten.sin.default
        return len(found)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = zpasses.shard(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), mesh=init_device_mesh("cpu", (1,)))
pipeline = zpasses.Pipeline((ReplaceTanhBySin(),))
step = torch.compile(model, backend="zpasses", options={"codegen": "eager", "pipeline": pipeline})
step(torch.ones(2, 3)).sum().backward()
'''


@pytest.mark.processes
@forked_or_started
def test_a_real_program_from_the_command_line(tmp_path, monkeypatch, forked):
    script = tmp_path / "train.py"
    script.write_text(REAL)
    words = ["bisect", "-o", str(tmp_path / "kept"), str(script), "--ignored"]
    if forked:
        monkeypatch.setattr("zpasses.tools.programs.subprocess", forked_subprocess)
        done = CliRunner().invoke(cli, words)
        status, output = done.exit_code, done.output
    else:
        done = start_python("-m", "zpasses", *words)
        status, output = done.returncode, done.stdout + done.stderr
    assert status == 1, output
    assert (
        "The run first goes wrong after pass 1 of 1: replace-tanh-by-sin\n"
        "rank0, call 1 (0/0 outputs), value 0 (float32[2, 3]) differs by" in output
    )
    (compiled,) = read(tmp_path / "kept" / "01-all-passes" / "dump").ranks[0].compiles
    assert compiled.graphs["joint"].last.after == "replace-tanh-by-sin"
    assert Path(tmp_path / "kept" / "03-0-passes" / "log.txt").exists()
