"""Numbers that would be those of one rank are refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

import zpasses
from tests.on_ranks import on_ranks
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes


@on_ranks(2)
def test_item_of_a_part_is_refused_and_full_tensor_is_right():
    torch.manual_seed(0)
    model, reference = (nn.Linear(4, 5) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    zpasses.shard(model, mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
    x = torch.ones(2, 4)
    for each in (step, reference):
        each(x).square().sum().backward()
    for name, param in model.named_parameters():
        plain = dict(reference.named_parameters())[name]
        for ours, expected in ((param, plain), (param.grad, plain.grad)):
            norm = ours.detach().norm()
            for number in (torch.Tensor.item, float, bool):
                with pytest.raises(zpasses.ShardingError, match=r"full_tensor\(\) first"):
                    number(norm)
            assert norm.full_tensor().item() == pytest.approx(expected.norm().item())
    total = zpasses.clip_grad_norm_(model.parameters(), 1.0)
    assert f"{total:.3f}" == f"{nn.utils.clip_grad_norm_(reference.parameters(), 1.0):.3f}"
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert f"{norm.full_tensor():.3f}" == "1.000"


@on_ranks(2)
def test_item_over_other_meshes_is_that_of_torch():
    zpasses.shard(nn.Linear(4, 5), mesh=world_mesh())
    other = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("mine",))
    part = DTensor.from_local(torch.tensor(1.0 + dist.get_rank()), other, [Partial()])
    assert part.item() == 1.0 + dist.get_rank()
    assert part.full_tensor().item() == 3.0


@on_ranks(2)
def test_anomaly_mode_finds_nan_in_the_rows_of_a_rank():
    model = zpasses.shard(nn.Linear(2, 2, bias=False), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
    with torch.autograd.set_detect_anomaly(True):
        step(torch.ones(1, 2)).sum().backward()
        assert model.get_parameter("weight").grad.full_tensor().eq(1).all()
        loss = (step(torch.ones(1, 2)) * torch.tensor([1.0, torch.nan])).sum()
        with pytest.raises(RuntimeError, match="returned nan values"):
            loss.backward()
