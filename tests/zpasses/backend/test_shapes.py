"""Sequence lengths that change with every batch and differ between ranks."""

import copy
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from zpasses import compat
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.dumps import read
from zpasses.inspect.overview_page import list_view
from zpasses.pipeline.events import observe_graphs
from zpasses.ranks.agree import simulated_answers
from zpasses.testing import fake_world, run_on_ranks, world_mesh
from zpasses.tools.bench.model import ModelSize, build_model

SIZE = ModelSize(width=16, layers=1, heads=2, seq=64, vocab=256, batch=2)


def train(options, count, evaluate=False, blocks=None, size=SIZE):
    """Train on drawn lengths, as one graph or with some blocks compiled one by one. Returns the
    number of captured graphs.
    """
    torch._dynamo.reset()
    before = compat.compile_counts()["captured"]
    model = step = zpasses.shard(build_model(size), mesh=world_mesh())
    options = {"codegen": "eager", **options}
    if blocks is None:
        step = torch.compile(model, backend="zpasses", options=options)
    else:
        zpasses.compile_blocks(model, blocks, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = build_model(size)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    draws = [random.Random(rank) for rank in range(dist.get_world_size())]
    for number in range(count):
        lengths = [draw.randrange(2, SIZE.seq + 1) for draw in draws]
        batches = [torch.arange(2 * length).view(2, length) % 251 for length in lengths]
        mine = batches[dist.get_rank()]
        step(mine, mine).backward()
        # The unsharded model sees the batches of all ranks.
        sum(plain(batch, batch) for batch in batches).div(len(batches)).backward()
        if number % 3 != 1:  # some parameters are kept, and some gradients accumulate
            optimizer.step()
            other.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            other.zero_grad()
        if evaluate:
            with torch.no_grad():
                step(mine, mine)
    for sharded, full in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), full, rtol=1e-4, atol=1e-6)
    return compat.compile_counts()["captured"] - before


@pytest.mark.processes
def test_twenty_lengths_take_two_compiles_and_a_dump_says_why(tmp_path):
    assert run_on_ranks(train, {"zero_stage": 3, "dump": tmp_path}, 20) == [2, 2]
    first, second = read(tmp_path).ranks[0].compiles
    assert not first.info.recompile_reason
    assert "size mismatch at index 1" in second.info.recompile_reason
    shown = list_view(read(tmp_path)).text()
    assert shown.count("compiled again: ") == 1
    assert second.info.recompile_reason[:40] in shown


LAYERS = replace(SIZE, layers=3)


@pytest.mark.processes
@pytest.mark.slow(quick="test_twenty_lengths_take_two_compiles_and_a_dump_says_why")
@pytest.mark.parametrize(
    ("prefetch", "blocks", "kinds"), [(1, "blocks.*", 1), ("auto", "blocks.*,tokens,norm,head", 4)]
)
def test_kinds_of_blocks_are_compiled_at_most_twice_for_twenty_lengths(prefetch, blocks, kinds):
    counts = run_on_ranks(train, {"prefetch": prefetch}, 20, blocks=blocks, size=LAYERS)
    assert max(counts) <= 2 * kinds


@pytest.mark.processes
@pytest.mark.slow(quick="test_twenty_lengths_take_two_compiles_and_a_dump_says_why")
@pytest.mark.parametrize("options", [{"zero_stage": 2}, {"memory_budget": "64MiB"}], ids=str)
def test_evaluation_between_steps_compiles_twice_too(options):
    assert run_on_ranks(train, options, 20, evaluate=True) == [4, 4]


def forward_peak(length, most=None):
    """The peak of the forward graph by the memory model, in bytes."""
    torch._dynamo.reset()
    peaks = []

    def observe(log):
        if log.kind == "forward":
            peaks.append(liveness(log.graph).peak_bytes)

    inputs, targets = (torch.zeros(2, length, dtype=torch.long) for _ in range(2))
    if most is not None:
        for each in (inputs, targets):
            torch._dynamo.mark_dynamic(each, 1, min=2, max=most)
    with fake_world(2), observe_graphs(observe):
        model = zpasses.shard(build_model(SIZE), mesh=world_mesh())
        step = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
        step(inputs, targets)
    return peaks[-1]


@pytest.mark.slow(quick="test_twenty_lengths_take_two_compiles_and_a_dump_says_why")
def test_plans_are_made_for_the_largest_length_that_is_named():
    # Dynamo's sizes of values that are no simple products of the length are bounded from above.
    largest = forward_peak(64)
    assert forward_peak(8) < 0.5 * largest
    assert largest <= forward_peak(8, most=64) <= 1.1 * largest


def test_a_smaller_batch_saves_what_the_first_one_saves():
    """Although some values of the smaller batch are too small to be worth a plan of its own."""
    saved = []

    def observe(log):
        if log.kind == "backward":
            inputs = [node for node in log.graph.nodes if node.op == "placeholder"]
            shapes = [tuple(node.meta["val"].shape) for node in inputs]
            saved.append([width for rows, *width in shapes if rows in (1024, 200)])

    blocks = [(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    options = {"codegen": "eager", "memory_budget": "4MiB"}
    with fake_world(2) as mesh, simulated_answers(), observe_graphs(observe):
        zpasses.shard(model, mesh=mesh)
        for rows in (1024, 200):
            torch.compiler.reset()
            step = torch.compile(model, backend="zpasses", options=options, dynamic=False)
            step(torch.ones(rows, 64)).sum().backward()
    first, second = saved
    assert first == second


def test_a_second_model_keeps_to_its_budget_whatever_the_first_one_saves():
    """Their parameters have equal names and sizes. The first one has a smaller batch."""
    peaks = []

    def observe(log):
        if log.kind in ("forward", "backward"):
            with use_fusion(False):
                peaks.append(liveness(log.graph).peak_bytes)

    options = {"codegen": "eager", "memory_budget": "4MiB"}
    with fake_world(2) as mesh, simulated_answers(), observe_graphs(observe):
        for rows in (200, 1024):
            blocks = [(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())] * 3
            model = nn.Sequential(*(copy.deepcopy(layer) for block in blocks for layer in block))
            zpasses.shard(model, mesh=mesh)
            torch.compiler.reset()
            step = torch.compile(model, backend="zpasses", options=options, dynamic=False)
            step(torch.ones(rows, 64)).sum().backward()
    assert len(peaks) == 4
    assert 3 << 20 < max(peaks) <= 4 << 20


@pytest.mark.inductor
def test_sizes_that_the_code_of_a_backward_depends_on_are_guarded():
    """Inductor lowers the gradients of a convolution for one length, after guards were made."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(4, 4, 3), nn.GELU(), nn.Conv1d(4, 4, 3))
    model = copy.deepcopy(plain)
    with fake_world(1) as mesh:
        zpasses.shard(model, mesh=mesh)
        step = torch.compile(model, backend="zpasses", dynamic=True, options={"cache": False})
        for length in (8, 12, 12, 8):
            batch = torch.randn(2, 4, length)
            step(batch).square().sum().backward()
            plain(batch).square().sum().backward()
    for sharded, full in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.to_local(), full.grad)
