"""Parameters that compiled code reads outside of a graph, as forwards of torch's own classes do."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import zpasses
from zpasses.integrations.preparation import prepare_model
from zpasses.testing import run_on_ranks, world_mesh

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


def _compiled_by_torch(model):
    zpasses.shard(model, mesh=world_mesh())
    model.compile(backend="zpasses", options=OPTIONS)


def _prepared(model):
    prepare_model(model, world_mesh(), OPTIONS, caller="the test")


def _count(compile_it):
    torch.compiler.reset()
    counters.clear()
    return _train(compile_it)


def _both():
    return [_count(each) for each in (_compiled_by_torch, _prepared)]


def test_reads_are_no_graphs_and_prepared_models_of_torchs_classes_are_one():
    for by_torch, prepared in run_on_ranks(_both):
        assert by_torch in (0, 2)  # torch 2.15 compiles forwards of its own classes
        assert prepared == 2  # compiled again when the first layer trains
