"""Host memory for the values that forward graphs save, and for the gradients of shards that rest on
the host: one arena for each run of a graph.

An arena has the exact size of what one run puts on the host, and is locked for accelerators. It
serves the next run once all its tensors are freed, so a training step allocates nothing after its
first forward. It is freed with the compiled graph. If forwards of a graph run before the backward
of the first, each has an arena. All arenas of saved values together keep to the option
`host_memory`: those that hold no tensor are freed first, and then a run is refused before it
starts.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zpasses import compat
from zpasses.errors import MemoryBudgetError
from zpasses.graph.host_copies import HostNeed, aligned, empty_like_on
from zpasses.host.host_pool import HostPool
from zpasses.host.locked_memory import LockedMemory
from zpasses.option_values import format_size


class HostFullError(MemoryBudgetError):
    """What is in use leaves too little within a limit."""


class HostBytes(HostPool):
    """What the saved values, or the gradients, of this process take of the host; `reserved` are the
    bytes of all arenas.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes of the tensors that exist."""
        self._owed = 0
        self.arenas: weakref.WeakSet[SavedArenas] = weakref.WeakSet()
        self.lock = threading.RLock()  # a finalizer may run while the lock is held

    def reserve(self, nbytes: int, device: torch.device, limit_bytes: int | None) -> LockedMemory:
        """Returns new memory, after freeing all that holds no tensor if it is short.

        Raises:
            HostFullError: if the memory in use leaves less within the limit.
            MemoryBudgetError: if the system or the driver refuses so much.
        """
        with self.lock:
            if limit_bytes is not None and self.reserved + nbytes > limit_bytes:
                for each in self.arenas:
                    each.release()
                if self.reserved + nbytes > limit_bytes:
                    raise HostFullError(_too_much(nbytes, self.reserved, limit_bytes))
            memory = LockedMemory.of(nbytes, device)
            self.reserved += nbytes
            weakref.finalize(memory, self._freed, nbytes).atexit = False
        return memory

    def _freed(self, nbytes: int) -> None:
        with self.lock:
            self.reserved -= nbytes

    @property
    def promised(self) -> int:
        """The largest limit of the graphs that exist, and what was promised beside it."""
        with self.lock:
            return max((each.limit_bytes or 0 for each in self.arenas), default=0) + self._owed

    def promise(self, nbytes: int, owner: Any) -> None:
        """Promises more bytes, for as long as an object lives."""
        with self.lock:
            self._owed += nbytes
        weakref.finalize(owner, self._promise_ends, nbytes).atexit = False

    def _promise_ends(self, nbytes: int) -> None:
        with self.lock:
            self._owed -= nbytes


def _too_much(nbytes: int, taken: int, limit_bytes: int) -> str:
    held = (
        f", while {format_size(taken)} hold values of forwards whose backward has not run"
        if taken
        else ""
    )
    return (
        f"host_memory={format_size(limit_bytes)!r}: this forward puts {format_size(nbytes)} on the "
        f"host{held}. Raise host_memory, run backward or free the results before the next forward, "
        "take shorter or smaller batches, or name the largest size of a dimension that changes: "
        "torch._dynamo.mark_dynamic(x, dim, max=...)."
    )


host, gradients = HostBytes(), HostBytes()
"""Of this process: of saved values, and of gradients."""


class SavedArenas:
    """The arenas of one compiled graph.

    Args:
        limit_bytes: the most that all arenas of the pool may take; None for no limit.
        pool: what counts them.
    """

    def __init__(self, limit_bytes: int | None = None, pool: HostBytes = host) -> None:
        self.limit_bytes, self.pool = limit_bytes, pool
        self._idle: list[LockedMemory] = []
        pool.arenas.add(self)

    @contextlib.contextmanager
    def run(self, nbytes: int, device: torch.device) -> Iterator[None]:
        """Context of a run of the graph, whose values get their memory from one arena.

        Args:
            nbytes: what they take together, each `aligned`.
            device: the device that copies them.

        Raises:
            MemoryBudgetError: as `HostBytes.reserve`.
        """
        lease = _Lease(self, self._take(nbytes, device))
        before, _current.lease = _current.lease, lease
        try:
            yield
        finally:
            _current.lease = before
            lease.give_back(0)

    def release(self) -> None:
        """Frees the arenas that hold no tensor."""
        self._idle.clear()

    def _take(self, nbytes: int, device: torch.device) -> LockedMemory:
        with self.pool.lock:
            fitting = [at for at, memory in enumerate(self._idle) if len(memory) >= nbytes]
            if fitting:
                return self._idle.pop(min(fitting, key=lambda at: len(self._idle[at])))
            self.release()  # with dynamic shapes: too small
        return self.pool.reserve(nbytes, device, self.limit_bytes)

    def _ended(self, memory: LockedMemory) -> None:
        self._idle.append(memory)


@dataclass(eq=False)
class _Lease:
    """The arena of one run, until all its tensors are freed."""

    arenas: SavedArenas
    memory: LockedMemory
    used: int = 0
    holders: int = 1
    """Tensors that exist, and the run itself."""

    def like(self, value: Tensor) -> Tensor:
        size, begin = value.numel() * value.element_size(), self.used
        self.used += aligned(size)
        part = memoryview(self.memory)[begin : begin + size]
        with self.arenas.pool.lock:
            self.holders += 1
            self.arenas.pool.live += size
        weakref.finalize(part, self.give_back, size).atexit = False
        flat = torch.frombuffer(part, dtype=value.dtype, count=value.numel())
        return flat.as_strided(value.shape, value.stride()).detach()

    def give_back(self, nbytes: int) -> None:
        """Notes that a tensor is freed, or that the run has ended."""
        with self.arenas.pool.lock:
            self.arenas.pool.live -= nbytes
            self.holders -= 1
            if not self.holders:
                self.arenas._ended(self.memory)


class _Current(threading.local):
    lease: _Lease | None = None


_current = _Current()
loose, loose_gradients = SavedArenas(), SavedArenas(pool=gradients)
"""For copies outside of a run of a compiled graph."""


def like_on_host(value: Tensor, otherwise: SavedArenas = loose) -> Tensor:
    """Returns an uninitialised host tensor with the shape, strides and dtype of a value.

    Args:
        otherwise: where its memory comes from outside of a run of a compiled graph.

    Raises:
        MemoryBudgetError: if the system or the driver refuses so much.
    """
    if not value.numel():  # of a rank without rows
        return empty_like_on(value, "cpu")
    if _current.lease is not None:
        return _current.lease.like(value)
    size = aligned(value.numel() * value.element_size())
    with otherwise.run(size, value.device):
        return like_on_host(value)


def with_arenas(
    code: Callable[[list[Any]], Any],
    need: HostNeed,
    arenas: SavedArenas,
    report: Callable[[MemoryBudgetError], None],
) -> Callable[[list[Any]], Any]:
    """Returns the code of a graph, with an arena for each of its runs.

    Args:
        need: what a run puts on the host.
        arenas: those of the graph.
        report: called with the error of a run that needs more, which has not begun.

    Raises:
        MemoryBudgetError: when the code is called, as `HostBytes.reserve`.
    """

    def run(args: list[Any]) -> Any:
        first = next((each for each in args if isinstance(each, Tensor)), None)
        if isinstance(first, compat.FakeTensor):  # nothing is copied
            return code(args)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(arenas.run(need.nbytes(args), need.device))
            except MemoryBudgetError as error:
                report(error)
                raise
            return code(args)

    return run
