"""Models whose blocks are compiled one by one, and of which what forwards save may rest on the
host.
"""

import torch

import zpasses
from zpasses.host.saved_arenas import host
from zpasses.runtime.block_schedule import block_schedule
from zpasses.testing import world_mesh

EAGER = {"codegen": "eager"}
TARGET = "h100,tflops=0.001,host_out_gb_s=2000,host_in_gb_s=2000"
"""Copies to the host are faster than matmuls there."""


def build(net, budget=None, host_memory="1GiB", **options):
    """Returns the model that `net` makes, sharded, with `layers` that are compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = net()
    zpasses.shard(model, mesh=world_mesh())
    if budget is not None:
        options |= {"memory_budget": budget, "host_memory": host_memory}
    given = {"target": TARGET, "cache": False, **options}
    zpasses.compile_blocks(model, "layers.*", **given)
    return model


def plans():
    """The plans of all steps so far."""
    return [each.cost for each in block_schedule().plans._plans.values()]


def plan():
    """The plan of the only step so far."""
    (found,) = plans()
    return found


def train(model, batch, steps=3):
    """Returns losses and gradients, and the bytes on the host between forward and backward."""
    results, held = [], []
    for number in range(steps):
        loss = model(batch(number))
        held.append(host.live)
        loss.backward()
        results.append(loss.detach())
    params = [each for each in model.parameters() if each.requires_grad]
    return results + [each.grad.to_local().clone() for each in params], held
