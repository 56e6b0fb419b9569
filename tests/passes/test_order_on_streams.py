"""The graphs of the catalogue's pipelines have no races, and what breaks their order is found by
the static check if and only if runs on simulated devices show it.
"""

import functools
import random

import pytest
import torch
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem
from torch import nn

from tests.cases import some_quick
from tests.flattening import TIERS, on_host, rewritten, two_tensors
from tests.graphs import drawn_examples
from tests.streams import races_and_difference
from zpasses import Pipeline
from zpasses.graph.queries import Editor, calls, value_of
from zpasses.graph.verifier.operators import is_launch
from zpasses.graph.verifier.order import find_races, group_stream, own_stream
from zpasses.pipeline.pipeline import catalogue
from zpasses.testing import capture_graphs, capture_ranks, copy_graph, fake_world, random_inputs
from zpasses.testing.steps import groups_of_captures
from zpasses.testing.stream_graphs import record_streams

pytestmark = pytest.mark.usefixtures("mi300x")

aten, F = torch.ops.aten, torch.ops._c10d_functional
WAIT = F.wait_tensor.default
STREAMS = (own_stream, group_stream)
LOWER = "merge-reads,gather-params,reduce-grads{form=%s}"
NAMED = sorted(name for name, each in catalogue().items() if isinstance(each, Pipeline))
PIPELINES = [
    *NAMED,
    "chunk-loss{chunks=2},"
    + LOWER % "all_reduce"
    + ",schedule{plan=one-ahead,mode=flat,memory_budget=1GiB}",
    LOWER % "reduce_scatter" + ",schedule{plan=one-ahead,mode=flat,memory_budget=1GiB}",
    LOWER % "reduce_scatter"
    + ",schedule{plan=one-ahead,mode=coalesced,memory_budget=1GiB},sdma{gathers=all}",
]
ELSEWHERE = {"flatten-on-device"}
"""Passes of graphs that are no training steps; they have tests of their own below."""


class Model(nn.Module):
    """Has parameters with uneven rows, a tied and a frozen one, and a scalar."""

    def __init__(self, rows=5):
        super().__init__()
        self.up, self.down = nn.Linear(6, rows), nn.Linear(rows, 6, bias=False)
        self.again, self.scale = nn.Linear(6, rows), nn.Parameter(torch.ones(()))
        self.again.weight = self.up.weight
        self.down.weight.requires_grad_(False)

    def forward(self, x):
        return self.again(self.down(self.up(x).relu())).sigmoid() * self.scale


X = torch.zeros(2, 6)


def test_pipelines_hold_every_pass_of_the_catalogue():
    used = {each.name for text in PIPELINES for each in Pipeline.parse(text)}
    passes = {name for name, each in catalogue().items() if not isinstance(each, Pipeline)}
    assert passes - used == ELSEWHERE


@pytest.mark.parametrize("pipeline", some_quick(PIPELINES, ["zero2", "zero3", PIPELINES[-1]]))
def test_pipelines_of_the_catalogue_have_no_race(pipeline):
    if pipeline in ("zero3", PIPELINES[-1]):
        captures = capture_ranks(Model(), (X,), world_size=2, pipeline=pipeline)
    else:  # with even rows, all ranks have the same graphs
        captures = [capture_graphs(Model(4), (X,), world_size=2, pipeline=pipeline)] * 2
    groups = groups_of_captures(captures)
    launches = 0
    for side in ("joint", "forward", "backward"):
        graphs = [getattr(each.after, side) for each in captures]
        for stream_of in STREAMS:
            assert [find_races(gm.graph, stream_of) for gm in graphs] == [[], []]
            schedule = record_streams(graphs, random_inputs(graphs), groups, stream_of=stream_of)
            assert schedule.first_difference(seeds=3) is None
            launches += len(schedule.streams) - 2
    assert launches > 4


