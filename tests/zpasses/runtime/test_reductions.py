"""Reductions of parameters: of tensors of which a rank has no element, and losses."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

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


PENALTIES = {
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 2),
    "l1_loss": lambda x: F.l1_loss(x, x.detach() * 2),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach() * 2, beta=0.1),
    "huber_loss": lambda x: F.huber_loss(x, x.detach() * 2, delta=0.1),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x.detach().sign()),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), (x * 2).sigmoid()),
    "with logits": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid() * 0.5),
    "a sum": lambda x: F.mse_loss(x, x.detach() * 2, reduction="sum"),
    "each": lambda x: F.mse_loss(x, x.detach() * 2, reduction="none").sin().sum(),
    "an infinite norm": lambda x: x.norm(math.inf),
}


@on_ranks(2)
def test_penalties_of_parameters_have_exact_gradients():
    model, reference = _models()
    for name, penalty in PENALTIES.items():
        for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            value, expected = _full(penalty(param)), penalty(wanted)
            torch.testing.assert_close(value, expected, msg=name)
            value.backward()
            expected.backward()
            torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, msg=name)
            param.grad = wanted.grad = None
