"""Draws small models of many kinds for the suite `programs`.

Each model takes float[rows, 6]. It consists of drawn blocks, each of which keeps the shape, and of
a head. Hidden sizes are odd, so that rows do not divide by the number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6


@dataclass(frozen=True)
class ModelChoice:
    """What a model consists of."""

    blocks: tuple[str, ...]
    """Keys of BLOCKS."""
    repeated: bool = False
    """Whether the first block runs again at the end, with the same parameters."""
    embedding: bool = False
    """Whether an embedding of the largest input is added to the input."""
    tied: bool = False
    """Whether the head has the weight of the embedding."""
    breaks: bool = False
    """Whether the graph breaks after the first block."""
    frozen: tuple[int, ...] = ()
    """Positions of the parameters that are frozen from the start."""
    between: Literal["nothing", "product", "sum", "list"] = "nothing"
    """What runs between blocks: a product or a sum of what they get and return, or nothing but a
    list that holds what they return."""
    checkpoints: bool = False
    """Whether every second block is called by a checkpoint."""


def draw_model(draw: random.Random) -> ModelChoice:
    """Draw a model of one to three blocks."""
    blocks = tuple(draw.choice(list(BLOCKS)) for _ in range(draw.choice((1, 1, 2, 3))))
    embedding = draw.random() < 0.3
    return ModelChoice(
        blocks,
        repeated=draw.random() < 0.15,
        embedding=embedding,
        tied=embedding and draw.random() < 0.6,
        breaks=draw.random() < 0.15,
        frozen=tuple(draw.sample(range(4), draw.choice((0, 0, 0, 1, 2)))),
    )


class Model(nn.Module):
    """The model of a choice."""

    def __init__(self, choice: ModelChoice) -> None:
        super().__init__()
        self.choice = choice
        layers = [BLOCKS[name]() for name in choice.blocks]
        self.layers = nn.ModuleList(layers + layers[: choice.repeated])
        self.embed = nn.Embedding(WIDTH, WIDTH) if choice.embedding else None
        self.head = nn.Linear(WIDTH, WIDTH if choice.tied else 3, bias=not choice.tied)
        if choice.tied and self.embed is not None:
            self.head.weight = self.embed.weight
        params = list(self.parameters())
        for at in choice.frozen:
            if at < len(params) - 1:
                params[at].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = x + self.embed(x.argmax(-1))
        held = []
        for at, layer in enumerate(self.layers):
            again = self.choice.checkpoints and at % 2 == 1
            y: Tensor = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            x = self._between(x, y)
            if self.choice.between == "list":
                held.append(x)
            if self.choice.breaks and at == 0:
                torch._dynamo.graph_break()
        return self.head(x)  # type: ignore[no-any-return]

    def _between(self, x: Tensor, y: Tensor) -> Tensor:
        match self.choice.between:
            case "product":
                return torch.mul(y, 0.75)
            case "sum":
                return torch.add(x, y, alpha=0.5)
        return y


def deepened(draw: random.Random, choice: ModelChoice) -> ModelChoice:
    """The same with more blocks, of which most do not run right before their backward."""
    deeper = replace(
        choice,
        blocks=(choice.blocks * 8)[: draw.choice((4, 6, 8))],
        between=draw.choice(("nothing", "nothing", "product", "sum", "list")),
        checkpoints=draw.random() < 0.25,
    )
    if {"buffers", "batch_norm", "recomputed"} & {*choice.blocks}:  # change in each run, or nested
        deeper = replace(deeper, checkpoints=False)
    return deeper


class _Feed(nn.Module):
    """A residual block with an uneven hidden size, in two nested modules."""

    def __init__(self, width: int = 7, recompute: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh())
        self.down = nn.Linear(width, WIDTH, bias=False)
        self.recompute = recompute

    def _inside(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return torch.add(x, checkpoint(self._inside, x, use_reentrant=False))
        return x + self._inside(x)


class _Adapted(nn.Module):
    """A frozen layer with a low-rank adapter (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 0.5  # type: ignore[no-any-return]


class _Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 1, (1, 2), padding=(0, 1), stride=(1, 2), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.gelu(self.first(x.view(-1, 1, 3, 2))))
        return x.expand(-1, -1, -1, 2).reshape(-1, WIDTH)


class _Attention(nn.Module):
    """Attention over two tokens of three features."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 9)
        self.out = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.view(-1, 1, 2, 3)).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.add(x, self.out(attended).reshape(-1, WIDTH))


class _Experts(nn.Module):
    """Two mixed experts, stacked ones, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.stacked = nn.Parameter(torch.randn(3, WIDTH, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        mixed = sum(weights[:, i : i + 1] * self.experts[i](x) for i in range(2))
        stacked = torch.einsum("bi,eij,be->bj", x, self.stacked, weights)
        return torch.as_tensor(mixed) + stacked.repeat(1, 3)


class _Scalars(nn.Module):
    """Parameters without dimensions, with one row, and one that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.row = nn.Parameter(torch.randn(1, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.row * self.gain


class _Buffers(nn.Module):
    """A counter and a running mean, which forward changes, and a constant that is not saved."""

    calls: Tensor
    mean: Tensor
    signs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("signs", torch.tensor([1.0, -1.0] * 3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.25)
        return x * self.weight * self.signs - self.mean.clone()


BLOCKS: Mapping[str, Callable[[], nn.Module]] = {
    "feed": _Feed,
    "wide": lambda: _Feed(13),
    "recomputed": lambda: _Feed(5, recompute=True),
    "adapted": _Adapted,
    "conv": _Conv,
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "group_norm": lambda: nn.GroupNorm(2, WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "attention": _Attention,
    "experts": _Experts,
    "scalars": _Scalars,
    "buffers": _Buffers,
}
"""Name -> a module that maps float[rows, 6] to float[rows, 6]."""
