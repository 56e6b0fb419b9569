"""The model and the data of all peers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from zpasses.errors import OptionError


@dataclass(frozen=True)
class ModelSize:
    """Shape of the GPT and of one rank's batch. The defaults give 20 million parameters."""

    width: int = 512
    """Width of the model."""
    layers: int = 6
    """Layers of the model."""
    heads: int = 8
    """Attention heads of a layer."""
    vocab: int = 512
    """Rows of the embedding; at least 256, as the data are bytes."""
    seq: int = 128
    """Tokens per sample."""
    batch: int = 4
    """Samples per rank and backward."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise OptionError(
                f"--width {self.width} is not divisible by --heads {self.heads}; choose a multiple."
            )
        if self.vocab < 256:
            raise OptionError(
                f"--vocab {self.vocab} is too small: the data are bytes; expected at least 256."
            )


class Block(nn.Module):
    """Attention and an MLP of four times the width, each after a LayerNorm and with a residual
    connection.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        split = (batch, seq, self.heads, width // self.heads)
        q, k, v = (
            part.view(split).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, seq, width))
        y: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return y


class ParallelBlock(Block):
    """The block for tensor parallelism: outputs of `qkv` are ordered by head, so that a part of its
    rows is a part of the heads.
    """

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, seq, -1, 3, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, seq, -1))
        y: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return y


class GPT(nn.Module):
    """A byte-level GPT that returns its loss.

    Args:
        size: its shape.
        block: class of its blocks.
    """

    def __init__(self, size: ModelSize, block: type[Block] = Block) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.seq, size.width)
        self.blocks = nn.ModuleList(block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, a scalar; `inputs` and `targets` are [batch, seq] of token ids."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build_model(size: ModelSize, block: type[Block] = Block) -> GPT:
    """The model, with the same weights in every process."""
    torch.manual_seed(0)
    model = GPT(size, block)
    for name, param in model.named_parameters():
        if param.dim() > 1:
            nn.init.normal_(
                param,
                std=0.02 / (2 * size.layers) ** 0.5
                if name.endswith(("project.weight", "down.weight"))
                else 0.02,
            )
    return model


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Cuts the layers of a model of `ParallelBlock` over the ranks of a mesh."""
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        plan |= {f"blocks.{number}.{name}": ColwiseParallel() for name in ("qkv", "up")}
        plan |= {f"blocks.{number}.{name}": RowwiseParallel() for name in ("project", "down")}
    parallelize_module(model, mesh, plan)


@functools.cache
def _text() -> Tensor:
    # This module of the standard library contains English text.
    return torch.frombuffer(
        bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8
    )


def batches(size: ModelSize, count: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """`count` batches (inputs, targets) of one rank, each of shape [batch, seq]. They depend only
    on the rank.
    """
    text = _text()
    draw = torch.Generator().manual_seed(1 + rank)
    made = []
    for _ in range(count):
        starts = torch.randint(len(text) - size.seq - 1, (size.batch,), generator=draw).tolist()
        rows = torch.stack([text[start : start + size.seq + 1] for start in starts]).long()
        made.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return made
