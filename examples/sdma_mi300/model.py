"""The two models whose step times were reported with and without gathers by SDMA engines, in plain
PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer, and the batch of one rank, which is one sequence."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    """Width of the MLP's hidden layer."""
    vocab: int
    seq: int
    gated: bool
    """True: gated MLP, RMSNorm and rotary positions, as in Qwen3. False: GELU, LayerNorm and
    learned positions.
    """
    head_width: int = 128
    reported_ms: tuple[float, float] = (0.0, 0.0)
    """Milliseconds of a step on 8 x MI300X with RCCL and with SDMA engines, as DeepSpeed's proposal
    reported them.
    """


MODELS = {
    "gpt-7b": Shape(32, 4096, 32, 32, 16384, 50304, 2048, gated=False, reported_ms=(697.7, 622.0)),
    "qwen3-32b": Shape(
        64, 5120, 64, 8, 25600, 151936, 1024, gated=True, reported_ms=(1402.5, 1263.2)
    ),
}


class Block(nn.Module):
    """Attention and an MLP, each after a norm and with a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        out, kv = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.attention_norm, self.mlp_norm = norm(shape.width), norm(shape.width)
        self.qkv = nn.Linear(shape.width, out + 2 * kv, bias=False)
        self.project = nn.Linear(out, shape.width, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False) if shape.gated else None
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor | None) -> Tensor:
        shape, (batch, seq, _) = self.shape, x.shape
        heads, kv = shape.heads, shape.kv_heads
        mixed = (
            self.qkv(self.attention_norm(x))
            .view(batch, seq, heads + 2 * kv, shape.head_width)
            .transpose(1, 2)
        )
        q, k, v = mixed.split((heads, kv, kv), dim=1)
        if turn is not None:
            q, k = rotated(q, turn), rotated(k, turn)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv != heads)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, seq, heads * shape.head_width))
        y = self.mlp_norm(x)
        return x + self.down(
            F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        )


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Apply rotary positions; `turn` is [2, seq, head width]: cosines and sines."""
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-second, first), dim=-1) * turn[1]


class Decoder(nn.Module):
    """Returns the mean cross-entropy of the next tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = None if shape.gated else nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x, turn = self.tokens(inputs), None
        if self.positions is not None:
            x = x + self.positions.weight[: inputs.shape[1]]
        else:
            half = self.shape.head_width // 2
            places = torch.arange(inputs.shape[1], device=inputs.device)[:, None] / 1e6 ** (
                torch.arange(half, device=inputs.device) / half
            )
            angles = torch.cat((places, places), dim=-1)
            turn = torch.stack((angles.cos(), angles.sin())).to(x.dtype)
        for block in self.blocks:
            x = block(x, turn)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
