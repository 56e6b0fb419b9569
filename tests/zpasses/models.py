"""Small models with weights and data of small integers, for which every order of summation gives
the same bits.
"""

import copy

import torch
from torch import nn


def integers(*shape, seed=0, dtype=torch.float32):
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_integer_weights(model):
    with torch.no_grad():
        for seed, param in enumerate(model.parameters()):
            param.copy_(integers(*param.shape, seed=seed))
    return model


class Tied(nn.Module):
    """Word embedding and output head share one weight of 10 rows."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class Odd(nn.Module):
    """Parameters of awkward shapes: 5 and 7 rows, one row, a scalar, no rows; a frozen and an
    unused one; and a buffer.
    """

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.empty(5, 7))
        self.deep = nn.Parameter(torch.empty(7, 5))
        self.single = nn.Parameter(torch.empty(1, 5))
        self.scale = nn.Parameter(torch.empty(()))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.frozen = nn.Parameter(torch.empty(5, 5), requires_grad=False)
        self.unused = nn.Parameter(torch.empty(3, 3))
        self.register_buffer("offset", torch.ones(5))
        with_integer_weights(self)

    def forward(self, x):
        hidden = (x @ self.wide.t() + self.offset) @ self.frozen
        return (
            self.scale * (hidden @ self.deep.t() @ self.deep + self.single)
            + torch.cat([self.empty, self.single]).sum()
        )


class Blocks(nn.Module):
    """Residual blocks of two linear layers, and a head."""

    def __init__(self, width=32, layers=3, outputs=50):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return self.head(x).logsumexp(-1).sum()


def reference_gradients(model, batches):
    """Gradients by name of an unsharded copy of `model`. The loss is the mean over `batches` (one
    per rank) of the summed output.
    """
    reference = copy.deepcopy(model)
    for batch in batches:
        (reference(batch).sum() / len(batches)).backward()
    return {name: param.grad for name, param in reference.named_parameters()}


def full_gradients(model):
    return {
        name: None if param.grad is None else param.grad.full_tensor()
        for name, param in model.named_parameters()
    }


def assert_same_values(actual, expected):
    """Assert equal names in equal order, and bit-identical tensors."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


class Adapted(nn.Module):
    """Layers whose matrices are frozen, with a small trained part each, as with adapters."""

    def __init__(self, layers=3, width=64):
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.trained = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        for frozen, trained in zip(self.frozen, self.trained, strict=True):
            x = x + torch.tanh(frozen(x)) + trained(x)
        return x.square().mean()
