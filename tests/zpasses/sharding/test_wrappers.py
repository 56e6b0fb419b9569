"""Wrappers around sharded models: DistributedDataParallel, and the names of `torch.compile`."""

import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.checkpoint.checkpoint_models import changed, sharded
from tests.zpasses.models import assert_same_values
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes


def _model():
    return nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 3)))


# --- DistributedDataParallel ----------------------------------------------------------------------
WRAPPED = [
    lambda model: DistributedDataParallel(model),
    lambda model: DistributedDataParallel(nn.Sequential(model, nn.Linear(3, 3))),
    lambda model: DistributedDataParallel(torch.compile(model)),
]


@on_ranks(2)
def test_ddp_and_sharding_refuse_each_other():
    said = (
        r"DistributedDataParallel around \w+, whose parameter \S*0\.weight is sharded by "
        r"zpasses.*Leave DistributedDataParallel out"
    )
    for wrap in WRAPPED:
        with pytest.raises(zpasses.ShardingError, match=said):
            wrap(sharded(_model()))
    model = DistributedDataParallel(_model())
    for each in (model, nn.Sequential(model)):
        with pytest.raises(zpasses.ShardingError, match="Shard the plain model and leave"):
            zpasses.shard(each, mesh=world_mesh())


@on_ranks(2)
@pytest.mark.slow(quick="the other tests of test_wrappers.py")
def test_ddp_that_ignores_the_shards_is_allowed():
    model = nn.Sequential(sharded(nn.Linear(4, 5)), nn.Linear(5, 5))
    model._ddp_params_and_buffers_to_ignore = {"0.weight", "0.bias"}
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(2, 4)).sum().backward()
    assert model[1].weight.grad is not None


# --- torch.compile --------------------------------------------------------------------------------
def _compiled(model):
    return torch.compile(model, backend="zpasses", options={"codegen": "eager"})


TARGETS = {
    "model": lambda: sharded(_model()),
    "wrapper": lambda: _compiled(sharded(_model())),
    "wrapper that was sharded": lambda: zpasses.shard(_compiled(_model()), mesh=world_mesh()),
}


@pytest.mark.parametrize("target", TARGETS)
@on_ranks(2)
def test_state_dict_loads_with_and_without_the_names_of_the_wrapper(target):
    expected = dict(changed(_model()).state_dict())
    for prefix in ("", "_orig_mod."):
        model, again = TARGETS[target](), TARGETS[target]()
        named = {prefix + name: value for name, value in expected.items()}
        assert model.load_state_dict(named) == ([], [])
        assert_same_values(zpasses.full_state_dict(model), expected)
        again.load_state_dict(model.state_dict())
        assert_same_values(zpasses.full_state_dict(again), expected)
    state = dict(_model().state_dict())
    state["other.weight"] = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other\.weight"):
        TARGETS[target]().load_state_dict(state)
    del state["other.weight"], state["0.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.bias"):
        TARGETS[target]().load_state_dict(state)


@on_ranks(2)
def test_compiled_submodule_loads_the_names_of_the_plain_model():
    model = sharded(_model())
    model[1] = _compiled(model[1])
    expected = dict(changed(_model()).state_dict())
    model.load_state_dict(expected)
    assert_same_values(zpasses.full_state_dict(model), expected)


@on_ranks(2)
def test_plain_compiled_model_keeps_the_names_of_torch():
    sharded(_model())  # so that the hook is there
    with pytest.raises(RuntimeError, match=r"Missing key.*_orig_mod"):
        _compiled(_model()).load_state_dict(_model().state_dict())


# --- inputs of another dtype ----------------------------------------------------------------------
@on_ranks(2)
@pytest.mark.slow(quick="the other tests of test_wrappers.py")
def test_inputs_of_another_dtype_get_a_hint():
    model = zpasses.shard(_model(), mesh=world_mesh(), param_dtype=torch.bfloat16)
    with pytest.raises(
        zpasses.ShardingError,
        match=r"linear: mat1.*'weight' of a Linear is gathered in torch.bfloat16, and another "
        r"argument is torch.float32.*x.to\(torch.bfloat16\)",
    ):
        model(torch.ones(2, 4))
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("zpasses").addHandler(handler)
    try:
        with pytest.raises(Exception, match="dtype"):
            _compiled(model)(torch.ones(2, 4))
        assert "failed on an input of torch.float32. Its parameters are gathered in " in records[-1]
        records.clear()
        _compiled(model)(torch.ones(2, 4, dtype=torch.bfloat16))
        with pytest.raises(Exception, match=r"shape|size"):
            _compiled(model)(torch.ones(2, 3, dtype=torch.bfloat16))
        assert not records
    finally:
        logging.getLogger("zpasses").removeHandler(handler)
