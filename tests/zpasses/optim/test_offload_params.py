"""Frozen parameters whose shards rest on the host, in one process."""

import copy
import logging
import re

import pytest
import torch
from torch import nn

import zpasses
from tests.streams import assert_each_wait_is_needed
from tests.zpasses.models import Adapted
from tests.zpasses.optim.offloading import captured_of
from zpasses import MemoryBudgetError, OptionError, ShardingError, ZpassesError
from zpasses.cost.memory import device_memory
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.schedule_planner import plan_schedule
from zpasses.cost.plan.schedule_problem import problem_of
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.host_copies import FROM_HOST, RELOAD, RELOAD_WAIT, host_copy_of
from zpasses.graph.queries import calls, collectives
from zpasses.optim import parameter_plan
from zpasses.option_values import parse_size
from zpasses.testing import capture_graphs, capture_ranks, fake_world


def offloaded(model, mesh, **options):
    zpasses.shard(model, mesh=mesh)
    zpasses.offload_parameters(model, **options)


def captured(pipeline="zero3", **options):
    return captured_of(Adapted, offloaded, pipeline, **options)


KEEPS_NOTHING = "zero3{reshard-after-forward.keep=nothing}"


def graphs_of(found):
    return found.after.forward, found.after.backward


# --- what is moved --------------------------------------------------------------------------------
def test_the_smallest_shards_stay_and_the_plan_says_where_bytes_rest():
    net = Adapted()
    with fake_world(2) as mesh:
        zpasses.shard(net, mesh=mesh)
        before = [param.detach().clone() for param in net.parameters()]
        assert zpasses.offload_parameters(net, device_bytes="512B") is net
        bias, matrix = 32 * 4, 32 * 64 * 4
        assert parameter_plan(net).host_bytes == 3 * matrix
        assert parameter_plan(net).device_bytes == 3 * bias + 3 * matrix
        zpasses.offload_parameters(net, device_bytes="128B")
        assert parameter_plan(net).host_bytes == 3 * matrix + 2 * bias
        for param, value in zip(net.parameters(), before, strict=True):
            assert torch.equal(param.to_local(), value.to_local())
        net.trained[0].requires_grad_(False)
        zpasses.offload_parameters(net)
        assert parameter_plan(net).device_bytes == 2 * matrix


def test_host_memory_is_refused_with_what_is_given_needed_and_available(monkeypatch):
    with fake_world(2) as mesh:
        net = Adapted()
        zpasses.shard(net, mesh=mesh)
        with pytest.raises(
            MemoryBudgetError,
            match=r"parameters that do not stay .* need 24\.38 KiB .* host_bytes=16 KiB\. Avail",
        ):
            zpasses.offload_parameters(net, host_bytes="16KiB")
        monkeypatch.setattr(device_memory, "free_bytes", lambda device: 1 << 13)
        with pytest.raises(MemoryBudgetError, match=r"host_bytes=None. Available: 4 KiB"):
            zpasses.offload_parameters(net)
        assert parameter_plan(net).host_bytes == 0


def test_what_cannot_move_is_refused_by_name():
    net = Adapted()
    with pytest.raises(ZpassesError, match=r"Adapted has no sharded parameter"):
        zpasses.offload_parameters(net)
    with pytest.raises(ZpassesError, match=r"got AdamW; expected a torch\.nn\.Module"):
        zpasses.offload_parameters(torch.optim.AdamW(net.parameters()))
    with pytest.raises(OptionError, match="offload_parameters, device_bytes"):
        zpasses.offload_parameters(net, device_bytes="much")
    with fake_world(2) as mesh:
        with torch.device("meta"):
            empty = Adapted()
        zpasses.shard(empty, mesh=mesh)
        with pytest.raises(ZpassesError, match=r"on meta\. Call to_empty"):
            zpasses.offload_parameters(empty)
        zpasses.shard(net.requires_grad_(True), mesh=mesh)
        with pytest.raises(ZpassesError, match="of 9, 9 are trained"):
            zpasses.offload_parameters(net)


def test_what_would_leave_the_host_is_refused_by_name():
    with fake_world(2) as mesh:
        net = Adapted()
        offloaded(net, mesh)
        with pytest.raises(ShardingError, match=r"'weight', which rests on the host"):
            net.to(torch.bfloat16)
        with pytest.raises(ShardingError, match=r"assigned to 'weight', which rests on the host"):
            net.frozen[0].weight = nn.Parameter(torch.zeros(64, 64))
        net.frozen[0].requires_grad_(True)
        with pytest.raises(ShardingError, match=r"'weight' rests on the host and is trained"):
            net(torch.randn(4, 64))
        step = torch.compile(net, backend="zpasses", options={"agreement": False})
        with pytest.raises(Exception, match=r"frozen.*weight' rests on the host and is trained"):
            step(torch.randn(4, 64))


