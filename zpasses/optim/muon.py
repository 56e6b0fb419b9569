"""Muon over shards: each matrix is orthogonalised as a whole, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zpasses import compat
from zpasses.graph.dialect import rows_per_rank
from zpasses.graph.padding import padded
from zpasses.optim.rows import Rows, StepOnRows
from zpasses.runtime.run_checks import limited_over


class Muon(StepOnRows, torch.optim.Muon):
    """`torch.optim.Muon` for sharded parameters, with the same arguments.

    Each matrix is gathered onto one rank, which orthogonalises it and scatters the rows. In each
    round, every rank has at most one matrix. The largest matrices come first. Matrices travel in
    bfloat16, in which Muon computes, so the result has the bits of the unsharded optimizer.
    """

    def _step_group(self, found: Sequence[Rows], group: dict[str, Any]) -> None:
        for batch in _rounds(found):
            self._step_round(batch, group)

    def _step_round(self, batch: Sequence[Rows], group: dict[str, Any]) -> None:
        lr, momentum = float(group["lr"]), group["momentum"]
        updates = []
        for rows in batch:
            state = self.state[rows.source]
            if "momentum_buffer" not in state:
                zeros = torch.zeros_like(rows.grad)
                state["momentum_buffer"] = rows.state(zeros, rows.shape)
            buffer = compat.local_part(state["momentum_buffer"])
            buffer.lerp_(rows.grad, 1 - momentum)
            update = rows.grad.lerp(buffer, momentum) if group["nesterov"] else buffer
            updates.append(update.bfloat16())

        def orthogonalise(full: Tensor) -> Tensor:
            how = group["ns_coefficients"], group["ns_steps"], group["eps"]
            return compat.newton_schulz(full, *how)

        with limited_over(batch[0].mesh, "Muon.step()"):
            found = _on_one_rank_each(batch, updates, orthogonalise)
        for rows, update in zip(batch, found, strict=True):
            rows.param.mul_(1 - lr * group["weight_decay"])
            adjusted = compat.adjusted_muon_lr(lr, group["adjust_lr_fn"], tuple(rows.shape))
            rows.param.add_(update, alpha=-adjusted)


def _rounds(found: Sequence[Rows]) -> Iterator[list[Rows]]:
    """Split matrices into rounds of at most one per rank of their mesh."""
    by_mesh: dict[Any, list[Rows]] = {}
    for rows in found:
        by_mesh.setdefault(rows.mesh, []).append(rows)
    for mesh, members in by_mesh.items():
        # Sorting is stable, and shapes are those of full matrices, so ranks agree.
        members.sort(key=lambda rows: -rows.shape.numel())
        size = 1 if mesh is None else mesh.size()
        for start in range(0, len(members), size):
            yield members[start : start + size]


def _on_one_rank_each(
    batch: Sequence[Rows], updates: Sequence[Tensor], compute: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Gather the i-th matrix onto the i-th rank, compute there, and return this rank's rows."""
    mesh = batch[0].mesh
    if mesh is None or mesh.size() == 1:
        return [compute(update) for update in updates]
    group, ranks, own = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    blocks = [rows_per_rank(rows.shape[0], ranks) for rows in batch]
    owners = [dist.get_global_rank(group, i) for i in range(len(batch))]
    parts: list[Tensor] | None = None
    works = []
    for i, (update, block) in enumerate(zip(updates, blocks, strict=True)):
        sent = _bytes(padded(update, block))
        received = [torch.empty_like(sent) for _ in range(ranks)] if i == own else None
        works.append(dist.gather(sent, received, dst=owners[i], group=group, async_op=True))
        parts = received or parts
    _wait(works)
    full = None
    if parts is not None:
        shape = batch[own].shape
        matrix = torch.cat([_floats(part, shape[1]) for part in parts])[: shape[0]]
        full = compute(matrix)
    works, results = [], []
    for i, block in enumerate(blocks):
        result = updates[i].new_empty((block, batch[i].shape[1]))
        pieces = None
        if i == own and full is not None:
            pieces = [_bytes(piece) for piece in padded(full, block * ranks).chunk(ranks)]
        target = _bytes(result)
        works.append(dist.scatter(target, pieces, src=owners[i], group=group, async_op=True))
        results.append(result)
    _wait(works)
    return [result[: update.shape[0]] for result, update in zip(results, updates, strict=True)]


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _bytes(rows: Tensor) -> Tensor:
    """A view as bytes, because not every backend knows bfloat16."""
    return rows.view(-1).view(torch.uint8)


def _floats(part: Tensor, columns: int) -> Tensor:
    return part.view(torch.bfloat16).view(-1, columns)
