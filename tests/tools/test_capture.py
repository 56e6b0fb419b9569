"""Tests of captures for other world sizes and targets, from Python and as a command."""

import errno
import os
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zpasses
from tests.programs import forked_or_started, run_program
from zpasses.dumps import read
from zpasses.dumps.runs import write
from zpasses.errors import OptionError, PassError, ShardingError
from zpasses.inspect.rank_agreement import rank_agreements
from zpasses.tools.capture.captured_step import CaptureError, CaptureRequest, load, run_capture
from zpasses.tools.capture.mesh_shapes import MeshShape
from zpasses.tools.cli.main import cli

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


def two_layers(mesh=None, width=8, shards_itself=False):
    """Two layers that are column and row parallel over dimension "tp"."""
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    if mesh is not None and "tp" in mesh.mesh_dim_names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if shards_itself:
        zpasses.shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(p.dim() - 1))
    return model, torch.ones(2, width)


def needs_a_mesh(mesh):
    raise AssertionError


def returns_keywords():
    return nn.Linear(2, 2), (torch.ones(1, 2),), {"labels": None}


def returns_int():
    return 3


def converted():
    """As torch does, unless nothing else has seen the fake weights."""
    raise RuntimeError("_apply(): Couldn't swap Linear.weight")


def raises_key_error():
    raise KeyError("nothing here")


def test_a_capture_whose_dump_could_not_be_written_fails(tmp_path, monkeypatch):
    written = []

    def fills(path, lines):
        written.append(path)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, lines)

    monkeypatch.setattr("zpasses.dumps.writer.write", fills)
    with pytest.raises(CaptureError, match=r"rank0/000-0_0 is incomplete.*MiB are free there"):
        run_capture(CaptureRequest(f"{HERE}:with_loss", tmp_path, world=2))


def test_a_huge_model_is_captured_for_another_world_size_and_target(tmp_path):
    options = {"zero_stage": 3, "target": "mi300x"}
    given = {"world": 512, "ranks": (0, 511), "arguments": {"layers": 3}, "options": options}
    report = run_capture(CaptureRequest(f"{HERE}:huge", tmp_path, **given))
    dump = read(tmp_path)
    assert list(dump.ranks) == [0, 511]
    (compiled,) = dump.ranks[511].compiles
    info = compiled.info
    assert (info.world, info.target["name"], info.codegen) == (512, "mi300x", "inductor")
    assert compiled.info.parameters["2.weight"].nbytes == 4 << 32
    assert compiled.info.parameters["2.weight"].shard_bytes == 4 << 23
    gathers = [node for node in compiled.graphs["forward"].last.snapshot.nodes if node.collective]
    assert {node.collective.ranks for node in gathers} == {512}
    assert compiled.graphs["backward"].last.snapshot.peak_bytes > 16 << 30
    assert set(report.seconds) == {"build", "shard", "step"}
    assert report.peak_rss_bytes < 4 << 30


def test_blocks_are_compiled_one_by_one(tmp_path):
    arguments = {"layers": 5}
    request = CaptureRequest(
        f"{HERE}:huge", tmp_path, world=512, arguments=arguments, compile_blocks="*"
    )
    run_capture(request)
    # The input of the first block needs no gradient.
    compiles = read(tmp_path).ranks[0].compiles
    assert len(compiles) == 2
    for compiled in compiles:
        nodes = compiled.graphs["forward"].last.snapshot.nodes
        assert len([node for node in nodes if node.collective]) == 1
    notes = [note for compiled in compiles for note in compiled.notes]
    assert any("a step runs 10 graphs, 5 of them backward" in note for note in notes)


