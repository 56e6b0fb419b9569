"""Losses over a vocabulary, and their graphs."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from zpasses import compat
from zpasses.graph.queries import numel, value_of

BF16, F32 = torch.bfloat16, torch.float32


INNER = 3
"""Elements per hidden state. Drawn vocabularies are larger."""


OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "per token": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "ignored": {"ignore_index": 2},
}


def cross_entropy(logits, labels, options):
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), **OPTIONS[options])


LOSSES = {
    **{name: lambda x, y, name=name: cross_entropy(x, y, name) for name in OPTIONS},
    "weighted": lambda x, y: F.cross_entropy(
        x.flatten(0, -2).float(), y.flatten(), weight=torch.arange(1.0, x.shape[-1] + 1)
    ),
    "with z-loss": lambda x, y: (
        cross_entropy(x, y, "mean") + 0.1 * x.float().logsumexp(-1).square().mean()
    ),
    "soft-capped": lambda x, y: cross_entropy(3 * torch.tanh(x / 3), y, "mean"),
    "scaled by a mean of all tokens": lambda x, y: (
        x.logsumexp(-1).mean() * cross_entropy(x, y, "mean")
    ),
    "without padded vocabulary": lambda x, y: cross_entropy(x[..., :-1], y, "mean"),
    "distilled": lambda x, y: F.kl_div(
        x.float().log_softmax(-1), torch.softmax(x.detach().float().cos(), -1), reduction="none"
    ).sum(),
}


def step(loss, dtype=F32, biased=False, tied=False, *, batch=2, seq=6, vocab=10):
    """A head with its loss, and inputs that need gradients."""
    torch.manual_seed(0)
    hidden = torch.randn(batch, seq, INNER, dtype=dtype, requires_grad=True)
    head = torch.randn(vocab, INNER, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocab, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab - 1, (batch, seq))

    def run(hidden, labels, head, bias):
        states = hidden + F.embedding(labels, head) if tied else hidden
        return LOSSES[loss](F.linear(states.tanh(), head, bias if biased else None), labels)

    return run, (hidden, labels, head, bias)


def decomposed(joint):
    """The graph as Inductor's decompositions make it."""
    old = joint.graph.find_nodes(op="placeholder")
    trace = make_fx(joint, decomposition_table=compat.inductor_decompositions())
    with compat.fake_mode_of([value_of(old[0])]):
        gm = trace(*map(value_of, old))
    for node, before in zip(gm.graph.find_nodes(op="placeholder"), old, strict=True):
        node.name = node.target = before.name
        node.meta["val"] = value_of(before)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def with_tangents(joint, inputs):
    wanted = joint.graph.find_nodes(op="placeholder")[len(inputs) :]
    return [
        *(each.detach() for each in inputs),
        *(
            torch.linspace(0.5, 1.5, numel(value_of(node))).view(value_of(node).shape)
            for node in wanted
        ),
    ]


def assert_close(got, expected, chunks):
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            rounding = (chunks + 4) * torch.finfo(one.dtype).eps
            scale = float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=0, atol=rounding * scale)
