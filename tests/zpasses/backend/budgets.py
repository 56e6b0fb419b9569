"""Steps with a memory budget: their input, their peak, and a look into their compile."""

import copy
import itertools
from contextlib import nullcontext

import torch
from hypothesis import strategies as st
from torch import nn

import zpasses
from tests.zpasses.models import Blocks
from zpasses import compat
from zpasses.backend.step_trials import StepTrials
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.pipeline.events import listen
from zpasses.testing import fake_world
from zpasses.testing.step_graphs import capture_step

SCHEDULED = "zero3"
X = torch.linspace(-1, 1, 48 * 32).reshape(48, 32)


def peak(capture):
    """The peak of a capture, which runs operators one by one."""
    graphs = capture.after.forward.graph, capture.after.backward.graph
    with fake_world(2), use_fusion(False):
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


WIDTHS = st.lists(st.sampled_from([1, 8, 24, 65, 129]), min_size=3, max_size=6)


TARGETS = st.sampled_from(
    ["h100", "mi300x", "h100,link_gb_s=0.05,network_gb_s=0.05", "h100,ranks_per_node=1"]
)


class Stack(nn.Module):
    def __init__(self, widths, frozen):
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        for number, layer in enumerate(self.layers):
            layer.requires_grad_(number not in frozen)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@st.composite
def steps(draw):
    widths = draw(WIDTHS)
    frozen = draw(st.sets(st.integers(0, len(widths) - 3), max_size=2))
    rows = draw(st.sampled_from([2, 40]))
    return Stack(widths, frozen), torch.linspace(-1, 1, rows * widths[0]).view(rows, widths[0])
