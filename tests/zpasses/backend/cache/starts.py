"""Programs that start with a compile cache, and what it did with their graphs."""

import logging
import os

import torch
import torch.distributed as dist
from torch import nn

import zpasses
from zpasses.pipeline import events
from zpasses.runtime.free_memory import planned_peak_bytes
from zpasses.testing import run_in_fresh_ranks, world_mesh


class Net(nn.Module):
    width, activation, trains_biases = 9, staticmethod(torch.tanh), True

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, self.width), nn.Linear(self.width, 6)
        self.down.bias.requires_grad_(self.trains_biases)

    def forward(self, x):
        return (self.down(self.activation(self.up(x))) - x).square().mean()


class Messages(logging.Handler):
    """What the compile cache did with each graph, as words."""

    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        text = record.getMessage()
        for name, sign in SIGNS.items():
            if sign in text:
                self.said.append(name if name in ("hit", "stored") else f"{name}: {text}")


SIGNS = {
    "hit": "from the compile cache, in",
    "stored": ": stored in the compile cache",
    "not stored": ": not stored in the compile cache: ",
    "miss": ": not in the compile cache: ",
    "off": "without the compile cache: ",
    "damaged": "is damaged",
}


def said_by_cache(folder):
    """A program begins whose compile cache is in a folder. Returns its messages, which grow."""
    os.environ["ZPASSES_CACHE_DIR"] = str(folder)
    events._listeners.clear()  # that of all tests keeps graphs out of the cache
    messages, log = Messages(), logging.getLogger("zpasses")
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    torch.manual_seed(0)
    return messages.said


def start(
    folder,
    options=None,
    *,
    lengths=(4, 4, 4),
    evaluate=False,
    dynamic=False,
    patch=None,
    mesh=world_mesh,
    reshard=None,
    reduce_dtype=None,
):
    """Train for a few steps; returns the losses, the parameters, and what the cache did."""
    said = said_by_cache(folder)
    if patch is not None:
        patch()
    torch._dynamo.reset()
    model = zpasses.shard(
        Net(), mesh=mesh(), reshard_after_forward=reshard, reduce_dtype=reduce_dtype
    )
    step = torch.compile(model, backend="zpasses", options=options or {}, dynamic=dynamic or None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    every = (options or {}).get("backwards_per_step", 1)
    for number, length in enumerate(lengths):
        x = torch.linspace(-1, 1, 6 * length).view(length, 6) * (1 + dist.get_rank())
        loss = step(x)
        loss.backward()
        losses.append(loss.item())
        if (number + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        if evaluate:
            with torch.no_grad():
                losses.append(step(x).item())
    weights = [param.full_tensor().tolist() for param in model.parameters()]
    losses.append(planned_peak_bytes())  # which a stored graph says, too
    return losses, weights, said


def on_fresh_ranks(fn, *args, **kwargs):
    """Processes that start anew: in one that lives on, process groups have other names."""
    outcomes = run_in_fresh_ranks(fn, *args, timeout_s=200, **kwargs)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    return [outcome.result for outcome in outcomes]


def starts(folder, *args, **kwargs):
    """What the first rank returns, after a check that ranks end with the same parameters."""
    first, *others = on_fresh_ranks(start, folder, *args, **kwargs)
    for other in others:
        assert other[1] == first[1]
    return first[:2], [each[2] for each in (first, *others)]


COLD = ["miss", "stored"]


def words(said):
    return [each.partition(":")[0] for each in said]
