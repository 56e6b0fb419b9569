"""torch.distributed: process groups, their stores, and collectives."""

from __future__ import annotations

import contextlib
import json
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as _c10d

functional = torch.ops._c10d_functional
"""The functional collectives."""

Work: Any = torch._C._distributed_c10d.Work if dist.is_available() else object
"""Handle of a started collective. Subclass it and override `wait` to make one."""


def process_group(name: str) -> dist.ProcessGroup:
    """Returns the process group that functional collectives know by `name`.

    Raises:
        RuntimeError: if no such group exists.
    """
    return cast(dist.ProcessGroup, cast(Any, _c10d)._resolve_process_group(name))


def group_name(group: object) -> str:
    """Returns the name of a group, which may be given by name.

    Graphs of torch >= 2.13 may hold the process group itself.
    """
    return str(group if isinstance(group, str) else cast(Any, group).group_name)


def group_ranks(name: str) -> list[int]:
    """Returns the global ranks of a group, in group order."""
    return dist.get_process_group_ranks(process_group(name))


def mesh_dimension(name: str) -> str:
    """Returns the name of the mesh dimension that a group was made for, "" if there is none.

    Dimensions of meshes without names are "dim_0", "dim_1", ... torch takes the default group for a
    dimension of all ranks, and does not note the dimension there.
    """
    text = str(getattr(process_group(name), "group_desc", ""))
    return text.removeprefix("mesh_") if text.startswith("mesh_") and text != _WHOLE else ""


_WHOLE = "mesh_default"
"""Description of a group that torch makes of all ranks, for a dimension of any name."""


def group_backends() -> dict[str, str]:
    """Returns the backend ("gloo", "nccl", "fake", ...) of every process group, by group name."""
    return {
        _c10d._world.pg_names[group]: backend for group, (backend, _) in _c10d._world.pg_map.items()
    }


def group_names() -> list[str]:
    """Returns the names of all process groups that this process is in."""
    return [group_name(group) for group in process_groups()]


def process_groups() -> list[dist.ProcessGroup]:
    """Returns all process groups that this process is in."""
    return list(_c10d._world.pg_map)


def group_backend(name: str) -> str:
    """Returns the backend of one group in lower case, such as "nccl" or "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend(process_group(name))).lower()


def is_fake_world() -> bool:
    """Whether the ranks of the default group are not processes of their own."""
    return "fake" in str(dist.get_backend()).lower()


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

    Timeouts longer than `seconds` become `seconds`. Shorter ones stay as they are. The groups that
    `make_group` made like each get the same timeouts, also if they are made inside.
    """
    limit, before = timedelta(seconds=seconds), []
    for name in names:
        group = process_group(name)
        for device in group._device_types:
            usual = _timeout_on(group, device)
            if usual is not None and usual > limit:
                _set_timeout(group, device, limit)
                before.append((group, device, usual))
    try:
        yield
    finally:
        for group, device, usual in before:
            _set_timeout(group, device, usual)


def collective_timeout(group: dist.ProcessGroup) -> timedelta:
    """Returns the time limit of collectives of CPU tensors that start now in this group."""
    return _timeout_on(group, torch.device("cpu")) or dist.default_pg_timeout


