"""A small model, sharded or not, whose parameters tests edit."""

import torch
from torch import nn

import zpasses
from zpasses.testing import world_mesh

X = torch.linspace(-1, 1, 12).reshape(2, 6)


EAGER = {"codegen": "eager", "agreement_timeout_s": 20.0}


def build(sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
    return zpasses.shard(model, mesh=world_mesh()) if sharded else model


def compiled(model, stage, **options):
    return torch.compile(
        model, backend="zpasses", options={"zero_stage": stage, **EAGER, **options}
    )
