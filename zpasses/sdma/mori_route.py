"""All-gathers on AMD's SDMA engines through mori (`mori.ccl.AllgatherSdma`).

What mori does not check is checked here: it takes at most eight ranks, whole 4-byte words, no more
bytes than its buffers hold, no empty tensors and no default stream; one call of a handle must be
over on all ranks before the same handle starts the next. Two handles
that take turns on one stream ensure that: a rank that starts call k + 2 has received every rank's
part of call k + 1, which each sent after it had copied out call k.

Releases without the argument `capturing` make the CPU wait in every call, and are refused: that
costs more than copy engines gain."""

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
from zpasses.errors import AgreementError
from zpasses.ranks.vote import exchange
from zpasses.sdma.platform import Platform, SideStream, node_name
from zpasses.sdma.routes import Pending, Route, gathered_shape, plain, refuse_capture
from zpasses.sdma.vote import Answer, first_refusal, one_node, refusal_in, run_with_timeout

__all__ = [
    "MoriRoute",
    "check",
    "examine",
    "forget",
    "installed_version",
    "is_started",
    "shut_down",
    "start",
]

MAX_RANKS = 8
MAX_BYTES = 1 << 30
"""Most bytes of one rank in one call."""
ARCHITECTURES = ("gfx942", "gfx950")
_WORD = 4
_ALIGNMENT = 16
_HANDLES = 2


@dataclass(frozen=True)
class _Engines:
    """The ranks ("PEs") that mori connects in this process. There is one such set in a process,
    ever."""

    ranks: tuple[int, ...]
    capacity_bytes: int
    """Most bytes of one rank in one call."""
    shmem: Any
    handles: tuple[Any, ...]
    stream: SideStream


_engines: _Engines | None = None
_spent: str | None = None
"""Why mori cannot be started in this process any more."""


# --- the vote -------------------------------------------------------------------------------------
def examine(group: str, platform: Platform, capacity_bytes: int) -> Answer:
    """What this rank knows before mori is touched."""
    return {
        "no": _obstacle(group, platform, capacity_bytes),
        "node": node_name(),
        "device": platform.device_id(),
        "version": installed_version(),
        "engines": list(_engines.ranks) if _engines is not None else None,
    }


def _obstacle(group: str, platform: Platform, capacity_bytes: int) -> str | None:
    architecture, size = platform.architecture(), compat.process_group(group).size()
    if architecture not in ARCHITECTURES:
        return f"mori's SDMA engines are those of {' and '.join(ARCHITECTURES)}; this is {architecture}"
    if size > MAX_RANKS:
        return f"mori gathers from at most {MAX_RANKS} ranks; the group has {size}"
    if _spent is not None:
        return _spent
    if os.environ.setdefault("MORI_ENABLE_SDMA", "1") != "1":
        return f"MORI_ENABLE_SDMA={os.environ['MORI_ENABLE_SDMA']}; mori uses SDMA engines only where it is 1"
    try:
        parameters = inspect.signature(
            importlib.import_module("mori.ccl").AllgatherSdma.__call__
        ).parameters
        importlib.import_module("mori.shmem")
    except Exception as error:
        return f"mori cannot be imported ({type(error).__name__}: {error}); pip install amd-mori"
    if "capturing" not in parameters:
        return f"mori {installed_version()} makes the CPU wait in every call; amd-mori >= 1.2.4 does not"
    needed = _HANDLES * (size + 1) * capacity_bytes
    if _engines is None and platform.free_bytes() < needed:
        return f"mori's buffers take {needed >> 20} MiB, but {platform.free_bytes() >> 20} MiB are free"
    return None


def installed_version() -> str:
    """Release of the installed mori."""
    try:
        return str(
            getattr(sys.modules.get("mori"), "__version__", None)
            or importlib.metadata.version("amd-mori")
        )
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def check(group: str, answers: Sequence[Answer]) -> str | None:
    """Why mori is not started for the group; None if it can be. The same on every rank, since all
    have the same answers."""
    reason = refusal_in(group, answers) or one_node(answers)
    if reason is not None:
        return reason
    versions = sorted({answer["version"] for answer in answers})
    if len(versions) > 1:
        return f"ranks have different releases of mori: {', '.join(versions)}"
    ranks, connected = compat.group_ranks(group), [answer["engines"] for answer in answers]
    if all(each is None for each in connected) or all(each == ranks for each in connected):
        return None
    rank, other = next(
        (rank, each) for rank, each in zip(ranks, connected, strict=True) if each is not None
    )
    return f"mori connects ranks {other} in the process of rank {rank} already, and connects one set of ranks only"


