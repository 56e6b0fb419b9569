"""Optimizers: the parts of torch's Muon, norms of many tensors, a hook for the end of
`load_state_dict`, and steps without hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that hold the hooks of its steps, each a dict."""


def step_without_hooks(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Call the `step` that the class of an optimizer defines, below the wrapper of torch that runs
    hooks, and what programs have put around it.
    """
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    return step(optimizer, *args, **kwargs)


def call_after_optimizer_load(check: Callable[[Optimizer], None]) -> None:
    """Call `check` after each `load_state_dict` of any optimizer.

    torch has such hooks per optimizer only, and for steps it has global ones, too. So this wraps
    the method of `torch.optim.Optimizer`.
    """
    original: Any = Optimizer.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        check(self)
        return result

    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def foreach_norm(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> Sequence[Tensor]:
    """Returns the norm of each tensor, computed in this dtype. The tensors are not empty."""
    return torch._foreach_norm(list(tensors), order, dtype) if tensors else ()


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Returns the orthogonalised matrix that `torch.optim.Muon` computes, in bfloat16."""
    from torch.optim import _muon

    module: Any = _muon
    result: Tensor = module._zeropower_via_newtonschulz(matrix, coefficients, steps, eps)
    return result


def adjusted_muon_lr(lr: float, how: str | None, shape: tuple[int, ...]) -> float:
    """Returns the learning rate that `torch.optim.Muon` uses for a matrix of this shape."""
    from torch.optim import _muon

    module: Any = _muon
    return float(module._adjust_lr(lr, how, shape))
