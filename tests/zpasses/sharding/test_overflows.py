"""An overflow of one rank: with `GradScaler`, all ranks skip the same steps."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from zpasses import compat
from zpasses.errors import ZpassesError
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes


class Words(nn.Module):
    """Each rank has the gradients of some of the words."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, words):
        return self.head(self.embed(words))


def local(value):
    return compat.local_of(value) if isinstance(value, DTensor) else value


def overflow(param):
    """In the rows of this rank."""
    local(param.grad)[0, 0] = torch.inf


def values_of(model):
    return [local(param).detach().clone() for param in model.parameters()]


def skips(scaler, model, optimizer):
    """Whether a step is skipped."""
    before, scale = values_of(model), scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    same = all(map(torch.equal, before, values_of(model)))
    assert same == (scaler.get_scale() < scale)
    return same


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adafactor": lambda params: zpasses.optim.Adafactor(params, lr=0.1),
    "offloaded": lambda params: zpasses.offload_optimizer(torch.optim.AdamW(params, lr=0.1)),
}
WINDOWS = {1: "block", 2: "option", 3: "none"}


@pytest.mark.parametrize("stage", some_quick((1, 2, 3), [2]))
@on_ranks(2)
def test_all_ranks_skip_the_steps_in_which_one_overflows(stage):
    """Only the words of rank 1 have gradients that are not finite, from the loss of either rank."""
    for make in OPTIMIZERS.values():
        torch.manual_seed(0)
        model = zpasses.shard(Words(), mesh=world_mesh())
        options = {"zero_stage": stage, "codegen": "eager"}
        options["backwards_per_step"] = 2 if WINDOWS[stage] == "option" else 1
        step = torch.compile(model, backend="zpasses", options=options)
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        found = []
        for number in range(5):
            block = zpasses.coalesce_grad_reduction(model)
            with block if WINDOWS[stage] == "block" else nullcontext():
                for micro in range(2):
                    weight = torch.ones(3, 4)
                    if (number, dist.get_rank(), micro) in ((1, 1, 0), (3, 0, 1)):
                        weight[2] = 3e38 if number == 1 else torch.inf
                    scaler.scale((step(torch.tensor([0, 1, 7])) * weight).sum()).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                zpasses.clip_grad_norm_(model.parameters(), 1.0)
            found.append(skips(scaler, model, optimizer))
        assert found == [False, True, False, True, False]
        assert all(value.isfinite().all() for value in values_of(model))


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_overflows_beside_parameters_that_are_not_sharded_are_shared(fused):
    for ignored, overflows in itertools.product(range(2), range(2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        params = set(model[ignored].parameters())
        zpasses.shard(model, mesh=world_mesh(), ignored_params=params)
        kinds = [{"params": [each]} for each in model.parameters()]  # lists are of one kind
        optimizer = torch.optim.AdamW(kinds, lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if dist.get_rank() == 1:
            overflow(model[overflows].get_parameter("weight"))
        assert skips(scaler, model, optimizer)


@on_ranks(4)
def test_overflows_of_parameters_on_several_meshes_are_shared():
    """Such as those of experts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    for at in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        zpasses.shard(model[at], mesh=mesh["shard"])
        zpasses.shard(model[1 - at], mesh=world_mesh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if dist.get_rank() == 3:
            overflow(model[at].get_parameter("weight"))
        assert skips(scaler, model, optimizer)


@on_ranks(2)
def test_scaled_gradients_of_steps_in_backward_are_refused():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    zpasses.shard(model, mesh=world_mesh())
    zpasses.compile_blocks(model, "*", codegen="eager")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    zpasses.step_in_backward(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
    scaler.scale(torch.ones(()))
    with pytest.raises(ZpassesError, match=r"zpasses\.step_in_backward.*gradient scaling"):
        scaler.step(optimizer)
