"""Graphs that are written by hand, for tests of order on streams."""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from zpasses.graph.queries import Editor
from zpasses.graph.verifier.order import find_races, own_stream
from zpasses.testing.stream_graphs import record_streams

WORLD, SEEDS = 2, 40


class GraphBuilder:
    """Builds a graph call by call. Inputs are float32[4, 2] unless a shape is given."""

    def __init__(self, *inputs, **shapes):
        self.graph = fx.Graph()
        self.inputs = [self.graph.placeholder(name) for name in (*inputs, *shapes)]
        with FakeTensorMode() as mode:
            for node in self.inputs:
                shape = shapes.get(node.name, (4, 2))
                node.meta["val"] = mode.from_tensor(torch.zeros(shape))
        self._end = self.graph.output(())

    def call(self, target, *args, **kwargs):
        return Editor(self.graph, before=self._end).call(target, *args, **kwargs)

    def returns(self, *values):
        self._end.args = (values,)
        return fx.GraphModule({}, self.graph)


def inputs_of(gm, size=WORLD, seed=0):
    """Random inputs for each rank."""
    generator = torch.Generator().manual_seed(seed)
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [
        [torch.randn(each.shape, generator=generator).to(each.dtype) for each in values]
        for _ in range(size)
    ]


def races_and_difference(gm, inputs=None, stream_of=own_stream, seeds=SEEDS):
    """What the static check says about a graph, and what its runs show."""
    schedule = record_streams(gm, inputs or inputs_of(gm), stream_of=stream_of)
    races = find_races(gm.graph, stream_of)
    return races, schedule.first_difference(seeds if races else seeds // 5), schedule
