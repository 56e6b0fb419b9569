"""Graphs that are written by hand, for tests of order on streams."""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from zpasses.graph.queries import Editor, calls
from zpasses.graph.verifier.order import find_races, own_stream
from zpasses.testing.stream_graphs import _Host, record_streams

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


def assert_each_wait_is_needed(graphs, wait, blocking, monkeypatch):
    """Checks that the order of streams holds, and that leaving out any of the waits is found by the
    static check and on simulated devices. Changes the graph of the first rank.

    Args:
        graphs: of all ranks.
        wait: the operator that awaits copies.
        blocking: the operator that copies at once, which takes the place of a wait for the check.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [
        [
            torch.randn(node.meta["val"].shape, generator=generator)
            for node in gm.graph.find_nodes(op="placeholder")
        ]
        for gm in graphs
    ]
    graph, awaited = graphs[0].graph, _Host._await_copy
    assert not find_races(graph)
    assert record_streams(graphs, inputs).first_difference(5) is None
    waits = calls(graph, wait)
    for left_out in waits:

        def skip(host, device, args, kwargs, left_out=left_out):
            if host._node.name == left_out.name:
                return host._copies.pop(args[0].data_ptr())[0]
            return awaited(host, device, args, kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(_Host, "_await_copy", skip)
            schedule = record_streams(graphs, inputs)
        assert schedule.first_difference(20) is not None
    for each in waits:
        name = each.args[0].name
        with graph.inserting_before(each):
            other = graph.call_function(blocking, each.args[1:])
        other.meta = dict(each.meta)
        each.replace_all_uses_with(other)
        graph.erase_node(each)
        named = f"{wait.overloadpacket.__name__}({name})"
        assert any(named in str(race) for race in find_races(graph))
    return len(waits)
