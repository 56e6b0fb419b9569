import operator

import pytest
import torch
from torch import nn

from tests.foreign import captured_ranks
from tests.zpasses.models import Odd
from zpasses import Level
from zpasses.graph.queries import Editor, collectives
from zpasses.graph.tags import Reduction, Tag, add_tag, tagged
from zpasses.passes import ZERO1, ZERO2, ZERO3, DeferReduction
from zpasses.pipeline.runner import run_passes
from zpasses.runtime.backward_variants import BackwardVariant, build_backward_variant
from zpasses.runtime.grad_slots import always_reduced, grad_slots
from zpasses.testing import (
    capture_graphs,
    capture_ranks,
    copy_graph,
    fake_world,
    listing,
    random_inputs,
    simulate,
    trace_joint,
)

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
X = torch.zeros(2, 6)


def mark_and_keep_all(graphs):
    return frozenset(range(len(grad_slots(graphs[0].graph))))


def variants(graphs, **choices):
    return [build_backward_variant(graph, BackwardVariant(**choices))[0] for graph in graphs]


def run_in_a_window(graphs, inputs, count, accum_dtype=None):
    """Returns the outputs of each of `count` backwards that reduce together, and the reductions
    that it runs.
    """
    every = mark_and_keep_all(graphs)
    own = len(graphs[0].graph.output_node().args[0])
    first = simulate(variants(graphs, deferred=every, accum_dtype=accum_dtype), inputs)
    pending = [run.outputs[own:] for run in first]
    runs = [first]
    for number in range(1, count):
        deferred = every if number < count - 1 else frozenset()
        graphs_now = variants(graphs, given=every, deferred=deferred, accum_dtype=accum_dtype)
        together = [[*values, *given] for values, given in zip(inputs, pending, strict=True)]
        runs.append(simulate(graphs_now, together))
    return [
        (
            [run.outputs[:own] for run in ranks],
            [each for each in ranks[0].collectives if "reduce" in each.op],
        )
        for ranks in runs
    ]


def assert_window_is_the_sum(graphs, count=3, accum_dtype=None):
    """A window of equal backwards reduces once, and returns `count` times the gradient of one
    backward.
    """
    inputs = random_inputs(graphs)
    plain = simulate(graphs, inputs)
    *before, (last, reductions) = run_in_a_window(graphs, inputs, count, accum_dtype)
    pairs = enumerate(zip(before[0][0][0], plain[0].outputs, strict=True))
    gradients = {i for i, (ours, alone) in pairs if ours is None and alone is not None}
    assert gradients
    assert all(ran == [] for _, ran in before)
    assert len(reductions) == len([each for each in plain[0].collectives if "reduce" in each.op])
    for ours, theirs in zip(last, plain, strict=True):
        for i, wanted in enumerate(theirs.outputs):
            expected = wanted * count if i in gradients else wanted
            assert (ours[i] is None) == (wanted is None)
            assert wanted is None or torch.equal(ours[i], expected)
            assert wanted is None or ours[i].dtype == wanted.dtype


def backwards(model, x, world_size, pipeline, **shard):
    captured = capture_ranks(
        model, (x,), world_size=world_size, pipeline=pipeline, shard=shard or None
    )
    return [each.after.backward for each in captured]


def test_the_four_variants_of_a_linear_layer(listing_snapshot):
    lower, model = "gather-params,reduce-grads{form=reduce_scatter}", nn.Linear(6, 4, bias=False)
    captured = capture_graphs(model, (X,), world_size=2, pipeline=lower)
    gm = copy_graph(captured.after.backward)
    DeferReduction()(gm.graph)
    none, zero = frozenset(), frozenset({0})
    shown = [
        listing(build_backward_variant(gm, BackwardVariant(given=given, deferred=deferred))[0])
        for given, deferred in ((none, none), (zero, none), (none, zero), (zero, zero))
    ]
    listing_snapshot("\n\n".join(shown))


@pytest.mark.parametrize(
    "pipeline", ["defer-reduction", "gather-params,reduce-grads,defer-reduction"]
)
def test_window_returns_the_sum_of_its_backwards(pipeline):
    assert_window_is_the_sum(backwards(Odd(), torch.zeros(2, 7), 3, pipeline))


