"""Adafactor over shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zpasses import compat
from zpasses.optim.rows import Rows, StepOnRows, SumOverRanks, run_in_rounds


class Adafactor(StepOnRows, torch.optim.Adafactor):
    """`torch.optim.Adafactor` for sharded parameters, with the same arguments.

    Ranks exchange two small all-reduces per step and group: the column sums of squared gradients
    and the norms of parameters, then the norms of updates. The result equals that of the unsharded
    parameters, but for the order of summation. `foreach` has no effect.
    """

    def _step_group(self, found: Sequence[Rows], group: dict[str, Any]) -> None:
        run_in_rounds([(rows, self._update(rows, group)) for rows in found])

    def _update(self, rows: Rows, group: dict[str, Any]) -> SumOverRanks:
        state = self._state_of(rows)
        state["step"] += 1
        step, numel = state["step"].item(), max(rows.shape.numel(), 1)
        lr = float(group["lr"])
        one_minus_beta2 = step ** group["beta2_decay"]
        eps1, eps2 = group["eps"]
        eps1 = torch.finfo(rows.param.dtype).eps if eps1 is None else eps1
        grad = -rows.grad if group["maximize"] else rows.grad

        by_rows = len(rows.shape) == 2 and rows.mesh is not None  # columns lie on all ranks
        sums = [rows.param.square().sum().view(1)]
        if grad.dim() > 1:
            row_var = compat.local_part(state["row_var"])
            row_mean = torch.norm(grad, dim=-1, keepdim=True).square_().div_(grad.size(-1))
            row_var.lerp_(row_mean, one_minus_beta2)
            squares = grad.square().sum(dim=-2, keepdim=True)
            if by_rows:
                sums += [row_var.sum().view(1), squares.view(-1)]
        total = yield torch.cat(sums)
        alpha = max(eps2, total[0].item() ** 0.5 / numel**0.5) * min(lr, 1 / step**0.5)
        if group["weight_decay"] != 0:
            rows.param.mul_(1 - lr * group["weight_decay"])
        if grad.dim() > 1:
            mean = row_var.mean(dim=-2, keepdim=True)
            if by_rows:
                mean, squares = total[1].view(1, 1) / rows.shape[0], total[2:].view_as(squares)
            col_var = compat.local_part(state["col_var"])
            col_var.lerp_(squares / rows.shape[-2], one_minus_beta2)
            estimate = (row_var @ col_var).div_(mean.clamp_(min=eps1))
        else:
            variance = compat.local_part(state["variance"])
            variance.lerp_(grad * grad, one_minus_beta2)
            estimate = variance.clone()
        update = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)
        square = yield update.square().sum().view(1)
        clip = max(1.0, square.item() ** 0.5 / (numel**0.5 * group["d"]))
        rows.param.add_(update, alpha=-alpha / clip)

    def _state_of(self, rows: Rows) -> dict[str, Any]:
        state: dict[str, Any] = self.state[rows.source]
        if state:
            return state
        state["step"] = torch.tensor(0.0)
        grad, shape = rows.grad, list(rows.shape)
        if grad.dim() <= 1:
            state["variance"] = rows.state(torch.zeros_like(grad), shape)
            return state
        state["row_var"] = rows.state(grad.new_zeros([*grad.shape[:-1], 1]), [*shape[:-1], 1])
        columns: Tensor = grad.new_zeros([*grad.shape[:-2], 1, grad.shape[-1]])
        state["col_var"] = rows.state(
            columns, [*shape[:-2], 1, shape[-1]], replicated=len(shape) == 2
        )
        return state
