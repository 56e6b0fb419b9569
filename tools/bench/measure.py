"""What is measured inside a rank: bytes, collectives and compile work, in the same way for every
peer."""

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

__all__ = [
    "MemoryProfile",
    "ResidentMemory",
    "Traffic",
    "Work",
    "held_bytes",
    "observe_work",
    "sent_bytes",
    "traffic",
]


# --- memory ---------------------------------------------------------------------------------------
_MARK = "zpasses.tools.bench "


class MemoryProfile:
    """Follows every allocation of this process while it is entered, and says what one marked step
    adds on top.

    It must be entered before anything is built: the profiler does not see the release of what it
    did not see allocated."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> MemoryProfile:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    @staticmethod
    def mark(name: str) -> Any:
        """A context manager around what to look at."""
        return record_function(_MARK + name)

    def read(self, name: str, device: str | None = None) -> tuple[int, int]:
        """Bytes allocated when the marked code began, and the most that it added to them. After
        leaving.

        Args:
            name: as it was marked.
            device: only the memory of this type of device, "CPU" or "CUDA"; None counts all
                together.
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
    """The most memory that this process held since the object was made, above what it held then
    (Linux).

    By the kernel's count, so that it does not matter which thread allocates and frees: gloo's free
    what they communicated, which torch's profiler does not see. The process must have been started
    with `ENVIRONMENT`, which has malloc return what is freed."""

    ENVIRONMENT: ClassVar[dict[str, str]] = {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_TOP_PAD_": "0",
    }

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._before = self._status("VmRSS")

    def peak_bytes(self) -> int:
        return max(
            self._status("VmHWM") - self._before, 0
        )  # the kernel counts to within some pages a thread

    @staticmethod
    def _status(key: str) -> int:
        line = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(key + ":")
        )
        return int(line.split()[1]) * 1024


def held_bytes() -> int:
    """Bytes of all tensors that Python objects hold, and of their gradients, each piece of memory
    once."""
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor):
            continue
        # A gradient that only autograd has seen is no object of Python's until it is asked for.
        grad = each.grad if each.is_leaf else None
        for held in (each, getattr(grad, "_local_tensor", grad)):
            if isinstance(held, Tensor) and type(held) in _PLAIN and held.device.type != "meta":
                storage = held.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


_PLAIN = (Tensor, nn.Parameter)  # DTensors hold such a one; fake tensors hold nothing


# --- collectives ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Traffic:
    """Collectives that process groups of this rank ran, by kind ("all_gather", "all_reduce",
    ...)."""

    counts: dict[str, float]
    sent_bytes: dict[str, float]
    """What one rank must send for them, at the least: ring algorithms.

    An all-gather of s bytes a rank sends (n-1)s, a reduce-scatter of s bytes in (n-1)/n s, an
    all-reduce of s bytes 2(n-1)/n s. """

    def per_step(self, since: Traffic, steps: int) -> Traffic:
        """The mean of each of the `steps` steps after `since`."""
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
    """Everything since the process started, as the process groups themselves recorded it.

    The flight recorder sits below every way to start a collective, Python or C++. (gloo runs a
    reduce-scatter as an all-reduce, and it shows as one.) TORCH_FR_BUFFER_SIZE must be set before
    the first group is made."""
    counts: dict[str, float] = {}
    sent: dict[str, float] = {}
    for entry in compat.flight_record():
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
    """Bytes that one rank sends for a collective of this kind, given so many."""
    size = dist.get_world_size()
    if "gather" in kind:
        return (size - 1) * given
    if "all_reduce" in kind or "allreduce" in kind:
        return 2 * (size - 1) / size * given
    if "reduce_scatter" in kind or "all_to_all" in kind or "alltoall" in kind:
        return (size - 1) / size * given
    return given


# --- compile work ---------------------------------------------------------------------------------
@dataclass
class Work:
    """Time in zpasses' own passes and in the checks after them, seconds."""

    passes_s: float = 0.0
    checks_s: float = 0.0


@contextlib.contextmanager
def observe_work() -> Iterator[Work]:
    """Inside, adds up what the zpasses backend reports; stays at 0 for peers that do not use it."""
    from zpasses.pipeline.observers import GraphLog, observe_graphs

    work = Work()

    def add(graph: GraphLog) -> None:
        work.passes_s += sum(record.time_us for record in graph.records) / 1e6
        work.checks_s += sum(record.check_us for record in graph.records) / 1e6

    with observe_graphs(add):
        yield work
