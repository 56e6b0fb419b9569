"""`zpasses.clip_grad_norm_`, compared with torch's on the unsharded model."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests.on_ranks import on_ranks
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes


class Net(nn.Module):
    """5 and 7 rows, one row, which leaves a rank without any, and a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 7)
        self.one, self.scale = nn.Parameter(torch.ones(1, 7)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * self.one * self.scale


def _batch(rank):
    return torch.linspace(-1, 1, 24).view(4, 6) * (1 + rank)


ORDERS = [0.0, 1.0, 2.0, 3.0, math.inf, -math.inf]


@pytest.mark.parametrize("ignored", [False, True])
@on_ranks(2)
def test_every_rank_gets_the_norm_of_the_unsharded_model(ignored):
    plain, model = Net(), Net()
    left = [model.a.bias, model.scale] if ignored else []
    zpasses.shard(model, mesh=world_mesh(), ignored_params=left)
    for order in ORDERS:
        model.zero_grad()
        plain.zero_grad()
        model(_batch(dist.get_rank())).pow(2).sum().backward()
        for param in left:
            dist.all_reduce(param.grad)
            param.grad /= 2
        for rank in range(2):
            (plain(_batch(rank)).pow(2).sum() / 2).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, order)
        norm = zpasses.clip_grad_norm_(model.parameters(), 0.1, order)
        assert type(norm) is torch.Tensor
        torch.testing.assert_close(norm, expected)
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            grad = param.grad if param in set(left) else param.grad.full_tensor()
            torch.testing.assert_close(grad, other.grad)


@on_ranks(2)
def test_torch_cannot_clip_sharded_and_plain_gradients_together():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    zpasses.shard(model, mesh=world_mesh(), ignored_params=[model[0].bias])
    model(_batch(dist.get_rank())).pow(2).sum().backward()
    with pytest.raises(zpasses.ShardingError, match=r"clip with zpasses\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, math.inf, foreach=True)


@on_ranks(2)
def test_norm_has_the_dtype_of_the_gradients():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for dtype in (torch.bfloat16, torch.float64):
        model = zpasses.shard(Net().to(dtype), mesh=mesh)
        model(_batch(0).to(dtype)).pow(2).sum().backward()
        grads = [param.grad.full_tensor().double() for param in model.parameters()]
        expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]))
        norm = zpasses.clip_grad_norm_(model.parameters(), 1e9)
        assert norm.dtype == dtype
        torch.testing.assert_close(norm, expected.to(dtype))


@on_ranks(2)
def test_norms_that_are_not_finite():
    model = zpasses.shard(Net(), mesh=world_mesh())
    assert zpasses.clip_grad_norm_(model.parameters(), 1.0) == 0
    (model(_batch(0)).sum() * math.inf).backward()
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 of the gradients is (nan|inf)"):
        zpasses.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