@pytest.mark.parametrize(
    ("accum_dtype", "shard"), [(None, {"reduce_dtype": torch.float32}), (torch.float32, {})]
)
def test_mixed_precision_is_deferred_before_the_cast_of_the_reduction(accum_dtype, shard):
    x, shard = X.bfloat16(), {"param_dtype": torch.bfloat16, **shard}
    graphs = backwards(nn.Linear(6, 5), x, 2, "zero2", **shard)
    assert {slot.dtype for slot in grad_slots(graphs[0].graph)} == {torch.bfloat16}
    given, extra = build_backward_variant(
        graphs[0], BackwardVariant(given=mark_and_keep_all(graphs), accum_dtype=accum_dtype)
    )
    assert {value.dtype for value in extra} == {accum_dtype or torch.bfloat16}
    assert_window_is_the_sum(graphs, accum_dtype=accum_dtype)
    assert [each.dtypes for _, each in collectives(given.graph)] == [
        each.dtypes for _, each in collectives(graphs[0].graph)
    ]


@pytest.mark.parametrize(
    ("options", "saved"),
    [("cap_mb=0", 1), ("mode=coalesced,memory_budget=1GiB", 0)],
    ids=["single", "coalesced"],
)
def test_each_gradient_can_have_its_own_variant(options, saved):
    """A collective over several gradients stays whole for the remaining gradients, and every output
    of it is awaited.
    """
    lower = "merge-reads,gather-params,reduce-grads,cache-params"
    pipeline = f"{lower},schedule{{plan=single,{options}}},defer-reduction"
    graphs = backwards(nn.Linear(6, 5), X, 2, pipeline)
    assert len(mark_and_keep_all(graphs)) == 2
    inputs = random_inputs(graphs)
    plain = simulate(graphs, inputs)
    mixed = simulate(variants(graphs, deferred=frozenset({0}), dropped=frozenset({1})), inputs)
    assert all(len(run.collectives) == 0 for run in mixed)
    half = simulate(variants(graphs, deferred=frozenset({0})), inputs)
    for ours, theirs in zip(half, plain, strict=True):
        pairs = zip(ours.outputs, theirs.outputs, strict=False)
        assert sum(mine is None and other is not None for mine, other in pairs) == 1
        assert len(ours.collectives) == len(theirs.collectives) - saved


class Twice(nn.Module):
    """A parameter that is read twice. Its gradients are reduced separately unless the reads are
    merged.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        return self.layer(self.layer(x).relu())


def test_gradients_that_are_reduced_separately_are_pending_as_one():
    graphs = backwards(Twice(), X, 2, "gather-params,reduce-grads,defer-reduction")
    assert len([each for _, each in collectives(graphs[0].graph) if "reduce" in each.op]) == 2
    assert len(mark_and_keep_all(graphs)) == 1
    assert_window_is_the_sum(graphs)


class Shared(nn.Module):
    """Two parameters with the same gradient. The graph must not return the same memory for both."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x + self.a + self.b


def test_pending_gradients_own_their_memory():
    graphs = backwards(Shared(), torch.zeros(6), 2, "zero3")
    own = len(graphs[0].graph.output_node().args[0])
    inputs = random_inputs(graphs)
    runs = simulate(variants(graphs, deferred=mark_and_keep_all(graphs)), inputs)
    for run, values in zip(runs, inputs, strict=True):
        storages = {value.untyped_storage().data_ptr() for value in run.outputs[own:]}
        assert len(storages) == 2
        assert not storages & {value.untyped_storage().data_ptr() for value in values}


# --- merged reductions --------------------------------------------------------------------------
SHAPES = ((4, 3), (2, 5), (6,))