def test_loss_dtypes_and_pipeline_are_applied(tmp_path):
    def captured(name, **given):
        options = {"pipeline": "gather-params"}
        request = CaptureRequest(
            f"{HERE}:with_loss", tmp_path / name, world=4, options=options, **given
        )
        run_capture(request)
        (compiled,) = read(tmp_path / name).ranks[0].compiles
        return compiled

    shard = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    gathers = [
        node
        for node in captured("a", shard=shard).graphs["joint"].last.snapshot.nodes
        if node.collective and "gather" in node.collective.kind
    ]
    assert {value.dtype for node in gathers for value in node.vals} == {"bfloat16"}
    assert list(captured("b", train=False).graphs) == ["captured", "inference"]
    compiled = captured("c")
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
        (f"{HERE}:returns_keywords", {}, "returned a dict as third value; expected a function"),
        (f"{HERE}:returns_int", {}, r"returned int; expected \(model, inputs\)"),
        (f"{HERE}:raises_key_error", {}, "raised KeyError: 'nothing here'"),
        (f"{HERE}:converted", {}, r"swap Linear.weight. torch converts .* the model in its dtype"),
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


def _of_mesh(text, tmp_path, **more):
    shape = MeshShape.parse(text)
    return CaptureRequest(
        more.pop("function", f"{HERE}:two_layers"), tmp_path, shape.ranks, mesh=shape, **more
    )


def test_a_model_with_tensor_parallelism_is_sharded_over_the_other_dimension(tmp_path):
    run_capture(_of_mesh("dp=4,tp=2", tmp_path, ranks=(0, 5), arguments={"width": 16}))
    for rank in (0, 5):
        (compiled,) = read(tmp_path).ranks[rank].compiles
        # 64 x 16 in fp32, cut by 2 and by 4
        assert compiled.info.parameters["0.weight"].shard_bytes == 512
        collectives = [
            node.collective
            for node in compiled.graphs["forward"].last.snapshot.nodes
            if node.collective
        ]
        ranks = {each.label: compiled.info.groups[each.group] for each in collectives}
        dp, tp = (rank % 2, *range(2 + rank % 2, 8, 2)), (rank & 6, (rank & 6) + 1)
        assert ranks == {"dp": dp, "tp": tp}
        assert {each.label: each.ranks for each in collectives} == {"dp": 4, "tp": 2}
        assert sorted(compiled.info.group_labels.values()) == ["dp", "tp"]
    assert [each.agree for each in rank_agreements(read(tmp_path))] == [True] * 3


def test_a_function_that_shards_its_model_is_left_alone(tmp_path):
    run_capture(_of_mesh("dp=2,tp=2", tmp_path, arguments={"shards_itself": True}))
    (compiled,) = read(tmp_path).ranks[0].compiles
    # The 32 x 8 weight of the first layer is cut along dimension 1, after rows were halved.
    (found,) = [node for node in compiled.info.inputs if node["param"] == "0.weight"]
    assert tuple(found["shape"]) in ((16, 4), (4, 16))


def test_a_mesh_of_one_dimension_needs_no_argument_of_the_function(tmp_path):
    run_capture(_of_mesh("dp=4", tmp_path, function=f"{HERE}:with_loss"))
    assert read(tmp_path).ranks[0].compiles[0].info.world == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp", "cannot read 'dp'; expected name=size"),
        ("dp=4,", "cannot read ''"),
        ("dp=0", "cannot read 'dp=0'"),
        ("dp=x", "cannot read 'dp=x'"),
        ("dp=2,dp=2", "dimension dp stands twice"),
        ("tp=8", "no dimensions to shard over; name exactly one"),
        ("dp=2,shard=2", "several dimensions to shard over: dp, shard"),
        ("shard=4,replicate=2", "before shard: replicate=8,shard=64"),
        ("replicate=2,dp_replicate=2,shard=2", "at most one dimension of replicas"),
    ],
)
def test_texts_of_meshes_that_are_refused(text, message):
    with pytest.raises(OptionError, match=message):
        MeshShape.parse(text)


def test_the_dimensions_of_a_mesh_are_those_of_the_data_and_those_of_the_model():
    shape = MeshShape.parse("replicate=2, shard=4 ,cp=2,tp=8")
    assert str(shape) == "replicate=2,shard=4,cp=2,tp=8"
    assert shape.ranks == 128
    assert shape.data_names == ("replicate", "shard")
    assert shape.model_names == ("cp", "tp")


