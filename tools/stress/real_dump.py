"""Writes the dump of a real compile, by two ranks of a fake process group."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from zpasses.sharding.shard import shard
from zpasses.testing import fake_world

__all__ = ["write_dump"]

_PIPELINE = "merge-reads,gather-params,reduce-grads,reshard-after-forward,bucket,overlap"


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def write_dump(folder: str) -> None:
    """Write the dump into a new folder."""
    for rank in range(2):
        torch.compiler.reset()
        with fake_world(2, rank) as mesh:
            model = shard(_Layers(), mesh=mesh)
            options: dict[str, Any] = {
                "pipeline": _PIPELINE,
                "codegen": "eager",
                "agreement": False,
                "dump": folder,
                "dump_ranks": "all",
            }
            step = torch.compile(model, backend="zpasses", options=options)
            step(torch.ones(8, 16)).sum().backward()


if __name__ == "__main__":
    write_dump(sys.argv[1])
