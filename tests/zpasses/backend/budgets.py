"""Steps with a memory budget: their input, their peak, and a look into their compile."""

import copy
from contextlib import nullcontext

import torch

import zpasses
from tests.zpasses.models import Blocks
from zpasses import compat
from zpasses.backend.step_trials import StepTrials
from zpasses.cost.memory.liveness import liveness
from zpasses.pipeline.events import listen
from zpasses.testing import fake_world
from zpasses.testing.step_graphs import capture_step

SCHEDULED = "zero3"
X = torch.linspace(-1, 1, 48 * 32).reshape(48, 32)


def peak(capture):
    graphs = capture.after.forward.graph, capture.after.backward.graph
    with fake_world(2):
        return max(liveness(graph).peak_bytes for graph in graphs)


def within_compile(check, model=None, *, world_size=2, shard=None, x=X, fake=False, **options):
    """Runs `check` with the trials of a step, while the backend compiles it. On fake tensors, it
    goes the way of generated code, and generates none.
    """
    done = []

    def observe(trials):
        check(trials)
        done.append(trials)

    on_fakes = compat.FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    codegen = "inductor" if fake else "eager"
    with fake_world(world_size) as mesh, listen(StepTrials, observe), on_fakes:
        net = zpasses.shard(copy.deepcopy(model or Blocks()), mesh=mesh, **(shard or {}))
        about = {"pipeline": SCHEDULED, "target": "h100", "codegen": codegen, **options}
        capture_step(net, x, options=about, fullgraph=True, dynamic=False)
    assert len(done) == 1
