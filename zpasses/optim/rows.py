"""Parameters as optimizers see them on one rank: local rows, and sums over the ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.runtime.layout import layout_of
from zpasses.runtime.run_checks import limited_over


@dataclass(frozen=True)
class Rows:
    """A parameter with a gradient. Every tensor is local."""

    param: Tensor
    grad: Tensor
    shape: torch.Size
    """Shape of the full parameter."""
    mesh: DeviceMesh | None
    """The mesh over which its rows are sharded; None if this rank holds all of them."""
    source: Tensor
    """The parameter in the optimizer."""

    @classmethod
    def of(cls, param: Tensor) -> Rows:
        """Return what this rank holds of a parameter.

        Raises:
            ShardingError: if this rank does not hold whole rows.
        """
        grad = param.grad
        assert grad is not None
        if not isinstance(param, DTensor):
            return cls(param, grad, param.shape, None, param)
        layout = layout_of(param)
        if layout.dim or layout.inner_mesh is not None:
            raise ShardingError(
                f"a parameter of shape {tuple(param.shape)} has placements {param.placements} on "
                f"{param.device_mesh}: a rank does not hold whole rows of it, which this optimizer "
                "needs. Use an optimizer that treats elements one by one, such as AdamW, for "
                "parameters under tensor parallelism and for those that shard_placement_fn cuts "
                "along another dimension than 0."
            )
        mesh = layout.mesh if param.dim() else None
        return cls(compat.local_of(param), compat.local_part(grad), param.shape, mesh, param)

    def state(self, rows: Tensor, shape: Sequence[int], *, replicated: bool = False) -> Tensor:
        """Wrap local state as a DTensor if the parameter is one.

        Args:
            shape: shape of the full state.
            replicated: every rank holds it whole.
        """
        if not isinstance(self.source, DTensor):
            return rows
        mesh, placements = self.source.device_mesh, self.source.placements
        if replicated:
            placements = (Replicate(),) * mesh.ndim
        return compat.make_dtensor(rows, mesh, placements, torch.Size(shape))


class StepOnRows(Optimizer):
    """The step of an optimizer that computes with the rows of this rank."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step. Call it on every rank.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            found = [Rows.of(param) for param in group["params"] if param.grad is not None]
            self._step_group(found, group)
        return loss

    @abstractmethod
    def _step_group(self, found: Sequence[Rows], group: dict[str, Any]) -> None:
        """Perform the step of the parameters of a group that have gradients."""


SumOverRanks = Generator[Tensor, Tensor, None]
"""The update of one parameter. It yields a flat tensor and gets its sum over the ranks."""


def run_in_rounds(updates: Sequence[tuple[Rows, SumOverRanks]]) -> None:
    """Run the updates of parameters together: one all-reduce per round, mesh and dtype."""
    sent: dict[int, Tensor] = {}
    running = dict(enumerate(updates))
    for i, (_, update) in enumerate(updates):
        sent[i] = next(update)
    while running:
        batches: dict[tuple[Any, ...], list[int]] = {}
        for i, (rows, _) in running.items():
            if rows.mesh is not None:
                key = rows.mesh.get_group(), sent[i].dtype, sent[i].device
                batches.setdefault(key, []).append(i)
        for (group, *_), members in batches.items():
            flat = torch.cat([sent[i] for i in members])
            with limited_over(updates[members[0]][0].mesh, "optimizer.step()"):
                dist.all_reduce(flat, group=group)
            parts = flat.split([sent[i].numel() for i in members])
            sent.update(zip(members, parts, strict=True))
        for i, (_, update) in list(running.items()):
            try:
                sent[i] = update.send(sent[i])
            except StopIteration:
                del running[i]
