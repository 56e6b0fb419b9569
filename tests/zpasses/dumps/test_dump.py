"""Tests of dumps that the backend writes: their content, and the handling of failures."""

import json
import os
import threading
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import zpasses
from tests.programs import start_python
from tests.zpasses.dumps.written import only_compile
from zpasses import Level, Pass, PassError, Pipeline, compat
from zpasses.dumps import DumpError, DumpPathError, DumpVersionError, NotADumpError, read
from zpasses.dumps.reader import HEADER
from zpasses.errors import OptionError
from zpasses.graph.verifier import CHECKS
from zpasses.testing import fake_world

X = torch.ones(2, 4)
NAMES = ("inner.0.weight", "inner.0.bias", "inner.1.weight", "inner.1.bias")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 3)])

    def forward(self, x):
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return x


def train(options, *, world=2, rank=0, model=None, backward=True, **shard):
    """Run one step as one rank of a fake process group, with eager code."""
    torch._dynamo.reset()
    with fake_world(world, rank) as mesh:
        model = zpasses.shard(model or Net(), mesh=mesh, **shard)
        step = torch.compile(model, backend="zpasses", options={"codegen": "eager", **options})
        loss = step(X).sum()
        if backward:
            loss.backward()
    return model


def test_a_dump_holds_every_graph_before_and_after_every_pass(tmp_path):
    train({"zero_stage": 3, "dump": tmp_path, "target": "mi300x"})
    found = only_compile(tmp_path)
    assert (found.name, found.info.state, found.error) == ("0/0", "done", None)
    assert list(found.graphs) == ["captured", "joint", "forward", "backward", "backward.variant0"]
    joint = found.graphs["joint"]
    assert [step.after for step in joint.steps] == [
        None,
        "merge-reads{max_hold_mb=1.0}",
        "exchange-rows{rows=off}",
        "gather-params",
        "reduce-grads",
        "reshard-after-forward",
    ]
    # No parameter is read twice, so merge-reads changes nothing.
    assert [step.number for step in joint.steps[:2]] == [1, 1]
    for step in joint.steps[1:]:
        assert step.run.changes == (step.number != 1) * step.run.changes
        assert step.run.after.nodes == len(step.snapshot.nodes)
        assert step.run.checks == (CHECKS if step.run.changes else ("unchanged",))
    assert joint.steps[1].run.options == {"max_hold_mb": 1.0}
    runs = [step.run for step in found.graphs["backward"].steps if step.run]
    (scheduled,) = (run for run in runs if run.name == "schedule")
    assert scheduled.notes[0].startswith("schedule: ")
    assert "4 collectives in launches: 0 of gathers and 1 of reductions" in scheduled.notes[0]
    started = [node for node in joint.last.snapshot.nodes if node.collective]
    gathers = [node for node in started if "gather" in node.collective.kind]
    assert [node.params for node in gathers] == [(name,) for name in NAMES]
    assert gathers[0].source.module == "inner.0"
    assert gathers[0].collective.nbytes == 3 * 4 * 4  # three of six rows


def test_a_dump_records_options_target_groups_and_parameters(tmp_path):
    train({"zero_stage": 2, "dump": tmp_path, "target": "mi300x,ranks_per_node=4"})
    found = only_compile(tmp_path)
    assert found.info.options == {
        "zero_stage": 2,
        "codegen": "eager",
        "target": "mi300x,ranks_per_node=4",
        "dump": str(tmp_path),
    }
    assert found.info.pipeline == str(Pipeline.parse("zero2"))
    assert (found.info.target["name"], found.info.target["ranks_per_node"]) == ("mi300x", 4)
    assert found.info.groups == {"0": (0, 1)}
    weight = found.info.parameters["inner.0.weight"]
    assert (weight.shape, weight.rows, weight.group) == ((6, 4), 6, "0")
    assert (weight.nbytes, weight.shard_bytes) == (96, 48)
    assert [each["param"] for each in found.info.inputs].count(None) == 1
    (agreement,) = found.graphs["forward"].agreements
    assert (agreement.group, agreement.result, agreement.collectives) == ("0", "single-rank", 1)
    assert "class Net" in found.sources["tests/zpasses/dumps/test_dump.py"]


def test_variants_record_their_inputs_and_outputs(tmp_path):
    train({"zero_stage": 2, "dump": tmp_path})
    graphs = only_compile(tmp_path).graphs
    variant, forward = graphs["forward.variant0"], graphs["forward"]
    assert (variant.of, variant.given, sorted(variant.kept)) == ("forward", (), sorted(NAMES))
    ends = [each.snapshot.nodes[-1] for each in (variant.first, forward.last)]
    assert len(ends[0].inputs) == 4 + len(ends[1].inputs)


