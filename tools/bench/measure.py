"""Measurements inside a rank, the same for every peer: memory, collectives, and time in passes."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zpasses import compat
from zpasses.pipeline.events import ObservedGraph, observe_graphs
from zpasses.runtime.gloo import STARTED


# --- memory ---------------------------------------------------------------------------------------
class ResidentMemory:
    """Peak memory of this process since the object was made, above the memory at that time (Linux).

    It reads the kernel's count, which includes every thread. gloo's threads free the tensors of
    collectives, and torch's profiler does not see that. The process must be started with
    `ENVIRONMENT`, so that malloc returns freed memory to the kernel.
    """

    ENVIRONMENT: ClassVar[dict[str, str]] = {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_TOP_PAD_": "0",
    }

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = self._status("VmRSS")

    def peak_bytes(self) -> int:
        return max(
            self._status("VmHWM") - self._before, 0
        )  # the kernel's count is off by some pages per thread

    @staticmethod
    def _status(key: str) -> int:
        line = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(key + ":")
        )
        return int(line.split()[1]) * 1024


def held_bytes() -> int:
    """Bytes of all tensors that Python objects hold, and of their gradients. Each storage counts
    once.
    """
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor):
            continue
        # A gradient becomes a Python object only when it is accessed.
        grad = each.grad if each.is_leaf else None
        for held in (each, getattr(grad, "_local_tensor", grad)):
            if isinstance(held, Tensor) and type(held) in _PLAIN and held.device.type != "meta":
                storage = held.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def settled_bytes() -> int:
    """`held_bytes` after tensors that nothing uses any more are freed."""
    gc.collect()  # compiling leaves reference cycles that hold tensors
    time.sleep(_SETTLE_S)  # gloo's threads release a collective's tensors some time after its wait
    return held_bytes()


_SETTLE_S = 0.2
_PLAIN = (Tensor, nn.Parameter)  # a DTensor contains one of these; fake tensors have no memory


# --- collectives ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Traffic:
    """Collectives that this rank's groups ran, by kind ("all_gather", "all_reduce", ...)."""

    counts: dict[str, float]
    sent_bytes: dict[str, float]
    """Minimum number of bytes that one rank sends for them, as in ring algorithms.

    With n ranks, an all-gather of s bytes per rank sends (n-1)s, a reduce-scatter of s bytes
    (n-1)/n s, and an all-reduce of s bytes 2(n-1)/n s.
    """

    def per_step(self, since: Traffic, steps: int) -> Traffic:
        """The mean per step of the `steps` steps after `since`."""
        counts = {
            kind: (count - since.counts.get(kind, 0)) / steps for kind, count in self.counts.items()
        }
        sent = {
            kind: (sent - since.sent_bytes.get(kind, 0.0)) / steps
            for kind, sent in self.sent_bytes.items()
        }
        return Traffic(
            {k: n for k, n in counts.items() if n}, {k: sent[k] for k, n in counts.items() if n}
        )


def traffic() -> Traffic:
    """All collectives since the process started, as the process groups and zpasses recorded them.

    The flight recorder covers every way to start a collective, from Python or C++, but not the
    exchanges of zpasses over gloo. gloo runs a reduce-scatter as an all-reduce, and it is recorded
    as one. TORCH_FR_BUFFER_SIZE must be set before the first group is made.
    """
    counts: dict[str, float] = dict(STARTED.calls)
    sent: dict[str, float] = dict(STARTED.sent_bytes)
    for entry in compat.flight_recorder_entries():
        kind = entry["profiling_name"].partition(":")[2].strip("_").removesuffix("_base")
        if kind != "barrier":
            counts[kind] = counts.get(kind, 0) + 1
            sent[kind] = sent.get(kind, 0.0) + sent_bytes(
                kind, sum(_sizes(entry["input_sizes"], entry["input_dtypes"]))
            )
    return Traffic(counts, sent)


def _sizes(shapes: list[list[int]], dtypes: list[str]) -> Iterator[int]:
    for shape, dtype in zip(shapes, dtypes, strict=True):
        yield torch.Size(shape).numel() * _ITEM_BYTES.get(dtype, 4)


_ITEM_BYTES = {
    **dict.fromkeys(("Double", "Long"), 8),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
}


def sent_bytes(kind: str, given: int) -> float:
    """Bytes that one rank sends for a collective of this kind with an input of `given` bytes."""
    size = dist.get_world_size()
    if "gather" in kind:
        return (size - 1) * given
    if "all_reduce" in kind or "allreduce" in kind:
        return 2 * (size - 1) / size * given
    if "reduce_scatter" in kind or "all_to_all" in kind or "alltoall" in kind:
        return (size - 1) / size * given
    return given


# --- time in passes -------------------------------------------------------------------------------
@dataclass
class PassTime:
    """Seconds in zpasses' own passes, and in the checks after them."""

    passes_s: float = 0.0
    checks_s: float = 0.0


@contextlib.contextmanager
def observe_pass_time() -> Iterator[PassTime]:
    """Add up the times that the backend reports inside the context. They stay 0 for peers without
    it.
    """
    work = PassTime()

    def add(graph: ObservedGraph) -> None:
        work.passes_s += sum(record.time_us for record in graph.records) / 1e6
        work.checks_s += sum(record.check_us for record in graph.records) / 1e6

    with observe_graphs(add):
        yield work