def test_meshes_and_arguments_that_do_not_fit_the_function_are_refused(tmp_path):
    with pytest.raises(CaptureError, match=r"no parameter named mesh, so nothing would use .* tp "):
        run_capture(_of_mesh("dp=4,tp=2", tmp_path, function=f"{HERE}:with_loss"))
    with pytest.raises(CaptureError, match=r"missing .* 'mesh'.* a device mesh as --mesh dp=4"):
        run_capture(CaptureRequest(f"{HERE}:needs_a_mesh", tmp_path))
    with pytest.raises(CaptureError, match="argument mesh is given twice"):
        run_capture(_of_mesh("dp=2,tp=2", tmp_path, arguments={"mesh": 3}))
    request = CaptureRequest(f"{HERE}:two_layers", tmp_path, mesh=MeshShape.parse("dp=2,tp=2"))
    with pytest.raises(OptionError, match=r"mesh dp=2,tp=2 has 4 ranks; expected .* 8"):
        run_capture(request)
    with pytest.raises(ShardingError, match="floating-point"):
        run_capture(_of_mesh("dp=2,tp=2", tmp_path, shard={"param_dtype": torch.int32}))
    shard = {"param_dtype": torch.bfloat16}
    request = _of_mesh("dp=2,tp=2", tmp_path, arguments={"shards_itself": True}, shard=shard)
    with pytest.raises(CaptureError, match="sharded already, so param_dtype would change nothing"):
        run_capture(request)


def test_backward_gathers_again_from_the_ranks_given(tmp_path):
    sizes = {}
    passes = "merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing}"
    for size in (None, "2"):
        folder = tmp_path / str(size)
        given = [] if size is None else ["--reshard-after-forward", size]
        command = ["capture", f"{HERE}:two_layers", "--world", "4", "--pipeline", passes]
        done = CliRunner().invoke(cli, [*command, *given, "-o", str(folder)])
        assert done.exit_code == 0, done.output
        (compiled,) = read(folder).ranks[0].compiles
        nodes = compiled.graphs["backward"].last.snapshot.nodes
        found = [each.collective for each in nodes if each.collective]
        sizes[size] = {each.ranks for each in found if "gather" in each.kind}
    assert sizes == {None: {4}, "2": {2}}


def test_a_large_dump_is_inspected_as_ones_own(tmp_path, monkeypatch):
    command = sys.modules["zpasses.tools.capture.capture_command"]  # loaded by the command line
    dump = tmp_path / "my dump"
    dump.mkdir()
    (dump / "graph.jsonl").write_text("{}")
    assert f"zpasses list '{dump}'; zpasses memory '{dump}';" in command._how_to_inspect(dump)
    monkeypatch.setattr(command, "_UNTRUSTED_BYTES", 1)
    assert f"zpasses memory '{dump}' --trusted; " in command._how_to_inspect(dump)


@pytest.mark.slow(quick="test_the_example_is_captured_from_the_command_line")
def test_the_example_of_experts_is_captured(tmp_path):
    arguments = {"layers": 2, "experts": 16, "hidden": 64, "seq": 8}
    given = {"arguments": arguments, "options": {"zero_stage": 3}}
    function = f"{ROOT}/examples/capture_llama.py:mixture"
    run_capture(CaptureRequest(function, tmp_path / "dump", 8, **given))
    (compiled,) = read(tmp_path / "dump").ranks[0].compiles
    assert "model.layers.0.mlp.experts.gate_up_proj" in compiled.info.parameters


@forked_or_started
def test_the_example_is_captured_from_the_command_line(tmp_path, forked):
    small = "layers=2 hidden=32 intermediate=48 heads=4 kv_heads=2 vocab=64 seq=8"
    arguments = [word for each in small.split() for word in ("--arg", each)]
    command = ["-m", "zpasses", "capture", f"{ROOT}/examples/capture_llama.py:llama", *arguments]
    options = ["--world", "64", "--target", "mi300x", "--zero-stage", "3", "--no-train", "-o"]
    options.append(str(tmp_path / "dump"))
    (done,) = run_program(*command, *options, forked=forked)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert f"zpasses html {tmp_path / 'dump'}" in done.stdout
    (compiled,) = read(tmp_path / "dump").ranks[0].compiles
    assert "model.layers.0.mlp.up_proj.weight" in compiled.info.parameters
    assert "inference" in compiled.graphs
