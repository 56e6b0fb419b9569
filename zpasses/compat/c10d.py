"""torch.distributed: process groups, their stores, and collectives."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

__all__ = [
    "Work",
    "collective_timeout",
    "default_store",
    "fake_store",
    "flight_recorder_entries",
    "functional",
    "global_rank",
    "group_backend",
    "group_backends",
    "group_name",
    "group_names",
    "group_ranks",
    "is_collective_timeout",
    "is_gloo",
    "limited_timeouts",
    "low_contention_all_gather",
    "low_contention_reduce_scatter",
    "process_group",
    "process_groups",
    "register_work",
    "storage_freed_check",
    "symm_mem_module",
    "symm_mem_stream",
]


functional = torch.ops._c10d_functional
"""The functional collectives."""

Work: Any = torch._C._distributed_c10d.Work if dist.is_available() else object
"""Handle of a started collective. Subclass it and override `wait` to make one."""


def process_group(name: str) -> dist.ProcessGroup:
    """Returns the process group that functional collectives know by `name`.

    Raises:
        RuntimeError: if no such group exists.
    """
    return cast(dist.ProcessGroup, cast(Any, c10d)._resolve_process_group(name))


def group_name(group: object) -> str:
    """Returns the name of a group, which may be given by name.

    Graphs of torch >= 2.13 may hold the process group itself.
    """
    return str(group if isinstance(group, str) else cast(Any, group).group_name)


def group_ranks(name: str) -> list[int]:
    """Returns the global ranks of a group, in group order."""
    return dist.get_process_group_ranks(process_group(name))


def group_backends() -> dict[str, str]:
    """Returns the backend ("gloo", "nccl", "fake", ...) of every process group, by group name."""
    return {
        c10d._world.pg_names[group]: backend for group, (backend, _) in c10d._world.pg_map.items()
    }


def group_names() -> list[str]:
    """Returns the names of all process groups that this process is in."""
    return [group_name(group) for group in process_groups()]


def process_groups() -> list[dist.ProcessGroup]:
    """Returns all process groups that this process is in."""
    return list(c10d._world.pg_map)


def group_backend(name: str) -> str:
    """Returns the backend of one group in lower case, such as "nccl" or "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend(process_group(name))).lower()


def is_gloo(name: str, device: torch.device | None = None) -> bool:
    """Whether tensors on `device` communicate through gloo in this group.

    Without a device, whether all devices of the group communicate through gloo. A group of
    simulated ranks counts as the backend that it simulates.
    """
    backend = group_backend(name)
    if backend == "undefined":
        # init_process_group() without a backend picks one for each device.
        group = process_group(name)
        backend = ",".join(
            f"{each.type}:{cast(Any, group._get_backend(each)).name()}"
            for each in group._device_types
        ).lower()
    return "gloo" in backend and (
        "cuda" not in backend or (device is not None and device.type == "cpu")
    )


@contextlib.contextmanager
def limited_timeouts(names: Sequence[str], seconds: float) -> Iterator[None]:
    """Context manager that limits the timeout of collectives of these groups that start inside it.

    Timeouts longer than `seconds` become `seconds`. Shorter ones stay as they are.
    """
    limit, before = timedelta(seconds=seconds), []
    for name in names:
        group = process_group(name)
        for device in group._device_types:
            backend: Any = group._get_backend(device)
            usual = getattr(getattr(backend, "options", None), "_timeout", None)
            if usual is not None and usual > limit:
                backend._set_default_timeout(limit)
                before.append((backend, usual))
    try:
        yield
    finally:
        for backend, usual in before:
            backend._set_default_timeout(usual)


def collective_timeout(group: dist.ProcessGroup) -> timedelta:
    """Returns the time limit of collectives of CPU tensors that start now in this group."""
    backend: Any = group._get_backend(torch.device("cpu"))
    usual = getattr(getattr(backend, "options", None), "_timeout", None)
    return usual if usual is not None else dist.default_pg_timeout


def is_collective_timeout(error: BaseException) -> bool:
    """Whether a collective gave up waiting for another rank, or found its connection closed.

    Backends raise plain RuntimeErrors, which only their text distinguishes.
    """
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error).lower()
    signs = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe")
    return any(sign in text for sign in signs)


def global_rank() -> int:
    """Returns this process's rank in the default group."""
    return dist.get_rank()


def default_store() -> Any:
    """Returns the store of the default process group."""
    return c10d._get_default_store()


def fake_store() -> Any:
    """Returns a store for a process group of simulated ranks, and registers the backend "fake"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def flight_recorder_entries() -> list[dict[str, Any]]:
    """Returns the flight recorder's entries: every collective of this process's groups, oldest
    first.

    The recorder is empty unless TORCH_FR_BUFFER_SIZE, its number of entries, is set before the
    first group is created.
    """
    dump = cast(Any, torch._C._distributed_c10d)._dump_fr_trace_json
    return cast(list[dict[str, Any]], json.loads(dump(True, False)).get("entries", []))


def register_work(tensor: Tensor, work: Any) -> None:
    """Makes `wait_tensor` of this tensor, or of a view of it, call `work.wait()`."""
    cast(Any, torch._C._distributed_c10d)._register_work(tensor, work)


def symm_mem_module() -> Any:
    """Returns the module that defines the operators `torch.ops.symm_mem`.

    Raises:
        ImportError: if torch was built without symmetric memory.
    """
    import torch.distributed._symmetric_memory as module

    return module


def low_contention_all_gather(source: Tensor, group: str) -> Tensor:
    """Starts an all-gather by copy engines through symmetric memory.

    Like a functional collective, it returns at once, and `wait_tensor` completes it.
    """
    symm_mem_module()
    result: Tensor = torch.ops.symm_mem._low_contention_all_gather(source, group)
    return result


def low_contention_reduce_scatter(source: Tensor, reduce_op: str, group: str) -> Tensor:
    """Starts a reduce-scatter ("sum" or "avg") that exchanges data by copy engines through
    symmetric memory.

    Like a functional collective, it returns at once, and `wait_tensor` completes it.
    """
    symm_mem_module()
    result: Tensor = torch.ops.symm_mem._low_contention_reduce_scatter(source, reduce_op, group)
    return result


def symm_mem_stream() -> torch.cuda.Stream:
    """Returns the stream on which low-contention collectives run."""
    return cast(torch.cuda.Stream, symm_mem_module()._get_backend_stream())


def storage_freed_check(tensor: Tensor) -> Callable[[], bool]:
    """Returns a function that tells whether a tensor's memory has been freed.

    The function does not keep the memory alive.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: bool(reference.expired())
