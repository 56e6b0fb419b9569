"""`model.to(...)` and its kind on sharded models: parameters stay the same objects."""

import copy

import pytest
import torch
from torch import nn

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.zpasses.models import Odd, Tied, assert_same_values, full_gradients, integers
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7))


def _step(model, x):
    model(x).pow(2).sum().backward()


CONVERSIONS = {
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "device": (lambda model: model.to("cpu"), torch.float32),
}


@pytest.mark.parametrize("how", some_quick(CONVERSIONS, ["bfloat16"]))
@on_ranks(2)
def test_compiled_blocks_are_converted_in_place(how):
    convert, dtype = CONVERSIONS[how]
    plain, x = _net(), torch.linspace(-1, 1, 24).view(4, 6)
    model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
    zpasses.compile_blocks(model, codegen="eager")
    params = list(model.parameters())
    calls = []
    params[0].register_hook(lambda grad: calls.append(grad.dtype))
    for each in (plain, model):
        _step(each, x)
        convert(each)
        _step(each, x.to(dtype))
    assert all(now is before for now, before in zip(model.parameters(), params, strict=True))
    assert {param.dtype for param in params} == {param.grad.dtype for param in params} == {dtype}
    assert calls == [torch.float32, dtype]
    expected = {name: param.grad for name, param in plain.named_parameters()}
    rtol = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(full_gradients(model), expected, rtol=rtol, atol=rtol)


@pytest.mark.inductor
@on_ranks(2, timeout_s=300)
@pytest.mark.slow(quick="test_compiled_blocks_are_converted_in_place")
def test_optimizer_of_a_converted_model_goes_on():
    plain, x = _net(), torch.linspace(-1, 1, 24).view(4, 6)
    model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
    runs = {model: torch.compile(model, backend="zpasses"), plain: plain}
    for each, run in runs.items():
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for dtype in (torch.float32, torch.float64):
            each.to(dtype)
            _step(run, x.to(dtype))
            optimizer.step()
            optimizer.zero_grad()
    actual = {name: param.full_tensor() for name, param in model.named_parameters()}
    torch.testing.assert_close(actual, dict(plain.named_parameters()))


@on_ranks(2)
def test_cached_parameters_follow_a_conversion_on_ranks_without_rows():
    model = zpasses.shard(nn.Linear(4, 1), mesh=world_mesh())
    run = torch.compile(model, backend="zpasses", options={"zero_stage": 2, "codegen": "eager"})
    x = integers(2, 4)
    run(x).sum().backward()
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        with torch.no_grad():
            full = torch.cat([p.full_tensor().flatten() for p in model.parameters()])
            assert torch.equal(run(x.to(dtype)), x.to(dtype) @ full[:4, None] + full[4:])
    assert model._parameters["bias"].dtype == torch.float32


@on_ranks(2)
def test_models_on_meta_get_memory_in_place():
    with torch.device("meta"):
        model, tied = Odd(), Tied()
    for each in (model, tied):
        zpasses.shard(each, mesh=world_mesh())
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        each.to_empty(device="cpu")
        held = optimizer.param_groups[0]["params"]
        assert all(now is old for now, old in zip(each.parameters(), held, strict=True))
    assert tied.head._parameters["weight"] is tied.embed._parameters["weight"]
    whole = Odd()
    model.load_state_dict(whole.state_dict())
    assert [param.requires_grad for param in model.parameters()] == [
        param.requires_grad for param in whole.parameters()
    ]
    actual = {name: param.full_tensor() for name, param in model.named_parameters()}
    assert_same_values(actual, {name: param.detach() for name, param in whole.named_parameters()})


class Keeps(nn.Module):
    """Keeps something that it computed of its weight, as some recurrent modules do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(integers(5, 4))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.rows = self.weight.shape[0], self.weight.dtype
        return self


@on_ranks(2)
def test_modules_that_look_at_their_converted_weights():
    model = zpasses.shard(Keeps(), mesh=world_mesh()).double()
    assert model.rows == (5, torch.float64)


@on_ranks(2)
def test_conversions_that_gather_leave_plain_parameters():
    model = zpasses.shard(nn.Linear(4, 5), mesh=world_mesh())
    expected = model.weight.detach().clone()
    model._apply(lambda param: param.full_tensor())
    assert type(model._parameters["weight"]) is nn.Parameter
    assert torch.equal(model.weight, expected)
