"""A fake of NCCL's zero-SM gathers and of the memory that it registers, for gloo ranks.

It reproduces the hazards of NCCL. Registering is a collective: a rank that does it alone, or with
another size, hangs or fails. A gather writes into the memory of all ranks at the place that the
output has on the rank that sends, so ranks with outputs at different places overwrite each other.
An output that is not registered is an error here, where NCCL would use compute units. Gathers run
late, in order, on a thread. They take raw addresses and keep nothing alive, and their outputs are
poison until then.

    with fake_zero_sm.installed(fake_zero_sm.Settings()) as fake:  # on every rank
        zpasses.sdma.init()
        ...
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests import fake_mori
from tests.fake_mori import HostPlatform, HostStream
from zpasses import compat
from zpasses.runtime.platform import register_platform
from zpasses.sdma.lifecycle import reset_routes

__all__ = ["Settings", "installed"]

_POISON = 0xA5


@dataclass
class Settings:
    """Settings of the fake on one rank."""

    obstacle: str | None = None
    """What this rank's torch lacks."""
    fail: str = ""
    """Where this rank fails: "connect", "allocate", "register" or "wrong_bytes"."""
    device_id: str | None = None
    architecture: str = "sm90"
    latency_s: float = 0.002
    calls: list[int] = field(default_factory=list)
    """Bytes of the output of each gather, in order; filled as they are made."""
    registered: list[Tensor] = field(default_factory=list)
    """The memory that is registered."""


@contextlib.contextmanager
def installed(settings: Settings | None = None) -> Iterator[Settings]:
    """Inside the context, CPU tensors are on a device whose gloo groups count as NCCL's."""
    given = settings or Settings()
    device = fake_mori.Settings(architecture=given.architecture, device_id=given.device_id)
    register_platform("cpu", _Platform(device, given))
    reset_routes()
    try:
        with mock.patch("zpasses.compat.group_backend", return_value="nccl"):
            yield given
    finally:
        reset_routes()
        register_platform("cpu", None)


class _Platform(HostPlatform):
    def __init__(self, device: fake_mori.Settings, settings: Settings) -> None:
        super().__init__(device)
        self._fake = settings

    def zero_sm_obstacle(self) -> str | None:
        return self._fake.obstacle

    def zero_sm_gathers(self, group: str, name: str, limit_s: float) -> _Gathers:
        return _Gathers(self._fake, group, name, limit_s)


class _Gathers:
    device = torch.device("cpu")

    def __init__(self, settings: Settings, group: str, name: str, limit_s: float) -> None:
        ranks, limit = compat.group_ranks(group), timedelta(seconds=limit_s)
        # NCCL registers over sockets of its own, beside the gathers that are under way.
        self._bootstrap = f"{name}.bootstrap"
        for each in (name, self._bootstrap):
            compat.make_group(group, each, ranks, "zero", limit)
        if settings.fail == "connect":
            raise RuntimeError("ncclCommInitRankConfig: unhandled system error")
        self._settings, self._name, self._ranks = settings, name, len(ranks)
        self._nccl, self.stream = HostStream(20.0), HostStream(20.0)
        self._allocated: Tensor | None = None

    def allocate(self, nbytes: int) -> Tensor:
        if self._settings.fail == "allocate":
            raise RuntimeError("ncclMemAlloc: out of memory")
        self._allocated = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        return self._allocated

    def register(self) -> None:
        if self._settings.fail == "register":
            raise RuntimeError("ncclCommWindowRegister: invalid usage")
        assert self._allocated is not None, "registered twice"
        (sizes,) = self._exchanged(torch.tensor([self._allocated.nbytes]), self._bootstrap).unbind(
            1
        )
        if len(set(sizes.tolist())) > 1:
            raise RuntimeError(f"ranks register memory of different sizes: {sizes.tolist()}")
        self._settings.registered.append(self._allocated)
        self._allocated = None

    def deregister(self) -> None:
        self._exchanged(torch.tensor([len(self._settings.registered)]), self._bootstrap)
        self._settings.registered.clear()

    def start(self, source: Tensor, out: Tensor) -> Any:
        place = self._place_of(out.data_ptr())
        self._settings.calls.append(out.nbytes)
        out.fill_(_POISON)
        address, nbytes = source.data_ptr(), source.nbytes
        self._nccl.run(lambda: self._run(address, nbytes, place))
        return self._nccl.record()

    def _place_of(self, address: int) -> tuple[int, int]:
        for window, memory in enumerate(self._settings.registered):
            if 0 <= address - memory.data_ptr() < memory.nbytes:
                return window, address - memory.data_ptr()
        raise AssertionError("the output is not in registered memory")

    def _run(self, address: int, nbytes: int, place: tuple[int, int]) -> None:
        time.sleep(self._settings.latency_s)
        sent = torch.frombuffer(bytearray(ctypes.string_at(address, nbytes)), dtype=torch.uint8)
        if self._settings.fail == "wrong_bytes":
            sent = sent + 1
        places, parts = (self._exchanged(each, self._name) for each in (torch.tensor(place), sent))
        for rank, (window, offset) in enumerate(places.tolist()):
            memory = self._settings.registered[window]
            at = offset + rank * nbytes
            memory[at : at + nbytes] = parts[rank]

    def _exchanged(self, mine: Tensor, group: str) -> Tensor:
        """The tensors of all ranks, [ranks, ...]."""
        full = mine.new_empty((self._ranks * mine.numel(),))
        compat.start_all_gather(mine, full, group).wait()
        return full.view(self._ranks, -1)
