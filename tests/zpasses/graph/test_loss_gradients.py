"""Gradients of a head that forward computes, for a gradient of one of the loss."""

import pytest
import torch
from torch.nn import functional as F

from tests.zpasses.graph.losses import (
    BF16,
    F32,
    LOSSES,
    assert_close,
    decomposed,
    step,
    with_tangents,
)
from zpasses import compat
from zpasses.cost.memory.liveness import liveness
from zpasses.graph.loss_chunks import chunk_regions
from zpasses.graph.queries import calls, copy_graph, nbytes, value_of
from zpasses.testing.step_graphs import trace_joint, trace_partitionable

aten = torch.ops.aten
LATE = "its gradients in backward, because "

HEADS = (torch.randn(6, 3), torch.randn(8, 3), torch.tensor([0, 3, 7, -100, 1, 2]))
"""Hidden states, head, labels."""


def chunk_calls(gm):
    return [node for node in gm.graph.nodes if compat.is_subgraph_call(node)]


def rewritten(joint, chunks=3, gradients="forward"):
    gm = copy_graph(joint)
    notes = chunk_regions(gm.graph, chunks, gradients).notes
    gm.graph.lint()
    gm.recompile()
    return gm, "; ".join(notes)


def traced(loss, dtype=F32):
    """The joint graph of a function of hidden states, head and labels."""
    hidden, head, labels = HEADS
    given = [each.to(dtype).requires_grad_() for each in (hidden, head)] + [labels]
    return trace_joint(loss, given), given


def assert_late(loss, reason, dtype=F32):
    """Gradients are in backward for a reason, and right."""
    joint, given = traced(loss, dtype)
    values = with_tangents(joint, given)
    gm, note = rewritten(joint)
    assert LATE in note
    assert reason in note
    assert len(chunk_calls(gm)) == 6
    assert_close(gm(*values), joint(*values), 3)


def cross_entropy(hidden, head, labels):
    return F.cross_entropy((hidden @ head.t()).float(), labels)