def _timeout_on(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Returns the time limit of collectives on a device; None if the backend has none."""
    options = getattr(group._get_backend(device), "options", None)
    return cast("timedelta | None", getattr(options, "_timeout", None))


def _set_timeout(group: dist.ProcessGroup, device: torch.device, limit: timedelta) -> None:
    """Sets the time limit of a group's collectives on a device, and those of the groups that were
    made of it.
    """
    for each in (group, *map(process_group, _made_of(group))):
        if device in each._device_types:
            cast(Any, each._get_backend(device))._set_default_timeout(limit)


# --- groups that are made of others ---------------------------------------------------------------
_DERIVED = re.compile(r"(.+)(\.(?:reductions|in_node|across_nodes))(?:_\d+_\d+)?(-\d+)?")

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, None]] = weakref.WeakKeyDictionary()
"""A group -> the names of the groups that were made of it, also of those that were destroyed."""


def second_group_name(name: str, number: int) -> str:
    """Returns the name of the second group of group `name` that is made after `number` others."""
    return f"{name}.reductions" + (f"-{number}" if number else "")


def node_group_name(name: str, kind: str, ranks: Sequence[int], number: int) -> str:
    """Returns the name of the group of some ranks of group `name` that is made after `number`
    others.

    Args:
        kind: "in_node" or "across_nodes".
    """
    return f"{name}.{kind}_{ranks[0]}_{ranks[-1]}" + (f"-{number}" if number else "")


def parent_group(name: str) -> str:
    """Returns the name of the group of which this one is the second group or a group of nodes, or
    `name` if it is neither.

    All ranks of the parent run the same collectives on the groups that are made of it. So they vote
    on the parent about these collectives, too.
    """
    found = _DERIVED.fullmatch(name)
    return found.group(1) if found else name


def group_suffix(name: str) -> str:
    """Returns what the name of a group adds to that of its parent, equally on all ranks of the
    parent; "" for a group that is made of no other.
    """
    found = _DERIVED.fullmatch(name)
    return found.group(2) + (found.group(3) or "") if found else ""


def second_group(name: str) -> str | None:
    """Returns the name of the second group that was made of a group.

    Returns None if there is none, or if it was destroyed.
    """
    found = _made_of(process_group(name))
    return next((each for each in found if each.startswith(second_group_name(name, 0))), None)


def _made_of(group: dist.ProcessGroup) -> list[str]:
    """The names of the groups that were made of a group and were not destroyed."""
    made = _made.get(group, ())
    existing = set(group_names()) if made else ()
    return [name for name in made if name in existing]


def make_group(
    like: str,
    name: str,
    ranks: Sequence[int],
    description: str,
    limit: timedelta,
    *,
    limited_alike: bool = True,
    zero_sm: bool = False,
) -> None:
    """Makes a process group of some ranks, with the backends and timeouts of another group.

    NCCL connects it in its first collective. All of its ranks must call this at the same time;
    others take no part.

    Args:
        like: the other group.
        name: of the new group. It must be equal on all of its ranks and was never used before.
        ranks: of the default group, in the order of the new one.
        description: for logs. `mesh_dimension` returns LABEL of "mesh_LABEL".
        limit: how long to wait for the other ranks.
        limited_alike: whether `limited_timeouts` of the other group limits this one, too.
        zero_sm: make a group of NCCL whose gathers take no compute units (`zero_sm_obstacle`).

    Raises:
        RuntimeError: if the other ranks do not come in time.
    """
    parent, default = process_group(like), _c10d._get_default_group()
    backend, options = _c10d._world.pg_map[parent][0], None
    if zero_sm:
        nccl = cast(Any, dist).ProcessGroupNCCL
        backend, options = "nccl", nccl.Options()
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
        options._timeout = limit
    with _without_bound_device(default):
        # torch's new_group() would name the group by how many groups this process is in, which
        # may differ between ranks.
        made, _ = _c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(default.rank()),
            list(ranks),
            _c10d.Backend(backend),
            _c10d._get_default_store(),
            cast(Any, name),
            options,
            timeout=limit,
            group_desc=description,
        )
    _c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    for device in made._device_types:
        usual = _timeout_on(parent, device)
        if usual is not None:
            cast(Any, made._get_backend(device))._set_default_timeout(usual)
    if limited_alike:
        _made.setdefault(parent, {})[name] = None


@contextlib.contextmanager
def _without_bound_device(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, torch does not split the communicator of the default group for new groups.

    All ranks of the default group would have to take part in that.
    """
    bound = group.bound_device_id
    if bound is None:
        yield
        return
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = bound


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
    """Returns this process's rank in the default group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def default_store() -> Any:
    """Returns the store of the default process group."""
    return _c10d._get_default_store()


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


def zero_sm_obstacle() -> str | None:
    """Returns why NCCL of this torch runs no gathers by copy engines; None if it does."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if not hasattr(nccl, "NCCL_CTA_POLICY_ZERO") or not hasattr(nccl, "register_mem_pool"):
        return f"torch {torch.__version__} cannot make process groups with NCCL's zero-CTA policy"
    version = torch.cuda.nccl.version()
    if version < _ZERO_SM_NCCL:
        given, needed = (".".join(map(str, each)) for each in (version, _ZERO_SM_NCCL))
        return f"NCCL {given} gathers by engines only from registered memory; {needed} from any"
    hip = torch.version.hip
    if hip is not None and tuple(map(int, hip.split(".")[:2])) < _ZERO_SM_ROCM:
        return f"RCCL of ROCm {hip} does not gather by engines; that of 7.12 does"
    return None


_ZERO_SM_NCCL = (2, 29)
"""NCCL 2.28 takes engines only if input and output are registered (its src/enqueue.cc)."""
_ZERO_SM_ROCM = (7, 12)
"""ROCm/rocm-systems#6771."""


def registered_memory(name: str, device: torch.device) -> Any:
    """Returns the NCCL backend of a group, which allocates and registers memory."""
    return cast(Any, process_group(name)._get_backend(device))


def start_all_gather(source: Tensor, out: Tensor, name: str) -> Any:
    """Starts an all-gather into `out`, and returns its handle. Both are contiguous."""
    return cast(Any, process_group(name))._allgather_base(out, source)


def storage_freed_check(tensor: Tensor) -> Callable[[], bool]:
    """Returns a function that tells whether a tensor's memory has been freed.

    The function does not keep the memory alive.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: bool(reference.expired())
