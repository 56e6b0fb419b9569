"""Bodies of branches and loops read sharded parameters, which are gathered before them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as mapped

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def _chosen(self, x):
    return torch.cond(x.sum() > 0, self.first, self.second, (x,))


def _nested(self, x):
    def inner(x):
        return torch.cond(x.max() > 0.5, self.first, torch.sin, (x,))

    return torch.cond(x.sum() > 0, inner, self.second, (x,)) + self.first(x)


def _scanned(self, x):
    def step(carry, row):
        carry = torch.tanh(self.first(carry) + row)
        return carry, self.second(carry)

    return scan(step, x[0] * 0, x)[1]


def _mapped(self, x):
    return mapped(lambda row: self.first(row).tanh(), x) + self.second(x)


def _looped(self, x):
    with torch.no_grad():
        start = torch.tensor(0), x
        _, x = while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, self.first(x).tanh()), start)
    return self.first(x)


def _batches():
    """Rank 0 takes the first branch of `_chosen`, and rank 1 the second."""
    batches = [torch.rand(3, 5, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    return [batches[0], -batches[1]]


FUNCTIONS = [_chosen, _nested, _scanned, _mapped, _looped]
CASES = [(function, stage) for function in FUNCTIONS for stage in (None, 2, 3)]


@pytest.mark.parametrize(("function", "stage"), some_quick(CASES, [(_chosen, 3), (_scanned, 2)]))
@on_ranks(2)
def test_bodies_that_read_parameters_train_as_unsharded_ones(function, stage):
    plain, model = Calls(function), zpasses.shard(Calls(function), mesh=world_mesh())
    options = {"zero_stage": stage, "codegen": "eager"}
    run = model if stage is None else torch.compile(model, backend="zpasses", options=options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(2):
        losses = [plain(each).square().mean() for each in _batches()]
        (sum(losses) / 2).backward()
        loss = run(_batches()[dist.get_rank()]).square().mean()
        torch.testing.assert_close(loss, losses[dist.get_rank()])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected.data)
