"""Parameters that compiled code reads in another way than as an attribute of a sharded module."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import zpasses
from tests.on_ranks import on_ranks
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(5, 5, bias=False)
        self.read = lambda: None

    def forward(self, x):
        return F.linear(self.inner(x), self.read())


def _error(before=lambda model: None, after=lambda model: None):
    """Returns the error of a compiled forward.

    Args:
        before: returns a function of what is read beside the layer, of a model that is not sharded.
        after: the same of a sharded model.
    """
    model = Reads()
    read = before(model)
    zpasses.shard(model, mesh=world_mesh())
    model.read = read or after(model)
    with pytest.raises(Exception) as raised:  # noqa: PT011  # of Dynamo, or of zpasses
        torch.compile(model, backend="zpasses")(torch.ones(2, 5))
    return str(raised.value)


def _kept(model):
    weight = model.inner.weight
    return lambda: weight


def _new(model):
    weight = nn.Parameter(torch.ones(5, 5))
    return lambda: weight


@on_ranks(2)
def test_errors_name_the_parameter_and_how_to_read_it():
    kept = _error(before=_kept)
    assert "that is no longer in the model, because zpasses.shard replaced it" in kept
    assert "shape [5, 5]" in kept
    assert "are trained but not sharded" in _error(after=_new)
    # Outside of the graph, because Dynamo does not trace what raises.
    shard = _error(after=lambda model: lambda: model.inner.get_parameter("weight"))
    assert "read a parameter as an attribute of its module, such as self.weight" in shard


class Whole(Reads):
    def forward(self, x):
        weight = self.inner.get_parameter("weight")
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return F.linear(self.inner(x), whole) * self.penalty().cosh()

    def penalty(self):
        total = next(self.parameters()).square().sum()
        return total.full_tensor() if isinstance(total, DTensor) else total


@pytest.mark.inductor
@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_gradients_of_full_values_are_averaged_over_the_batches_of_the_ranks(compiled):
    plain, model = Whole(), zpasses.shard(Whole(), mesh=world_mesh())
    batches = [torch.randn(2, 5, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    run = torch.compile(model, backend="zpasses") if compiled else model
    run(batches[dist.get_rank()]).square().mean().backward()
    for batch in batches:
        (plain(batch).square().mean() / 2).backward()
    found, expected = (next(each.parameters()).grad for each in (model, plain))
    torch.testing.assert_close(found.full_tensor(), expected)
