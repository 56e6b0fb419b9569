"""Windows on real ranks: whatever the way, the gradients are those of a backward each, and of the unsharded model, bit for bit."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from tests.ranks import run_on_ranks, world_mesh
from tests.zpasses.models import integers

pytestmark = pytest.mark.processes

EAGER = {"codegen": "eager"}
N = 3


class Net(nn.Module):
    """Odd rows, a parameter read twice, a scalar, a frozen one, one without rows, one that nobody reads."""

    def __init__(self, between=None):
        super().__init__()
        self.between = between
        self.wide = nn.Linear(4, 5, bias=False)
        self.deep = nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unread = nn.Parameter(torch.ones(3))
        with torch.no_grad():
            for seed, param in enumerate((self.wide.weight, self.deep.weight, self.deep.bias)):
                param.copy_(integers(*param.shape, seed=seed).sign())

    def forward(self, x):
        x = self.deep(self.wide(x))
        if self.between:
            torch._dynamo.graph_break()
            x = x * self.scale
        x = self.wide(x * self.scale + self.frozen)
        return x.sum() + self.empty.sum()


def data(count=N, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return [integers(1, 4, seed=10 * rank + i).sign() for i in range(count)]


def grads(model):
    found = {}
    for name, param in model.named_parameters():
        grad = param.grad
        found[name] = None if grad is None else grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return found


def assert_same(ours, theirs):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert (ours[name] is None) == (value is None), name
        assert value is None or (torch.equal(ours[name], value) and ours[name].dtype == value.dtype), f"{name}: {ours[name]} != {value}"


def unsharded(model, batches_of_ranks, dtype=torch.float32):
    """Mean over ranks of the sum over batches."""
    model = copy.deepcopy(model)
    for batches in batches_of_ranks:
        for x in batches:
            if dtype is torch.float32:
                model(x).backward()
            else:
                cast = {name: param.to(dtype) for name, param in model.named_parameters()}
                torch.func.functional_call(model, cast, (x.to(dtype),)).backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= len(batches_of_ranks)
    return grads(model)


@contextlib.contextmanager
def plain(model):
    yield None


def per_backward(step, model, batches):
    for x in batches:
        step(x).backward()


def flushed(step, model, batches, **options):
    with zpasses.coalesce_grad_reduction(step, **options):
        for x in batches:
            step(x).backward()
            assert all(param.grad is None for param in model.parameters())


def counted(step, model, batches, **options):
    with zpasses.coalesce_grad_reduction(model, backwards=len(batches), **options):
        for i, x in enumerate(batches):
            assert all(param.grad is None for param in model.parameters()), i
            step(x).backward()


def announced(step, model, batches, **options):
    with zpasses.coalesce_grad_reduction(model, **options) as window:
        for i, x in enumerate(batches):
            if i == len(batches) - 1:
                window.last()
            step(x).backward()


WAYS = {"flushed": flushed, "counted": counted, "announced": announced}


def _matrix(stage, codegen="eager", between=None, dtype=torch.float32):
    reference = Net(between)
    shard = {} if dtype is torch.float32 else {"param_dtype": dtype, "reduce_dtype": torch.float32}
    options = {"zero_stage": stage, "codegen": codegen}
    batches = [x.to(dtype) for x in data()]
    expected = unsharded(reference, [data(rank=rank) for rank in range(dist.get_world_size())], dtype)

    def fresh(**more):
        model = zpasses.shard(copy.deepcopy(reference), mesh=world_mesh(), **shard)
        return model, torch.compile(model, backend="zpasses", options={**options, **more})

    model, step = fresh()
    per_backward(step, model, batches)
    assert_same(grads(model), expected)
    for accum in (None, torch.float32):
        for way in WAYS.values():
            model.zero_grad()
            way(step, model, batches, grad_accum_dtype=accum)
            assert_same(grads(model), expected)
    model, step = fresh(backwards_per_step=N)
    for _ in range(2):
        model.zero_grad()
        per_backward(step, model, batches)
        assert_same(grads(model), expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_way_gives_the_gradients_of_a_backward_each(stage):
    run_on_ranks(_matrix, stage)


def _more():
    import time
    for kwargs in ({"stage":2, "codegen":"inductor","dtype":torch.bfloat16},):
        t=time.time()
        _matrix(**kwargs)
        torch._dynamo.reset()
        print(kwargs, time.time()-t, flush=True)
    raise ValueError


def test_more():
    run_on_ranks(_more, timeout=280)
