"""Reductions of tensors of which a rank has no element."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zpasses
from tests.on_ranks import on_ranks
from tests.training_programs import act, check, program
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes


def _full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def _models():
    """A sharded model and its reference, of whose first layer the second rank has nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 5))
    reference = copy.deepcopy(model)
    return zpasses.shard(model, mesh=world_mesh()), reference


def test_clipping_by_an_infinite_norm():
    clip = act("clip", kind="inf")
    scale = act("scale_grads", way="=", factor=0.5)
    actions = "backward", "backward", clip, "zero_grad", "backward", scale, clip
    check(program(*actions, blocks=("scalars",)))  # one row, so a rank has none


REDUCTIONS = {
    "max": torch.max,
    "amin": torch.amin,
    "argmax": torch.argmax,
    "largest": lambda x: x.abs().max(),
    "norm": lambda x: torch.linalg.vector_norm(x, math.inf),
    "of a list": lambda x: torch._foreach_abs([x])[0].amax(),
    "two norms": lambda x: torch.stack(torch._foreach_norm([x, x * 2], math.inf)),
}


@on_ranks(2)
def test_reductions_of_parameters():
    model, reference = _models()
    for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        for name, reduce in REDUCTIONS.items():
            for value, expected in ((param, wanted), (param.detach() * 2, wanted.detach() * 2)):
                assert torch.equal(_full(reduce(value)), reduce(expected)), name
