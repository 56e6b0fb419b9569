"""What keeps the time of a compile low: no garbage collection, fast pickles."""

import gc
import io

import pytest
import torch
from torch import nn
from torch.fx._graph_pickler import GraphPickler
from torch.fx.experimental.proxy_tensor import make_fx

import zpasses
from zpasses import compat
from zpasses.garbage import no_garbage_collection
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import world_mesh

WIDTH, DEPTH = 8, 6


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)))


def step_of(model, **options):
    zpasses.shard(model, mesh=world_mesh())
    return torch.compile(model, backend="zpasses", options={"codegen": "eager", **options})


def test_the_backend_collects_no_garbage(one_rank):
    enabled = []
    with observe_graphs(lambda graph: enabled.append(gc.isenabled())):
        step_of(layers())(torch.ones(2, WIDTH)).sum().backward()
    assert enabled
    assert not any(enabled)
    assert gc.isenabled()


def test_no_garbage_is_collected_in_the_trace_either(one_rank):
    enabled = []

    class Traced(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers()

        def forward(self, x):
            enabled.append(seen())
            return self.layers(x)

    @torch._dynamo.assume_constant_result
    def seen():
        return gc.isenabled()

    model = Traced()
    step = step_of(model)
    torch._dynamo.reset()  # forgets callbacks
    step(torch.ones(2, WIDTH))
    torch.compile(lambda x: x + 1, backend="zpasses")
    step(torch.ones(3, WIDTH))
    assert enabled[-1] is False
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with no_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def inputs_of(gm):
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def test_graphs_are_pickled_in_c(monkeypatch):
    monkeypatch.setattr(GraphPickler, "dumps", None)  # which is in Python where dill is installed
    gm = make_fx(lambda x: torch.relu(x) + 1, tracing_mode="fake")(torch.ones(3))
    mode = next(iter(gm.graph.nodes)).meta["val"].fake_mode
    found = compat.unpack_graph(compat.pack_graph(gm, inputs_of(gm)), mode)
    assert [str(node.target) for node in found.graph.nodes] == [
        str(node.target) for node in gm.graph.nodes
    ]
    found.recompile()
    assert torch.equal(found(torch.tensor([-1.0, 2.0])), torch.tensor([1.0, 3.0]))


def test_what_only_dill_can_pickle_is_packed_too():
    pytest.importorskip("dill")
    gm = make_fx(lambda x: torch.relu(x) + 1, tracing_mode="fake")(torch.ones(3))
    node = next(iter(gm.graph.nodes))
    node.meta["custom"] = {"function": lambda: 3}
    found = compat.unpack_graph(compat.pack_graph(gm, inputs_of(gm)), node.meta["val"].fake_mode)
    assert next(iter(found.graph.nodes)).meta["custom"]["function"]() == 3


def test_a_deep_copy_of_a_spec_has_the_same_mesh_and_pickles_as_torchs(one_rank):
    model = zpasses.shard(nn.Linear(WIDTH, WIDTH), mesh=world_mesh())
    (weight, _) = model.parameters()
    spec = compat.spec_of(weight)
    assert torch._dynamo.guards.extract_dtensor_spec(None, spec).mesh is spec.mesh
    file = io.BytesIO()
    torch.save(weight.detach(), file)
    text = file.getvalue()
    assert b"zpasses" not in text
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True).to_local(), weight.to_local())
