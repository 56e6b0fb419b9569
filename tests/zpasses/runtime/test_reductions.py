"""Reductions of tensors of which a rank has no element."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zpasses
from zpasses.testing.ranks import run_on_ranks

RANKS = 2


def _full(value: Tensor | DTensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _models() -> tuple[nn.Module, nn.Module]:
    """A sharded model and its reference, of whose first layer the second rank has nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 5))
    reference = copy.deepcopy(model)
    zpasses.shard(model, mesh=dist.init_device_mesh("cpu", (RANKS,)))
    return model, reference


def _clip_rank(order: float, foreach: bool, times: float) -> None:
    model, reference = _models()
    x, norms = torch.randn(4, 6), []
    for each, call in ((model, torch.compile(model, backend="zpasses")), (reference, reference)):
        for _ in range(2):  # the second gradient is added to the first
            call(x).square().mean().backward()
        for param in each.parameters():
            param.grad = param.grad * times if times != 1.0 else param.grad
        clip = nn.utils.clip_grad_norm_
        norms.append(_full(clip(each.parameters(), 0.01, order, foreach=foreach)))
    torch.testing.assert_close(*norms)
    for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(_full(param.grad), wanted.grad)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("times", [1.0, 2.0])
@pytest.mark.slow(quick="the other tests of test_reductions.py")
def test_clipping_by_an_infinite_norm(foreach: bool, times: float) -> None:
    run_on_ranks(_clip_rank, math.inf, foreach, times, ranks=RANKS, timeout_s=60)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": torch.max,
    "amin": torch.amin,
    "argmax": torch.argmax,
    "largest": lambda x: x.abs().max(),
    "norm": lambda x: torch.linalg.vector_norm(x, math.inf),
    "of a list": lambda x: torch._foreach_abs([x])[0].amax(),
    "two norms": lambda x: torch.stack(torch._foreach_norm([x, x * 2], math.inf)),
}


def _reduce_rank() -> None:
    model, reference = _models()
    for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        for name, reduce in REDUCTIONS.items():
            for value, expected in ((param, wanted), (param.detach() * 2, wanted.detach() * 2)):
                assert torch.equal(_full(reduce(value)), reduce(expected)), name


def test_reductions_of_parameters() -> None:
    run_on_ranks(_reduce_rank, ranks=RANKS, timeout_s=60)
