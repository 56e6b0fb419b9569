"""Gathers by NCCL's zero-SM collectives: copy engines write into registered outputs.

NCCL takes copy engines on a communicator with the zero-CTA policy if the output is in memory that
all ranks have registered together, at equal places of it. The input may be any memory. So the route
has a second process group of the same ranks, and lends outputs from registered buffers.

Registering makes ranks wait for each other, and a rank may free an output later than the others: it
may keep a loss, and with it what forward saved. So a buffer is lent again only once the ranks have
told each other that it is back, in a vote before a gather that finds none. Buffers that are never
given back only cost memory.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.graph.padding import rounded_up
from zpasses.ranks.agree import exchange
from zpasses.runtime.gloo import gathered_shape
from zpasses.runtime.platform import Platform, ZeroSmGathers
from zpasses.sdma.refusals import attempt
from zpasses.sdma.routes import (
    TRIAL_BYTES,
    C10dRoute,
    Route,
    SideStreamWork,
    raise_if_capturing,
    resolve_contiguous,
    start_delivery,
    trial_gather,
)

_GRANULE = 2 << 20
"""Sizes of buffers are multiples of this, as those of NCCL's allocator."""
_SETTINGS = {"NCCL_CTA_POLICY": "2", "NCCL_CUMEM_ENABLE": "1", "NCCL_WIN_ENABLE": "1"}
"""What NCCL's variables must say where they are set: they overrule the process group."""

# How many groups this process has tried to make of a group. A name is never used again, because the
# store keeps the addresses that the earlier group had.
_tried: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


# --- the vote -------------------------------------------------------------------------------------
def local_obstacle(group: str, platform: Platform, capacity_bytes: int) -> str | None:
    """What this rank can tell before NCCL is asked for another process group."""
    backend = compat.group_backend(group)
    if "nccl" not in backend:
        return f"zero-SM gathers need a group of backend nccl; this one is {backend}"
    obstacle = platform.zero_sm_obstacle()
    if obstacle is not None:
        return obstacle
    for variable, needed in _SETTINGS.items():
        value = os.environ.get(variable)
        if value is not None and value != needed:
            return f"{variable}={value}; NCCL takes engines only if it is {needed}"
    if platform.architecture().startswith("gfx") and "NCCL_CUMEM_ENABLE" not in os.environ:
        return "RCCL registers memory only if NCCL_CUMEM_ENABLE=1 is set before it starts"
    return None


# --- starting -------------------------------------------------------------------------------------
def start(
    group: str, platform: Platform, capacity_bytes: int, timeout_s: float
) -> ZeroSmRoute | str:
    """Make the process group, register a first buffer and gather once, with a vote after each.
    Returns a reason if the route cannot be taken.
    """
    members = compat.process_group(group)
    question = "sdma: the process group of zero-SM gathers"
    number = exchange(group, question, _tried.get(members, 0), timeout_s, merge=max)
    _tried[members] = number + 1
    made: list[ZeroSmGathers] = []

    def connect() -> None:
        made.append(platform.zero_sm_gathers(group, f"{group}.zero_sm-{number}", timeout_s))

    refusal = attempt(group, question, connect, platform, timeout_s)
    if refusal is not None:
        return f"process group: {refusal}"
    most = 2 * members.size() * capacity_bytes
    route = ZeroSmRoute(made[0], _Buffers(group, platform, made[0], most, timeout_s))
    refusal = route.buffers.add(TRIAL_BYTES)
    if refusal is not None:
        return f"registered memory: {refusal}"
    trial = functools.partial(trial_gather, route, group, made[0].device)
    refusal = attempt(group, "sdma: the trial of zero-SM gathers", trial, platform, timeout_s)
    return route if refusal is None else f"trial gather: {refusal}"


# --- buffers --------------------------------------------------------------------------------------
@dataclass
class _Buffer:
    memory: Tensor
    """uint8[bytes], registered by all ranks."""
    is_back: Callable[[], bool]
    """Whether this rank has freed what was lent of it."""