def test_nodes_keep_their_ids_from_the_joint_graph_to_forward_and_backward(tmp_path):
    train({"zero_stage": 3, "dump": tmp_path})
    graphs = only_compile(tmp_path).graphs
    joint = graphs["joint"].last.snapshot
    for half in ("forward", "backward"):
        same = [
            node
            for node in graphs[half].first.snapshot.nodes
            if node.id in joint.by_id and node.op != "output"
        ]
        assert len(same) >= 8
        assert all(joint.by_id[node.id].name == node.name for node in same)


def test_a_call_without_gradients_dumps_one_inference_graph(tmp_path):
    with torch.no_grad():
        train({"zero_stage": 3, "dump": tmp_path}, backward=False)
    graph = only_compile(tmp_path).graphs["inference"]
    levels = [step.level for step in graph.steps if step.after is None]
    assert levels == ["joint", "forward"]


def test_every_compile_and_every_run_has_its_own_folder(tmp_path):
    train({"zero_stage": 2, "dump": tmp_path}, rank=1, backward=False)
    for stage in (2, 3):
        train({"zero_stage": stage, "dump": tmp_path})
    assert [each.folder for each in read(tmp_path).ranks[0].compiles] == ["000-0_0", "001-0_0"]


@pytest.mark.parametrize(("ranks", "dumping"), [(None, {0}), ("0, 2", {0, 2}), ("7", set())])
def test_only_rank_0_dumps_by_default(tmp_path, ranks, dumping):
    folder = tmp_path / "dump"
    options = {"zero_stage": 3, "dump": folder, **({"dump_ranks": ranks} if ranks else {})}
    for rank in (0, 2):
        train(options, world=3, rank=rank, backward=False)
    assert set(read(folder).ranks if dumping else []) == dumping
    assert folder.exists() == bool(dumping)


def test_the_option_overrides_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ZPASSES_DUMP", str(tmp_path / "environment"))
    monkeypatch.setenv("ZPASSES_DUMP_RANKS", "1")
    train({}, rank=1, backward=False)
    train({"dump": str(tmp_path / "option"), "dump_ranks": "all"}, backward=False)
    assert list(read(tmp_path / "environment").ranks) == [1]
    assert list(read(tmp_path / "option").ranks) == [0]
    monkeypatch.setenv("ZPASSES_DUMP_RANKS", "first")
    with pytest.raises(
        OptionError, match="ZPASSES_DUMP_RANKS: got 'first'; expected 'all' or rank numbers"
    ):
        zpasses.Options.parse({})
    with pytest.raises(OptionError, match="option 'dump_ranks'"):
        zpasses.Options.parse({"dump_ranks": "-1"})


def test_the_flush_of_a_window_is_dumped_with_its_compile(tmp_path):
    with fake_world(2) as mesh:
        model = zpasses.shard(Net(), mesh=mesh)
        options = {"zero_stage": 2, "codegen": "eager", "dump": tmp_path}
        step = torch.compile(model, backend="zpasses", options=options)
        for _ in range(2):
            with zpasses.coalesce_grad_reduction(model):
                step(X).sum().backward()
    graphs = only_compile(tmp_path).graphs
    assert {step.level for step in graphs["flush"].steps} == {"joint", "backward"}
    assert "flush.2" not in graphs  # the second flush reuses its code
    deferring = [graph for graph in graphs.values() if graph.of == "backward"]
    assert sorted(deferring[0].kept) == sorted(only_compile(tmp_path).info.parameters)


# --- failures -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Raises(Pass):
    """Raises, or leaves an invalid graph."""

    name: ClassVar[str] = "raises"
    level: ClassVar[Level] = Level.JOINT
    wrong: bool = False

    def rewrite(self, graph):
        if not self.wrong:
            raise ValueError("planted error")
        first = next(node for node in graph.nodes if node.op == "call_function")
        graph.output_node().prepend(first)  # its users now come before it
        return 1


@pytest.mark.parametrize("wrong", [False, True])
def test_a_failing_pass_leaves_the_graph_before_it_and_the_error(tmp_path, wrong):
    pipeline = Pipeline((*Pipeline.parse("gather-params").passes, Raises(wrong)))
    with pytest.raises(Exception, match="raises") as caught:
        train({"pipeline": pipeline, "dump": tmp_path})
    assert isinstance(compat.inner_exception(caught.value) or caught.value, PassError)
    found = only_compile(tmp_path)
    assert found.info.state == "failed"
    assert (found.error.type, found.error.where) == ("PassError", str(Raises(wrong)))
    assert "malformed" in found.error.message if wrong else "planted error" in found.error.message
    assert "in rewrite" in found.error.traceback or wrong
    joint = found.graphs["joint"]
    assert joint.error == joint.steps[-1].error
    assert joint.last.after == "gather-params"
    assert len(joint.last.snapshot.nodes) == joint.last.run.after.nodes
    left = [node.name for node in joint.steps[-1].snapshot.nodes]
    assert (left == [node.name for node in joint.last.snapshot.nodes]) == (not wrong)


