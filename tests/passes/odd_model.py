"""A model with every odd kind of parameter."""

import torch
from torch import nn


class Model(nn.Module):
    """Has a parameter with odd rows, a tied, a frozen, a scalar, an unused and an empty one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6, bias=False)
        self.again, self.last = nn.Linear(6, 5, bias=False), nn.Linear(5, 5)
        self.again.weight = self.up.weight
        self.scale, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0, 6))
        self.down.weight.requires_grad_(False)

    def forward(self, x):
        hidden = self.again(self.down(self.up(x).relu()))
        return self.last(hidden) * self.scale, x @ self.empty.t()
