"""All-gathers on AMD's SDMA engines through mori (`mori.ccl.AllgatherSdma`).

This module checks what mori does not check. mori takes at most eight ranks, whole 4-byte words, and
no more bytes than its buffers hold. It takes no empty tensors and no default stream. One call of a
handle must be complete on all ranks before the same handle starts the next call. Two handles that
alternate on one stream ensure that: a rank that starts call k + 2 has received every rank's part of
call k + 1, and each rank sent that part after it had copied out call k.

Releases of mori without the argument `capturing` make the CPU wait in every call. They are refused,
because that costs more than copy engines gain.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import inspect
import itertools
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zpasses import compat
from zpasses.cost.time.route_figures import MAX_RANKS
from zpasses.errors import AgreementError
from zpasses.graph.padding import rounded_up
from zpasses.ranks.agree import exchange
from zpasses.runtime.gloo import gathered_shape
from zpasses.runtime.platform import Platform, SideStream
from zpasses.sdma.refusals import Answer, attempt, refusal_in, run_with_timeout
from zpasses.sdma.routes import (
    Route,
    SideStreamWork,
    raise_if_capturing,
    resolve_contiguous,
)

MAX_BYTES = 1 << 30
"""Most bytes per rank in one call."""
ARCHITECTURES = ("gfx942", "gfx950")
_WORD = 4
_ALIGNMENT = 16
_NUM_HANDLES = 2


@dataclass(frozen=True)
class _MoriState:
    """The state of mori in this process, and the ranks ("PEs") that it connects. A process can have
    only one such set of ranks, ever.
    """

    ranks: tuple[int, ...]
    capacity_bytes: int
    """Most bytes per rank in one call."""
    shmem: Any
    handles: tuple[Any, ...]
    stream: SideStream


_state: _MoriState | None = None
_disabled_reason: str | None = None
"""Why mori can no longer be started in this process."""


# --- the vote -------------------------------------------------------------------------------------
def local_obstacle(group: str, platform: Platform, capacity_bytes: int) -> str | None:
    """What this rank can tell before mori is touched."""
    architecture, size = platform.architecture(), compat.process_group(group).size()
    if architecture not in ARCHITECTURES:
        return f"mori supports {' and '.join(ARCHITECTURES)}; this device is {architecture}"
    if size > MAX_RANKS:
        return f"mori gathers from at most {MAX_RANKS} ranks; the group has {size}"
    if _disabled_reason is not None:
        return _disabled_reason
    if os.environ.setdefault("MORI_ENABLE_SDMA", "1") != "1":
        value = os.environ["MORI_ENABLE_SDMA"]
        return f"MORI_ENABLE_SDMA={value}; mori uses SDMA engines only if it is 1"
    try:
        parameters = inspect.signature(
            importlib.import_module("mori.ccl").AllgatherSdma.__call__
        ).parameters
        importlib.import_module("mori.shmem")
    except Exception as error:
        return f"mori cannot be imported ({type(error).__name__}: {error}); pip install amd-mori"
    if "capturing" not in parameters:
        version = installed_version()
        return f"mori {version} makes the CPU wait in every call; amd-mori >= 1.2.4 does not"
    needed = _NUM_HANDLES * (size + 1) * capacity_bytes
    if _state is None and platform.free_bytes() < needed:
        free = platform.free_bytes() >> 20
        return f"mori's buffers take {needed >> 20} MiB, but {free} MiB are free"
    return None


def answer() -> Answer:
    """What must be equal on all ranks."""
    connected = list(_state.ranks) if _state is not None else None
    return {"version": installed_version(), "connected_ranks": connected}


def installed_version() -> str:
    """Version of the installed mori."""
    try:
        return str(
            getattr(sys.modules.get("mori"), "__version__", None)
            or importlib.metadata.version("amd-mori")
        )
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def disagreement(group: str, answers: Sequence[Answer]) -> str | None:
    """Why mori cannot be started for the group, given the states of all ranks; None if it can."""
    versions = sorted({answer["version"] for answer in answers})
    if len(versions) > 1:
        return f"ranks have different releases of mori: {', '.join(versions)}"
    ranks, connected = compat.group_ranks(group), [answer["connected_ranks"] for answer in answers]
    if all(each is None for each in connected) or all(each == ranks for each in connected):
        return None
    rank, other = next(
        (rank, each) for rank, each in zip(ranks, connected, strict=True) if each is not None
    )
    return (
        f"mori already connects ranks {other} in the process of rank {rank}, and a process can "
        "connect only one set of ranks"
    )


# --- starting -------------------------------------------------------------------------------------
def start(group: str, platform: Platform, capacity_bytes: int, timeout_s: float) -> MoriRoute | str:
    """Start mori for a group whose ranks can all start it, or reuse it if it runs for the
    same ranks. Returns a reason if it did not start.

    The ranks vote after each stage, so no rank continues if another failed. A process in which a
    stage failed does not try again, because mori's state there is unknown.
    """
    global _state, _disabled_reason
    if _state is None:
        _disabled_reason = "a rank was lost while mori was being started"
        started = _start(group, platform, capacity_bytes, timeout_s)
        if isinstance(started, str):
            _disabled_reason = f"mori failed to start earlier ({started})"
            return started
        _state, _disabled_reason = started, None
    return MoriRoute(_state)


def _start(
    group: str, platform: Platform, capacity_bytes: int, timeout_s: float
) -> _MoriState | str:
    ccl, shmem = importlib.import_module("mori.ccl"), importlib.import_module("mori.shmem")
    ranks = compat.group_ranks(group)
    rank, size = compat.process_group(group).rank(), len(ranks)
    unique: list[bytes] = []
    # The group's first rank creates the id. mori's own bootstrap through torch asks global rank 0,
    # which need not be in the group.
    failed = (
        run_with_timeout(
            timeout_s, lambda: unique.append(bytes(shmem.shmem_get_unique_id())), platform
        )
        if rank == 0
        else None
    )
    answers = exchange(
        group,
        "sdma: mori's unique id",
        {"refusal": failed, "id": unique[0].hex() if unique else None},
        timeout_s,
    )
    refusal = refusal_in(group, answers)
    if refusal is not None:
        return f"shmem_get_unique_id: {refusal}"
    unique_id = bytes.fromhex(answers[0]["id"])

    def connect() -> str | None:
        status = shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, rank, size, unique_id)
        if status not in (0, None):
            return f"returned {status}"
        known = shmem.shmem_mype(), shmem.shmem_npes()
        return (
            None
            if known == (rank, size)
            else f"this is PE {known[0]} of {known[1]}; expected {rank} of {size}"
        )

    refusal = attempt(group, "sdma: mori's shmem_init_attr", connect, platform, timeout_s)
    if refusal is not None:
        return f"shmem_init_attr: {refusal}"
    handles: list[Any] = []

    def make_handles() -> None:
        for _ in range(_NUM_HANDLES):
            handle = ccl.AllgatherSdma(
                rank,
                size,
                input_buffer_size=capacity_bytes,
                output_buffer_size=size * capacity_bytes,
            )
            _keep_alive_forever(handle)
            handles.append(handle)

    refusal = attempt(group, "sdma: mori's handles", make_handles, platform, timeout_s)
    if refusal is not None:
        return f"AllgatherSdma: {refusal}"
    state = _MoriState(
        tuple(ranks), min(capacity_bytes, MAX_BYTES), shmem, tuple(handles), platform.side_stream()
    )
    trial = functools.partial(_trial_gather, state, rank)
    refusal = attempt(group, "sdma: the trial of mori", trial, platform, timeout_s)
    return state if refusal is None else f"trial gather: {refusal}"


def _trial_gather(state: _MoriState, rank: int) -> str | None:
    """Gather once with every handle, and check the result."""
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    mine = torch.full((_ALIGNMENT,), rank + 1, dtype=torch.uint8, device=device)
    expected = torch.arange(1, len(state.ranks) + 1, dtype=torch.uint8).repeat_interleave(
        _ALIGNMENT
    )
    for handle in state.handles:
        full = torch.zeros(_ALIGNMENT * len(state.ranks), dtype=torch.uint8, device=device)
        state.stream.follow_current()
        if not handle(mine, full, mine.numel(), stream=state.stream.handle, capturing=True):
            return "the call was refused"
        state.stream.synchronize()
        if not torch.equal(full.cpu(), expected):
            got, wanted = full[::_ALIGNMENT].tolist(), expected[::_ALIGNMENT].tolist()
            return f"got wrong bytes: {got}; expected {wanted}"
    return None


def _keep_alive_forever(handle: Any) -> None:
    """Keep a handle alive until the process ends. Its destructor frees memory that all ranks share
    and may wait for them, and at exit no rank answers.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))


