"""The training program of the suite `caches`, which every rank runs through Inductor."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import zpasses

__all__ = ["CacheResult", "train"]

_STEPS = 3


@dataclass(frozen=True)
class CacheResult:
    """What one rank saw."""

    losses: tuple[float, ...]
    unsharded: tuple[float, ...]
    """Losses of an unsharded run."""
    ran: Mapping[str, int]
    """Collectives that ran in the last step, by operator."""


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x))) * self.scale
        return F.mse_loss(y, x)


def train(options: Mapping[str, Any], caches: str) -> CacheResult:
    """Train for three steps through Inductor, and count what communicates.

    Args:
        options: of the compile.
        caches: folder with a compile cache per rank.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches, str(dist.get_rank())))
    torch.manual_seed(0)
    model, reference = _Model(), _Model()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    unsharded = tuple(_step(reference, optimizer, number) for number in range(_STEPS))
    zpasses.shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    compiled = torch.compile(model, backend="zpasses", options=dict(options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = [_step(compiled, optimizer, number) for number in range(_STEPS - 1)]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:  # nothing is compiled any more
        losses.append(_step(compiled, optimizer, _STEPS - 1))
    names = [event.name.partition("::") for event in profiled.events()]
    ran = Counter(name for space, _, name in names if space in ("_c10d_functional", "zpasses"))
    return CacheResult(tuple(losses), unsharded, dict(ran))


def _step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = model(torch.linspace(-1, 1, 24).reshape(4, 6) * (number + 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)
