"""Steps whose saved values rest on the host."""

import torch
import torch.distributed as dist
from torch import nn

from tests.zpasses.models import Blocks
from zpasses.graph.host_copies import host_copy_of
from zpasses.host.saved_arenas import host

TARGET = "h100,tflops=1,host_out_gb_s=2000,host_in_gb_s=2000"
"""Copies to the host are faster than matmuls there."""


def copies(graph):
    return [each for node in graph.nodes if (each := host_copy_of(node)) is not None]


X = torch.linspace(-1, 1, 2048 * 64).reshape(2048, 64)


class Net(Blocks):
    """Its operators allocate nothing but their results, as the memory model has it."""

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return self.head(x).square().mean()


WIDTH = 64


class Block(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.a = nn.Linear(width, rank, bias=False) if rank else None
        self.b = nn.Linear(rank, width, bias=False) if rank else None

    def forward(self, x):
        y = self.down(nn.functional.gelu(self.up(x)))
        return x + y if self.a is None else x + y + self.b(self.a(x))


def batch(step, rows=1024):
    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(rows, WIDTH, generator=draw)


def steps_of(model, optimizer, case, evaluates=False):
    """Trains at least two steps. Returns losses, gradients and parameters, and the bytes on the
    host between each forward and its backward.
    """
    results, held, window = [], [], case.options.get("backwards_per_step", 1)
    for at in range(2 * max(2, len(case.lengths))):
        x = batch(at, case.lengths[at % len(case.lengths)])
        if len(case.lengths) > 1:
            torch._dynamo.mark_dynamic(x, 0)
        if evaluates:
            with torch.no_grad():
                results.append(model(x))
        loss = model(x)
        held.append(host.live)
        loss.backward()
        results.append(loss.detach())
        if (at + 1) % window == 0:
            grads = [each.grad for each in model.parameters() if each.grad is not None]
            results += [each.to_local().clone() for each in grads]
            optimizer.step()
            optimizer.zero_grad()
    assert host.live == 0
    return results + [each.to_local().clone() for each in model.parameters()], held