# --- gathering ------------------------------------------------------------------------------------
class MoriRoute(Route):
    """All-gathers of one group."""

    name = "mori"
    _lock = threading.Lock()  # shared by all groups, which share handles and stream
    _calls_started = 0

    def __init__(self, state: _MoriState) -> None:
        self._state = state

    def all_gather(self, inputs: Sequence[Tensor], group_size: int, group: str) -> list[Tensor]:
        outputs = [each.new_empty(gathered_shape(each.shape, group_size)) for each in inputs]
        self._gather(
            [
                (resolve_contiguous(each), output)
                for each, output in zip(inputs, outputs, strict=True)
            ]
        )
        return outputs

    def all_gather_out(self, source: Tensor, group_size: int, group: str, out: Tensor) -> Tensor:
        self._gather([(resolve_contiguous(source), out)])
        return out

    def _gather(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        raise_if_capturing(pairs[0][0].device)
        stream = self._state.stream
        with MoriRoute._lock:
            stream.follow_current()
            for pack in _group_into_calls(pairs, self._state.capacity_bytes):
                needs = (
                    self._gather_pack(pack)
                    if len(pack) > 1
                    else self._gather_bytes(*map(_as_bytes, pack[0]))
                )
                event = stream.record()
                for source, target in pack:
                    compat.register_work(target, SideStreamWork(event, (source, target, *needs)))

    def _gather_pack(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Gather several tensors in one call, because a call costs more than the copies that pack
        it.
        """
        stream, size = self._state.stream, len(self._state.ranks)
        packed = stream.empty(
            sum(rounded_up(source.nbytes, _WORD) for source, _ in pairs), pairs[0][0].device
        )
        gathered = stream.empty(packed.numel() * size, packed.device)
        places = list(
            itertools.accumulate(
                (rounded_up(source.nbytes, _WORD) for source, _ in pairs), initial=0
            )
        )
        for (source, _), place in zip(pairs, places, strict=False):
            stream.run(
                functools.partial(packed[place : place + source.nbytes].copy_, _as_bytes(source))
            )
        self._launch(packed, gathered)
        for (source, target), place in zip(pairs, places, strict=False):
            parts = gathered.view(size, -1)[:, place : place + source.nbytes]
            stream.run(functools.partial(_as_bytes(target).view(size, -1).copy_, parts))
        return [packed, gathered]

    def _gather_bytes(self, source: Tensor, target: Tensor) -> list[Tensor]:
        """Gather in one call if sizes and addresses allow it, else in pieces through temporary
        buffers. Returns the buffers, which must stay alive.
        """
        count = source.numel()
        aligned = source.data_ptr() % _ALIGNMENT == 0 and target.data_ptr() % _ALIGNMENT == 0
        if count <= self._state.capacity_bytes and count % _WORD == 0 and aligned:
            self._launch(source, target)
            return []
        step = self._state.capacity_bytes // _ALIGNMENT * _ALIGNMENT
        return [
            each
            for offset in range(0, count, step)
            for each in self._gather_piece(source, target, offset, min(step, count - offset))
        ]

    def _gather_piece(
        self, source: Tensor, target: Tensor, offset: int, count: int
    ) -> tuple[Tensor, Tensor]:
        stream, size = self._state.stream, len(self._state.ranks)
        part, padded = source[offset : offset + count], rounded_up(count, _WORD)
        if padded != count or part.data_ptr() % _ALIGNMENT:
            given, part = part, stream.empty(padded, source.device)
            stream.run(functools.partial(part[:count].copy_, given))
        gathered = stream.empty(size * padded, source.device)
        self._launch(part, gathered)
        place = target.view(size, -1)[:, offset : offset + count]
        stream.run(functools.partial(place.copy_, gathered.view(size, -1)[:, :count]))
        return part, gathered

    def _launch(self, source: Tensor, target: Tensor) -> None:
        if source.numel() == 0:
            return  # mori raises on empty tensors
        handle = self._state.handles[MoriRoute._calls_started % _NUM_HANDLES]
        MoriRoute._calls_started += 1
        if not handle(
            source, target, source.numel(), stream=self._state.stream.handle, capturing=True
        ):
            raise RuntimeError(
                f"mori refused to gather {source.numel()} bytes per rank. Other ranks may have "
                "started this gather, so the run cannot continue. "
                "Leave the pass 'sdma' out of the pipeline, or set MORI_ENABLE_SDMA=0."
            )


def _group_into_calls(
    pairs: Sequence[tuple[Tensor, Tensor]], capacity_bytes: int
) -> list[list[tuple[Tensor, Tensor]]]:
    """Group neighbours that fit into one call, in order. An empty tensor has a group of its own."""
    packs: list[list[tuple[Tensor, Tensor]]] = []
    room = 0
    for source, target in pairs:
        needed = rounded_up(source.nbytes, _WORD)
        if packs and 0 < needed <= room:
            packs[-1].append((source, target))
            room -= needed
        else:
            packs.append([(source, target)])
            room = capacity_bytes - needed if needed else 0
    return packs


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8[bytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


# --- leaving --------------------------------------------------------------------------------------
def shut_down(timeout_s: float, platform: Platform) -> str | None:
    """Leave mori together with the other ranks, when nothing is in flight. Returns a reason if that
    was not possible.

    mori's finalize call waits for all ranks, so it runs only if all of them have arrived in time.
    """
    global _state, _disabled_reason
    state = _state
    if state is None:
        return None
    disable("mori was shut down in this process")
    group = next(
        (name for name in compat.group_backends() if compat.group_ranks(name) == list(state.ranks)),
        None,
    )
    if group is None:
        return (
            "the process group no longer exists; call zpasses.sdma.shutdown() before "
            "destroy_process_group()"
        )

    try:
        finish = state.stream.synchronize
        refusal = attempt(group, "sdma: leaving mori", finish, platform, timeout_s)
    except AgreementError as error:
        return str(error)
    return refusal or run_with_timeout(timeout_s, state.shmem.shmem_finalize, platform)


def disable(reason: str | None) -> None:
    """Stop using mori in this process. Without a reason, mori may be started again, which only
    tests may do.
    """
    global _state, _disabled_reason
    _state, _disabled_reason = None, reason


def is_started() -> bool:
    return _state is not None
