"""Device streams emulated by threads: work on one stream runs in order, concurrently with the code
that enqueued it.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["DeviceFaultError", "HostStream"]


class DeviceFaultError(RuntimeError):
    """An action that would crash, corrupt memory or hang on a real device."""


class HostStream:
    """Runs the work that is enqueued on it, in a thread of its own."""

    _numbers = itertools.count(1)
    _by_handle: dict[int, HostStream] = {}

    def __init__(self, time_limit_s: float) -> None:
        self.handle = next(HostStream._numbers)
        HostStream._by_handle[self.handle] = self
        self._limit_s, self._queue, self.fault = time_limit_s, queue.Queue[Callable[[], Any]](), ""
        threading.Thread(target=self._serve, name=f"stream {self.handle}", daemon=True).start()

    @classmethod
    def of(cls, handle: int) -> HostStream:
        return cls._by_handle[handle]

    def _serve(self) -> None:
        while True:
            work = self._queue.get()
            try:
                if not self.fault or isinstance(work, _Signal):
                    work()
            except Exception as error:
                self.fault = f"{type(error).__name__}: {error}"

    def follow_current(self) -> None:
        """Does nothing, because CPU operators are complete when they return."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def run(self, work: Callable[[], Any]) -> None:
        self._queue.put(work)

    def record(self) -> _HostEvent:
        event = _HostEvent(self, self._limit_s)
        self._queue.put(_Signal(event))
        return event

    def keep(self, tensor: Tensor) -> None:
        self._queue.put(lambda: tensor)

    def synchronize(self) -> None:
        self.record().wait()


class _HostEvent:
    def __init__(self, stream: HostStream, limit_s: float) -> None:
        self.reached, self._stream, self._limit_s = threading.Event(), stream, limit_s

    def wait(self) -> None:
        if not self.reached.wait(2 * self._limit_s):
            raise DeviceFaultError(f"stream {self._stream.handle} hangs")
        if self._stream.fault:
            raise DeviceFaultError(self._stream.fault)


class _Signal:
    def __init__(self, event: _HostEvent) -> None:
        self._event = event

    def __call__(self) -> None:
        self._event.reached.set()