# --- starting -------------------------------------------------------------------------------------
def start(group: str, platform: Platform, capacity_bytes: int, timeout_s: float) -> MoriRoute | str:
    """Start mori for a group whose ranks all passed `check`, or join what runs for the same ranks;
    a reason if it did not start.

    Each stage is voted on, so no rank goes on where another failed. A process in which a stage
    failed does not try again: what mori left behind there is not known."""
    global _engines, _spent
    if _engines is None:
        _spent = "mori was being started when a rank was lost"
        started = _start(group, platform, capacity_bytes, timeout_s)
        if isinstance(started, str):
            _spent = f"mori failed to start earlier ({started})"
            return started
        _engines, _spent = started, None
    return MoriRoute(_engines)


def _start(group: str, platform: Platform, capacity_bytes: int, timeout_s: float) -> _Engines | str:
    ccl, shmem = importlib.import_module("mori.ccl"), importlib.import_module("mori.shmem")
    ranks = compat.group_ranks(group)
    rank, size = compat.process_group(group).rank(), len(ranks)
    unique: list[bytes] = []
    # The group's own first rank makes the id: mori's way through torch asks global rank 0, which
    # need not be in the group.
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
        {"no": failed, "id": unique[0].hex() if unique else None},
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

    refusal = first_refusal(
        group,
        "sdma: mori's shmem_init_attr",
        run_with_timeout(timeout_s, connect, platform),
        timeout_s,
    )
    if refusal is not None:
        return f"shmem_init_attr: {refusal}"
    handles: list[Any] = []

    def make_handles() -> None:
        for _ in range(_HANDLES):
            handle = ccl.AllgatherSdma(
                rank,
                size,
                input_buffer_size=capacity_bytes,
                output_buffer_size=size * capacity_bytes,
            )
            _never_destroy(handle)
            handles.append(handle)

    refusal = first_refusal(
        group,
        "sdma: mori's handles",
        run_with_timeout(timeout_s, make_handles, platform),
        timeout_s,
    )
    if refusal is not None:
        return f"AllgatherSdma: {refusal}"
    engines = _Engines(
        tuple(ranks), min(capacity_bytes, MAX_BYTES), shmem, tuple(handles), platform.side_stream()
    )
    refusal = first_refusal(
        group,
        "sdma: a trial of mori",
        run_with_timeout(timeout_s, lambda: _try(engines, rank), platform),
        timeout_s,
    )
    return engines if refusal is None else f"trial gather: {refusal}"


def _try(engines: _Engines, rank: int) -> str | None:
    """Gather once with every handle, and look at what came."""
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    mine = torch.full((_ALIGNMENT,), rank + 1, dtype=torch.uint8, device=device)
    expected = torch.arange(1, len(engines.ranks) + 1, dtype=torch.uint8).repeat_interleave(
        _ALIGNMENT
    )
    for handle in engines.handles:
        full = torch.zeros(_ALIGNMENT * len(engines.ranks), dtype=torch.uint8, device=device)
        engines.stream.follow_current()
        if not handle(mine, full, mine.numel(), stream=engines.stream.handle, capturing=True):
            return "the call was refused"
        engines.stream.synchronize()
        if not torch.equal(full.cpu(), expected):
            return f"got wrong bytes: {full[::_ALIGNMENT].tolist()} for {expected[::_ALIGNMENT].tolist()}"
    return None


