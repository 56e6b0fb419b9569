"""How many ranks share a machine, and its memory."""

from __future__ import annotations

import os

import torch.distributed as dist


def local_ranks() -> int:
    """Returns the number of ranks on this machine. Where nothing says it, as torchrun does by
    LOCAL_WORLD_SIZE, all ranks count.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or (
        dist.get_world_size() if dist.is_initialized() else 1
    )
    return max(1, int(ranks))
