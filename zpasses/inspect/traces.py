"""Reads traces of `torch.profiler` (chrome JSON, also compressed by gzip) from untrusted files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zpasses.dumps.errors import DumpError, NotATraceError
from zpasses.dumps.files import Record, parse_object, read_bytes
from zpasses.dumps.limits import Limits

__all__ = ["MemoryEvent", "Trace", "TraceEvent", "read_trace"]

_MOST = 1 << 62
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
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotATraceError(f"{path} is not UTF-8 text; {_EXPECTED}") from error
    del data
    try:
        whole = parse_object(text, str(path), limits)
    except DumpError as error:
        if "traceEvents" in text[: 1 << 16] or type(error).__name__ == "DumpTooLargeError":
            raise
        raise NotATraceError(f"{path} is not a trace; {_EXPECTED}") from error
    del text
    if not isinstance(whole.data.get("traceEvents"), list):
        raise NotATraceError(f"{path} has no list 'traceEvents'; {_EXPECTED}")
    return _trace(path, whole)


_EXPECTED = "expected the JSON that torch.profiler exports by export_chrome_trace."


def _trace(path: Path, whole: Record) -> Trace:
    events: list[TraceEvent] = []
    memory: list[MemoryEvent] = []
    items = whole.items("traceEvents")
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise NotATraceError(f"{path}, event {number}: is no object; {_EXPECTED}")
        phase = item.get("ph")
        if phase == "X":
            events.append(_event(Record(item, f"{path}, event {number}")))
        elif phase == "i" and item.get("name") == "[memory]":
            memory.append(_memory(Record(item, f"{path}, event {number}")))
    events.sort(key=lambda each: (each.start_us, -each.end_us))
    memory.sort(key=lambda each: each.at_us)
    about = whole.optional_record("distributedInfo")
    process = whole.optional_record("zpasses")
    return Trace(
        path,
        about.optional_integer("rank") if about is not None else None,
        about.optional_integer("world_size") if about is not None else None,
        tuple(events),
        tuple(memory),
        {key: process.integer(key) for key in process.data} if process is not None else None,
    )


def _event(record: Record) -> TraceEvent:
    start = _time(record, "ts")
    args = record.data.get("args")
    correlation = args.get("correlation") if isinstance(args, dict) else None
    return TraceEvent(
        record.text("name")[:_NAME_CHARS],
        record.text("cat", "")[:_NAME_CHARS],
        (_track(record, "pid"), _track(record, "tid")),
        start,
        start + record.number("dur", 0.0),
        correlation if type(correlation) is int else None,
    )


def _memory(record: Record) -> MemoryEvent:
    args = record.record("args")
    return MemoryEvent(
        _time(record, "ts"),
        int(_whole(args, "Device Type")),
        int(_whole(args, "Total Allocated")),
    )


def _whole(record: Record, key: str) -> int:
    value = record.data.get(key, 0)
    if type(value) is not int or abs(value) >= _MOST:
        raise record.fail(key, "an integer")
    return value


def _time(record: Record, key: str) -> float:
    value: Any = record.data.get(key)
    if type(value) not in (int, float) or not -_MOST < value < _MOST:
        raise record.fail(key, "a number of microseconds")
    return float(value)


def _track(record: Record, key: str) -> str:
    value = record.data.get(key, "")
    if type(value) not in (int, str):
        raise record.fail(key, "a number or a text")
    return str(value)[:_NAME_CHARS]
