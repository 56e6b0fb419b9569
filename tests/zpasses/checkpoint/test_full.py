"""`zpasses.full_state_dict`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests.on_ranks import on_ranks, rank_0_before_rank_1
from tests.zpasses.checkpoint.checkpoint_models import Several, changed, sharded
from tests.zpasses.models import Tied, assert_same_values
from zpasses.testing import run_on_ranks

pytestmark = pytest.mark.processes


def _full_state():
    plain = Several()
    model = sharded(plain)
    state = zpasses.full_state_dict(model)
    assert_same_values(state, dict(plain.state_dict()))
    assert_same_values(zpasses.full_state_dict(torch.compile(model)), state)
    assert state["tied.embed.weight"] is state["tied.head.weight"]
    for name, value in state.items():
        assert type(value) is torch.Tensor, name
        assert value.untyped_storage().nbytes() == value.nbytes, f"{name} drags padding along"
        value.copy_(torch.zeros_like(value))
    assert_same_values(zpasses.full_state_dict(model), dict(plain.state_dict()))  # they were copies
    model.load_state_dict(dict(changed(plain).state_dict()))
    plain.load_state_dict(zpasses.full_state_dict(model))
    assert_same_values(dict(plain.state_dict()), dict(changed(Several()).state_dict()))


@pytest.mark.parametrize("ranks", [1, 3])
def test_full_state_dict_is_the_one_of_the_plain_model(ranks):
    run_on_ranks(_full_state, ranks=ranks)


@on_ranks(4)
def test_buffers_are_those_of_the_first_rank():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = zpasses.shard(nn.BatchNorm1d(3), mesh=mesh)
    with torch.no_grad():
        model.running_mean += dist.get_rank()
        model.num_batches_tracked += 1 + dist.get_rank()
    state = zpasses.full_state_dict(model)
    assert state["running_mean"].tolist() == [0.0] * 3
    assert state["num_batches_tracked"] == 1
    assert model.num_batches_tracked == 1 + dist.get_rank()  # the model keeps its own


@on_ranks(2)
def test_other_states_and_ranks_with_different_models():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"step": 3}

    assert zpasses.full_state_dict(sharded(Extra(2, 2)))["_extra_state"] == {"step": 3}
    plain = Several()
    state = zpasses.full_state_dict(sharded(plain), rank0_only=True, cpu_offload=True)
    assert_same_values(state, {} if dist.get_rank() else dict(plain.state_dict()))
    plain = Tied()  # without shards
    state = zpasses.full_state_dict(plain)
    assert_same_values(state, dict(plain.state_dict()))
    assert state["head.weight"].data_ptr() != plain.head.weight.data_ptr()
    model = sharded(nn.Linear(4, 4 + dist.get_rank()))
    with pytest.raises(zpasses.AgreementError, match="ranks differ in the model; rank 1"):
        zpasses.full_state_dict(model)


@on_ranks(2)
def test_a_call_on_one_rank_does_not_hang():
    model = sharded(nn.Linear(4, 4))
    # When the first rank has given up, the second one is told, too.
    with (
        rank_0_before_rank_1(),
        pytest.raises(zpasses.AgreementError, match=r"rank 1 .* did not .*full_state_dict"),
    ):
        zpasses.full_state_dict(model, timeout_s=0.4)
