"""Rewrites of graphs that compute the rows of a large product in chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.graphs import few_examples
from tests.zpasses.graph.losses import (
    BF16,
    F32,
    INNER,
    LOSSES,
    assert_close,
    decomposed,
    step,
    with_tangents,
)
from zpasses import compat
from zpasses.cost.memory.liveness import liveness
from zpasses.graph.loss_chunks import chunk_regions, rows_per_chunk
from zpasses.graph.loss_regions import find_regions
from zpasses.graph.queries import copy_graph, numel, value_of
from zpasses.testing.step_graphs import trace_joint, trace_partitionable

GRADIENTS = st.sampled_from(["forward", "backward"])


@few_examples
@given(st.data())
def test_results_are_equal_but_for_the_rounding_of_sums_over_chunks(data):
    draw = data.draw
    loss, dtype = draw(st.sampled_from(sorted(LOSSES))), draw(st.sampled_from([F32, BF16]))
    sizes = {"batch": draw(st.integers(1, 3)), "seq": draw(st.integers(5, 9))}
    sizes["vocab"] = draw(st.integers(INNER + 3, 17))
    fn, inputs = step(loss, dtype, draw(st.booleans()), draw(st.booleans()), **sizes)
    joint = trace_joint(fn, inputs)
    values = with_tangents(joint, inputs)
    if draw(st.booleans()):
        joint = decomposed(joint)
    chunks, gradients = draw(st.integers(2, 7)), draw(GRADIENTS)
    rewritten = copy_graph(joint)
    assert chunk_regions(rewritten.graph, chunks, gradients).changed == 1
    rewritten.graph.lint()
    rewritten.recompile()
    assert_close(rewritten(*values), joint(*values), chunks)


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.slow(quick="test_results_are_equal_but_for_the_rounding_of_sums_over_chunks")
def test_every_loss_in_both_forms(loss):
    for dtype, biased, tied in [(F32, True, True), (BF16, False, False), (BF16, True, True)]:
        fn, inputs = step(loss, dtype, biased, tied)
        traced = trace_joint(fn, inputs)
        values = with_tangents(traced, inputs)
        for joint in (traced, decomposed(traced)):
            for gradients in ("forward", "backward"):
                rewritten = copy_graph(joint)
                assert chunk_regions(rewritten.graph, 5, gradients).changed == 1
                rewritten.recompile()
                assert_close(rewritten(*values), joint(*values), 5)


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_forward_saves_no_logits_and_no_half_holds_more_than_one_chunk(gradients):
    fn, inputs = step("smoothed", batch=8, seq=64, vocab=97)
    traced = trace_partitionable(fn, inputs)
    logits = 8 * 64 * 97 * 4
    whole = [liveness(gm.graph).peak_bytes for gm in traced.partition(copy_graph(traced.joint))]
    rewritten = copy_graph(traced.joint)
    chunk_regions(rewritten.graph, 8, gradients)
    halves = traced.partition(rewritten)
    peaks = [liveness(gm.graph).peak_bytes for gm in halves]
    assert all(peak > logits for peak in whole)
    assert all(peak < 0.6 * logits for peak in peaks)
    for gm in halves:
        assert all(numel(value_of(node)) * 4 < 0.2 * logits for node in gm.graph.nodes)
    values = with_tangents(traced.joint, inputs)
    expected = traced.joint(*values)
    outputs = halves[0](*values[: len(inputs)])
    saved = outputs[traced.outputs :]
    grads = halves[1](*saved, *values[len(inputs) :])
    assert_close([*outputs[: traced.outputs], *grads], expected, 8)


def test_equal_chunks_share_a_subgraph():
    fn, inputs = step("mean", batch=4, seq=8)
    # The first chunk adds to no sum of earlier ones; with gradients in backward: forward, too.
    for gradients, calls, bodies in [("forward", 16, 2), ("backward", 32, 3)]:
        joint = trace_joint(fn, inputs)
        chunk_regions(joint.graph, 16, gradients)
        found = [node for node in joint.graph.nodes if compat.is_subgraph_call(node)]
        assert len(found) == calls
        assert len({node.args[1] for node in found}) == bodies


def test_phases_compute_a_sum_over_all_tokens_before_what_reads_it():
    fn, inputs = step("scaled by a mean of all tokens")
    joint = trace_joint(fn, inputs)
    chunk_regions(joint.graph, 2)
    assert len([node for node in joint.graph.nodes if compat.is_subgraph_call(node)]) == 4


def test_chunks_are_multiples_of_tiles_if_they_are_large():
    assert rows_per_chunk(8192, 16) == 512
    assert rows_per_chunk(1000, 7) == 192
    assert rows_per_chunk(100, 6) == 32
    assert rows_per_chunk(7, 2) == 4


def test_a_product_with_fewer_rows_than_chunks_has_a_chunk_per_row():
    assert rows_per_chunk(4, 32) == 1
    fn, inputs = step("mean")
    joint = trace_joint(fn, inputs)
    assert "chunks of 1 tokens" in "; ".join(chunk_regions(joint.graph, 1000).notes)


# --- graphs that stay as they are -----------------------------------------------------------------
def refused(fn, *inputs):
    joint = trace_joint(fn, inputs)
    before = str(joint.graph)
    found = chunk_regions(joint.graph, 2)
    assert found.changed == 0
    assert str(joint.graph) == before
    return "; ".join(found.notes)


def test_a_graph_without_a_head_says_so():
    x, w = torch.randn(6, 3, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    nothing = "no product whose rows become wider and are then reduced"
    assert refused(lambda x: x.sin().sum(), x) == nothing
    assert refused(lambda x, w: F.gelu(x @ w.t()) @ w, x, w) == nothing
    assert refused(lambda x, w: (x @ w).logsumexp(-1), w, torch.randn(3, 2)) == nothing


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda logits: (logits.logsumexp(-1).sum(), logits), "the graph returns mm"),
        (lambda logits: logits.cumsum(0).logsumexp(-1).sum(), "cumsum is aten.cumsum.default"),
        (lambda logits: logits.logsumexp(-1).sum() + logits.amax(0).sum(), "reduces rows by aten"),
        (
            lambda logits: (logits + torch.rand_like(logits)).logsumexp(-1).sum(),
            "is aten.rand_like",
        ),
    ],
    ids=["returned", "cumulative", "maximum over tokens", "random"],
)
def test_a_refusal_names_what_was_found(loss, reason):
    x, w = torch.randn(6, 3, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    assert reason in refused(lambda x, w: loss(x @ w.t()), x, w)


def test_two_heads_are_two_regions():
    fn, inputs = step("mean")

    def both(hidden, labels, head, bias):
        return fn(hidden, labels, head, bias) + fn(hidden.flip(0), labels, head.flip(0), bias)

    joint = trace_joint(both, inputs)
    assert len(find_regions(joint.graph)[0]) == 2
    rewritten = copy_graph(joint)
    assert chunk_regions(rewritten.graph, 3).changed == 2
    rewritten.recompile()
    values = with_tangents(joint, inputs)
    assert_close(rewritten(*values), joint(*values), 3)


def test_chunks_make_constants_themselves():
    """Inductor loads what a subgraph is given, and keeps expressions of many loads in memory."""
    run, given = step("mean", dtype=BF16)
    gm = decomposed(trace_joint(run, given))
    assert chunk_regions(gm.graph, 3).changed == 1
    calls = [node for node in gm.graph.nodes if compat.subgraph_of(node) is not None]
    assert calls
    for call in calls:
        inputs = compat.subgraph_of(call).graph.find_nodes(op="placeholder")
        rows = [value_of(each).shape[:1] for each in inputs]
        # Hidden states, the head in both orders, its sum so far, and what tokens have.
        assert all(each in ([4], [INNER], [10]) for each in map(list, rows))
        assert len(inputs) <= 7
