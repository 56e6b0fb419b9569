"""Models of three equal layers, of many kinds, whose memory is measured."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS = 64, 1024


class Gated(nn.Module):
    """Gate and value, from one product or from two."""

    def __init__(
        self, act=F.silu, *, bias=False, wider=2, norm=nn.RMSNorm, swapped=False, fused=True
    ):
        super().__init__()
        self.act, self.swapped = act, swapped
        inner, parts = wider * WIDTH, 1 if fused else 2
        self.into = nn.ModuleList(
            nn.Linear(WIDTH, 2 * inner // parts, bias=bias) for _ in range(parts)
        )
        self.down, self.norm = nn.Linear(inner, WIDTH, bias=bias), norm(WIDTH)

    def forward(self, x):
        made = [each(self.norm(x)) for each in self.into]
        gate, value = made if len(made) == 2 else made[0].chunk(2, -1)
        if self.swapped:
            gate, value = value, gate
        return x + self.down(self.act(gate) * value)


class PostNorm(nn.Module):
    """Normalizes what a layer makes, and the sum."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner, self.outer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.outer(x + self.inner(self.down(torch.relu(self.up(x)).square())))


class Attention(nn.Module):
    """Causal attention over 8 sequences, with norms of queries and keys, and a gate."""

    def __init__(self, *, norms=True, gated=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH // 4) for _ in range(2 * norms))
        self.gate = nn.Linear(WIDTH, WIDTH) if gated else None

    def forward(self, x):
        tokens = x.view(8, -1, WIDTH)
        normed = self.norm(tokens)
        heads = (
            each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(normed).chunk(3, -1)
        )
        query, key, value = heads
        if self.norms:
            query, key = self.norms[0](query), self.norms[1](key)
        made = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        made = made.transpose(1, 2).reshape(tokens.shape)
        if self.gate is not None:
            made = made * torch.sigmoid(self.gate(normed))
        return (tokens + self.out(made)).view(x.shape)


class Checkpointed(nn.Module):
    """What backward computes again, with the random numbers of forward."""

    def __init__(self, make=Attention):
        super().__init__()
        self.inner = make()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Dropped(nn.Module):
    """Dropout of what a layer makes."""

    def __init__(self):
        super().__init__()
        self.inner, self.dropout = Gated(), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.inner(x))


class Experts(nn.Module):
    """All of four experts, weighted."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) * 0.02)

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        made = F.gelu(torch.einsum("nd,edf->enf", x, self.up))
        made = torch.einsum("enf,efd->end", made, self.down)
        return x + torch.einsum("end,ne->nd", made, weights)


class Scan(nn.Module):
    """A short convolution over tokens, and a sum over them."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.near = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 4, padding=3, groups=2 * WIDTH)

    def forward(self, x):
        value, gate = self.into(x).chunk(2, -1)
        near = F.silu(self.near(value.t()[None])[0, :, : len(x)].t())
        return x + self.out(torch.cumsum(near, 0) / 64 * F.silu(gate))


class Mixer(nn.Module):
    """A product over tokens."""

    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.inner = nn.Linear(128, 128), nn.LayerNorm(WIDTH), Gated(F.gelu)

    def forward(self, x):
        tokens = x.view(-1, 128, WIDTH)
        mixed = tokens + self.mix(self.norm(tokens).transpose(1, 2)).transpose(1, 2)
        return self.inner(mixed.reshape(x.shape))


class Rotary(nn.Module):
    """Attention with rotated queries and keys between norms that are written out, and a gate."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.inner = nn.Linear(WIDTH, WIDTH, bias=False), Gated(norm=nn.Identity)
        angles = torch.outer(torch.arange(TOKENS // 8), 10000 ** (-torch.arange(8) / 8))
        self.register_buffer("turn", torch.stack((angles.cos(), angles.sin())))

    def forward(self, x):
        tokens = x.view(8, -1, WIDTH)
        normed = self.normed(tokens, self.scales[0])
        query, key, value = (
            each(normed).unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv
        )
        made = F.scaled_dot_product_attention(
            self.rotated(query), self.rotated(key), value, is_causal=True
        )
        x = (tokens + self.out(made.transpose(1, 2).reshape(tokens.shape))).view(x.shape)
        return x + self.inner(self.normed(x, self.scales[1]))

    def normed(self, x, scale):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale

    def rotated(self, x):
        (cos, sin), (left, right) = self.turn, x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


class Encoder(nn.Module):
    """torch's layer, with dropout in its attention, which it then computes operator by operator."""

    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, F.gelu, batch_first=True)

    def forward(self, x):
        return self.inner(x.view(8, -1, WIDTH)).view(x.shape)


