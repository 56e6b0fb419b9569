"""Code that has the local tensor of a parameter: one rank may read it, and writes are seen."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.parallel_models import whole
from tests.zpasses.runtime.watched_models import EAGER, X, build, compiled
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh

pytestmark = pytest.mark.processes


def _local(param):
    return param.to_local() if isinstance(param, DTensor) else param


HANDLES = {
    "data": lambda param: _local(param).data,
    "storage": lambda param: torch.empty(0).set_(_local(param).untyped_storage()),
    "array": lambda param: torch.from_numpy(_local(param).detach().numpy()),
}


def _step(model, run):
    run(X).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


@pytest.mark.parametrize("kind", HANDLES)
@on_ranks(2)
def test_writes_by_a_handle_that_is_kept_over_steps_are_seen(kind):
    shown = []
    for sharded in (False, True):
        model = build(sharded)
        run = compiled(model, 2) if sharded else model
        handles = [HANDLES[kind](param) for param in model.parameters()]
        found = []
        for _ in range(2):
            _step(model, run)
            for _ in range(2):
                found.append(run(X).detach())
                for handle in handles:
                    handle.mul_(1.5)
        run(X).square().sum().backward()
        shown.append([*found, *[whole(param.grad) for param in model.parameters()]])
    torch.testing.assert_close(shown[1], shown[0])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.inner(x).tanh()


def _blocks(sharded):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)])
    if sharded:
        zpasses.shard(model, mesh=world_mesh())
        zpasses.compile_blocks(model, "*", zero_stage=3, **EAGER)
    return model


@pytest.mark.slow(quick="test_writes_between_a_forward_and_its_backward_are_refused")
@on_ranks(2)
def test_one_rank_may_read_its_rows_at_any_time():
    for stage in (2, "blocks"):
        shown = []
        for sharded in (False, True):
            model = build(sharded) if stage == 2 else _blocks(sharded)
            run = compiled(model, stage) if sharded and stage == 2 else model
            for _ in range(3):
                _step(model, run)
            found = []
            for _ in range(3):
                with torch.no_grad():
                    found += [run(X), run(X)]
                if dist.get_rank() == 0:
                    [_local(param).norm() for param in model.parameters()]
            first = run(X).square().sum()
            if dist.get_rank() == 0:
                [_local(param).norm() for param in model.parameters()]
            (first + run(X).square().sum()).backward()
            shown.append([*found, *[whole(param.grad) for param in model.parameters()]])
        torch.testing.assert_close(shown[1], shown[0])


@on_ranks(2)
def test_writes_between_a_forward_and_its_backward_are_refused():
    for stage, hidden in ((2, True), (3, False), (3, True)):
        model = build(True)
        loss = compiled(model, stage)(X).square().sum()
        for param in model.parameters():
            local = param.to_local()
            with torch.no_grad():
                (local.data if hidden else local).mul_(1.5)
        # Unsharded, backward uses what is written through `.data`. Stage 2 has saved the old
        # value, so all stages refuse it.
        with pytest.raises(zpasses.ShardingError, match="edited between a forward and its"):
            loss.backward()


def _one_rank_writes(cached):
    model = build(True)
    run = compiled(model, 2)
    for _ in range(3):
        _step(model, run)
    if cached:
        run(X)
    if dist.get_rank() == 0:
        next(model.parameters()).to_local().data[0] = 0.0
    run(X).sum().backward()
    return float(whole(next(model.parameters()))[0].abs().sum())


@pytest.mark.slow(quick="test_writes_between_a_forward_and_its_backward_are_refused")
def test_a_write_of_one_rank_is_named_where_another_rank_reads_a_copy():
    for rank in run_in_fresh_ranks(_one_rank_writes, True):
        assert "zpasses.errors.AgreementError" in rank.error
        assert "a write to `to_local()` of parameter '0.weight'" in rank.error
    assert run_on_ranks(_one_rank_writes, False) == [0.0, 0.0]


class _Alone(nn.Module):
    """One row, so that a rank has none."""

    def __init__(self):
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, 6))

    def forward(self, x):
        return x * self.row


@on_ranks(2)
def test_steps_of_ones_own_may_leave_out_ranks_without_rows():
    shown = []
    for sharded in (False, True):
        model = _Alone()
        run = model
        if sharded:
            run = compiled(zpasses.shard(model, mesh=world_mesh()), 2)
        for _ in range(3):
            run(X).square().sum().backward()
            for param in model.parameters():
                if _local(param).numel():
                    _local(param).data.sub_(_local(param.grad), alpha=0.1)
            model.zero_grad()
        shown.append(whole(next(model.parameters())).detach())
    torch.testing.assert_close(shown[1], shown[0])


@on_ranks(2)
def test_parameters_that_were_replaced_unseen_are_refused():
    for way in ("dict", "swap"):
        model = build(True)
        run = compiled(model, 3)
        param = model[0].get_parameter("weight")
        other = nn.Parameter(param.detach() * 1.5)
        if way == "dict":
            model[0]._parameters["weight"] = other
        else:
            torch.utils.swap_tensors(param, other)
        with pytest.raises(zpasses.ShardingError, match=r"0\.weight was replaced where"):
            run(X)
