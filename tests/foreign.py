"""Models sharded as SimpleFSDP does it: a parametrization gathers the weight at every read."""

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn.utils import parametrize

from zpasses.testing import capture_graphs, fake_world


class Gather(nn.Module):
    def __init__(self, group, dtype=None):
        super().__init__()
        self.group, self.dtype = group, dtype

    def forward(self, shard):
        return funcol.all_gather_tensor_autograd(
            shard.to(self.dtype) if self.dtype else shard, 0, self.group
        )


def simple_fsdp(mesh, dtype=None, activation=nn.ReLU):
    """Returns two layers, 6 -> 8 -> 6, with weights sharded by rows over the mesh.

    The values are the same on every rank.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), activation(), nn.Linear(8, 6, bias=False))
    for layer in (model[0], model[2]):
        rows = layer.weight.shape[0] // mesh.size()
        start = rows * mesh.get_local_rank()
        layer.weight = nn.Parameter(layer.weight.detach()[start : start + rows].clone())
        parametrize.register_parametrization(
            layer, "weight", Gather(mesh.get_group(), dtype), unsafe=True
        )
    return model


def already_sharded(model, mesh):
    """For `capture_graphs(shard=...)`: the model is already sharded."""


def captured_ranks(pipeline, dtype=None):
    """Returns the captured steps of a SimpleFSDP model on both of two ranks."""
    captures = []
    for rank in range(2):
        with fake_world(2, rank) as mesh:
            model, x = simple_fsdp(mesh, dtype), torch.ones(2, 6, dtype=dtype)
            captures.append(capture_graphs(model, (x,), shard=already_sharded, pipeline=pipeline))
    return captures
