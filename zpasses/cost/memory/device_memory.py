"""How much memory a device has free. One function, so that tests can replace it."""

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


_CGROUP = Path("/sys/fs/cgroup")


def _host_bytes() -> int | None:
    """Memory that new processes could use: that of the host, within the limit of the container."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
        limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            free = min(free, max(0, int(text) - int(used.read_text())))
        return free
    except (OSError, KeyError, ValueError):
        names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
        return (
            os.sysconf(names[0]) * os.sysconf(names[1])
            if all(name in os.sysconf_names for name in names)
            else None
        )
