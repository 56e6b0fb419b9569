"""Trained parameters whose shards rest on the host, in one process."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn

import zpasses
from tests.host_stream import HostStream
from tests.streams import assert_each_wait_is_needed
from tests.zpasses.optim.offloading import captured_of
from zpasses import MemoryBudgetError, OptionError, ShardingError, ZpassesError
from zpasses.cost.memory import device_memory
from zpasses.graph.dialect import TO_HOST
from zpasses.graph.host_copies import (
    OFFLOAD,
    OFFLOAD_WAIT,
    RELOAD,
    SETTLE,
    host_copy_of,
    is_on_host,
)
from zpasses.graph.queries import calls, collectives, returned_values
from zpasses.graph.tags import tag_of
from zpasses.host import host_pool
from zpasses.host.saved_arenas import SavedArenas, gradients, host, like_on_host
from zpasses.optim import parameter_plan
from zpasses.runtime.platform import register_platform
from zpasses.testing import capture_graphs, capture_ranks, fake_world

MATRIX, BIAS = 32 * 64 * 4, 32 * 4
"""Bytes of a shard, on two ranks."""


class Net(nn.Module):
    """Layers, of which the first is frozen."""

    def __init__(self, layers=3, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.layers[0].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def offloaded(model, mesh, **options):
    zpasses.shard(model, mesh=mesh)
    zpasses.offload_parameters(model, trained=True, **options)


def captured(pipeline="zero3", **options):
    return captured_of(Net, offloaded, pipeline, **options)


# --- what is moved --------------------------------------------------------------------------------
def test_trained_shards_move_if_asked_for_and_the_plan_counts_their_gradients():
    with fake_world(2) as mesh:
        net, other = Net(), Net()
        zpasses.shard(other, mesh=mesh)
        zpasses.offload_parameters(other)
        assert parameter_plan(other).host_bytes == MATRIX + BIAS
        assert parameter_plan(other).grad_bytes == 0
        zpasses.offload_parameters(other, trained=True)
        offloaded(net, mesh)
        assert parameter_plan(net) == parameter_plan(other)
        assert parameter_plan(net).host_bytes == 3 * (MATRIX + BIAS)
        assert parameter_plan(net).grad_bytes == 2 * (MATRIX + BIAS)
        assert parameter_plan(copy.deepcopy(net)) == parameter_plan(net)
        net.layers[0].requires_grad_(True)
        with pytest.raises(ShardingError, match=r"'weight' rests .*, trained=True\)\."):
            net(torch.randn(4, 64))
        zpasses.offload_parameters(net, trained=True)
        assert parameter_plan(net).grad_bytes == parameter_plan(net).host_bytes


def test_host_memory_of_gradients_is_part_of_the_need(monkeypatch):
    with fake_world(2) as mesh:
        net = Net(layers=2)
        zpasses.shard(net, mesh=mesh)
        need = r"need 24\.38 KiB .*, of which 8\.125 KiB are for their gradients.*=16 KiB"
        with pytest.raises(MemoryBudgetError, match=need):
            zpasses.offload_parameters(net, trained=True, host_bytes="16KiB")
        with pytest.raises(MemoryBudgetError, match=r"need 8\.125 KiB of host memory on a rank\. "):
            zpasses.offload_parameters(net, host_bytes="4KiB")
        zpasses.offload_parameters(net)
        net.requires_grad_(True)
        monkeypatch.setattr(device_memory, "free_bytes", lambda device: 48 << 10)
        with pytest.raises(MemoryBudgetError, match=r"need 24\.38 KiB .* Available: 24 KiB"):
            zpasses.offload_parameters(net, trained=True)
        assert parameter_plan(net).grad_bytes == 0


def test_memory_of_gradients_is_kept_for_them(monkeypatch):
    with fake_world(2) as mesh:
        net = Net(layers=2)
        zpasses.shard(net, mesh=mesh)
        zpasses.offload_parameters(net, trained=True)
        plan = parameter_plan(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        free = (plan.grad_bytes + (8 << 10)) * 2  # of two ranks
        monkeypatch.setattr(device_memory, "free_bytes", lambda device: free)
        monkeypatch.setattr(host_pool, "_pools", [gradients])
        before = gradients.promised - gradients.reserved - plan.grad_bytes
        monkeypatch.setattr(gradients, "reserved", gradients.reserved + before)
        with pytest.raises(MemoryBudgetError, match=r"states .* Available: 8 KiB"):
            zpasses.offload_optimizer(optimizer)


def test_what_cannot_move_is_refused_by_name():
    with fake_world(2) as mesh:
        net = Net()
        zpasses.shard(net, mesh=mesh)
        with pytest.raises(OptionError, match=r"trained: got 'yes'; expected True or False"):
            zpasses.offload_parameters(net, trained="yes")
        param = net.layers[1].get_parameter("weight")
        param.grad = torch.zeros_like(param)
        with pytest.raises(ZpassesError, match=r"have gradients\. Call it before the first"):
            zpasses.offload_parameters(net, trained=True)
        param.grad = None
        zpasses.offload_parameters(net, trained=True)
        with pytest.raises(ZpassesError, match=r"no parameter can move: of 6, 4 are trained"):
            zpasses.offload_parameters(net, trained=True)


# --- graphs ---------------------------------------------------------------------------------------
def test_a_gradient_leaves_once_it_is_reduced_beside_the_kernels_that_follow():
    last = "reshard-after-forward,schedule{plan=one-ahead,cap_mb=0}"
    found = captured(f"merge-reads,gather-params,reduce-grads,{last}")
    assert len(calls(found.before.joint.graph, TO_HOST)) == 6
    graph = found.after.backward.graph
    assert not calls(graph, TO_HOST)
    at = {node: number for number, node in enumerate(graph.nodes)}
    waits = [each for each in returned_values(graph) if each is not None]
    assert [each.target for each in waits] == [OFFLOAD_WAIT] * 6
    for wait in waits:
        started, grad = wait.args
        assert is_on_host(wait)
        assert tag_of(wait).role == tag_of(grad).role == "shard_grad"
        assert host_copy_of(started).nbytes == tag_of(started).nbytes
        assert at[started] > at[grad]
    spans = [range(at[wait.args[0]], at[wait]) for wait in waits]
    kernels = [at[node] for node in calls(graph, torch.ops.aten.mm.default)]
    assert any(number in span for number in kernels for span in spans)
    assert len(calls(graph, RELOAD)) > 0
    starts = [at[node] for node, each in collectives(graph) if "reduce" in each.op]
    assert min(map(min, spans)) < max(starts)  # the first leave before the last are reduced


@pytest.mark.slow(quick="test_a_gradient_leaves_once_it_is_reduced_beside_the_kernels_that_follow")
def test_leaving_out_a_wait_is_found_by_the_check_and_by_simulation(monkeypatch):
    ranks = captured(capture=capture_ranks, layers=2, width=16)
    graphs = [each.after.backward for each in ranks]
    assert assert_each_wait_is_needed(graphs, OFFLOAD_WAIT, TO_HOST, monkeypatch) == 2


@pytest.mark.slow(quick="test_a_gradient_leaves_once_it_is_reduced_beside_the_kernels_that_follow")
def test_gradients_that_are_summed_on_the_host_are_there(caplog):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.inner(self.inner(x).tanh()).sum()

    options = {"world_size": 2, "shard": offloaded}
    x = (torch.randn(8, 64),)
    merged = capture_graphs(Twice(), x, pipeline="zero3", **options).after.backward.graph
    assert len(calls(merged, OFFLOAD)) == 1
    apart = capture_graphs(Twice(), x, pipeline="gather-params,reduce-grads,schedule", **options)
    assert len(calls(apart.after.backward.graph, TO_HOST)) == 2
    assert not calls(apart.after.backward.graph, OFFLOAD)


# --- memory of gradients --------------------------------------------------------------------------
def test_gradients_have_memory_of_their_own():
    value, live, of_grads = torch.randn(100), host.live, gradients.live
    copied = TO_HOST(value)
    assert torch.equal(copied, value)
    assert (host.live - live, gradients.live - of_grads) == (0, 400)
    del copied
    gc.collect()
    assert gradients.live == of_grads


def test_the_smallest_idle_memory_that_suffices_serves_the_next_run():
    arenas, cpu = SavedArenas(), torch.device("cpu")
    held = []
    for size in (4096, 64, 1024):
        with arenas.run(size, cpu):
            held.append(like_on_host(torch.empty(size, dtype=torch.uint8)))
    addresses = [each.data_ptr() for each in held]
    held.clear()
    gc.collect()
    for size, address in zip(
        (1024, 64, 2048), (addresses[2], addresses[1], addresses[0]), strict=True
    ):
        with arenas.run(size, cpu):
            held.append(like_on_host(torch.empty(size, dtype=torch.uint8)))
        assert held[-1].data_ptr() == address


def test_gradients_of_a_rank_without_rows_take_nothing():
    arenas = SavedArenas()
    with arenas.run(0, torch.device("cpu")):
        assert like_on_host(torch.empty(0, 4)).shape == (0, 4)
    with arenas.run(64, torch.device("cpu")):
        empty, filled = (like_on_host(torch.empty(size, 4)) for size in (0, 4))
    assert (empty.shape, filled.shape) == ((0, 4), (4, 4))


def test_the_cpu_reads_a_gradient_after_its_copy_has_ended():
    made = []

    class Device:
        @staticmethod
        def side_stream():
            made.append(HostStream(10.0))
            return made[-1]

    register_platform("cpu", Device())
    try:
        value, gate, settled = torch.randn(64), threading.Event(), []
        OFFLOAD_WAIT(OFFLOAD(value), value)
        made[0].run(lambda: gate.wait(10))
        ticket = OFFLOAD(value)
        waiting = threading.Thread(target=lambda: settled.append(SETTLE(value)))
        waiting.start()
        waiting.join(0.05)
        assert not settled
        gate.set()
        waiting.join(10)
        assert settled
        OFFLOAD_WAIT(ticket, value)
    finally:
        register_platform("cpu", None)


# --- the dialect ----------------------------------------------------------------------------------
def test_the_gradient_of_a_gradient_on_the_host_is_exact():
    shard = torch.randn(3, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda value: TO_HOST(value).pow(2), (shard,))
    torch.library.opcheck(TO_HOST, (shard,))
