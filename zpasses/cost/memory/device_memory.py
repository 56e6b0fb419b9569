"""How much memory a device has free, or had in use. Functions of a module, so that tests can
replace them.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Returns the bytes that can still be allocated on a device, including what torch's allocator
    has cached.

    On "cpu" it returns the machine's available memory, which all ranks on the machine share.
    Returns None if torch cannot tell, as for "meta".
    """
    if device.type == "cpu":
        return _host_bytes()
    module = torch.get_device_module(device.type) if device.type != "meta" else None
    probe = getattr(module, "mem_get_info", None)
    if module is None or probe is None or not module.is_available():
        return None
    free, _ = probe(device)
    reserved, allocated = (
        getattr(module, "memory_reserved", None),
        getattr(module, "memory_allocated", None),
    )
    cached = (
        reserved(device) - allocated(device)
        if reserved is not None and allocated is not None
        else 0
    )
    return int(free) + int(cached)


def fallen_bytes(device: torch.device) -> int:
    """Returns by how much the allocated memory of this process is below its highest level; 0 if
    torch does not count it, as on "cpu".
    """
    module = torch.get_device_module(device.type) if device.type not in ("cpu", "meta") else None
    highest = getattr(module, "max_memory_allocated", None)
    now = getattr(module, "memory_allocated", None)
    return int(highest(device) - now(device)) if highest is not None and now is not None else 0


_CGROUP = Path("/sys/fs/cgroup")


def _droppable_bytes() -> int:
    """Files that were read count as used in a container, and are dropped when memory is needed."""
    stat = _CGROUP / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _host_bytes() -> int | None:
    """Memory that new processes could use: that of the host, within the limit of the container."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
        limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            free = min(free, max(0, int(text) - int(used.read_text()) + _droppable_bytes()))
        return free
    except (OSError, KeyError, ValueError):
        names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
        return (
            os.sysconf(names[0]) * os.sysconf(names[1])
            if all(name in os.sysconf_names for name in names)
            else None
        )
