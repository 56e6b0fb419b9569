"""Models that read sharded parameters within transforms of torch.func train as unsharded ones."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vjp, vmap

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes


def _laplacian(net, x):
    return vmap(lambda point: hessian(lambda p: net(p).sum())(point).diagonal().sum())(x)


def _tangent(net, x):
    value, along = jvp(net, (x,), (torch.ones_like(x),))
    return value * along


def _pullback(net, x):
    value, back = vjp(net, x)
    return value.sum(1) * back(torch.ones_like(value))[0].sum(1)


def _slope(net, x):
    return vmap(grad(lambda point: net(point).sum()))(x)


def _jacobian(net, x):
    return vmap(jacfwd(net))(x)


def _swapped(net, x):
    twice = {name: 2 * param for name, param in net.named_parameters()}
    return functional_call(net, twice, (x,)) + net(x)


class Derives(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.function = function

    def forward(self, x):
        return self.function(self.net, x).square().mean()


FUNCTIONS = [_laplacian, _tangent, _pullback, _slope, _jacobian, _swapped]
CASES = [(function, stage) for function in FUNCTIONS for stage in (None, 2, 3)]


@pytest.mark.parametrize(
    ("function", "stage"),
    some_quick(CASES, [(_laplacian, None), (_tangent, 3)]),
)
@on_ranks(2)
def test_derivatives_of_a_sharded_model_train_it_as_an_unsharded_one(function, stage):
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    plain, model = Derives(function), zpasses.shard(Derives(function), mesh=world_mesh())
    options = {"zero_stage": stage, "codegen": "eager"}
    run = model if stage is None else torch.compile(model, backend="zpasses", options=options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(2):
        losses = [plain(each) for each in batches]
        (sum(losses) / 2).backward()
        loss = run(batches[dist.get_rank()])
        torch.testing.assert_close(loss, losses[dist.get_rank()])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected.data)
