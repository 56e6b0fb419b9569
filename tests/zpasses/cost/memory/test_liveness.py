"""Compare the memory model with figures computed by hand, and with what a model allocates."""

import gc
import operator

import pytest
import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile, record_function

import zpasses
from tests.cases import some_quick
from tests.graphs import Param, joint, rewritten
from zpasses import compat
from zpasses.cost.memory.liveness import (
    liveness,
    reinplaceable_all_reduces,
    scratch_bytes,
)
from zpasses.graph.aliases import memory_root, root_output
from zpasses.graph.queries import collective_of, is_wait, saved_inputs
from zpasses.graph.tags import Tag, add_tag
from zpasses.passes import CacheParams, GatherParams, ReduceGrads
from zpasses.passes.bucket import Bucket
from zpasses.pipeline.events import observe_graphs
from zpasses.runtime.codegen import eager_module
from zpasses.testing import fake_world
from zpasses.tools.bench.model import ModelSize, batches, build_model

aten = torch.ops.aten
UNIT = 4096
"""Bytes of the tensors below, which have 1024 floats."""


@pytest.fixture(autouse=True)
def backend_is_not_gloo(monkeypatch):
    """Graphs outlive the fake world that made them, but gloo's scratch memory depends on their
    group.
    """
    monkeypatch.setattr("zpasses.compat.is_gloo", lambda group, device=None: False)