class WrittenOut(nn.Module):
    """Causal attention as a softmax with positions, from constants, and a stack of activations."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.norm = nn.Linear(WIDTH, 3), nn.LayerNorm(WIDTH)

    def forward(self, x):
        tokens = x.view(8, -1, WIDTH)
        heads = (
            each.unflatten(-1, (4, -1)).transpose(1, 2)
            for each in self.qkv(self.norm(tokens)).chunk(3, -1)
        )
        query, key, value = heads
        at = torch.arange(tokens.shape[1])
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(4, 1, 1)
        scores = query @ key.transpose(-1, -2) / 4 + slopes * (at[None] - at[:, None])
        weights = scores.masked_fill(at[None] > at[:, None], -torch.inf).softmax(-1)
        made = self.out((weights @ value).transpose(1, 2).reshape(tokens.shape)).view(x.shape)
        several = torch.stack((F.elu(made), F.hardswish(made), made.sin()), -1)
        return x + (several * self.gate(x).softmax(-1)[:, None]).sum(-1)


class TransposedNorm(nn.Module):
    """A batch norm of transposed values: Inductor lays its result out otherwise than the graph
    shows, and copies it for a product.
    """

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        tokens = x.view(-1, 128, WIDTH)
        normed = self.norm(tokens.transpose(1, 2)).transpose(1, 2)
        return x + self.down(torch.relu(self.up(normed))).reshape(x.shape)


def stacked(make, layers=3):
    torch.manual_seed(0)
    model = nn.Sequential(*(make() for _ in range(layers)))
    return model, [(torch.randn(TOKENS, WIDTH),)] * 2


def both(*makes):
    return nn.Sequential(*(make() for make in makes))


KINDS = {
    "swiglu": Gated,
    "swapped": partial(Gated, swapped=True),
    "geglu": partial(Gated, F.gelu),
    "geglu-tanh": partial(Gated, partial(F.gelu, approximate="tanh")),
    "reglu": partial(Gated, F.relu),
    "glu": partial(Gated, torch.sigmoid),
    "tanh": partial(Gated, torch.tanh),
    "mish": partial(Gated, F.mish),
    "softplus": partial(Gated, F.softplus),
    "bias": partial(Gated, bias=True, norm=nn.LayerNorm),
    "wide": partial(Gated, wider=4),
    "two-products": partial(Gated, fused=False),
    "two-products-bias": partial(Gated, F.gelu, bias=True, fused=False),
    "post-norm": PostNorm,
    "attention": Attention,
    "checkpointed-attention": Checkpointed,
    "gated-attention": partial(Attention, gated=True),
    "plain-attention": partial(Attention, norms=False),
    "llama": partial(both, Attention, Gated),
    "gated-llama": partial(both, partial(Attention, gated=True), partial(Gated, F.gelu)),
    "dropout": Dropped,
    "experts": Experts,
    "scan": Scan,
    "mixer": Mixer,
    "transposed-norm": TransposedNorm,
    "written-out": WrittenOut,
    "checkpointed-written-out": partial(Checkpointed, WrittenOut),
    "rotary": Rotary,
    "checkpointed-rotary": partial(Checkpointed, Rotary),
    "encoder": Encoder,
    "checkpointed-encoder": partial(Checkpointed, Encoder),
}
LAYERS = {"gpt": None, **{name: partial(stacked, make) for name, make in KINDS.items()}}
LAYERS["two-layers"] = partial(stacked, Gated, layers=2)  # forward peaks where `addmm` adds