@pytest.mark.parametrize("tier", TIERS)
def test_flat_buffers_have_no_race(tier):
    graphs = [on_host(rewritten(two_tensors(), TIERS[tier], 2, rank)) for rank in (0, 1)]
    values = [[torch.randn(2, 3), torch.randn(4)]] * 2
    for stream_of in STREAMS:
        assert [find_races(gm.graph, stream_of) for gm in graphs] == [[], []]
        schedule = record_streams(graphs, values, stream_of=stream_of)
        assert schedule.first_difference(seeds=8) is None


MUTANTS = drawn_examples(75)


# --- seeded mutations -----------------------------------------------------------------------------
@functools.cache
def lowered():
    """Forward and backward graphs of two pipelines."""
    found = []
    for pipeline in (PIPELINES[-1], PIPELINES[-2]):
        after = capture_graphs(Model(4), (X,), pipeline=pipeline).after
        found += [after.joint, after.backward]
    return found


def drop_waits(gm, draw):
    """Drops some or all waits of a launch. The outputs of coalesced collectives arrive together."""
    waits = calls(gm.graph, WAIT)
    of = {}
    for wait in waits:
        source = wait.args[0]
        of.setdefault(source if is_launch(source.target) else source.args[0], []).append(wait)
    several = draw.choice(list(of.values()))
    for wait in several if draw.random() < 0.7 else several[:1]:
        wait.replace_all_uses_with(wait.args[0])
        gm.graph.erase_node(wait)


def await_another(gm, draw):
    wait, other = draw.sample(calls(gm.graph, WAIT), 2)
    wait.replace_all_uses_with(wait.args[0])
    wait.args = other.args
    if list(gm.graph.nodes).index(other.args[0]) > list(gm.graph.nodes).index(wait):
        other.args[0].append(wait)


def write(gm, draw):
    nodes = list(gm.graph.nodes)
    values = [(node, value_of(node)) for node in nodes[:-1]]
    floats = [n for n, v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    used = {each for node in nodes if is_launch(node.target) for each in node.all_input_nodes}
    node = draw.choice([each for each in floats if each in used or draw.random() < 0.1])
    later = [each for each in nodes[nodes.index(node) + 1 :] if each.op != "placeholder"]
    before = draw.choice(later[:6])
    Editor(gm.graph, before=before).call(aten.add_.Tensor, node, draw.uniform(1, 2))


def return_started(gm, draw):
    started = draw.choice([wait.args[0] for wait in calls(gm.graph, WAIT)])
    output = gm.graph.output_node()
    output.args = ((*output.args[0], started),)


def gather_without_keeping(gm, draw):
    gathers = [node for node in gm.graph.nodes if str(node.target).endswith("all_gather.default")]
    gathers += calls(gm.graph, F.all_gather_into_tensor.default)
    node = draw.choice(gathers)
    node.target = torch.ops.symm_mem._low_contention_all_gather.default
    node.args = (node.args[0], node.args[2])


def gather_into_used_memory(gm, draw):
    gathers = calls(gm.graph, F.all_gather_into_tensor.default)
    buffers = [
        (node, other)
        for node in gathers
        for other in gm.graph.nodes
        if other < node and getattr(value_of(other), "shape", None) == value_of(node).shape
    ]
    node, out = draw.choice(buffers)
    node.target, node.kwargs = F.all_gather_into_tensor_out.default, {"out": out}


MUTATIONS = [drop_waits, drop_waits, await_another, write, write, write, return_started]
MUTATIONS += [gather_without_keeping, gather_into_used_memory]


def test_mutated_graphs_race_if_and_only_if_runs_show_it():
    counts = {True: 0, False: 0}
    with fake_world(2):
        for seed in range(MUTANTS):
            draw = random.Random(seed)
            gm = copy_graph(draw.choice(lowered()))
            mutation = draw.choice(MUTATIONS)
            try:
                mutation(gm, draw)
            except IndexError:  # the graph has nothing to draw from
                continue
            stream_of = draw.choice(STREAMS)
            races, difference, _ = races_and_difference(gm, stream_of=stream_of)
            assert bool(races) == bool(difference), (
                f"seed {seed}, {mutation.__name__}: {list(map(str, races))}, {difference}\n"
                f"{gm.graph}"
            )
            counts[bool(races)] += 1
    assert min(counts.values()) > MUTANTS // 10, counts
