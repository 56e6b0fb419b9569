"""Training on real ranks of models with frozen layers, whose shards rest elsewhere or encoded."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.zpasses.backend.cache.starts import said_by_cache, words
from tests.zpasses.cost.memory.allocations import allocated
from zpasses.testing import world_mesh

WIDTH = 33
"""Uneven: the last rank holds fewer rows, and no block of values is full."""
KEEPS_NOTHING = (
    "merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing},schedule"
)


class Net(nn.Module):
    """Frozen layers, one of them read twice, each with a small trained part."""

    def __init__(self, layers=3, checkpoints=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.head.weight.requires_grad_(False)
        self.checkpoints = checkpoints

    def forward(self, x):
        x = self.tied(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.scale * torch.tanh(self.frozen(x)) + self.trained(x)


def train(
    make=Net,
    before=None,
    after=None,
    *,
    mesh=None,
    steps=3,
    compiled=torch.compile,
    backwards=1,
    shard=None,
    dtype=torch.float32,
    **options,
):
    """Trains a model. Returns losses, gradients, outputs and parameters, and the model.

    Args:
        before, after: called with the model before and after it is sharded.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = make()
    if before is not None:
        before(net)
    zpasses.shard(net, mesh=mesh or world_mesh(), **(shard or {}))
    if after is not None:
        after(net)
    stage = {} if "pipeline" in options else {"zero_stage": 3}
    options = {"codegen": "eager", "backwards_per_step": backwards, **stage, **options}
    step = compiled(net, backend="zpasses", options=options) if compiled else net
    trains = [each for each in net.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trains)
    torch.manual_seed(dist.get_rank())
    results = []
    for _ in range(steps):
        for _ in range(backwards):
            loss = step(torch.randn(16, WIDTH).to(dtype)).square().mean()
            loss.backward()
            results.append(loss.detach())
        results += [each.grad.to_local().clone() for each in trains]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        x = torch.ones(2, WIDTH, dtype=dtype)
        results += [step(x), net(x)]
    return results + [each.detach().to_local().clone() for each in trains], net


def blocks(net, backend, options):
    """Compiles the layers one by one, in place of `torch.compile`."""
    options.pop("backwards_per_step")
    zpasses.compile_blocks(net, "layers.*", **options)
    return net


def assert_same(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)


CASES = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3, nothing kept": {"pipeline": KEEPS_NOTHING},
    "lowered only": {"pipeline": "gather-params,reduce-grads"},
    "unlowered": {"pipeline": ""},
    "uncompiled": {"compiled": None},
    "blocks": {"compiled": blocks},
    "windows": {"backwards": 2},
    "windows of stage 1": {"backwards": 2, "zero_stage": 1},
    "packed": {"shard": {"pack_mb": 1.0}},
    "budget": {"memory_budget": "20%"},
    "verified": {"verify": "simulate"},
}
"""Options of `train` for which results are to be the same."""
BF16 = {
    "shard": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "dtype": torch.bfloat16,
}


def started(folder, after):
    """A program that starts: one step. Returns what it computed, and what the cache did."""
    said = said_by_cache(folder)
    net = zpasses.shard(Net(1), mesh=world_mesh())
    after(net)
    step = torch.compile(net, backend="zpasses", options={"zero_stage": 3})
    loss = step(torch.ones(4, WIDTH)).square().mean()
    loss.backward()
    grads = [each.grad.to_local().tolist() for each in net.parameters() if each.requires_grad]
    return [loss.item(), *grads], words(said)


def measured(width, freeze, after, *, zeroes=True, pipeline="zero3"):
    """Returns the bytes that rest before a step, what forward and backward take above them, and the
    model, six layers.

    Args:
        freeze: called with the model before it is sharded.
        after: called with the model after that.
        zeroes: whether the gradients of the step before are gone.
    """
    torch._dynamo.reset()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
        freeze(net)
        zpasses.shard(net, mesh=world_mesh())
        after(net)
        options = {"pipeline": pipeline, "codegen": "eager"}
        step = torch.compile(net, backend="zpasses", options=options)
        x = torch.randn(8, width)
        for _ in range(2):
            net.zero_grad()
            step(x).sum().backward()
        if zeroes:
            net.zero_grad()
        gc.collect()
        with record_function("measured"):
            step(x).sum().backward()
    return *allocated(profiler, "measured"), net
