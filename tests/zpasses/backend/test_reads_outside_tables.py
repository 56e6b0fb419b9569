"""Parameters that compiled code reads in another way than as an attribute of a sharded module."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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
        return F.linear(x, whole) + F.linear(self.inner(x), whole) * self.penalty().cosh()

    def penalty(self):
        total = next(self.parameters()).square().sum()
        return total.full_tensor() if isinstance(total, DTensor) else total


@pytest.mark.inductor
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_gradients_of_full_values_are_averaged_over_the_batches_of_the_ranks(compiled, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    plain, model = Whole(), zpasses.shard(Whole(), mesh=mesh)
    batches = [torch.randn(2, 5, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    run = torch.compile(model, backend="zpasses") if compiled else model
    run(batches[dist.get_rank()]).square().mean().backward()
    for batch in batches:
        (plain(batch).square().mean() / 2).backward()
    found, expected = (next(each.parameters()).grad for each in (model, plain))
    torch.testing.assert_close(found.full_tensor(), expected)


class Writes(Reads):
    def forward(self, x):
        weight = self.inner.weight
        self.write(weight)  # between two graphs
        return F.linear(x, weight), weight.t()


def _normalizes(weight):
    weight.data = F.normalize(weight.data, dim=1)


def _writes_to_a_view(weight):
    torch._dynamo.graph_break()
    weight[0].data.zero_()


WRITES = (
    lambda weight: weight.mul_(2),
    lambda weight: torch.mul(weight, 2, out=weight),
    lambda weight: torch.mul(weight, 2, out=weight.data),
    lambda weight: F.relu(weight, inplace=True),
    lambda weight: F.relu(weight[1:], inplace=True),
    lambda weight: weight.__ipow__(2),
    lambda weight: torch._foreach_mul_([weight], 2),
)


class WritesWithin(Writes):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


@on_ranks(2)
def test_writes_within_a_graph_are_refused():
    model = zpasses.shard(WritesWithin(), mesh=world_mesh())
    for write in WRITES:
        torch.compiler.reset()
        model.write = write
        with pytest.raises(Exception, match=r"writes to parameter inner\.weight.*is sharded"):
            torch.compile(model, backend="zpasses", fullgraph=True)(torch.ones(2, 5))


@on_ranks(2)
def test_writes_between_graphs_and_to_what_a_graph_returns_are_refused():
    model = zpasses.shard(Writes(), mesh=world_mesh())
    run = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
    x = torch.ones(2, 5)
    for write in (_normalizes, _writes_to_a_view):
        model.write = write
        with pytest.raises(Exception, match=r"write(s|) to parameter.*is sharded.*write"):
            run(x)
    model.write = lambda weight: torch._dynamo.graph_break()
    y, weight = run(x)
    torch.testing.assert_close(y, x @ weight)
    torch.testing.assert_close(weight, model.inner.get_parameter("weight").full_tensor().t())
    with pytest.raises(zpasses.ShardingError, match=r"write to parameter 'inner\.weight'"):
        weight.add_(1.0)
