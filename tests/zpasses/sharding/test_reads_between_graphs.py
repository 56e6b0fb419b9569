"""Parameters that compiled code reads outside of a graph, as forwards of torch's own classes do."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import zpasses
from tests.on_ranks import on_ranks
from zpasses.integrations.preparation import prepare_model
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes

OPTIONS = {"codegen": "eager"}


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))  # uneven rows


def _train(compile_it):
    """Returns the losses of six steps, of which the first three train the last layer only."""
    model, plain = _model(), _model()
    for each in (model, plain):
        each[0].requires_grad_(False)
    compile_it(model)
    losses = []
    for number in range(6):
        if number == 3:
            model.requires_grad_(True)
            plain.requires_grad_(True)
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(number))
        both = [each(x).square().mean() for each in (model, plain)]
        losses.append([loss.item() for loss in both])
        for each, loss in zip((model, plain), both, strict=True):
            loss.backward()
            optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, rel=1e-6)
    return counters["stats"]["unique_graphs"]


@on_ranks(2)
def test_reads_are_no_graphs_and_prepared_models_of_torchs_classes_are_one():
    def compiled_by_torch(model):
        zpasses.shard(model, mesh=world_mesh())
        model.compile(backend="zpasses", options=OPTIONS)

    def prepared(model):
        prepare_model(model, world_mesh(), OPTIONS, caller="the test")

    # torch 2.15 compiles forwards of its own classes. Twice, because the first layer trains later.
    for compile_it, graphs in ((compiled_by_torch, (0, 2)), (prepared, (2,))):
        torch.compiler.reset()
        counters.clear()
        assert _train(compile_it) in graphs
