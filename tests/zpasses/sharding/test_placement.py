"""`shard_placement_fn` and `grad_divide_factor` of `zpasses.shard`."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.training_programs import act, check, program
from tests.zpasses.models import assert_same_values, with_integer_weights
from zpasses.errors import ShardingError
from zpasses.testing import (
    assert_step_equals_reference,
    capture_ranks,
    fake_world,
    world_mesh,
)


class Wide(nn.Module):
    """Parameters with fewer rows than there are ranks, and longer other dimensions."""

    def __init__(self, columns=7):
        super().__init__()
        self.short = nn.Parameter(torch.empty(2, columns))
        self.deep = nn.Parameter(torch.empty(2, 3, 8 if columns == 8 else 9))
        self.bias = nn.Parameter(torch.empty(5))
        self.scale = nn.Parameter(torch.empty(()))
        with_integer_weights(self)

    def forward(self, x):
        hidden = x @ self.short.t()  # [n, 2]
        deep = self.deep.view(-1).view(2, 3, -1)  # a parameter that is read is contiguous
        return torch.einsum("nk,kij->nij", hidden, deep).sum() * self.scale + self.bias.sum()


def longest(param):
    return Shard(max(range(param.dim()), key=lambda dim: param.shape[dim])) if param.dim() else None


@pytest.fixture
def mesh():
    with fake_world(4, rank=1) as mesh:
        yield mesh


def test_parameters_are_cut_where_the_function_says(mesh):
    plain = Wide()
    model = zpasses.shard(copy.deepcopy(plain), mesh=mesh, shard_placement_fn=longest)
    params = dict(model.named_parameters())
    expected = {"short": Shard(1), "deep": Shard(2), "bias": Shard(0), "scale": Replicate()}
    assert {name: param.placements[0] for name, param in params.items()} == expected
    assert torch.equal(params["short"].to_local(), plain.short[:, 2:4])
    deep = params["deep"].to_local()
    assert torch.equal(deep, plain.deep[..., 3:6])
    assert deep.movedim(2, 0).is_contiguous(), "the dimension that is cut comes first in memory"
    assert not deep.is_contiguous()
    model = zpasses.shard(nn.Linear(8, 2), mesh=mesh, shard_placement_fn=lambda _: Shard(-1))
    assert [param.placements for param in model.parameters()] == [(Shard(1),), (Shard(0),)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shard_placement_fn": lambda _: Shard(2)}, "has 2 dimensions"),
        (
            {"shard_placement_fn": lambda _: Replicate()},
            "expected a torch.distributed.tensor.Shard",
        ),
        *(({"grad_divide_factor": each}, "grad_divide_factor is") for each in (0, -1, "4", True)),
    ],
)
def test_other_arguments_are_refused(mesh, given, said):
    with pytest.raises(ShardingError, match=said):
        zpasses.shard(nn.Linear(8, 2), mesh=mesh, **given)


def test_ties_that_are_cut_in_two_ways_are_refused(mesh):
    a, b = (nn.Linear(8, 8, bias=False) for _ in range(2))
    b.weight = a.weight
    zpasses.shard(a, mesh=mesh)
    with pytest.raises(ShardingError, match="Shard both the same way"):
        zpasses.shard(b, mesh=mesh, shard_placement_fn=lambda _: Shard(1))


def test_reading_the_shard_in_compiled_code_is_refused(mesh):
    class Peeking(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self._parameters["weight"].to_local().sum()

    model = zpasses.shard(Peeking(8, 2), mesh=mesh, shard_placement_fn=longest)
    options = {"codegen": "eager", "agreement": False}
    compiled = torch.compile(model, backend="zpasses", options=options)
    with pytest.raises(Exception, match="reads the local shard of parameter"):
        compiled(torch.ones(1, 8))


FLAT_BUCKETS = "gather-params,reduce-grads,schedule{plan=one-ahead,mode=flat},flatten-on-device"
ALL_REDUCE = "gather-params,reduce-grads{form=all_reduce},schedule"


@pytest.mark.parametrize("pipeline", ["zero3-one-ahead", FLAT_BUCKETS, ALL_REDUCE])
@pytest.mark.slow(quick="test_gradients_equal_those_of_the_unsharded_model")
def test_passes_deal_with_any_dimension(pipeline):
    about = {"shard": {"shard_placement_fn": longest}, "pipeline": pipeline}
    captures = capture_ranks(Wide(), [torch.zeros(3, 7)], world_size=4, **about)
    assert_step_equals_reference(captures)


class Broken(nn.Module):
    """Dynamo compiles neither the loop, because of the break, nor what it calls as one frame. So
    each read of a parameter is a graph."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(6, 6))
        self.deep = nn.Parameter(torch.randn(2, 6, 5))

    def forward(self, x):
        for weight in ("wide", "deep"):
            x = x @ getattr(self, weight)
            torch._dynamo.graph_break()
        return x


def _last(param):
    return Shard(param.dim() - 1) if param.dim() > 1 else None


@on_ranks(2)
def test_graphs_of_a_broken_model_read_what_is_cut_along_different_dimensions():
    torch.manual_seed(0)
    plain = Broken()
    model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh(), shard_placement_fn=_last)
    step = torch.compile(model, backend="zpasses", options={"codegen": "eager"}, dynamic=True)
    for rows in (2, 3):
        x = torch.ones(rows, 6)
        torch.testing.assert_close(step(x), plain(x))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("shard", "options"),
    some_quick(
        [
            ({"pack_mb": 1.0, "grad_divide_factor": 1.0}, {"zero_stage": 2}),
            ({"grad_divide_factor": 4.0}, {"zero_stage": 3}),
        ],
        [({"grad_divide_factor": 4.0}, {"zero_stage": 3})],
    ),
    ids=str,
)
def test_gradients_equal_those_of_the_unsharded_model(shard, options):
    actions = "backward", act("backward", micro=2, window="exit")
    check(program(*actions, blocks=("experts", "scalars"), cut_last=True, **shard), **options)


@on_ranks(2)
def test_checkpoints_go_to_and_from_fsdp2(tmp_path):
    plain, mesh = Wide(columns=8), world_mesh()  # FSDP2 cuts other dimensions evenly only
    del plain.scale  # and refuses 0-dimensional parameters
    ours = zpasses.shard(copy.deepcopy(plain), mesh=mesh, shard_placement_fn=longest)
    theirs = copy.deepcopy(plain)
    fully_shard(theirs, mesh=mesh, shard_placement_fn=longest)

    def zeroed(model):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        return model

    for source, target in ((ours, theirs), (theirs, ours)):
        folder = tmp_path / type(source).__name__
        dcp.save(get_model_state_dict(source), checkpoint_id=folder)
        state = get_model_state_dict(zeroed(target))
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(target, state)
        full = {name: value.full_tensor() for name, value in target.state_dict().items()}
        assert_same_values(full, plain.state_dict())
    zpasses.save_safetensors(ours, tmp_path / "files")
    zpasses.load_safetensors(zeroed(ours), tmp_path / "files")
    assert_same_values(zpasses.full_state_dict(ours), plain.state_dict())
    zeroed(ours).load_state_dict(plain.state_dict())
    assert_same_values(zpasses.full_state_dict(ours), plain.state_dict())