LATE_LOSSES = {"per token", "scaled by a mean of all tokens"}


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_chunk_is_one_call_if_the_loss_is_one_value(loss):
    fn, inputs = step(loss, BF16, biased=True, tied=True)
    for joint in (trace_joint(fn, inputs), decomposed(trace_joint(fn, inputs))):
        gm, note = rewritten(joint, 4)
        assert len(chunk_calls(gm)) == (8 if loss in LATE_LOSSES else 4)
        assert (LATE in note) == (loss in LATE_LOSSES)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients_for_a_gradient_of_one_have_the_bits_of_those_in_backward(dtype):
    fn, inputs = step("smoothed", dtype, biased=True, tied=True)
    joint = trace_joint(fn, inputs)
    values = [*with_tangents(joint, inputs)[:-1], torch.ones(())]
    early, late = (rewritten(joint, 3, each)[0](*values) for each in ("forward", "backward"))
    for one, other in zip(early, late, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("gradient", [0.0, 0.25, 1 / 3, -7.0])
def test_a_loss_may_be_scaled_inside_and_outside(gradient):
    for inside in (lambda loss: loss / 3, lambda loss: (0.5 * loss).reshape(1)):
        joint, given = traced(lambda *inputs, inside=inside: inside(cross_entropy(*inputs)), BF16)
        (tangent,) = joint.graph.find_nodes(op="placeholder")[3:]
        values = [*(each.detach() for each in given), torch.full_like(value_of(tangent), gradient)]
        values[-1] = torch.full(value_of(tangent).shape, gradient)
        gm, note = rewritten(joint)
        assert LATE not in note
        assert_close(gm(*values), joint(*values), 3)


def test_two_heads_of_one_loss_are_computed_with_it():
    def loss(hidden, head, labels):
        return cross_entropy(hidden, head, labels) + cross_entropy(hidden.sin(), 2 * head, labels)

    joint, given = traced(loss)
    gm, note = rewritten(joint)
    assert LATE not in note
    assert len(chunk_calls(gm)) == 6
    values = with_tangents(joint, given)
    assert_close(gm(*values), joint(*values), 3)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_heads_and_frozen_hidden_states(frozen):
    given = [
        each.requires_grad_(at != frozen) for at, each in enumerate(traced(cross_entropy)[1][:2])
    ]
    given.append(HEADS[2])
    joint = trace_joint(cross_entropy, given)
    gm, note = rewritten(joint)
    assert LATE not in note
    assert len(chunk_calls(gm)) == 3
    values = with_tangents(joint, given)
    assert_close(gm(*values), joint(*values), 3)


def test_a_gradient_without_dimensions_keeps_its_dtype():
    def loss(hidden, head, labels, scale):
        return cross_entropy(hidden * scale, head, labels) + F.cross_entropy(
            (hidden @ head.t() * scale).float(), labels
        )

    inputs = [*traced(cross_entropy, BF16)[1], torch.tensor(1.5, dtype=BF16, requires_grad=True)]
    joint = trace_joint(loss, inputs)
    gm, note = rewritten(joint)
    assert LATE not in note
    values = with_tangents(joint, inputs)
    assert_close(gm(*values), joint(*values), 3)


# --- halves ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.1])
def test_backward_holds_no_call_of_a_chunk_whatever_it_recomputes(budget):
    fn, inputs = step("mean", BF16, biased=True, batch=8, seq=64, vocab=97)
    step_graphs = trace_partitionable(fn, inputs)
    joint, _ = rewritten(step_graphs.joint, 8)
    forward, backward = compat.partition(
        joint, step_graphs.inputs, activation_budget=budget, **step_graphs.options
    )
    assert len(chunk_calls(forward)) == 8
    assert not chunk_calls(backward)
    assert not calls(backward.graph, aten.mm.default)
    head = value_of(forward.graph.find_nodes(op="placeholder")[2])
    # Backward holds the gradient of the head twice, while it is multiplied; of wide values none.
    assert liveness(backward.graph).peak_bytes < 3 * nbytes(head) + 8 * 64 * 97


@pytest.mark.parametrize(("layers", "vocab", "tokens"), [(0, 128, 64), (1, 40, 300), (3, 700, 96)])
def test_gradients_in_forward_take_about_the_same_memory(layers, vocab, tokens):
    """So a budget needs no trial of gradients in backward."""

    def loss(hidden, head, labels, *weights):
        for each in weights:
            hidden = hidden + torch.tanh(hidden @ each)
        return cross_entropy(hidden, head, labels)

    weights = [torch.randn(16, 16, requires_grad=True) for _ in range(layers)]
    head = torch.randn(vocab, 16, dtype=BF16, requires_grad=True)
    hidden = torch.randn(tokens, 16, dtype=BF16, requires_grad=True)
    weights = [each.detach().to(BF16).requires_grad_() for each in weights]
    step_graphs = trace_partitionable(loss, [hidden, head, torch.zeros(tokens).long(), *weights])

    def peak(chunks, gradients):
        halves = step_graphs.partition(rewritten(step_graphs.joint, chunks, gradients)[0])
        return max(liveness(each.graph).peak_bytes for each in halves)

    for chunks in (2, 4, 8):
        assert peak(chunks, "forward") <= 1.03 * peak(chunks, "backward")


def test_a_checkpointed_loss_computes_its_gradients_once():
    def loss(hidden, head, labels):
        return torch.utils.checkpoint.checkpoint(
            cross_entropy, hidden, head, labels, use_reentrant=False
        )

    step_graphs = trace_partitionable(loss, traced(loss)[1])
    for node in step_graphs.joint.graph.nodes:
        if node.op == "call_function":
            compat.mark_recompute(node)
    forward, backward = step_graphs.partition(rewritten(step_graphs.joint)[0])
    assert len(chunk_calls(forward)) == 3
    assert not chunk_calls(backward)


def test_other_readers_of_what_leads_to_the_gradient_read_the_true_one():
    """A scale of the loss is a parameter, and its gradient is that of the loss times a sum."""

    def loss(hidden, head, labels, scale):
        logits = (hidden @ head.t()).float() * scale
        return scale * F.cross_entropy(logits, labels, reduction="none").sum() + scale.sin()

    inputs = [*traced(cross_entropy)[1], torch.tensor(1.5, requires_grad=True)]
    joint = trace_joint(loss, inputs)
    gm, note = rewritten(joint)
    assert LATE not in note
    values = with_tangents(joint, inputs)
    assert_close(gm(*values), joint(*values), 3)


# --- gradients that stay in backward --------------------------------------------------------------
class Clipped(torch.autograd.Function):
    """Passes values on, and clips their gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.05, 0.05)


class ScaledByItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.abs().sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Clipped, "clamp (aten.clamp.default) is not linear in the gradient of the loss"),
        (ScaledByItself, "abs_1 (aten.abs.default) is not linear in the gradient of the loss"),
    ],
)
def test_gradients_that_are_not_linear(function, reason):
    def of_logits(hidden, head, labels):
        return F.cross_entropy(function.apply(hidden @ head.t()).float(), labels)

    def of_loss(hidden, head, labels):
        losses = F.cross_entropy((hidden @ head.t()).float(), labels, reduction="none")
        return function.apply(losses[:, None]).sum()

    assert_late(of_logits, reason)
    assert_late(of_loss, reason)


def two_losses(hidden, head, labels):
    logits = (hidden @ head.t()).float()
    return F.cross_entropy(logits, labels), logits.logsumexp(-1).square().mean()


def loss_per_token(hidden, head, labels):
    return F.cross_entropy(hidden @ head.t(), labels, reduction="none")


def of_all_tokens(hidden, head, labels):
    logits = hidden @ head.t()
    return logits.logsumexp(-1).mean() * F.cross_entropy(logits, labels)


def through_large_values(hidden, head, labels):
    return (torch.softmax(hidden @ head.t(), -1) @ head).sin().sum()


@pytest.mark.parametrize(
    ("loss", "reason", "dtype"),
    [
        (two_losses, "they depend on the gradients of 2 results: tangents_1, tangents_2", F32),
        (loss_per_token, "the loss is no single value: tangents_1 has the shape [6]", F32),
        (cross_entropy, "is float16, whose small values are lost without", torch.float16),
        (of_all_tokens, "needs a value of all tokens before, so nothing would be saved", F32),
        (through_large_values, "expand, which they need, is more than a value per token", F32),
    ],
)
def test_losses_whose_gradients_stay_in_backward(loss, reason, dtype):
    assert_late(loss, reason, dtype)


def test_gradients_in_backward_on_demand():
    joint, _ = traced(cross_entropy)
    gm, note = rewritten(joint, gradients="backward")
    assert len(chunk_calls(gm)) == 6
    assert LATE not in note
