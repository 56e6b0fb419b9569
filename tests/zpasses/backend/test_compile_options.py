"""Compile options that change the graphs."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.on_ranks import on_ranks
from zpasses.errors import OptionError
from zpasses.graph.queries import collectives, saved_inputs
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import fake_world, world_mesh
from zpasses.tools.stress.drawn_models import Model, ModelChoice


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def backward_of(**options):
    """The backward graph of one compile."""
    seen = []
    torch._dynamo.reset()
    with (
        fake_world(8) as mesh,
        observe_graphs(lambda log: seen.append(log.graph) if log.kind == "backward" else None),
    ):
        model = zpasses.shard(Mlp(), mesh=mesh)
        torch.compile(model, backend="zpasses", options={"codegen": "eager", **options})(
            torch.ones(4, 8)
        ).sum().backward()
    (graph,) = seen
    return graph


def wide(graph):
    """Count the saved activations that are as wide as the hidden layer."""
    return sum(node.meta["val"].shape == (4, 32) for node in saved_inputs(graph.nodes))


@pytest.mark.parametrize(("options", "saved"), [({"zero_stage": 3}, 1), ({"zero_stage": 2}, 2)])
def test_elementwise_results_are_recomputed_where_parameters_are_gathered_again(options, saved):
    assert wide(backward_of(**options)) == saved
    assert wide(backward_of(**options, recompute_elementwise=saved != 1)) == 3 - saved


class Running(nn.Module):
    """Changes a buffer, and subtracts the new value."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 6))
        self.register_buffer("mean", torch.ones(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return self.head(x * self.weight - self.mean.clone())


@pytest.mark.inductor
def test_backward_recomputes_nothing_from_a_buffer_that_forward_changes():
    torch._dynamo.reset()
    plain, x = Running(), torch.linspace(-1, 2, 24).view(4, 6)
    with fake_world(1) as mesh:
        model = zpasses.shard(copy.deepcopy(plain), mesh=mesh)
        torch.compile(model, backend="zpasses")(x).square().sum().backward()
        found = dict(model.named_parameters())["head.weight"].grad.to_local()
    plain(x).square().sum().backward()
    torch.testing.assert_close(found, plain.head.weight.grad)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6, bias=False))
        self.norm, self.second_norm = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = x + checkpoint(self.first, x, use_reentrant=False)
        return self.last(self.second_norm(self.norm(x)))


def test_normalizations_beside_checkpoints_are_saved_value_by_value():
    """Their operator reads statistics that forward changes, and returns several tensors."""
    options = {"codegen": "eager", "zero_stage": 1, "target": "h100", "memory_budget": "0%"}
    with fake_world(2) as mesh:
        model = zpasses.shard(Checkpointed(), mesh=mesh)
        torch.compile(model, backend="zpasses", options=options)(torch.ones(4, 6)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
@pytest.mark.slow(quick="test_backward_recomputes_nothing_from_a_buffer_that_forward_changes")
def test_a_budget_recomputes_no_normalization_from_statistics_that_changed():
    options = {"codegen": "eager", "zero_stage": 1, "memory_budget": "0%"}
    plain, x = Model(ModelChoice(("batch_norm", "wide"))), torch.linspace(-1, 2, 24).view(4, 6)
    model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
    call = torch.compile(model, backend="zpasses", options=options)
    for each in (call, plain):
        (each(x).square().mean() + each(2 * x).square().mean()).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


ROOMY = (
    "merge-reads,gather-params,reduce-grads,reshard-after-forward,"
    "schedule{plan=single,memory_budget=1GiB}"
)
SLOW_LAUNCH = "cpu,launch_us=1000000"
SLOW_MEMORY = "cpu,launch_us=0.001,hop_us=0.001,network_hop_us=0.001,memory_gb_s=0.001"


def test_target_decides_what_is_merged(monkeypatch):
    # gloo copies the tensors that it all-reduces together.
    form = ROOMY.replace("reduce-grads", "reduce-grads{form=all_reduce}")
    monkeypatch.setattr("zpasses.compat.is_gloo", lambda group, device=None: True)
    few, many = (
        sum("reduce" in each.op for _, each in collectives(backward_of(pipeline=form, target=it)))
        for it in (SLOW_LAUNCH, SLOW_MEMORY)
    )
    assert few < many
    monkeypatch.setenv("ZPASSES_TARGET", SLOW_LAUNCH)
    assert sum("reduce" in each.op for _, each in collectives(backward_of(pipeline=form))) == few


def test_unknown_target_is_refused_with_the_nearest_one():
    with pytest.raises(Exception, match=r"unknown target 'h10'. Did you mean \"h100\"") as error:
        torch.compile(Mlp(), backend="zpasses", options={"target": "h10"})(torch.ones(4, 8))
    assert isinstance(error.value.__cause__ or error.value.inner_exception, OptionError)
