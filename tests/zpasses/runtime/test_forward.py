"""Gradients between a compiled graph and `param.grad`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zpasses


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def compiled(mesh):
    model = zpasses.shard(nn.Linear(4, 3), mesh=mesh)
    return torch.compile(model, backend="zpasses", options={"codegen": "eager"}), model._parameters[
        "weight"
    ]


def test_gradients_are_plain_dtensors_and_add_up(mesh):
    step, weight = compiled(mesh)
    for expected in (2.0, 4.0, 6.0):
        step(torch.ones(2, 4)).sum().backward()
        assert type(weight.grad) is DTensor
        assert torch.equal(weight.grad.full_tensor(), torch.full((3, 4), expected))


def test_gradient_hooks_run_and_may_replace_the_gradient(mesh):
    step, weight = compiled(mesh)
    seen = []
    weight.register_hook(lambda grad: grad * 3)
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.full_tensor()))
    step(torch.ones(2, 4)).sum().backward()
    assert torch.equal(seen[0], torch.full((3, 4), 6.0))


def test_autograd_grad_gives_dtensors_and_does_not_change_param_grad(mesh):
    step, weight = compiled(mesh)
    (grad,) = torch.autograd.grad(step(torch.ones(2, 4)).sum(), [weight])
    assert isinstance(grad, DTensor)
    assert weight.grad is None
    assert torch.equal((grad * 2).full_tensor(), torch.full((3, 4), 4.0))


def test_one_forward_may_run_backward_twice(mesh):
    step, weight = compiled(mesh)
    loss = step(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(weight.grad.full_tensor(), torch.full((3, 4), 4.0))
