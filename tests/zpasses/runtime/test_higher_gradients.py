"""Gradients that leave through torch.autograd.grad and hooks, and gradients of gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

import zpasses
from tests.on_ranks import on_ranks
from zpasses.runtime.watched import WatchedShard
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes


def _pair():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return plain, zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())


def _run(model, stage):
    options = {"zero_stage": stage, "codegen": "eager"}
    return torch.compile(model, backend="zpasses", options=options) if stage else model


SLOW = pytest.mark.slow(
    quick="test_gradients_are_dtensors_that_add_up_and_hooks_see_and_replace_them"
)
STAGES = pytest.mark.parametrize("stage", [None, pytest.param(2, marks=SLOW), 3])


def _kinds(model):
    """The classes of gradients. torch's reductions fail where a rank has no element."""
    some_empty = [param.shape[0] < dist.get_world_size() for param in model.parameters()]
    assert any(some_empty)
    return [WatchedShard if empty else DTensor for empty in some_empty]


@STAGES
@on_ranks(2)
def test_gradients_are_dtensors_that_add_up_and_hooks_see_and_replace_them(stage):
    plain, model = _pair()
    run, params, kinds = _run(model, stage), list(model.parameters()), _kinds(model)
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))

    def compare(found, factor, *, summed=False):
        # Autograd adds gradients up, which gives DTensors of either class.
        assert [type(value) for value in found] == kinds or summed
        assert all(isinstance(value, DTensor) for value in found)
        for value, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(value.full_tensor(), factor * reference)

    compare(torch.autograd.grad(run(x).sum(), params), 1)
    assert all(param.grad is None for param in params)
    for _ in range(3):
        run(x).sum().backward()
    compare([param.grad for param in params], 3, summed=True)
    model.zero_grad()
    seen = []
    for param in params:
        param.register_hook(lambda grad, at=param: seen.append((at, type(grad))) or grad * 3)
        param.register_post_accumulate_grad_hook(lambda at: seen.append((at, type(at.grad))))
    run(x).sum().backward()
    wanted = {id(param): kind for param, kind in zip(params, kinds, strict=True)}
    assert len(seen) == 8
    assert all(kind is wanted[id(param)] for param, kind in seen)
    compare([param.grad for param in params], 3)


def _penalty(run, x):
    (grad,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean()


@on_ranks(2)
def test_gradient_penalty_of_the_uncompiled_model_is_exact():
    plain, model = _pair()
    x = torch.randn(3, 4, requires_grad=True)
    _penalty(plain, x).backward()
    _penalty(model, x).backward()
    for param, reference in zip(model.parameters(), plain.parameters(), strict=True):
        if reference.grad is None:
            assert param.grad is None
        else:
            torch.testing.assert_close(param.grad.full_tensor(), reference.grad)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=SLOW), 3])
@on_ranks(2)
def test_gradient_penalty_of_the_compiled_model_names_the_way_out(stage):
    plain, model = _pair()
    run, x = _run(model, stage), torch.randn(3, 4, requires_grad=True)
    with pytest.raises(
        zpasses.ShardingError, match=r"cannot differentiate a backward again.*sharded model itself"
    ):
        _penalty(run, x)
    # Both in one step.
    (run(x).sum() + _penalty(model, x)).backward()
    (plain(x).sum() + _penalty(plain, x)).backward()
    for param, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), reference.grad)


@on_ranks(2)
def test_batches_of_gradients_are_exact_for_inputs_and_refused_for_parameters():
    plain, model = _pair()
    x, ways = torch.randn(3, 4, requires_grad=True), torch.eye(3).unsqueeze(-1)
    expected, found = (
        torch.autograd.grad(each(x), x, ways, is_grads_batched=True) for each in (plain, model)
    )
    torch.testing.assert_close(found, expected)
    with pytest.raises(zpasses.ShardingError, match=r"is_grads_batched.*one gradient at a time"):
        torch.autograd.grad(model(x), list(model.parameters()), ways, is_grads_batched=True)


@pytest.mark.inductor
@on_ranks(2)
def test_batches_of_gradients_and_tangents_of_the_compiled_model_name_the_way_out():
    plain, model = _pair()
    run = torch.compile(model, backend="zpasses")
    x, ways = torch.randn(3, 4, requires_grad=True), torch.eye(3).unsqueeze(-1)
    with pytest.raises(zpasses.ShardingError, match=r"is_grads_batched.*sharded model itself"):
        torch.autograd.grad(run(x), x, ways, is_grads_batched=True)
    run(torch.randn(3, 4))  # torch 2.15 compiles nothing for inputs with tangents
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.randn(3, 4), torch.ones(3, 4))
        with pytest.raises(zpasses.ShardingError, match=r"a tangent.*sharded model itself"):
            run(dual)
        found, expected = (forward_ad.unpack_dual(each(dual)).tangent for each in (model, plain))
        torch.testing.assert_close(found, expected)
        run(x)  # no input has a tangent
