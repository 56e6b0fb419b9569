"""Numbers that would be those of one rank are refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

import zpasses
from tests.on_ranks import on_ranks
from zpasses.errors import AgreementError
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes

INDUCTOR = [pytest.mark.inductor, pytest.mark.slow(quick="eager")]


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


class _NanGradient(torch.autograd.Function):
    """A NaN in the second row of the gradient of a weight, which autograd finds nowhere else."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.tensor([[1.0], [torch.nan]])


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return x @ _NanGradient.apply(self.weight)


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=INDUCTOR)])
@on_ranks(2)
def test_ranks_raise_together_for_a_nan_in_the_rows_of_one(codegen):
    model = zpasses.shard(_Model(), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"codegen": codegen})
    for _ in range(20):  # until all ranks predict the backward
        step(torch.ones(1, 2)).sum().backward()
    found = r"detect_anomaly: NaN in gradients that graph \d+/0 backward returns: 1 of . on rank 1"
    for _ in range(2):
        with torch.autograd.set_detect_anomaly(True), pytest.raises(AgreementError, match=found):
            step(torch.ones(1, 2)).sum().backward()
    step(torch.ones(1, 2)).sum().backward()


@on_ranks(2)
def test_a_rank_that_goes_on_after_a_nan_of_its_loss_is_an_error_on_all():
    """The others would wait for it in the backward, which they predict."""
    model = zpasses.shard(nn.Linear(2, 2), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
    for _ in range(20):
        step(torch.ones(1, 2)).sum().backward()
    with torch.autograd.set_detect_anomaly(True):
        loss = step(torch.ones(1, 2)).sum() * 0.0
        if dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match="returned nan values"):
                loss.sqrt().backward()
        with pytest.raises(
            AgreementError, match=r"rank 0 comes to .* backward .* rank 1 to .* forw"
        ):
            loss.backward() if dist.get_rank() == 0 else step(torch.ones(1, 2))
