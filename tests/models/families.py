"""Trains small models by Inductor's code, sharded and unsharded."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zpasses
from zpasses.testing import world_mesh

STEPS = 2


@dataclass(frozen=True)
class Family:
    """A model and its batches, both drawn from torch's seed."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    """Returns one argument, a tuple of them, or keywords."""
    loss: Callable[[Any], Tensor] = lambda output: output.square().mean()
    rounding: float = 0.0
    """Allowed error of a gradient, relative to the largest entry of all of them: some are 0, such
    as those of the biases of keys, and have only rounding errors."""


@dataclass(frozen=True)
class _Step:
    """What the unsharded model computes in a step."""

    losses: list[Tensor]
    """Per rank."""
    grads: dict[str, Tensor | None]
    """Averaged over the ranks."""
    buffers: list[list[Tensor]]
    """Per rank, after the step."""


def of_transformers(name: str, **config: Any) -> Any:
    """Build a model of transformers, given by its class and the values of its configuration."""
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))


def cases(families: Iterable[str], quick: Mapping[str, int]) -> list[Any]:
    """Returns the parameters `name` and `stages` of a test of all stages of all families.

    Args:
        families: names.
        quick: family -> the stage that is not slow.
    """
    marks = pytest.mark.slow(quick="other families and stages of the same test")
    params = []
    for name in families:
        slow = tuple(stage for stage in (1, 2, 3) if stage != quick.get(name))
        if name in quick:
            params.append(pytest.param(name, (quick[name],), id=f"{name}-{quick[name]}"))
        params.append(pytest.param(name, slow, marks=marks, id=f"{name}-{''.join(map(str, slow))}"))
    return params


def train(family: Family, *stages: int) -> None:
    """Train sharded models of some stages on this rank, and compare each step with the unsharded
    model: the loss, gradients and buffers. Both are compiled with default options.

    Every rank has batches of its own. As DDP does, the unsharded model averages the gradients of
    the ranks' batches. The sum of two numbers has one order, so two ranks compute equal bits,
    unless Inductor orders sums within a kernel differently for the two graphs. Rank 0 computes the
    steps of all ranks, which costs one compile instead of two.
    """
    expected: list[Any] = [_unsharded(family) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(expected)
    for stage in stages:
        torch.compiler.reset()  # what rank 0 has seen must not decide which sizes are dynamic
        model = zpasses.shard(_build(family), mesh=world_mesh())
        run = torch.compile(model, backend="zpasses", options={"zero_stage": stage})
        for number, step in enumerate(expected[0]):
            loss = _backward(family, run, number, dist.get_rank())
            _compare(f"stage {stage}, step {number}", family.rounding, loss, model, step)
            _update(model)


def _build(family: Family) -> nn.Module:
    torch.manual_seed(0)
    return family.model().train()


def _unsharded(family: Family) -> list[_Step]:
    model, world = _build(family), dist.get_world_size()
    run = torch.compile(model)
    buffers = [[each.clone() for each in model.buffers()] for _ in range(world)]
    steps = []
    for number in range(STEPS):
        losses = []
        for rank in range(world):
            for buffer, value in zip(model.buffers(), buffers[rank], strict=True):
                buffer.copy_(value)
            losses.append(_backward(family, run, number, rank))
            buffers[rank] = [each.clone() for each in model.buffers()]
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= world
        grads = {name: param.grad for name, param in model.named_parameters()}
        steps.append(_Step(losses, grads, list(buffers)))
        _update(model)
    return steps


def _backward(family: Family, run: Any, number: int, rank: int) -> Tensor:
    seed = 1 + STEPS * rank + number
    torch.manual_seed(seed)
    batch = family.batch()
    torch.manual_seed(seed)  # of dropout
    if isinstance(batch, dict):
        output = run(**batch)
    else:
        output = run(*batch) if isinstance(batch, tuple) else run(batch)
    loss = family.loss(output)
    loss.backward()
    return loss.detach()


def _update(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()  # the gradients of a step are not those of the next


def _compare(when: str, rounding: float, loss: Tensor, model: nn.Module, step: _Step) -> None:
    rank = dist.get_rank()
    grads = [grad for grad in step.grads.values() if grad is not None]
    bound = rounding and rounding * max(grad.abs().max().item() for grad in grads if grad.numel())
    loss_bound = rounding * step.losses[rank].abs().item()
    _check_equal(f"loss, {when}", loss, step.losses[rank], loss_bound)
    for name, param in model.named_parameters():
        grad = None if param.grad is None else param.grad.full_tensor()
        _check_equal(f"gradient of {name}, {when}", grad, step.grads[name], bound)
    for (name, buffer), value in zip(model.named_buffers(), step.buffers[rank], strict=True):
        _check_equal(f"buffer {name}, {when}", buffer, value, bound)


def _check_equal(what: str, got: Tensor | None, wanted: Tensor | None, bound: float) -> None:
    if got is None or wanted is None:
        assert got is wanted, f"{what}: got {got}, expected {wanted}"
        return
    if not wanted.is_floating_point():
        bound = 0.0
    torch.testing.assert_close(got, wanted, rtol=0, atol=bound, msg=lambda text: f"{what}: {text}")
