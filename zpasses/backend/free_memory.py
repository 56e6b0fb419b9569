"""Memory that a training step may use: the option `memory_budget="auto"`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from zpasses.ranks.vote import exchange

__all__ = ["agreed_free_bytes"]

_USED_SHARE = 0.9
"""Part of the free memory that a step may use. The rest is for fragmentation and kernels' scratch.
"""
_CGROUP = Path("/sys/fs/cgroup")


def agreed_free_bytes(groups: Sequence[str], device: torch.device) -> int:
    """Return 90 % of the memory that is free on the rank of these groups with the least.

    The ranks vote once per group; later calls return the same answer.
    """
    free = int(_USED_SHARE * free_bytes(device))
    for group in groups:
        free = min(exchange(group, "free memory", free, remember="memory_budget=auto"))
    return free


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this rank can still allocate on a device.

    Memory that torch's allocator holds and does not use counts as free. On a CPU, the ranks of the
    host share its free memory equally.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device) - module.memory_allocated(device))
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or (
        dist.get_world_size() if dist.is_initialized() else 1
    )
    return _free_host_bytes() // max(1, int(ranks))


def _free_host_bytes() -> int:
    """Memory that new processes could use: that of the host, within the limit of the container."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free