def test_a_compile_that_fails_after_the_passes_records_where(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "partition", lambda *_, **__: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        train({"zero_stage": 3, "dump": tmp_path})
    found = only_compile(tmp_path)
    error = found.error
    assert (found.info.state, error.type, error.where) == ("failed", "ZeroDivisionError", "compile")
    assert found.graphs["joint"].last.after == "reshard-after-forward"


def test_unusable_dump_folders_are_refused_with_advice(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("full", "newer", "older", "linked", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    for name, version in (("newer", 99), ("older", 2), ("linked", 3)):
        header = {"format": "zpasses-dump", "version": version}
        (tmp_path / name / HEADER).write_text(json.dumps(header))
    (tmp_path / "linked" / "rank0").symlink_to(tmp_path / "full")
    (tmp_path / "elsewhere" / HEADER).symlink_to(tmp_path / "linked" / HEADER)
    for name, kind, text in [
        ("elsewhere", DumpPathError, "zpasses-dump.json is a symbolic link"),
        ("file", DumpPathError, "is a file"),
        ("file/below", DumpPathError, "is a file or is below a file"),
        ("full", NotADumpError, r"contains 'thesis.tex' and no dump"),
        ("newer", DumpVersionError, "version 99"),
        ("older", DumpVersionError, "version 2; this zpasses writes version 3"),
        ("linked", DumpPathError, "symbolic link"),
    ]:
        with pytest.raises(Exception, match=text) as caught:
            train({"dump": tmp_path / name}, backward=False)
        error = compat.inner_exception(caught.value) or caught.value
        assert isinstance(error, kind)
        assert isinstance(error, DumpError)
        assert "ZPASSES_DUMP" in str(error)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path):
    from zpasses.dumps.runs import write

    (tmp_path / "secret").write_text("mine")
    planted = tmp_path / f".zpasses-{os.getpid()}-{threading.get_ident()}-events.jsonl"
    planted.symlink_to(tmp_path / "secret")
    write(tmp_path / "events.jsonl", [b"{}"])
    assert (tmp_path / "secret").read_text() == "mine"
    assert (tmp_path / "events.jsonl").read_text() == "{}\n"


def test_a_full_disk_ends_the_dump_and_not_the_training(tmp_path, monkeypatch, caplog):
    from zpasses.dumps import writer

    write = writer.write

    def full(path, lines):
        if "gather-params" in path.name:
            raise OSError(28, "No space left on device")
        write(path, lines)

    monkeypatch.setattr(writer, "write", full)
    model = train({"zero_stage": 3, "dump": tmp_path})
    assert all(param.grad is not None for param in model.parameters())
    assert "is incomplete: [Errno 28] No space left" in caplog.text
    found = only_compile(tmp_path)
    assert found.info.state == "compiling"
    left = [None, "merge-reads{max_hold_mb=1.0}", "exchange-rows{rows=off}"]
    assert [step.after for step in found.graphs["joint"].steps] == left


# --- without a dump -------------------------------------------------------------------------------
def test_reading_loads_no_torch_and_a_compile_without_a_dump_loads_no_writer(tmp_path):
    code = """
import sys
import zpasses.dumps
assert "torch" not in sys.modules
import torch, zpasses
from zpasses.testing import fake_world
with fake_world(2) as mesh:
    model = zpasses.shard(torch.nn.Linear(2, 2), mesh=mesh)
    torch.compile(model, backend="zpasses", options={"codegen": "eager"})(torch.ones(1, 2)).sum().backward()
assert "zpasses.dumps.writer" not in sys.modules and "zpasses.dumps.describe" not in sys.modules
"""  # noqa: E501
    done = start_python("-c", code, variables={"TORCH_TRACE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    (trace,) = tmp_path.iterdir()
    artifact, _, graph = (
        trace.read_text().partition('"zpasses_02_joint_after_gather-params"')[2].partition("\n")
    )
    assert '"encoding": "string"' in artifact
    assert "full: weight" in graph


def test_torchs_structured_trace_receives_the_graphs_of_every_pass(monkeypatch):
    artifacts = {}
    monkeypatch.setattr(compat, "is_structured_trace_on", lambda: True)
    monkeypatch.setattr(
        compat, "trace_artifact", lambda name, text: artifacts.update({name: text()})
    )
    train({"zero_stage": 3})
    names = [name.split("_", 2)[2] for name in artifacts]
    assert names[:5] == [
        "captured_before_captured_passes",
        "joint_before_joint_passes",
        "joint_after_gather-params",
        "joint_after_reduce-grads",
        "joint_after_reshard-after-forward",
    ]
    assert "all_gather_into_tensor" in artifacts["zpasses_02_joint_after_gather-params"]
    assert "all_gather_into_tensor" not in artifacts["zpasses_01_joint_before_joint_passes"]


@pytest.mark.parametrize(
    ("error", "raised"), [(zpasses.AgreementError, False), (zpasses.PassError, True)]
)
def test_ranks_that_disagree_have_no_line_that_raised(error, raised):
    from zpasses.dumps import writer

    with pytest.raises(error) as caught:
        raise error("wrong")
    assert bool(writer._failure(caught.value, "somewhere").raised) is raised
