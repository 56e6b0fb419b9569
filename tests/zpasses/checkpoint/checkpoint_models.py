"""Models of the tests of checkpoints, and comparisons of whole models."""

import copy

import torch
from torch import nn

import zpasses
from tests.zpasses.models import Odd, Tied, with_integer_weights
from zpasses.testing import world_mesh


class Several(nn.Module):
    """Tied weights, odd shapes, buffers, and dtypes of several widths."""

    def __init__(self):
        super().__init__()
        self.tied, self.odd = with_integer_weights(Tied()), Odd()
        self.norm = nn.BatchNorm1d(4)
        self.narrow = nn.Parameter(torch.arange(9.0).view(3, 3).bfloat16())
        self.wide = nn.Parameter(torch.arange(6.0).view(2, 3).double())
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def changed(model):
    """A copy whose every value differs."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(~value if value.dtype is torch.bool else value + 1)
    return model


def sharded(model, **options):
    return zpasses.shard(copy.deepcopy(model), mesh=world_mesh(), **options)
