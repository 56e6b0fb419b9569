"""Sharded `nn.RNN`, `nn.GRU` and `nn.LSTM`."""

import copy
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.zpasses.models import full_gradients, reference_gradients
from zpasses.errors import ShardingError
from zpasses.integrations.full_states import unsharded
from zpasses.sharding.rnn import LIST_OF_WEIGHTS
from zpasses.testing import fake_world, world_mesh


class Tagger(nn.Module):
    """Words, an RNN, and classes."""

    def __init__(self, rnn):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(7, 3), rnn
        self.head = nn.LazyLinear(2)
        with torch.no_grad():
            self(torch.zeros(1, 1, dtype=torch.long))

    def forward(self, words):
        x = self.embed(words).tanh()
        outputs, state = self.rnn(x)
        return self.head(outputs).tanh() + (state[0] if isinstance(state, tuple) else state).mean()


RNNS = {
    "lstm": lambda: nn.LSTM(3, 5),
    "projected lstm": lambda: nn.LSTM(3, 5, 2, proj_size=2),
    "two-way gru": lambda: nn.GRU(3, 5, 2, bidirectional=True, batch_first=True),
    "rnn without biases": lambda: nn.RNN(3, 5, bias=False),
    "normed lstm": lambda: weight_norm(weight_norm(nn.LSTM(3, 5), "weight_ih_l0"), "weight_hh_l0"),
    "normed rnn": lambda: weight_norm(
        weight_norm(nn.RNN(3, 5, bias=False), "weight_ih_l0"), "weight_hh_l0"
    ),
}


def _words(rank):
    return torch.randint(7, (4, 2), generator=torch.Generator().manual_seed(rank))


def _check_steps(plain, model, run, steps=1):
    for _ in range(steps):
        batches = [_words(rank) for rank in range(dist.get_world_size())]
        expected = reference_gradients(plain, batches)
        run(batches[dist.get_rank()]).sum().backward()
        torch.testing.assert_close(full_gradients(model), expected)
        for name, param in plain.named_parameters():
            param.grad = expected[name]
        for each in (plain, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()


@pytest.mark.parametrize("name", some_quick(RNNS, ["rnn without biases", "normed rnn"]))
@on_ranks(2)
def test_a_sharded_rnn_trains_as_the_unsharded_one(name):
    torch.manual_seed(0)
    plain = Tagger(RNNS[name]())
    model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
    for stage in (None, 3, 2):
        run = model
        if stage is not None:
            options = {"zero_stage": stage, "codegen": "eager"}
            run = torch.compile(model, backend="zpasses", options=options)
        _check_steps(plain, model, run, 2)
    copied = copy.deepcopy(model)
    _check_steps(plain, copied, copied)


@pytest.mark.slow(quick="test_a_sharded_rnn_trains_as_the_unsharded_one")
@pytest.mark.parametrize(("rnn", "traced"), [(nn.LSTM, False), (nn.GRU, True)])
@on_ranks(2)
def test_a_sharded_rnn_trains_by_the_code_of_inductor(rnn, traced):
    torch.manual_seed(0)
    plain = Tagger(rnn(3, 5))
    model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
    with torch._dynamo.config.patch(allow_rnn=traced):
        run = torch.compile(model, backend="zpasses", fullgraph=traced)
        _check_steps(plain, model, run, 2)


class _CountReads(TorchDispatchMode):
    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.zpasses.unshard.default
        return func(*args, **(kwargs or {}))


def test_a_forward_reads_each_weight_once():
    with fake_world(2) as mesh:
        rnn = zpasses.shard(nn.LSTM(3, 5, 2), mesh=mesh)
        with _CountReads() as counted, torch.no_grad():
            rnn(torch.ones(2, 1, 3))
    assert counted.reads == len(list(rnn.parameters()))


def test_the_module_keeps_no_full_weights_and_is_edited_without_reading_them():
    with fake_world(2) as mesh, _CountReads() as counted:
        rnn = zpasses.shard(nn.GRU(3, 5), mesh=mesh)
        assert not any(vars(rnn)["_flat_weights"])
        rnn.weight_hh_l0 = nn.Parameter(torch.ones(15, 5))
        rnn.double()
        copied = copy.deepcopy(rnn)
        with zpasses.local_shards(copied):
            copied.bias_hh_l0 = copied.bias_hh_l0
        copied.reset_parameters()
    assert not any(vars(rnn)["_flat_weights"])
    assert rnn.get_parameter("weight_hh_l0").to_local().eq(1).all()
    assert counted.reads == 0


def test_threads_that_run_one_module_hold_weights_of_their_own():
    """Their forwards overlap: the second one begins in the first, and ends after it."""
    barrier, results = threading.Barrier(2, timeout=60), {}
    with fake_world(2) as mesh, torch.no_grad():
        rnn = zpasses.shard(nn.LSTM(3, 5), mesh=mesh)
        forward = nn.LSTM.forward

        def overlapping(self, x):
            first = threading.current_thread().name == "first"
            barrier.wait()
            if not first:
                barrier.wait()
            weights = self._flat_weights
            output = forward(self, x)
            assert all(a is b for a, b in zip(weights, self._flat_weights, strict=True))
            results[threading.current_thread().name] = weights
            if first:
                barrier.wait()
            return output

        with mock.patch.object(nn.LSTM, "forward", overlapping):
            threads = [
                threading.Thread(target=rnn, args=(torch.ones(2, 1, 3),), name=name)
                for name in ("first", "second")
            ]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        assert results["first"][0] is not results["second"][0]
        with _CountReads() as counted:
            rnn(torch.ones(2, 1, 3))
    assert counted.reads == 4


@pytest.mark.parametrize("module", [nn.LSTM(3, 5), nn.Linear(3, 5)])
def test_an_attribute_error_of_a_gather_is_what_the_user_sees(module):
    def fails(self):
        raise AttributeError("no such route")

    with fake_world(2) as mesh:
        zpasses.shard(module, mesh=mesh)
        broken = mock.patch.object(zpasses.sharding.reads, "to_local_shard", fails)
        with broken, pytest.raises(ShardingError, match="AttributeError: no such route"):
            module(torch.ones(2, 1, 3))


def test_a_pruned_weight_is_none_in_the_list():
    with fake_world(2) as mesh:
        rnn = zpasses.shard(nn.GRU(3, 5), mesh=mesh)
        del rnn.bias_hh_l0
        assert [each is None for each in rnn._flat_weights] == [False, False, False, True]


def test_an_rnn_may_be_ignored_in_part():
    with fake_world(2) as mesh:
        rnn = nn.RNN(3, 5)
        kept = rnn.bias_hh_l0
        zpasses.shard(rnn, mesh=mesh, ignored_params={kept})
        assert rnn._flat_weights[3] is kept
        with torch.no_grad():
            assert rnn(torch.ones(2, 1, 3))[0].shape == (2, 1, 5)


def test_a_block_with_full_parameters_runs_an_rnn():
    with fake_world(2):
        model = nn.Sequential(nn.LSTM(3, 5))
        full = {name: param.detach().clone() for name, param in model.named_parameters()}
        x = torch.randn(4, 2, 3)
        expected = model(x)[0]
        zpasses.shard(model, mesh=world_mesh())
        with unsharded(model, full):
            assert torch.equal(model(x)[0], expected)
        assert vars(model[0])[LIST_OF_WEIGHTS] == [None] * 4
