"""`zpasses measure`, and traces of real runs on two gloo ranks."""

import json
import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner

import zpasses
from zpasses.cost.time.target import TARGETS, Target
from zpasses.inspect import open as open_dump
from zpasses.inspect.traces import read_trace
from zpasses.runtime.profiling import Watch, watch_if_profiling
from zpasses.testing import run_on_ranks, world_mesh
from zpasses.tools.bench.model import ModelSize, build_model
from zpasses.tools.calibrate_trace import target_from_run
from zpasses.tools.cli.main import cli

PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from zpasses.tools.bench.model import ModelSize, build_model

dist.init_process_group("gloo")
torch.manual_seed(0)
size = ModelSize(width=64, layers=2, heads=2, seq=32, batch=2)
model = build_model(size)
zpasses.shard(model, mesh=init_device_mesh("cpu", (2,)))
step = torch.compile(model, backend="zpasses", options={"zero_stage": 3})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.randint(0, 255, (2, 32))
for _ in range(50):
    step(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _train_and_trace(folder, codegen, per_block=False):
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = build_model(ModelSize(width=64, layers=2, heads=2, seq=32, batch=2))
    zpasses.shard(model, mesh=world_mesh())
    options = {"dump": f"{folder}/dump", "dump_ranks": "all", "codegen": codegen, "zero_stage": 3}
    step = model if per_block else torch.compile(model, backend="zpasses", options=options)
    if per_block:
        zpasses.compile_blocks(model, "blocks.*", prefetch=1, **options)
    tokens = torch.randint(0, 255, (2, 32))
    gradients = []
    if per_block:  # until the schedule knows what runs next
        step(tokens, tokens).backward()
    for traced in (False, True):
        model.zero_grad()
        profile = torch.profiler.profile(profile_memory=True)
        with profile if traced else torch.enable_grad():
            step(tokens, tokens).backward()
        gradients.append([each.grad.to_local().clone() for each in model.parameters()])
    profile.export_chrome_trace(f"{folder}/rank{rank}.json.gz")
    return all(map(torch.equal, *gradients))


@pytest.mark.processes
def test_all_collective_time_of_a_real_step_is_joined_to_nodes(tmp_path):
    assert run_on_ranks(_train_and_trace, str(tmp_path), "eager") == [True, True]
    for rank in (0, 1):
        trace = tmp_path / f"rank{rank}.json.gz"
        assert read_trace(trace).rank == rank
        found = open_dump(tmp_path / "dump").measured(trace)
        assert found.joined_share >= 0.95
        assert {each.graph.graph.name for each in found.graphs} == {"forward", "backward"}
        for each in found.graphs:
            assert each.runs == 1
            assert each.collectives
            assert all(one.time_us > 0 for one in each.collectives.values())
            # Some gradients are freed when their reduction ends, before it is awaited.
            assert 0.94 < each.rise_bytes / each.predicted_rise_bytes < 1.01
            assert 0 <= each.unjoined_compute_us < each.total_us
            # Every operator of eager code is a node: what is left is Python.
            costly = [node for node in each.snapshot.nodes if node.cost_us and not node.collective]
            assert {node.id for node in costly} <= set(each.operators)


@pytest.mark.processes
@pytest.mark.slow(quick="test_all_collective_time_of_a_real_step_is_joined_to_nodes")
def test_collectives_that_leave_their_graph_are_joined_to_its_nodes(tmp_path):
    assert run_on_ranks(_train_and_trace, str(tmp_path), "eager", per_block=True) == [True, True]
    found = open_dump(tmp_path / "dump").measured(tmp_path / "rank0.json.gz")
    assert found.joined_share_of_graphs >= 0.95
    assert not found.reasons
    assert {each.graph.graph.name for each in found.graphs} == {"forward", "backward"}
    for each in found.graphs:
        assert each.runs == 2  # one per block
        nodes = [node.id for node in each.snapshot.nodes if node.collective is not None]
        assert nodes == list(each.collectives)
        assert all(one.time_us > 0 for one in each.collectives.values())


@pytest.mark.processes
@pytest.mark.slow(quick="test_all_collective_time_of_a_real_step_is_joined_to_nodes")
def test_measure_runs_a_program_and_shows_both_times(tmp_path):
    program, output = tmp_path / "train.py", tmp_path / "out"
    program.write_text(textwrap.dedent(PROGRAM))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = ["measure", "--json", "-o", str(output), "--steps", "2", "--", *launch]
    done = CliRunner().invoke(cli, [*command, str(program)])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["joined_share"] >= 0.95
    assert [each["measured"]["runs"] for each in data["graphs"]] == [2, 2]
    assert data["process"]["steps"] == 2
    assert data["process"]["peak_rss_bytes"] > 1 << 20
    assert "--trace" in done.stderr
    found = target_from_run(output)
    assert found != TARGETS["cpu"]
    assert Target.parse(str(found)) == found
    again = CliRunner().invoke(cli, ["measure", "-o", str(output), str(program)])
    assert again.exit_code == 2
    assert "contains the dump of another run" in again.stderr


def test_a_program_that_never_steps_is_reported(tmp_path):
    program = tmp_path / "idle.py"
    program.write_text("print('nothing to do')")
    output = tmp_path / "out"
    done = CliRunner().invoke(cli, ["measure", "-o", str(output), str(program)])
    assert done.exit_code == 2
    assert "ended before 6 optimizer steps" in done.stderr
    assert "nothing to do" in done.stderr


def test_messages_are_watched_only_while_a_profiler_records():
    assert watch_if_profiling(lambda: None) is None


def test_what_a_watched_message_raises_is_raised_by_its_wait():
    def fail():
        raise RuntimeError("connection closed")

    watch = Watch(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection closed"):
            watch.join()
