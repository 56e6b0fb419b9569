"""Models and optimizers for tests of offloaded states, and comparisons of them."""

import copy
import gc

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import zpasses
from zpasses import compat
from zpasses.simulate.equality import bits
from zpasses.testing import capture_graphs

__all__ = [
    "ONE",
    "OPTIMIZERS",
    "SMALL",
    "Large",
    "Lion",
    "Net",
    "assert_bits",
    "assert_same_training",
]
__all__ += ["backward", "measured", "optimizer_of", "train"]


def assert_bits(ours, theirs):
    """Nested values have the same keys and the same bits."""
    mine, structure = compat.pytree.tree_flatten(ours)
    others, expected = compat.pytree.tree_flatten(theirs)
    assert structure == expected
    for at, (value, other) in enumerate(zip(mine, others, strict=True)):
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype
            assert value.stride() == other.stride()
            assert torch.equal(bits(value.detach()), bits(other.detach())), (at, value, other)
        else:
            assert value == other


class Lion(torch.optim.Optimizer):
    """One moment, and lists of tensors."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param]["moment"] = torch.zeros_like(param)
            moments = [self.state[param]["moment"] for param in params]
            grads = [param.grad for param in params]
            signs = [each.sign() for each in torch._foreach_lerp(moments, grads, 0.1)]
            torch._foreach_add_(params, signs, alpha=-group["lr"])
            torch._foreach_lerp_(moments, grads, 0.01)


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW loop": (torch.optim.AdamW, {"foreach": False}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "AdamW tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.02)}),
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "Lion": (Lion, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "Adagrad foreach": (torch.optim.Adagrad, {"foreach": True}),
    "NAdam": (torch.optim.NAdam, {"foreach": True}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "ASGD": (torch.optim.ASGD, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adafactor of zpasses": (zpasses.optim.Adafactor, {"weight_decay": 0.1}),
    "Muon": (torch.optim.Muon, {}),
    "Muon of zpasses": (zpasses.optim.Muon, {}),
    "Rprop": (torch.optim.Rprop, {}),
}
SMALL = {"bucket_bytes": "1KiB", "device_bytes": "600B"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = (8, 16, 12, 16, 5)
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))
        self.sometimes = nn.Parameter(torch.ones(9, 3))
        self.never = nn.Parameter(torch.ones(9, 3))
        self.none = nn.Parameter(torch.ones(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.layers[2].weight.data = self.layers[2].weight.data.t().contiguous().t()  # strides

    def forward(self, x, number):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale + (self.sometimes.sum() if number % 2 else 0) + self.none.sum()


def optimizer_of(model, which):
    cls, options = OPTIMIZERS[which]
    params = [each for each in model.parameters() if each.dim() == 2 or "Muon" not in which]
    if which in ("Muon", "Muon of zpasses", "Adafactor"):  # which fail for empty ones
        params = [each for each in params if each.numel()]
    if which == "SGD fused":  # fails if a parameter gets its first gradient later than others
        params = [each for each in params if each is not model.sometimes]
    half = [{"params": params[:4]}, {"params": params[4:], "lr": 0.005}]
    return cls(half, **{"lr": 0.01, **copy.deepcopy(options)})


def backward(model, number, batches=2):
    for at in range(batches):  # gradients add up
        seed = torch.Generator().manual_seed(10 * number + at)
        model(torch.randn(4, 8, generator=seed), number).square().sum().backward()


def train(model, optimizer, numbers):
    for number in numbers:
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()


def assert_same_training(model, optimizer, other, plain):
    assert_bits(dict(model.state_dict()), dict(other.state_dict()))
    ours, theirs = optimizer.state_dict(), plain.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert_bits(dict(sorted(ours["state"].items())), dict(sorted(theirs["state"].items())))


# --- memory ---------------------------------------------------------------------------------------
class Large(nn.Module):
    """Twelve equal matrices, whose states take 128 KiB each with AdamW."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList(torch.ones(64, 256) for _ in range(12))


ONE = 2 * 64 * 256 * 4


def measured(options, steps=3, prepare=lambda model: model):
    """Steps a model. Returns its optimizer, and per step the bytes of the device (which are those
    of torch's allocator: the host's are mapped) at rest before it, and the peak above them.

    Args:
        prepare: shards the model, for example.
    """
    model = prepare(Large())
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if options is not None:
            zpasses.offload_optimizer(optimizer, **options)
        for number in range(steps):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            gc.collect()
            with record_function(f"step {number}"):
                optimizer.step()
    events = profiled.profiler.kineto_results.events()
    found = []
    for number in range(steps):
        (mark,) = (each for each in events if each.name() == f"step {number}")
        live = rest = peak = 0
        for each in sorted(
            (each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()
        ):
            live += each.nbytes()
            if each.start_ns() < mark.start_ns():
                rest = peak = live
            elif each.start_ns() <= mark.start_ns() + mark.duration_ns():
                peak = max(peak, live)
        found.append((rest, peak - rest))
    return optimizer, found


def captured_of(net, shard, pipeline, capture=capture_graphs, layers=4, width=256, **options):
    """The graphs of a net of this many layers of a width, on a slow device of two ranks."""
    about = {"pipeline": pipeline, "options": {"target": "h100,tflops=1", **options}}
    x = (torch.randn(8 * width, width),)
    return capture(net(layers, width), x, world_size=2, shard=shard, **about)