class _Buffers:
    """Registered memory. All ranks of a group add, lend and take back the same buffers, in the same
    order.
    """

    def __init__(
        self,
        group: str,
        platform: Platform,
        gathers: ZeroSmGathers,
        most_bytes: int,
        timeout_s: float,
    ) -> None:
        self._group, self._platform, self._gathers = group, platform, gathers
        self._most_bytes, self._timeout_s = most_bytes, timeout_s
        self._all: list[_Buffer] = []
        self._free: list[int] = []
        """Those that all ranks know to be back on all ranks."""

    def lend(self, nbytes: int) -> Tensor | None:
        """Returns uint8[nbytes] with a storage of its own, or None if there is no room. It is back
        once that storage is freed.
        """
        fitting = self._fitting(nbytes)
        if not fitting:
            self._take_back(nbytes)
            fitting = self._fitting(nbytes)
        if not fitting:
            return None
        self._free.remove(fitting[0])
        buffer = self._all[fitting[0]]
        lent: Tensor = from_dlpack(buffer.memory[:nbytes])
        buffer.is_back = compat.storage_freed_check(lent)
        return lent

    def _fitting(self, nbytes: int) -> list[int]:
        """The free buffers that are large enough and not twice as large, the smallest first."""
        size = rounded_up(nbytes, _GRANULE)
        fitting = [each for each in self._free if size <= self._all[each].memory.nbytes <= 2 * size]
        return sorted(fitting, key=lambda each: self._all[each].memory.nbytes)

    def _take_back(self, nbytes: int) -> None:
        """Agree on which buffers are back, and add one if few of this size are.

        With as many to lend as are lent, the next vote is several gathers away.
        """
        back = [number for number, each in enumerate(self._all) if each.is_back()]
        question = f"sdma: registered memory for {nbytes} bytes"
        self._free = exchange(self._group, question, back, self._timeout_s, merge=_in_all)
        size = rounded_up(nbytes, _GRANULE)
        alike = sum(size <= each.memory.nbytes <= 2 * size for each in self._all)
        if 2 * len(self._fitting(nbytes)) <= alike:
            self.add(nbytes)

    def add(self, nbytes: int) -> str | None:
        """Register another buffer on all ranks if there is room. Returns why it failed; then none
        is added again.
        """
        size, made = rounded_up(nbytes, _GRANULE), list[Tensor]()
        if sum(each.memory.nbytes for each in self._all) + size > self._most_bytes:
            return "the limit is reached"

        def allocate() -> None:
            made.append(self._gathers.allocate(size))

        for what, step in (("allocating", allocate), ("registering", self._gathers.register)):
            question = f"sdma: {what} memory"
            refusal = attempt(self._group, question, step, self._platform, self._timeout_s)
            if refusal is not None:
                self._most_bytes = 0
                return refusal
        self._free.append(len(self._all))
        self._all.append(_Buffer(made[0], lambda: True))
        return None


def _in_all(answers: Sequence[Sequence[int]]) -> list[int]:
    return sorted(set(answers[0]).intersection(*answers[1:]))


# --- gathering ------------------------------------------------------------------------------------
class ZeroSmRoute(Route):
    """All-gathers of one group. Those for which there is no registered memory run as functional
    collectives, on all ranks.
    """

    name = "nccl_zero"

    def __init__(self, gathers: ZeroSmGathers, buffers: _Buffers) -> None:
        self.buffers, self._gathers = buffers, gathers
        self._fallback, self._lock = C10dRoute(), threading.Lock()

    def all_gather(self, inputs: Sequence[Tensor], group_size: int, group: str) -> list[Tensor]:
        return [self._gather_one(resolve_contiguous(each), group_size, group) for each in inputs]

    def all_gather_out(self, source: Tensor, group_size: int, group: str, out: Tensor) -> Tensor:
        given = resolve_contiguous(source)
        full = self._start(given, group_size)
        if full is None:
            return self._fallback.all_gather_out(given, group_size, group, out)
        stream = self._gathers.stream
        stream.follow_current()
        start_delivery(full, given, out, stream)
        return out

    def _gather_one(self, source: Tensor, group_size: int, group: str) -> Tensor:
        full = self._start(source, group_size)
        if full is None:
            return self._fallback.all_gather([source], group_size, group)[0]
        return full.view(source.dtype).view(gathered_shape(source.shape, group_size))

    def _start(self, source: Tensor, group_size: int) -> Tensor | None:
        """Start a gather; uint8[bytes of all ranks], or None without registered memory."""
        raise_if_capturing(source.device)
        if not source.numel():
            return None
        with self._lock:
            full = self.buffers.lend(source.nbytes * group_size)
            if full is None:
                return None
            work = self._gathers.start(source.reshape(-1).view(torch.uint8), full)
        compat.register_work(full, SideStreamWork(work, (source, full)))
        return full

    def leave(self, group: str, timeout_s: float, platform: Platform) -> str | None:
        leaving, deregister = "sdma: leaving zero-SM gathers", self._gathers.deregister
        try:
            return attempt(group, leaving, deregister, platform, timeout_s)
        except AgreementError as error:
            return str(error)