class GraphBuilder:
    """Builds a graph by hand, with fake values of shape [1024]."""

    def __init__(self, *inputs):
        self.graph = fx.Graph()
        with compat.FakeTensorMode() as self.mode:
            self.inputs = [
                self._value(self.graph.placeholder(name), torch.empty(1024)) for name in inputs
            ]

    def call(self, target, *args, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            values = fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
            return self._value(node, target(*values[0], **values[1]))

    def live(self, *returned):
        """Returns the number of tensors alive during each call, and during the output."""
        self.graph.output(returned)
        found = liveness(self.graph)
        units = [nbytes / UNIT for nbytes in found.live_bytes]
        return units[len(self.inputs) :]

    def _value(self, node, value):
        node.meta["val"] = value
        return node


def test_a_value_lives_from_its_node_to_its_last_reader():
    builder = GraphBuilder("x")
    a = builder.call(aten.sin.default, *builder.inputs)
    b = builder.call(aten.cos.default, a)
    c = builder.call(aten.add.Tensor, a, b)
    assert builder.live(c) == [1, 2, 3, 1]


def test_memory_of_the_caller_does_not_count():
    builder = GraphBuilder("x", "y")
    a = builder.call(aten.add.Tensor, *builder.inputs)
    assert builder.live(a, builder.inputs[0]) == [1, 1]


def test_views_keep_their_base_alive_and_take_no_memory():
    builder = GraphBuilder("x")
    a = builder.call(aten.sin.default, *builder.inputs)
    view = builder.call(aten.view.default, a, [32, 32])
    part = builder.call(aten.slice.Tensor, view, 0, 0, 1)
    other = builder.call(aten.cos.default, *builder.inputs)
    end = builder.call(aten.sum.default, part)
    assert builder.live(end, other)[:4] == [1, 1, 1, 2]


def test_a_copy_of_a_slice_does_not_keep_its_source_alive():
    builder = GraphBuilder("x")
    a = builder.call(aten.sin.default, *builder.inputs)
    part = builder.call(aten.slice_copy.Tensor, a, 0, 0, 512)
    b = builder.call(aten.cos.default, *builder.inputs)
    assert builder.live(part, b) == [1, 1.5, 1.5, 1.5]


def test_an_op_that_returns_what_it_writes_to_takes_no_memory():
    builder = GraphBuilder("x")
    a = builder.call(aten.sin.default, *builder.inputs)
    b = builder.call(aten.add_.Tensor, a, 1.0)
    assert builder.live(b) == [1, 1, 1]


def test_outputs_of_one_op_have_separate_lifetimes():
    builder = GraphBuilder("x")
    both = builder.call(
        aten.aminmax.default, builder.call(aten.view.default, builder.inputs[0], [2, 512]), dim=0
    )
    first = builder.call(operator.getitem, both, 0)
    second = builder.call(operator.getitem, both, 1)
    a = builder.call(aten.sin.default, first)
    b = builder.call(aten.cos.default, second)
    # 512 floats each: the first output is freed after its reader, the second lives on
    assert builder.live(a, b) == [0, 1, 1, 1, 1.5, 1.5, 1]


def test_an_unread_value_lives_only_during_its_node():
    builder = GraphBuilder("x")
    builder.call(aten.sin.default, *builder.inputs)
    a = builder.call(aten.cos.default, *builder.inputs)
    assert builder.live(a) == [1, 1, 1]


def test_saved_values_die_at_their_last_use_in_a_backward_graph():
    builder = GraphBuilder("primals_1", "saved", "tangents_1")
    a = builder.call(aten.mul.Tensor, builder.inputs[1], builder.inputs[2])
    b = builder.call(aten.mul.Tensor, a, builder.inputs[0])
    assert {node.name for node in saved_inputs(builder.graph.nodes)} == {"saved", "tangents_1"}
    assert builder.live(b) == [3, 2, 1]


def test_shards_and_inputs_of_the_model_belong_to_the_caller_in_a_backward_graph():
    builder = GraphBuilder("primals_1", "p", "tangents_1")
    add_tag(builder.inputs[1], Tag("shard", ("p",)))
    assert [node.name for node in saved_inputs(builder.graph.nodes)] == ["tangents_1"]


def test_saved_views_of_one_tensor_count_once_and_die_together():
    builder = GraphBuilder("whole", "view", "tangents_1")
    builder.inputs[1].meta["val"] = builder.inputs[0].meta["val"].view(32, 32)
    a = builder.call(aten.mul.Tensor, builder.inputs[0], builder.inputs[2])
    b = builder.call(aten.neg.default, a)
    c = builder.call(aten.sum.default, builder.inputs[1])
    assert builder.live(b, c)[:2] == [3, 3]  # whole, tangents, a; whole, a, b


def started(gm):
    return [node for node in gm.graph.nodes if collective_of(node) is not None]


def buffers_at(gm, node):
    return sorted(buffer.nbytes for buffer in liveness(gm.graph).alive_at(node))


def test_a_collective_holds_inputs_and_outputs_until_it_is_awaited():
    with fake_world(2):
        gm = rewritten(joint([Param((6, 2))], 0, 2), ReduceGrads("reduce_scatter"))
    (reduction,) = [node for node in started(gm) if "reduce_scatter" in node.name]
    (wait,) = reduction.users
    # The tangent is a saved value, and the output of the forward part lives on.
    before = [
        each
        for each in liveness(gm.graph).alive_at(wait)
        if each.node in (reduction, reduction.args[0])
    ]
    assert sorted(each.nbytes for each in before) == [24, 48]
    after = liveness(gm.graph).alive_at(gm.graph.output_node())
    assert [each.nbytes for each in after if each.node in (reduction, reduction.args[0])] == [24]


def test_no_output_of_a_collective_is_freed_before_all_are_awaited():
    with fake_world(2):
        gm = rewritten(
            joint([Param((4, 2)), Param((6, 2))], 0, 2),
            GatherParams(),
            Bucket(memory_budget="1GiB"),
        )
    (gather,) = [node for node in started(gm) if "coalesced" in node.name]
    waits = [node for node in gm.graph.nodes if is_wait(node)]
    held = [each for each in liveness(gm.graph).alive_at(waits[-1]) if each.node is gather]
    assert [each.nbytes for each in held] == [48, 32]


def test_gloo_takes_scratch_memory_until_the_wait(monkeypatch):
    params = [Param((4, 2)), Param((6, 2))]
    with fake_world(2):
        gm = rewritten(
            joint(params, 0, 2),
            GatherParams(),
            ReduceGrads("all_reduce"),
            Bucket(mode="coalesced", memory_budget="1GiB"),
        )
        assert [scratch_bytes(node) for node in started(gm)] == [0, 0]
        plain = liveness(gm.graph)
        monkeypatch.setattr("zpasses.compat.is_gloo", lambda group, device=None: True)
        gather, reduction = started(gm)
        # The gather packs shards and gathers into a flat buffer. The reduction packs gradients and
        # reduces them in place.
        assert [scratch_bytes(gather), scratch_bytes(reduction)] == [40 + 80, 80]
        gloo = liveness(gm.graph)
    wait = next(iter(next(iter(gather.users)).users))
    at = gloo.nodes.index(wait)
    assert gloo.live_bytes[at] - plain.live_bytes[at] == 120
    assert gloo.live_bytes[at + 2] == plain.live_bytes[at + 2]


def _all_reduced(graph, item):
    started = graph.call(torch.ops._c10d_functional.all_reduce.default, item, "sum", "0")
    return started, graph.call(torch.ops._c10d_functional.wait_tensor.default, started)


def test_an_all_reduce_overwrites_a_dead_value_of_the_graph():
    with fake_world(2):
        builder = GraphBuilder("x")
        a = builder.call(aten.sin.default, *builder.inputs)
        _, reduced = _all_reduced(builder, builder.call(aten.view.default, a, [2, 512]))
        assert builder.live(builder.call(aten.cos.default, reduced)) == [1, 1, 1, 1, 2, 1]


@pytest.mark.parametrize(
    "case",
    ["input of the graph", "read later", "a view is read later", "returned", "not contiguous"],
)
def test_an_all_reduce_does_not_overwrite_values_that_are_read_later(case):
    with fake_world(2):
        builder = GraphBuilder("x")
        a = builder.call(aten.sin.default, *builder.inputs)
        half = builder.call(aten.view.default, a, [2, 512])
        item = {
            "input of the graph": builder.inputs[0],
            "not contiguous": builder.call(aten.t.default, half),
        }.get(case, a)
        started, reduced = _all_reduced(builder, item)
        later = {"read later": a, "a view is read later": half}.get(case, reduced)
        builder.graph.output(
            (builder.call(aten.cos.default, later), reduced, *([a] if case == "returned" else []))
        )
        assert started not in reinplaceable_all_reduces(builder.graph)
        assert any(buffer.node is started for buffer in liveness(builder.graph).buffers)


@pytest.mark.parametrize("form", ["coalesced", "flat"])
def test_eager_codegen_reduces_in_place_and_does_not_change_the_graph(form):
    with fake_world(2):
        gm = rewritten(
            joint([Param((4, 2)), Param((6, 2))], 0, 2),
            ReduceGrads("all_reduce"),
            Bucket(mode=form, memory_budget="1GiB"),
        )
        before = [node.target for node in gm.graph.nodes]
        module = eager_module(gm)
        module.recompile()
    assert "all_reduce_" + ("coalesced_" if form == "coalesced" else "") + ".default" in module.code
    assert [node.target for node in gm.graph.nodes] == before


def test_cached_parameters_live_to_the_end():
    with fake_world(2):
        gathered = rewritten(joint([Param((6, 2))], 0, 2), GatherParams())
        kept = rewritten(gathered, CacheParams())
    assert liveness(kept.graph).live_bytes[-1] - liveness(gathered.graph).live_bytes[-1] == 48


def test_alive_at_lists_the_largest_first_and_adds_up():
    with fake_world(3):
        gm = rewritten(
            joint([Param((7, 2)), Param((3, 2))], 0, 3),
            GatherParams(),
            ReduceGrads("reduce_scatter"),
        )
    found = liveness(gm.graph)
    for node, live in zip(found.nodes, found.live_bytes, strict=True):
        sizes = [each.nbytes for each in found.alive_at(node)]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(sizes) == live
    assert found.peak_bytes == sum(each.nbytes for each in found.alive_at(found.peak_node))


def test_bytes_of_overrides_the_bytes_of_a_node():
    builder = GraphBuilder("x")
    a = builder.call(aten.sin.default, *builder.inputs)
    builder.graph.output((a,))
    assert liveness(builder.graph, bytes_of=lambda node: 5 if node is a else None).peak_bytes == 5


def test_an_empty_graph_has_no_peak():
    assert liveness(GraphBuilder("x").graph).peak_bytes == 0


# --- compared with allocations --------------------------------------------------------------------
def allocated(profiled, name):
    """(bytes allocated when the code with this mark started, peak above them)."""
    events = profiled.profiler.kineto_results.events()
    step = next(event for event in events if event.name() == name)
    live = resting = peak = 0
    allocations = (event for event in events if event.name() == "[memory]")
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        live += event.nbytes()
        if event.start_ns() < step.start_ns():
            resting = peak = live
        elif event.start_ns() <= step.start_ns() + step.duration_ns():
            peak = max(peak, live)
    return resting, peak - resting


SIZE = ModelSize(width=128, layers=2, heads=4, vocab=256, seq=64, batch=4)


RESHARDED = "reshard-after-forward,bucket{cap_mb=1,memory_budget=1GiB},overlap"


@pytest.mark.parametrize(
    "last",
    some_quick(["cache-params", RESHARDED], [RESHARDED]),
    ids=["cached", "resharded"],
)
@pytest.mark.slow(
    quick="test_plans_keep_the_bits_and_the_budget_and_are_never_slower_than_one_ahead"
)
def test_modelled_peaks_are_what_a_step_allocates(last):
    graphs = {}
    options = {
        "pipeline": f"merge-reads,gather-params,reduce-grads,{last}",
        "codegen": "eager",
        "agreement": False,
    }
    # Entered first: the profiler misses the release of memory whose allocation it has not seen.
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
        fake_world(2) as mesh,
    ):
        model = build_model(SIZE)
        zpasses.shard(model, mesh=mesh)
        step = torch.compile(model, backend="zpasses", fullgraph=True, options=options)
        warmup, measured = batches(SIZE, 2, 0)
        with observe_graphs(lambda log: graphs.setdefault(log.kind, log.graph)):
            step(*warmup).backward()
        step(*warmup).backward()
        for param in model.parameters():
            param.grad = None
        gc.collect()
        with record_function("measured forward"):
            loss = step(*measured)
        with record_function("measured backward"):
            loss.backward()
    resting, forward = allocated(profiled, "measured forward")
    before_backward, backward = allocated(profiled, "measured backward")
    backward += before_backward - resting  # memory that outlives forward
    ahead, back = liveness(graphs["forward"]), liveness(graphs["backward"])
    assert ahead.peak_bytes == pytest.approx(forward, rel=0.02)
    # Cached parameters outlive forward. Backward does not need them, so they count as its caller's.
    assert back.peak_bytes + ahead.live_bytes[-1] - back.live_bytes[0] == pytest.approx(
        backward, rel=0.02
    )


def test_each_output_of_a_call_has_memory_of_its_own():
    built = GraphBuilder("x")
    (x,) = built.inputs
    call = built.call(aten.var_mean.correction, x, [0])
    first, second = (built.call(operator.getitem, call, at) for at in range(2))
    view = built.call(aten.view.default, second, [1])
    built.graph.output((first, view))
    assert [memory_root(each) for each in (first, view)] == [first, second]
    assert [root_output(memory_root(each)) for each in (first, view, x)] == [
        (call, 0),
        (call, 1),
        (x, 0),
    ]
    buffers = [each for each in liveness(built.graph).buffers if each.node is call]
    assert [each.output for each in buffers] == [0, 1]
    # Views share the memory of what they view, also if a call makes several.
    parts = built.call(aten.split.Tensor, x, 512)
    part = built.call(operator.getitem, parts, 1)
    assert memory_root(part) is x
