"""Optimizers that compute element by element step on the shards, without DTensor's dispatch."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from zpasses.runtime import shard_step
from zpasses.simulate.equality import bits
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes

OPTIMIZERS = {
    "SGD": (optim.SGD, [{}, {"momentum": 0.9, "nesterov": True}, {"foreach": True}]),
    "Adam": (optim.Adam, [{"amsgrad": True}, {"foreach": True}, {"fused": True}]),
    "AdamW": (optim.AdamW, [{}, {"foreach": True}, {"fused": True}]),
    "NAdam": (optim.NAdam, [{}, {"foreach": True}]),
    "RAdam": (optim.RAdam, [{}, {"foreach": True}]),
    "Adamax": (optim.Adamax, [{}, {"foreach": True}]),
    "Adadelta": (optim.Adadelta, [{}, {"foreach": True}]),
    "Adagrad": (optim.Adagrad, [{}, {"foreach": True}, {"fused": True}]),
    "RMSprop": (optim.RMSprop, [{"momentum": 0.9, "centered": True}, {"foreach": True}]),
    "ASGD": (optim.ASGD, [{}, {"foreach": True}]),
}


class Net(nn.Module):
    """Uneven rows, fewer rows than ranks, a scalar, and a parameter that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 7), nn.Linear(7, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * self.scale


def build(sharded=True):
    torch.manual_seed(0)
    return zpasses.shard(Net(), mesh=world_mesh()) if sharded else Net()


def backward(model, seed=0):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()


def train(model, optimizer, seeds):
    for seed in seeds:
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()


class Calls(TorchDispatchMode):
    """Counts operators on DTensors, and on plain tensors."""

    def __init__(self):
        super().__init__()
        self.sharded, self.plain = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        of_shards = any(issubclass(each, DTensor) for each in types)
        (self.sharded if of_shards else self.plain).append(func)
        return func(*args, **kwargs or {})


def assert_same_states(ours, theirs):
    """Two optimizers of two models hold the same bits, placed alike."""
    pairs = zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)
    for param, other in pairs:
        state, expected = ours.state.get(param, {}), theirs.state.get(other, {})
        assert list(state) == list(expected)
        for one, two in [(param, other), *zip(state.values(), expected.values(), strict=True)]:
            assert type(one) is type(two)
            if isinstance(one, DTensor):
                assert one.placements == two.placements
                assert (one.shape, one.stride()) == (two.shape, two.stride())
                one, two = one.to_local(), two.to_local()
            assert torch.equal(bits(one.detach()), bits(two.detach()))


@pytest.mark.parametrize("which", some_quick(OPTIMIZERS, ["AdamW"]))
@on_ranks(3)
def test_a_step_has_the_bits_of_dtensors_and_dispatches_none(which):
    cls, variants = OPTIMIZERS[which]
    for options in variants:
        models = build(), build()
        ours, theirs = (cls(each.parameters(), lr=0.05, **options) for each in models)
        for seed in range(3):
            backward(models[0], seed)
            with Calls() as calls:
                ours.step()
            ours.zero_grad()
            assert calls.plain
            assert not calls.sharded
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(shard_step, "_BY_ELEMENT", frozenset())
                train(models[1], theirs, [seed])
        assert_same_states(ours, theirs)


@on_ranks(2)
def test_hooks_see_dtensors_around_the_whole_step():
    model, plain = build(), build(sharded=False)
    optimizer, other = (optim.AdamW(each.parameters(), lr=0.05) for each in (model, plain))
    seen = []

    def halve(each, args, kwargs):
        for param in each.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)
        seen.append(("before", type(each.param_groups[0]["params"][0]), len(each.state)))

    def after(each, args, kwargs):
        states = [entries["exp_avg"] for entries in each.state.values()]
        seen.append(("after", type(states[0]), len(states)))

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(after)
    train(model, optimizer, [0])
    assert [each[0] for each in seen] == ["before", "after"]
    assert issubclass(seen[0][1], DTensor)
    assert issubclass(seen[1][1], DTensor)
    assert (seen[0][2], seen[1][2]) == (0, 4)
    other.register_step_pre_hook(halve)
    train(model, optimizer, [1])  # the hook that steps is still the last one
    train(plain, other, [0, 1])
    torch.testing.assert_close(
        zpasses.full_state_dict(model), dict(plain.state_dict()), rtol=0, atol=1e-6
    )


