"""Rprop over shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zpasses.optim.rows import Rows, local


class Rprop(torch.optim.Rprop):
    """`torch.optim.Rprop` for sharded parameters, with the same arguments.

    It computes element by element, so each rank updates its rows and nothing is communicated.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _local_rows(self):
            # torch's wrapper would run the hooks of the optimizer a second time.
            torch.optim.Rprop.step.__wrapped__(self)  # type: ignore[attr-defined]
        return loss


@contextmanager
def _local_rows(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, an optimizer holds the local rows of its parameters, gradients and state."""
    before = [group["params"] for group in optimizer.param_groups]
    state = optimizer.state
    rows: dict[Tensor, Rows] = {}
    optimizer.state = type(state)(dict)
    for group in optimizer.param_groups:
        own = []
        for param in group["params"]:
            if param.grad is None:
                continue
            found = Rows.of(param, elementwise=True)
            own.append(nn.Parameter(found.param, requires_grad=False))
            own[-1].grad = found.grad
            rows[own[-1]] = found
            optimizer.state[own[-1]] = {
                name: local(value) if isinstance(value, Tensor) else value
                for name, value in state.get(param, {}).items()
            }
        group["params"] = own
    try:
        yield
    finally:
        for param, found in rows.items():
            for name, value in optimizer.state[param].items():
                wraps = isinstance(value, Tensor) and value.dim() and value.shape == param.shape
                state[found.source][name] = found.state(value, found.shape) if wraps else value
        optimizer.state = state
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