def _never_destroy(handle: Any) -> None:
    """A destructor frees memory that all ranks share, and may wait for them; at the end of a
    process nobody answers."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))


# --- gathering ------------------------------------------------------------------------------------
class MoriRoute(Route):
    """Gathers of one group."""

    name = "mori"
    _lock = threading.Lock()  # one for all groups: they share handles and stream
    _turn = 0

    def __init__(self, engines: _Engines) -> None:
        self._engines = engines

    def all_gather(self, inputs: Sequence[Tensor], group_size: int, group: str) -> list[Tensor]:
        outputs = [each.new_empty(gathered_shape(each.shape, group_size)) for each in inputs]
        self._gather([(plain(each), output) for each, output in zip(inputs, outputs, strict=True)])
        return outputs

    def all_gather_out(self, source: Tensor, group_size: int, group: str, out: Tensor) -> Tensor:
        self._gather([(plain(source), out)])
        return out

    def _gather(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        refuse_capture(pairs[0][0].device)
        stream = self._engines.stream
        with MoriRoute._lock:
            stream.follow_current()
            for pack in _packs(pairs, self._engines.capacity_bytes):
                needs = (
                    self._gather_pack(pack)
                    if len(pack) > 1
                    else self._gather_bytes(*map(_as_bytes, pack[0]))
                )
                event = stream.record()
                for source, target in pack:
                    compat.register_work(target, Pending(event, (source, target, *needs)))

    def _gather_pack(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Gather several tensors in one call: a call costs more than copies of what it moves."""
        stream, size = self._engines.stream, len(self._engines.ranks)
        packed = stream.empty(
            sum(_padded(source.nbytes) for source, _ in pairs), pairs[0][0].device
        )
        gathered = stream.empty(packed.numel() * size, packed.device)
        places = list(
            itertools.accumulate((_padded(source.nbytes) for source, _ in pairs), initial=0)
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
        """Gather in one call where bytes and addresses allow it, else in pieces through memory that
        is returned, to be kept."""
        count = source.numel()
        aligned = source.data_ptr() % _ALIGNMENT == 0 and target.data_ptr() % _ALIGNMENT == 0
        if count <= self._engines.capacity_bytes and count % _WORD == 0 and aligned:
            self._launch(source, target)
            return []
        step = self._engines.capacity_bytes // _ALIGNMENT * _ALIGNMENT
        return [
            each
            for offset in range(0, count, step)
            for each in self._gather_piece(source, target, offset, min(step, count - offset))
        ]

    def _gather_piece(
        self, source: Tensor, target: Tensor, offset: int, count: int
    ) -> tuple[Tensor, Tensor]:
        stream, size = self._engines.stream, len(self._engines.ranks)
        part, padded = source[offset : offset + count], _padded(count)
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
            return  # mori raises
        handle = self._engines.handles[MoriRoute._turn % _HANDLES]
        MoriRoute._turn += 1
        if not handle(
            source, target, source.numel(), stream=self._engines.stream.handle, capturing=True
        ):
            raise RuntimeError(
                f"mori refused to gather {source.numel()} bytes a rank, which other ranks may have "
                "started: this run cannot go on. "
                "Leave the pass 'sdma' out of the pipeline, or set MORI_ENABLE_SDMA=0."
            )


def _padded(nbytes: int) -> int:
    return -(-nbytes // _WORD) * _WORD


def _packs(
    pairs: Sequence[tuple[Tensor, Tensor]], capacity_bytes: int
) -> list[list[tuple[Tensor, Tensor]]]:
    """Neighbours that fit into one call together, in order; what has no bytes is by itself."""
    packs: list[list[tuple[Tensor, Tensor]]] = []
    room = 0
    for source, target in pairs:
        needed = _padded(source.nbytes)
        if packs and 0 < needed <= room:
            packs[-1].append((source, target))
            room -= needed
        else:
            packs.append([(source, target)])
            room = capacity_bytes - needed if needed else 0
    return packs


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, [bytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


# --- leaving --------------------------------------------------------------------------------------
def shut_down(timeout_s: float, platform: Platform) -> str | None:
    """Leave mori together with the other ranks, once nothing is under way; a reason if that was not
    possible.

    mori's own goodbye waits for all ranks, so it is said only when all of them have come here in
    time."""
    global _engines, _spent
    engines = _engines
    if engines is None:
        return None
    forget("mori was shut down in this process")
    group = next(
        (
            name
            for name in compat.group_backends()
            if compat.group_ranks(name) == list(engines.ranks)
        ),
        None,
    )
    if group is None:
        return "the process group is gone already; call zpasses.sdma.shutdown() before destroy_process_group()"

    def finish() -> None:
        engines.stream.synchronize()

    try:
        refusal = first_refusal(
            group, "sdma: leaving mori", run_with_timeout(timeout_s, finish, platform), timeout_s
        )
    except AgreementError as error:
        return str(error)
    return refusal or run_with_timeout(timeout_s, engines.shmem.shmem_finalize, platform)


def forget(reason: str | None) -> None:
    """Do not touch mori in this process any more; with no reason, start afresh, as only tests
    may."""
    global _engines, _spent
    _engines, _spent = None, reason


def is_started() -> bool:
    return _engines is not None
