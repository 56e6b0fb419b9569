"""Equal blocks that are compiled once: same numbers as one graph, whatever the blocks contain."""

import logging
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zpasses
from tests.cases import some_quick
from tests.graphs import drawn_examples
from tests.zpasses.layered_models import (
    DEPTH,
    WIDTH,
    Attention,
    Broken,
    Checkpointed,
    Dropout,
    Frozen,
    InPlace,
    Layer,
    Net,
    Pair,
    Pairs,
    Recurrent,
    Repeated,
    Shared,
    Statistics,
    trained,
)
from zpasses import compat
from zpasses.backend.blocks import outline_blocks
from zpasses.cost.memory import liveness
from zpasses.cost.step_time import step_time
from zpasses.cost.target import TARGETS
from zpasses.dumps import read
from zpasses.graph.nodes import calls as calls_of
from zpasses.pipeline.observers import observe_graphs
from zpasses.testing import fake_world, run_on_ranks, world_mesh

EAGER = {"codegen": "eager"}
H100 = TARGETS["h100"]
SLOW = pytest.mark.slow(quick="the same without a compiler")


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(build, options, steps=3, **how):
    """Returns losses and full parameters of this rank after some steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    zpasses.shard(model, mesh=world_mesh())
    return trained(model, torch.compile(model, backend="zpasses", options=options), steps, **how)


def compare(build, options, **how):
    """Train with and without blocks; returns the subgraph calls of every graph."""
    calls = {}

    def observe(graph):
        number = sum(map(compat.is_subgraph_call, graph.graph.nodes))
        calls.setdefault(graph.kind, []).append(number)

    losses, params = train(build, options, **how)
    with observe_graphs(observe):
        found, others = train(build, {**options, "blocks": "layers.*"}, **how)
    assert found == losses
    for other, param in zip(others, params, strict=True):
        assert torch.equal(other, param)
    return calls


CASES = {
    "plain": (Net, {}),
    "attention": (lambda: Net(Attention), {}),
    "dropout": (lambda: Net(Dropout), {}),
    "several results": (lambda: Pairs(Pair), {}),
    "in place": (lambda: Net(InPlace), {}),
    "checkpoint": (Checkpointed, {}),
    "shared weight": (Shared, {}),
    "frozen": (Frozen, {}),
    "autocast": (Net, {"autocast": True}),
    "window": (Net, {"window": True}),
    "evaluation": (Net, {"evaluate": True}),
    "repeated": (Repeated, {}),
    "recurrent": (Recurrent, {}),
}


@pytest.mark.processes
@pytest.mark.parametrize("stage", some_quick([1, 2, 3], [2]))
def test_all_stages_train_to_the_same_bits(stage):
    (first, second) = run_on_ranks(compare, Net, {**EAGER, "zero_stage": stage}, window=True)
    assert first == second
    assert first["forward"] == first["backward"] == [DEPTH]


@pytest.mark.parametrize(
    "case",
    some_quick(
        CASES,
        ["attention", "dropout", "several results", "checkpoint", "shared weight", "window"],
    ),
)
def test_blocks_of_all_kinds_train_to_the_same_bits(case, one_rank):
    build, how = CASES[case]
    calls = compare(build, {**EAGER, "zero_stage": 3}, **how)
    assert min(calls["forward"]) >= DEPTH


@pytest.mark.processes
@pytest.mark.parametrize(
    "more",
    some_quick([{"memory_budget": "1MiB"}, {"verify": "simulate"}], [{"memory_budget": "1MiB"}]),
    ids=str,
)
def test_budgets_and_simulated_ranks_take_blocks(more):
    (first, second) = run_on_ranks(compare, Net, {**EAGER, **more})
    assert first == second
    assert first["forward"] == first["backward"] == [DEPTH]


def test_graphs_between_breaks_have_their_own_blocks(one_rank):
    calls = compare(Broken, {**EAGER, "zero_stage": 3})
    assert calls["forward"] == [2, 2]


def test_another_number_of_layers_is_compiled_again(one_rank):
    calls = compare(Net, {**EAGER, "zero_stage": 3}, depths=[4, 2, 4])
    assert calls["forward"] == [4, 2]


def test_a_block_that_writes_to_its_inputs_stays_in_the_graph(one_rank, caplog):
    with caplog.at_level(logging.INFO, "zpasses"):
        calls = compare(lambda: Net(Statistics), {**EAGER, "zero_stage": 3})
    assert calls["forward"] == [0]
    assert "layers.0 is compiled by itself: it writes to a tensor that it is given" in caplog.text


KINDS = {
    "layer": Layer,
    "attention": Attention,
    "in place": InPlace,
    "other constant": lambda: Layer(eps=1e-3),
    "statistics": Statistics,
}


@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=7),
)
@settings(max_examples=drawn_examples(20), deadline=None)
def test_drawn_sequences_of_blocks_compute_the_same(kinds, order):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(KINDS[kind]() for kind in kinds)})
    order = [at % len(kinds) for at in order]

    def run(x):
        for at in order:
            x = model.layers[at](x)
        return x

    graphs = []

    def backend(gm, inputs):
        outlined = compat.clone_graph_module(gm)
        graphs.append((gm, outlined, outline_blocks(outlined, "layers.*"), inputs))
        return gm

    with torch.no_grad():
        torch.compile(run, backend=backend)(torch.randn(2, 5, WIDTH))
        ((gm, outlined, report, inputs),) = graphs
        for found, expected in zip(outlined(*inputs), gm(*inputs), strict=True):
            assert torch.equal(found, expected)
    called = Counter(kinds[at] for at in order)
    repeated = {kind: n for kind, n in called.items() if n > 1 and kind != "statistics"}
    assert sorted(map(len, report.calls.values())) == sorted(repeated.values())
    assert sum(map(compat.is_subgraph_call, outlined.graph.nodes)) == sum(repeated.values())


def gathers_in_backward(codegen):
    found = []

    def observe(graph):
        if graph.kind == "backward":
            gathers = compat.functional.all_gather_into_tensor.default
            found.append(len(calls_of(graph.graph, gathers)))

    pipeline = "gather-params,reduce-grads,reshard-after-forward"
    with observe_graphs(observe):
        for blocks in (None, "layers.*"):
            train(Net, {"codegen": codegen, "pipeline": pipeline, "blocks": blocks}, 1)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=SLOW)])
def test_full_parameters_are_gathered_again_for_backward(codegen):
    for plain, with_blocks in run_on_ranks(gathers_in_backward, codegen):
        assert plain == with_blocks > 2 * DEPTH


def test_a_dump_has_one_graph_per_distinct_block(one_rank, tmp_path):
    options = {**EAGER, "zero_stage": 3, "blocks": "layers.*", "dump": str(tmp_path)}
    train(Net, options, 1)
    (compiled,) = read(tmp_path).ranks[0].compiles
    graphs = compiled.graphs
    assert {"forward.block_0", "backward.block_0"} <= graphs.keys()
    assert not any("block_1" in name for name in graphs)
    block, whole = (graphs[name].last.snapshot for name in ("forward.block_0", "forward"))
    assert sum("addmm" in node.target for node in block.nodes) == 1
    calls = [node for node in whole.nodes if "invoke_subgraph" in node.target]
    assert [node.source.module for node in calls] == [f"layers.{at}" for at in range(DEPTH)]
    assert all(node.cost_us > 0 for node in calls)


def test_schedules_of_calls_keep_to_their_budget(tmp_path):
    torch._dynamo.reset()
    with fake_world(64):
        width = 512
        layers = [nn.TransformerEncoderLayer(width, 4, batch_first=True) for _ in range(4)]
        model = zpasses.shard(nn.Sequential(*layers), mesh=world_mesh())
        options = {**EAGER, "target": "h100", "blocks": "auto", "dump": str(tmp_path)}
        step = torch.compile(model, backend="zpasses", options=options)
        step(torch.randn(1, 8, width)).sum().backward()
    (compiled,) = read(tmp_path).ranks[0].compiles
    found = compiled.graphs["backward"].prediction
    assert len([name for name in compiled.graphs if "block_" in name]) == 2
    assert found.peak_bytes <= found.limit_bytes


def test_the_time_of_a_call_is_that_of_its_block_and_so_is_its_memory(one_rank):
    found = []

    def observe(graph):
        if graph.kind == "forward":
            found.append(
                (liveness(graph.graph).peak_bytes, step_time([graph.graph], H100).total_us)
            )

    with observe_graphs(observe):
        for blocks in (None, "layers.*"):
            options = {**EAGER, "pipeline": "", "blocks": blocks, "recompute_elementwise": False}
            train(Net, options, 1)
    (memory, time), (memory_of_calls, time_of_calls) = found
    assert memory <= memory_of_calls < 1.3 * memory
    assert time_of_calls == pytest.approx(time, rel=0.1)


INDUCTOR_CASES = [
    "attention",
    *(
        pytest.param(case, marks=pytest.mark.slow(quick="the same with attention"))
        for case in CASES
        if case not in ("attention", "dropout")
    ),
]


@pytest.mark.inductor
@pytest.mark.parametrize("case", INDUCTOR_CASES)
def test_generated_code_of_blocks_computes_the_same(case, one_rank):
    build, how = CASES[case]
    # What eager code computes takes no C++ compiler, but rounds otherwise under autocast.
    reference = {} if case == "autocast" else EAGER
    losses, params = train(build, {"zero_stage": 3, **reference}, **how)
    found, others = train(build, {"zero_stage": 3, "blocks": "layers.*"}, **how)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    for other, param in zip(others, params, strict=True):
        torch.testing.assert_close(other, param, rtol=1e-4, atol=1e-5)
