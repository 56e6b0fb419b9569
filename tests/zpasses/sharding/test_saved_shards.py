"""Shards that code takes for the model, or for those of another rank."""

import copy
import pickle

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.checkpoint.checkpoint_models import sharded
from tests.zpasses.models import Odd, assert_same_values, integers
from zpasses.sharding.saved_shards import StateShard
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh

pytestmark = pytest.mark.processes

SAVES = {
    "save_file": lambda state, path: safetensors.torch.save_file(state, path),
    "of copies": lambda state, path: safetensors.torch.save_file(
        {name: value.detach().clone().cpu().contiguous() for name, value in state.items()}, path
    ),
    "of a deep copy": lambda state, path: safetensors.torch.save_file(copy.deepcopy(state), path),
    "save": lambda state, path: safetensors.torch.save(state),
}


@on_ranks(2)
def test_safetensors_of_shards_says_what_to_save(tmp_path):
    model, path = sharded(nn.Linear(4, 5)), tmp_path / "model.safetensors"
    rows = 2 if dist.get_rank() else 3
    said = (
        rf"sharded by zpasses.*holds {rows} of 5 rows.*zpasses.save_safetensors.*"
        r"zpasses.full_state_dict\(model\) on every rank.*torch.distributed.checkpoint"
    )
    for save in SAVES.values():
        with pytest.raises(zpasses.ShardingError, match=said):
            save(model.state_dict(), path)
    with pytest.raises(zpasses.ShardingError, match=r"holds . of . rows"):
        safetensors.torch.save_model(sharded(Odd()), path)
    with pytest.raises(RuntimeError, match="data pointer on an invalid python storage"):
        safetensors.torch.save_file(dict(model.named_parameters()), path)  # an error of torch


@on_ranks(2)
def test_values_of_a_state_dict_work_as_dtensors():
    model = sharded(nn.Linear(4, 5))
    state = model.state_dict()
    for name, value in {**state, **copy.deepcopy(state)}.items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), getattr(model, name))
        assert isinstance(value * 2, DTensor)
        assert not isinstance(value * 2, StateShard)
        assert type(pickle.loads(pickle.dumps(value))) is DTensor
    other = sharded(nn.Linear(4, 5))
    for assign in (False, True):
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other.weight, model.weight)
        other(torch.ones(2, 4)).sum().backward()
        assert not isinstance(other._parameters["weight"].data, StateShard)
    state["weight"].zero_()
    assert not model.weight.any(), "the state dict shares the parameters' memory"


# --- files of one rank ----------------------------------------------------------------------------
def _trained(rows=5, seed=0):
    torch.manual_seed(seed)
    model = zpasses.shard(nn.Linear(4, rows, bias=False), mesh=world_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(integers(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _step(model, optimizer):
    model(integers(2, 4)).square().sum().backward()
    optimizer.step()


SLOW = pytest.mark.slow(
    quick="the same test with a model, and test_state_of_the_same_rank_is_loaded"
)


def _loaded_from_rank_0(folder, what, rows):
    model, optimizer = _trained(rows)
    source = model if what == "model" else optimizer
    if dist.get_rank() == 0:
        torch.save(source.state_dict(), f"{folder}/state.pt")
    dist.barrier()
    model, optimizer = _trained(rows, seed=1)
    state = torch.load(f"{folder}/state.pt")
    try:
        (model if what == "model" else optimizer).load_state_dict(state)
        zpasses.full_state_dict(model, timeout_s=20)  # any vote tells the first rank
    except (zpasses.ShardingError, zpasses.AgreementError) as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(("what", "rows"), [("model", 4), pytest.param("optimizer", 5, marks=SLOW)])
def test_state_of_one_rank_is_not_loaded_on_another(what, rows, tmp_path):
    outcomes = run_in_fresh_ranks(_loaded_from_rank_0, str(tmp_path), what, rows)
    first, second = [each.result for each in outcomes]
    assert "rank 1 failed while loading saved shards" in first
    name = "weight in the state dict" if what == "model" else "exp_avg of the optimizer's state"
    assert second.startswith(f"{name} was saved by rank 0 of the mesh, and this is rank 1.")
    assert "torch.distributed.checkpoint and zpasses.training_state" in second


@on_ranks(2)
def test_state_of_the_same_rank_is_loaded(tmp_path):
    (model, optimizer), path = _trained(), f"{tmp_path}/{dist.get_rank()}.pt"
    torch.save((model.state_dict(), optimizer.state_dict()), path)
    again, again_optimizer = _trained(seed=1)
    weights, moments = torch.load(path)
    again.load_state_dict(weights)
    again_optimizer.load_state_dict(moments)
    for _ in range(2):
        _step(model, optimizer)
        _step(again, again_optimizer)
    assert_same_values(zpasses.full_state_dict(again), zpasses.full_state_dict(model))


class _Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * super().forward(x)


@on_ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_state_of_an_unsharded_optimizer_is_loaded(kind):
    torch.manual_seed(0)
    plain, model = _Scaled(), sharded(_Scaled())
    optimizers = [kind(each.parameters(), lr=0.1) for each in (plain, model)]
    x = torch.randn(8, 4)

    def step(each, optimizer):
        each(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(plain, optimizers[0])
    model.load_state_dict(plain.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        step(each, optimizer)
    torch.testing.assert_close(zpasses.full_state_dict(model), dict(plain.state_dict()))


def _save_alone(folder):
    model, optimizer = _trained()
    torch.save((model.state_dict(), optimizer.state_dict()), f"{folder}/{dist.get_rank()}.pt")


def _load_in_another_world(folder):
    model, optimizer = _trained()
    weights, moments = torch.load(f"{folder}/{dist.get_rank() % 2}.pt")
    told = []
    try:
        model.load_state_dict(weights)
    except zpasses.ShardingError as error:
        told.append(str(error))
    with pytest.raises(zpasses.ShardingError, match="was saved over"):
        optimizer.load_state_dict(moments)
    return told


@pytest.mark.slow(quick="test_state_of_one_rank_is_not_loaded_on_another")
def test_state_of_another_world_is_refused(tmp_path):
    run_on_ranks(_save_alone, str(tmp_path))
    for outcome in run_in_fresh_ranks(_load_in_another_world, str(tmp_path), ranks=3):
        (told,) = outcome.result
        assert "was saved over" in told