def test_moves_copies_and_state_dicts_keep_the_shards_on_the_host():
    with fake_world(2) as mesh:
        net, other = Adapted(), Adapted()
        offloaded(net, mesh)
        zpasses.shard(other, mesh=mesh)
        param, plan = net.frozen[0].get_parameter("weight"), parameter_plan(net)
        address = param.to_local().data_ptr()
        net.to("cpu").to_empty(device="cpu")
        copied = copy.deepcopy(net)
        net.load_state_dict(other.state_dict())
        zpasses.pack_shards(net, 1.0)
        assert net.frozen[0].get_parameter("weight") is param
        assert param.to_local().data_ptr() == address
        assert parameter_plan(net) == parameter_plan(copied) == plan
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())
        other.load_state_dict(copied.state_dict())
        assert torch.equal(
            copied.frozen[0].get_parameter("weight").to_local(),
            other.frozen[0].get_parameter("weight").to_local(),
        )


# --- graphs ---------------------------------------------------------------------------------------
def test_a_shard_comes_ahead_of_its_gather_in_forward_and_in_backward():
    found = captured(KEEPS_NOTHING)
    assert calls(found.before.joint.graph, FROM_HOST) == []
    for gm in graphs_of(found):
        nodes = list(gm.graph.nodes)
        at = {node: number for number, node in enumerate(nodes)}
        gathers = [node for node, each in collectives(gm.graph) if "gather" in each.op]
        waits = calls(gm.graph, RELOAD_WAIT)
        assert waits
        for wait in waits:
            started, host, _ = wait.args
            assert started.target is RELOAD
            assert host.op == "placeholder"
            (gather,) = wait.users
            assert gather in gathers
            assert host_copy_of(started).nbytes in (128 * 4, 128 * 256 * 4)
        ahead = [at[wait] - at[wait.args[0]] for wait in waits]
        assert max(ahead) > 3  # something is computed in between
    assert len(calls(found.after.forward.graph, RELOAD)) == 8


@pytest.mark.slow(quick="test_a_shard_comes_ahead_of_its_gather_in_forward_and_in_backward")
def test_copies_keep_to_the_memory_of_the_schedule(caplog):
    with caplog.at_level(logging.INFO, logger="zpasses"):
        found = captured()
    said = re.findall(r"copies from the host; .* peak (.*) of (.*)", caplog.text)
    for gm, texts in zip(graphs_of(found), said, strict=True):
        peak, limit = (parse_size(text, "the log") for text in texts)
        with fake_world(2):
            assert liveness(gm.graph).peak_bytes <= 1.001 * peak
        assert peak <= limit


@pytest.mark.slow(quick="test_a_shard_comes_ahead_of_its_gather_in_forward_and_in_backward")
def test_a_parameter_that_is_kept_is_not_read_again():
    kept = captured(memory_budget="1GiB")
    assert calls(kept.after.backward.graph, RELOAD) == []
    lean = captured(
        pipeline="merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing},schedule"
    )
    read = [[node.args[0].name for node in calls(each.graph, RELOAD)] for each in graphs_of(lean)]
    assert set(read[1]) < set(read[0])  # backward needs no bias
    assert len(read[1]) == 3  # nor the first matrix


@pytest.mark.slow(quick="test_a_shard_comes_ahead_of_its_gather_in_forward_and_in_backward")
def test_gathers_start_when_their_shards_have_come():
    # The copies take nearly as long as the kernels.
    target = Target.parse("h100,tflops=1,host_in_gb_s=0.3")
    gm = captured().before.forward
    with fake_world(2), use_target(target):
        problem = problem_of(gm.graph, target)
        jobs = {job.number: job for job in problem.jobs}
        for number, item in enumerate(problem.items):
            assert (jobs[number].reload_us > 0) == item.tag.params[0].startswith("frozen")
        bound_us, planned = schedule_bound_us(problem), plan_schedule(problem, 1 << 30)
    copies = sum(job.reload_us for job in problem.jobs)
    first = max(job.reload_us for job in problem.jobs)
    assert copies > 0.7 * sum(problem.work_us)
    assert bound_us <= planned.cost.total_us
    assert planned.cost.exposed_us < 1.5 * first
    slow = Target.parse("h100,tflops=1,host_in_gb_s=0.01")
    with fake_world(2), use_target(slow):
        problem = problem_of(gm.graph, slow)
        assert schedule_bound_us(problem) == sum(job.reload_us for job in problem.jobs)
        assert plan_schedule(problem, 1 << 30).cost.total_us >= schedule_bound_us(problem)


@pytest.mark.slow(quick="test_a_shard_comes_ahead_of_its_gather_in_forward_and_in_backward")
def test_leaving_out_a_wait_is_found_by_the_check_and_by_simulation(monkeypatch):
    ranks = captured(capture=capture_ranks, layers=2, width=16)
    for side in ("forward", "backward"):
        graphs = [getattr(each.after, side) for each in ranks]
        assert_each_wait_is_needed(graphs, RELOAD_WAIT, FROM_HOST, monkeypatch)


@pytest.mark.slow(quick="test_a_shard_comes_ahead_of_its_gather_in_forward_and_in_backward")
def test_a_world_of_one_rank_reads_what_came_without_another_copy():
    torch.manual_seed(0)
    found = capture_graphs(
        Adapted(), (torch.randn(8, 64),), world_size=1, pipeline="zero3", shard=offloaded
    )
    for wait in calls(found.after.forward.graph, RELOAD_WAIT):
        assert all(user.target is not torch.ops.aten.clone.default for user in wait.users)
