"""Measurements inside a rank, the same for every peer: memory, collectives, and time in passes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from zpasses import compat
from zpasses.pipeline.events import ObservedGraph, observe_graphs
from zpasses.runtime.gloo import STARTED

__all__ = [
    "MemoryProfile",
    "PassTime",
    "ResidentMemory",
    "Traffic",
    "held_bytes",
    "observe_pass_time",
    "sent_bytes",
    "traffic",
]


# --- memory ---------------------------------------------------------------------------------------
_MARK = "zpasses.tools.bench "


class MemoryProfile:
    """Context manager that follows every allocation of this process, and measures what a marked
    section adds.

    It must be entered before any tensor is made, because the profiler misses the release of memory
    whose allocation it has not seen.
    """

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> MemoryProfile:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    @staticmethod
    def mark(name: str) -> Any:
        """A context manager around the code to measure."""
        return record_function(_MARK + name)

    def read(self, name: str, device: str | None = None) -> tuple[int, int]:
        """(bytes allocated when the marked code started, peak above them). Call it after leaving
        the context.

        Args:
            name: the name of the mark.
            device: count only memory of this device type, "CPU" or "CUDA"; None counts all.
        """
        results: Any = self._profile.profiler
        events = results.kineto_results.events()
        step = next(event for event in events if event.name() == _MARK + name)
        start, end = step.start_ns(), step.start_ns() + step.duration_ns()
        live = resting = peak = 0
        for event in sorted(
            (event for event in events if event.name() == "[memory]"),
            key=lambda event: event.start_ns(),
        ):
            if device is not None and event.device_type().name != device:
                continue
            live += event.nbytes()
            if event.start_ns() < start:
                resting = peak = live
            elif event.start_ns() <= end:
                peak = max(peak, live)
        return resting, peak - resting


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
    "Double": 8,
    "Long": 8,
    "Half": 2,
    "BFloat16": 2,
    "Short": 2,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
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