def merged(form):
    """Returns a backward graph of one of two ranks, with one collective for three gradients."""

    def fn(*values):
        return tuple(value * 2.0 for value in values)

    gm = trace_joint(fn, [torch.zeros(shape, requires_grad=True) for shape in SHAPES])
    graph = gm.graph
    output = graph.output_node()
    grads = list(output.args[0])[-len(SHAPES) :]
    edit = Editor(graph, output)
    names = tuple(f"p{i}" for i in range(len(SHAPES)))

    def call(role, params, target, *args):
        node = edit.call(target, *args)
        add_tag(node, Tag(role, params, 1, bucket=0, origin="test"))
        return node

    if form == "coalesced":
        several, wait = c10d.reduce_scatter_tensor_coalesced.default, c10d.wait_tensor.default
        started = call("reduce", names, several, grads, "avg", 2, "0")
        parts = [edit.call(operator.getitem, started, i) for i in range(len(names))]
        done = [
            call("reduced", (name,), wait, part) for name, part in zip(names, parts, strict=True)
        ]
    else:
        flat = [edit.call(aten.view.default, grad, [2, -1]) for grad in grads]
        if form == "packed and tagged":
            for node, name in zip(flat, names, strict=True):
                add_tag(node, Tag("reduce_input", (name,), origin="test"))
        packed = call("reduce_input", names, aten.cat.default, flat, 1)
        started = call("reduce", names, c10d.reduce_scatter_tensor.default, packed, "avg", 2, "0")
        whole = call("reduced", names, c10d.wait_tensor.default, started)
        sizes = [torch.Size(shape).numel() // 2 for shape in SHAPES]
        parts = [
            edit.call(aten.slice.Tensor, whole, 1, sum(sizes[:i]), sum(sizes[: i + 1]))
            for i in range(len(sizes))
        ]
        done = [
            edit.call(aten.view.default, part, [shape[0] // 2, *shape[1:]])
            for part, shape in zip(parts, SHAPES, strict=True)
        ]
    shards = [edit.call(aten.clone.default, node) for node in done]
    for node, name, shape in zip(shards, names, SHAPES, strict=True):
        reduction = Reduction(shape[0], torch.float32, None, "0")
        add_tag(node, Tag("shard_grad", (name,), origin="test", reduction=reduction))
    output.args = (tuple(shards),)
    gm.recompile()
    return gm


@pytest.mark.parametrize("form", ["coalesced", "packed", "packed and tagged"])
def test_merged_reductions_are_deferred_gradient_by_gradient(form):
    graphs = []
    for rank in range(2):
        with fake_world(2, rank):
            graphs.append(merged(form))
            assert run_passes(graphs[-1].graph, [DeferReduction()])[0].changes == 3
    assert [slot.shape for slot in grad_slots(graphs[0].graph)] == list(SHAPES)
    assert_window_is_the_sum(graphs)


def test_merged_reduction_whose_parts_cannot_be_identified_is_unchanged():
    with fake_world(2):
        gm = merged("packed")
        for node, tag in list(tagged(gm.graph, "reduce_input")):
            add_tag(node, Tag("reduce_input", (*tag.params, "another"), origin="test"))
        assert DeferReduction().rewrite(gm.graph) == 0
    assert grad_slots(gm.graph) == []
    assert always_reduced(gm.graph) == ["p0", "p1", "p2"]


# --- graphs of other libraries ------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_reductions_of_a_model_that_zpasses_did_not_shard(dtype):
    graphs = [each.after.backward for each in captured_ranks("defer-reduction", dtype)]
    assert len(mark_and_keep_all(graphs)) == 2
    assert_window_is_the_sum(graphs)


# --- the pass -------------------------------------------------------------------------------------
def test_marking_adds_no_node_and_counts_gradients():
    captured = capture_graphs(Odd(), (torch.zeros(2, 7),), world_size=2, pipeline="zero3")
    (record,) = (each for each in captured.records if each.name == "defer-reduction")
    assert record.changes == 5
    assert record.nodes_before == record.nodes_after
    assert record.collectives_before == record.collectives_after


def test_every_stage_can_defer_and_the_pass_runs_last():
    for pipeline in (ZERO1, ZERO2, ZERO3):
        assert DeferReduction() in pipeline.at(Level.BACKWARD)
        assert pipeline.passes[-1] == DeferReduction()
