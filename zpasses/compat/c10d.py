"""Process groups, their stores, and the collectives: torch.distributed."""

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
    "default_store",
    "fake_store",
    "flight_record",
    "functional",
    "group_backend",
    "group_backends",
    "group_name",
    "group_names",
    "group_ranks",
    "is_gloo",
    "limited_timeouts",
    "low_contention_all_gather",
    "low_contention_reduce_scatter",
    "process_group",
    "process_groups",
    "register_work",
    "storage_reference",
    "symmetric_memory",
    "symmetric_stream",
]


functional = torch.ops._c10d_functional
"""The functional collectives."""

Work: Any = torch._C._distributed_c10d.Work if dist.is_available() else object
"""What a collective that was started is awaited by; derive from it and override `wait`."""


def process_group(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives call `name`; raises RuntimeError if there is
    none."""
    return cast(dist.ProcessGroup, cast(Any, c10d)._resolve_process_group(name))


def group_name(group: object) -> str:
    """The name of a group; graphs of torch >= 2.13 may hold the process group itself."""
    return str(group if isinstance(group, str) else cast(Any, group).group_name)


def group_ranks(name: str) -> list[int]:
    """Global ranks of the group, in group order."""
    return dist.get_process_group_ranks(process_group(name))


def group_backends() -> dict[str, str]:
    """Group name -> backend ("gloo", "nccl", "fake", ...) of every process group of this
    process."""
    return {
        c10d._world.pg_names[group]: backend for group, (backend, _) in c10d._world.pg_map.items()
    }


def group_names() -> list[str]:
    """Names of every process group that this process is in."""
    return [group_name(group) for group in process_groups()]


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group that this process is in."""
    return list(c10d._world.pg_map)


def group_backend(name: str) -> str:
    """Backend of one group, in lower case; "cpu:gloo,cuda:nccl" style names are kept whole."""
    return str(dist.get_backend(process_group(name))).lower()


def is_gloo(name: str, device: torch.device | None = None) -> bool:
    """Whether tensors on `device` communicate through gloo in this group; without a device, whether
    all that it can communicate do.

    A group of simulated ranks counts as what it says it is.
    """
    backend = group_backend(name)
    if (
        backend == "undefined"
    ):  # init_process_group() without a name takes what there is for each device
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
    """Collectives of these groups that start inside give up after `seconds`, if they would wait
    longer."""
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


def default_store() -> Any:
    """The store through which the ranks of this job met."""
    return c10d._get_default_store()


def fake_store() -> Any:
    """A store for a process group of ranks that do not exist; registers the backend "fake"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def flight_record() -> list[dict[str, Any]]:
    """Every collective that this process's groups ran, oldest first, as they recorded it
    themselves.

    Nothing is recorded unless TORCH_FR_BUFFER_SIZE, the number of entries to keep, is set before
    the first group is made."""
    dump = cast(Any, torch._C._distributed_c10d)._dump_fr_trace_json
    return cast(list[dict[str, Any]], json.loads(dump(True, False)).get("entries", []))


def register_work(tensor: Tensor, work: Any) -> None:
    """Let `wait_tensor` of this tensor, or of a view of it, call `work.wait()`."""
    cast(Any, torch._C._distributed_c10d)._register_work(tensor, work)


def symmetric_memory() -> Any:
    """The module that defines the operators `torch.ops.symm_mem`; raises ImportError where torch
    was built without it."""
    import torch.distributed._symmetric_memory as module

    return module


def low_contention_all_gather(source: Tensor, group: str) -> Tensor:
    """Gather by copy engines through symmetric memory; under way, as the functional collectives
    are."""
    symmetric_memory()
    result: Tensor = torch.ops.symm_mem._low_contention_all_gather(source, group)
    return result


def low_contention_reduce_scatter(source: Tensor, reduce_op: str, group: str) -> Tensor:
    """Exchange by copy engines and reduce ("sum", "avg"); under way, as the functional collectives
    are."""
    symmetric_memory()
    result: Tensor = torch.ops.symm_mem._low_contention_reduce_scatter(source, reduce_op, group)
    return result


def symmetric_stream() -> torch.cuda.Stream:
    """The stream on which low-contention collectives run."""
    return cast(torch.cuda.Stream, symmetric_memory()._get_backend_stream())


def storage_reference(tensor: Tensor) -> Callable[[], bool]:
    """Asks whether a tensor's memory has been freed, without keeping it."""
    from torch.multiprocessing.reductions import StorageWeakRef

    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: bool(reference.expired())
