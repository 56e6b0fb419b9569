"""Reads traces of `torch.profiler` (chrome JSON, also compressed by gzip) from untrusted files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from zpasses.dumps.dump_errors import DamagedDumpError, NotATraceError
from zpasses.dumps.files import damaged, decoded, read_bytes
from zpasses.dumps.limits import Limits
from zpasses.dumps.nodes import Count, Micros, Record

_NAME_CHARS = 300


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A stretch of time on one thread or one stream of a device."""

    name: str
    category: str
    """ "cpu_op", "user_annotation", "kernel", "cuda_runtime", ..."""
    thread: tuple[str, str]
    """Process and thread."""
    start_us: float
    end_us: float
    correlation: int | None = None
    """Number that a kernel shares with the call that launched it."""


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Bytes that an allocator of torch holds after an allocation or a release.

    They count from the start of the trace.
    """

    at_us: float
    device: int
    """Type of the device: 0 for the CPU."""
    allocated: int


@dataclass(frozen=True)
class Trace:
    """What one rank recorded."""

    path: Path
    rank: int | None
    """None if the program had no process group."""
    world: int | None
    events: tuple[TraceEvent, ...]
    """In the order of their start. An event follows those that contain it."""
    memory: tuple[MemoryEvent, ...] = ()
    """In the order of time. Empty without `profile_memory=True`."""
    process: Mapping[str, int] | None = None
    """What `zpasses measure` adds: "peak_rss_bytes", "peak_device_bytes", "steps"."""


def read_trace(path: str | Path, limits: Limits | None = None) -> Trace:
    """Read a trace that `torch.profiler` exported by `export_chrome_trace`.

    Args:
        path: a file of JSON, or one that gzip has compressed.
        limits: upper bounds for what is read; None is `Limits()`.

    Raises:
        NotATraceError: if the file is missing, or contains something else.
        DumpTooLargeError: if it exceeds the limits.
        DumpError: if it is damaged.
    """
    limits, path = limits or Limits(), Path(path)
    if not path.exists():
        raise NotATraceError(
            f"{path} does not exist; expected a trace that torch.profiler exported by "
            "export_chrome_trace."
        )
    data = read_bytes(path.resolve(), limits)
    try:
        whole = decoded(data, _File, path, limits)
    except DamagedDumpError as error:
        if b"traceEvents" in data[: 1 << 16]:
            raise
        raise NotATraceError(f"{path} is not a trace; {_EXPECTED}") from error
    return _trace(path, whole)


_EXPECTED = "expected the JSON that torch.profiler exports by export_chrome_trace."


Number = Annotated[float, Meta(gt=-(1 << 62), lt=1 << 62)]
Integer = Annotated[int, Meta(gt=-(1 << 62), lt=1 << 62)]


class _Job(Record, frozen=True):
    rank: Count | None = None
    world_size: Count | None = None


class _File(Record, frozen=True):
    """A file of the profiler. Events have other fields in each phase."""

    trace_events: list[dict[str, Any]] = field(name="traceEvents")
    job: _Job = field(name="distributedInfo", default=_Job())
    process: dict[str, Count] | None = field(name="zpasses", default=None)


class _Span(Record, frozen=True):
    name: str
    ts: Number
    cat: str = ""
    pid: int | str = ""
    tid: int | str = ""
    dur: Micros = 0.0
    args: Any = None


class _MemoryArguments(Record, frozen=True):
    device: Integer = field(name="Device Type", default=0)
    allocated: Integer = field(name="Total Allocated", default=0)


class _Memory(Record, frozen=True):
    ts: Number
    args: _MemoryArguments


def _trace(path: Path, whole: _File) -> Trace:
    events: list[TraceEvent] = []
    memory: list[MemoryEvent] = []
    for number, item in enumerate(whole.trace_events):
        try:
            if item.get("ph") == "X":
                events.append(_event(msgspec.convert(item, _Span)))
            elif item.get("ph") == "i" and item.get("name") == "[memory]":
                found = msgspec.convert(item, _Memory)
                memory.append(MemoryEvent(found.ts, found.args.device, found.args.allocated))
        except msgspec.ValidationError as error:
            raise damaged(error, f"{path}, event {number}") from error
    events.sort(key=lambda each: (each.start_us, -each.end_us))
    memory.sort(key=lambda each: each.at_us)
    job = whole.job
    return Trace(path, job.rank, job.world_size, tuple(events), tuple(memory), whole.process)


def _event(span: _Span) -> TraceEvent:
    correlation = span.args.get("correlation") if isinstance(span.args, dict) else None
    number = correlation if type(correlation) is int else None
    track = (str(span.pid)[:_NAME_CHARS], str(span.tid)[:_NAME_CHARS])
    named = (span.name[:_NAME_CHARS], span.cat[:_NAME_CHARS], track)
    return TraceEvent(*named, span.ts, span.ts + span.dur, number)
