"""Models of layers, for tests of what finds, compiles or schedules equal blocks."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zpasses

WIDTH, DEPTH = 8, 4
VOCAB = 10
"""As large as a batch, so that the gradient of the embedding can take the memory of activations."""


class Layer(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, layers, head; what a layer is, and how it is called, differs between tests."""

    def __init__(self, layer=Layer):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def call(self, layer, x):
        return layer(x)

    def forward(self, tokens, depth=DEPTH):
        x = self.tokens(tokens)
        for layer in self.layers[:depth]:
            x = self.call(layer, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Dropout(Layer):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class Attention(Layer):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().forward(x + mixed.transpose(1, 2).flatten(2))


class Pair(Layer):
    def forward(self, x):
        y = super().forward(x)
        return y, y.detach().mean()


class Pairs(Net):
    def call(self, layer, x):
        y, mean = layer(x)
        return y + mean


class ReadTwice(Layer):
    """A layer that reads each of its weights twice."""

    def forward(self, x):
        return super().forward(super().forward(x))


class Checkpointed(Net):
    def call(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


class Shared(Net):
    """The first two layers share a weight."""

    def __init__(self):
        super().__init__()
        self.layers[1].down.weight = self.layers[0].down.weight


class Frozen(Net):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.up.weight.requires_grad_(False)


class Repeated(Net):
    """Each layer runs twice in a row."""

    def call(self, layer, x):
        return layer(layer(x))


class Recurrent(Net):
    """The first layer runs again at the end."""

    def forward(self, tokens, depth=DEPTH):
        x = self.layers[0](self.tokens(tokens))
        for layer in self.layers[1:]:
            x = layer(x)
        x = self.layers[0](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Statistics(Layer):
    """A layer that writes to a buffer, which it is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return super().forward(x)


def trained(
    model,
    step,
    steps,
    *,
    autocast=False,
    window=False,
    evaluate=False,
    depths=None,
    clip=False,
):
    """Trains a sharded `Net` for some steps; returns losses and full parameters of this rank.

    Args:
        step: the model, or its compiled form.
        depths: number of layers to call in each step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    mode = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        batches = [torch.randint(VOCAB, (2, VOCAB // 2), generator=draw) for _ in range(2)]
        args = (depths[number],) if depths else ()
        with zpasses.coalesce_grad_reduction(model) if window else contextlib.nullcontext():
            for batch in batches:
                with mode:
                    loss = step(batch, *args)
                loss.backward()
                losses.append(loss.item())
        if clip:
            losses.append(zpasses.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                losses.append(step(batches[0]).item())
    return losses, [param.full_tensor().detach() for param in model.parameters()]