class Normed(optim.SGD):
    """Divides each gradient by its norm, which a shard does not know."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad /= param.grad.norm()
        return super().step(closure)


@on_ranks(2)
def test_subclasses_step_on_dtensors():
    model, plain = build(), build(sharded=False)
    for each in (model, plain):
        train(each, Normed(each.parameters(), lr=0.1), range(2))
    torch.testing.assert_close(
        zpasses.full_state_dict(model), dict(plain.state_dict()), rtol=0, atol=1e-6
    )


@on_ranks(2)
def test_a_gradient_that_is_placed_otherwise_is_redistributed():
    model, plain = build(), build(sharded=False)
    for each in (model, plain):
        backward(each)
    param = model.get_parameter("a.weight")
    param.grad = param.grad.redistribute(placements=[Replicate()])
    for each in (model, plain):
        optim.SGD(each.parameters(), lr=0.1).step()
    torch.testing.assert_close(
        zpasses.full_state_dict(model), dict(plain.state_dict()), rtol=0, atol=1e-6
    )


@on_ranks(2)
def test_a_step_that_raises_leaves_the_optimizer_whole_and_counts_as_an_edit():
    model, plain = build(), build(sharded=False)
    optimizer, other = (optim.AdamW(each.parameters(), lr=0.05) for each in (model, plain))
    train(model, optimizer, [0])
    train(plain, other, [0])
    params, state = optimizer.param_groups[0]["params"], dict(optimizer.state)
    memory = params[0]._zpasses_memory
    before = memory.edits
    for each, step in ((model, optimizer), (plain, other)):
        backward(each)
        step.param_groups[0]["betas"] = ("wrong", 0.9)
        with pytest.raises(TypeError):
            step.step()
        step.param_groups[0]["betas"] = (0.9, 0.99)
    assert memory.edits > before
    assert optimizer.param_groups[0]["params"] is params
    assert dict(optimizer.state) == state
    for step in (optimizer, other):
        step.step()
    torch.testing.assert_close(
        zpasses.full_state_dict(model), dict(plain.state_dict()), rtol=0, atol=1e-6
    )


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@on_ranks(2)
def test_a_compiled_step_has_the_bits_of_one_that_is_not():
    models = build(), build()
    ours, theirs = (optim.AdamW(each.parameters(), lr=0.1) for each in models)
    step = torch.compile(ours.step, backend="eager")
    for seed in range(2):
        backward(models[0], seed)
        step()
        ours.zero_grad()
        train(models[1], theirs, [seed])
    assert_same_states(ours, theirs)


@on_ranks(2)
def test_a_later_step_uses_rows_that_were_assigned():
    """Nothing of a step is kept for the next one."""
    model, plain = build(), build(sharded=False)
    pairs = [(each, optim.AdamW(each.parameters(), lr=0.05)) for each in (model, plain)]
    saved = copy.deepcopy(dict(plain.state_dict()))
    for each, optimizer in pairs:
        train(each, optimizer, [0])
        if each is plain:
            each.load_state_dict(saved)
        else:
            weight = each.get_parameter("a.weight")
            rows = weight.shape[0] // dist.get_world_size() + 1
            own = saved["a.weight"].split(rows)[dist.get_rank()]
            weight.data = DTensor.from_local(
                own.clone(), weight.device_mesh, weight.placements, shape=(7, 4), stride=(4, 1)
            )
            for name in ("a.bias", "b.weight", "scale"):
                each.get_parameter(name).data.copy_(saved[name])
        train(each, optimizer, [1])
    torch.testing.assert_close(
        zpasses.full_state_dict(model), dict(plain.state_dict()), rtol=0, atol=1e-6
    )
