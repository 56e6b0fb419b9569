"""A dump of a real compile, which tests share."""

import functools
import tempfile
from pathlib import Path

import torch
from torch import nn

import zpasses
from zpasses.cost.memory.liveness import liveness
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import fake_world

SCHEDULE = "schedule{plan=one-ahead,memory_budget=1MiB}"
PIPELINE = (
    f"merge-reads,gather-params,reduce-grads,reshard-after-forward{{keep=nothing}},{SCHEDULE}"
)


class Layers(nn.Module):
    """Three linear layers with ReLU."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def dump_training_step(folder, world=2, rank=0, model=Layers, **options):
    """Compile a step of `Layers` as one rank of a fake process group. Returns kind of graph ->
    bytes alive along the graph after its passes.
    """
    seen = {}
    with (
        fake_world(world, rank) as mesh,
        observe_graphs(lambda log: seen.update({log.kind: liveness(log.graph).live_bytes})),
    ):
        model = zpasses.shard(model(), mesh=mesh)
        given = {"codegen": "eager", "agreement": False, "pipeline": PIPELINE, **options}
        given |= {"dump": str(folder), "dump_ranks": "all"}
        torch._dynamo.reset()
        torch.compile(model, backend="zpasses", options=given)(torch.ones(8, 64)).sum().backward()
        torch._dynamo.reset()
    return seen


_folders = []


@functools.cache
def real_dump():
    """(folder, kind of graph -> bytes alive after its passes), for both ranks of two."""
    _folders.append(tempfile.TemporaryDirectory())  # deleted when the process ends
    folder = Path(_folders[-1].name) / "dump"
    dump_training_step(folder, rank=1)
    return folder, dump_training_step(folder)


class ExtraParameter(Layers):
    """`Layers` with one parameter more, which comes first among its inputs."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))
        self._parameters = {"scale": self._parameters["scale"], **self._parameters}

    def forward(self, x):
        return super().forward(x * self.scale)
