"""Optimizers: the parts of torch's Muon."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["adjusted_muon_lr", "newton_schulz"]


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
