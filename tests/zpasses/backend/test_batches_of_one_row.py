"""Batches of one row on some ranks: torch traces other operators for them, and sharding must not
depend on it.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.zpasses.models import full_gradients, reference_gradients
from zpasses.passes import schedule
from zpasses.pipeline.events import observe_graphs
from zpasses.ranks.agree import simulated_answers
from zpasses.testing import fake_world, world_mesh


def _layers():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def _encoder():
    return nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)


class _Decoder(nn.Module):
    """Backward reads the bias of a norm with some batches only, to compute its result again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
        self.query = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        return self.layers(x, self.query.expand(len(x), -1, -1))


class _InTwoGraphs(_Decoder):
    def forward(self, x):
        out = super().forward(x)
        torch._dynamo.graph_break()
        return out @ self.query.T


CASES = [(_layers, (4,)), (_encoder, (5, 4)), (_Decoder, (6, 8)), (_InTwoGraphs, (6, 8))]


@pytest.mark.parametrize(("build", "shape"), some_quick(CASES, [CASES[0], CASES[3]]))
def test_ranks_ask_for_the_same_plans_whatever_their_batch(build, shape, monkeypatch):
    asked, adopt = [], schedule.adopt

    def record(groups, question, signature, mine, **kwargs):
        asked[-1].append(signature)
        return adopt(groups, question, signature, mine, **kwargs)

    monkeypatch.setattr(schedule, "adopt", record)
    with simulated_answers():
        for rows in (3, 1):
            torch.compiler.reset()
            asked.append([])
            with fake_world(2) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
                model = zpasses.shard(build(), mesh=mesh)
                run = torch.compile(model, backend="zpasses", dynamic=False)
                run(torch.ones(rows, *shape)).sum().backward()
    assert asked[0]
    assert asked[0] == asked[1]


def test_a_block_gathers_in_backward_although_the_first_one_needs_no_weight_there():
    """The first block gets data, whose gradient nobody needs: its backward reads no weight. The
    question about the others has the same parameters, and another answer.
    """
    gathers = []

    def count(observed):
        if observed.kind == "backward":
            found = observed.graph.nodes
            gathers.append(sum("all_gather" in str(node.target) for node in found))

    with fake_world(2) as mesh, simulated_answers(), observe_graphs(count):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        zpasses.shard(model, mesh=mesh)
        zpasses.compile_blocks(model, "*", zero_stage=3, codegen="eager", prefetch=0)
        model(torch.ones(2, 4)).sum().backward()
    assert sorted(set(gathers)) == [0, 1]


@pytest.mark.slow(quick="test_ranks_ask_for_the_same_plans_whatever_their_batch")
@pytest.mark.parametrize("build", [_Decoder, _InTwoGraphs])
@on_ranks(2)
def test_ranks_gather_the_same_whatever_the_batch_of_the_first_compile(build):
    for rows in ((1, 3), (3, 1)):
        torch.compiler.reset()
        torch.manual_seed(0)
        plain = build()
        model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
        run = torch.compile(model, backend="zpasses", options={"codegen": "eager"}, dynamic=False)
        batches = [torch.randn(each, 6, 8) for each in rows]
        run(batches[dist.get_rank()]).sum().backward()
        torch.testing.assert_close(full_gradients(model), reference_gradients(plain, batches))


@pytest.mark.slow(quick="test_ranks_ask_for_the_same_plans_whatever_their_batch")
@on_ranks(2)
def test_a_rank_may_have_a_batch_of_one_row():
    torch.manual_seed(0)
    plain = _layers()
    model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
    run = torch.compile(model, backend="zpasses")
    for rows in ((3, 3), (1, 3), (3, 1)):
        batches = [torch.randn(each, 4) for each in rows]
        run(batches[dist.get_rank()]).sum().backward()
        torch.testing.assert_close(full_gradients(model), reference_gradients(plain, batches))
        model.zero_grad()
