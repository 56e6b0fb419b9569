"""Reads files from an untrusted folder: regular files below one folder, within limits, as JSON of
known types.

File names come from directory listings that match a pattern, never from the content of a file.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from zpasses.dumps.dump_errors import DamagedDumpError, DumpPathError
from zpasses.dumps.limits import Limits

T = TypeVar("T")

_ADDRESSABLE = (1 << 62) - 1
"""Bytes that one read may ask for."""


def list_folder(folder: Path, limits: Limits) -> list[str]:
    """Names of the entries of a folder, sorted.

    Raises:
        DamagedDumpError: if it cannot be read.
        DumpPathError: if it is a link or no folder.
        DumpTooLargeError: if it has too many entries.
    """
    try:
        status = os.lstat(folder)
    except OSError as error:
        raise DamagedDumpError(f"{folder}: cannot be read: {error.strerror or error}.") from error
    if not stat.S_ISDIR(status.st_mode):
        raise DumpPathError(
            f"{folder} is {_kind(status.st_mode)}; expected a folder. Nothing was read from it."
        )
    names: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) > limits.entries:
                    raise limits.exceeded(folder, "has more entries", "entries")
    except OSError as error:
        raise DamagedDumpError(f"{folder}: cannot be read: {error.strerror or error}.") from error
    return sorted(names)


@contextlib.contextmanager
def _opened(path: Path, limits: Limits) -> Iterator[Any]:
    """Open a regular file. A link is not followed, and a pipe does not block."""
    flags = (
        os.O_RDONLY
        | getattr(os, "O_NOFOLLOW", 0)
        | getattr(os, "O_NONBLOCK", 0)
        | getattr(os, "O_CLOEXEC", 0)
    )
    try:
        before = os.lstat(path)
        if not stat.S_ISREG(before.st_mode):
            raise DumpPathError(
                f"{path} is {_kind(before.st_mode)}; a dump contains only regular files. "
                "Nothing was read from it."
            )
        handle = os.open(path, flags)
    except FileNotFoundError as error:
        raise DamagedDumpError(
            f"{path} is missing: the dump is truncated, or was copied incompletely. "
            "Copy the whole folder."
        ) from error
    except OSError as error:
        raise DumpPathError(f"{path}: cannot be opened: {error.strerror or error}.") from error
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DumpPathError(
                f"{path} is {_kind(status.st_mode)}; a dump contains only regular files."
            )
        if status.st_size > limits.file_bytes:
            raise limits.exceeded(path, f"has {status.st_size:,} bytes, more", "file_bytes")
        yield file


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a file" if stat.S_ISREG(mode) else "a device, pipe or socket"


def read_bytes(path: Path, limits: Limits) -> bytes:
    """The content of one file. If it is compressed by gzip, what it contains, within the limit on
    a file.

    Raises:
        DamagedDumpError: if the file is missing.
        DumpPathError: if it is a link or no regular file.
        DumpTooLargeError: if it exceeds the limits.
    """
    with _opened(path, limits) as file:
        # The writer replaces whole files.
        data: bytes = file.read(os.fstat(file.fileno()).st_size)
    return _decompressed(data, path, limits) if data[:2] == b"\x1f\x8b" else data


def _decompressed(data: bytes, path: Path, limits: Limits) -> bytes:
    stream = zlib.decompressobj(wbits=31)
    try:
        content = stream.decompress(data, min(limits.file_bytes, _ADDRESSABLE) + 1)
    except zlib.error as error:
        raise DamagedDumpError(
            f"{path}: is damaged ({error}); expected a whole file of gzip. Copy it again."
        ) from error
    if len(content) > limits.file_bytes:
        raise limits.exceeded(path, "decompresses to more bytes", "file_bytes")
    if not stream.eof:
        raise DamagedDumpError(f"{path}: ends too early. Copy the whole file.")
    return content


def read_lines(path: Path, limits: Limits) -> Iterator[tuple[int, bytes]]:
    """(number, content) of each line of one file. Raises as `read_bytes` does.

    Every line must end with a line break, because a truncated file ends within a line.
    """
    left = limits.file_bytes
    with _opened(path, limits) as file:
        number = 0
        while data := file.readline(min(limits.line_bytes, _ADDRESSABLE) + 1):
            number += 1
            left -= len(data)
            if len(data) > limits.line_bytes:
                raise limits.exceeded(
                    f"{path}, line {number}", "the line has more bytes", "line_bytes"
                )
            if left < 0:
                raise limits.exceeded(path, "has grown to more bytes", "file_bytes")
            if not data.endswith(b"\n"):
                raise DamagedDumpError(
                    f"{path}, line {number}: the line has no end: the file is truncated. "
                    "Copy or dump it again."
                )
            yield number, data


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decoded(data: bytes, kind: type[T], where: str | Path, limits: Limits) -> T:
    """JSON as a value of a declared type.

    Args:
        where: the place of the JSON, for error messages.

    Raises:
        DamagedDumpError: if it is not JSON, or not of that type. The error names the field.
        DumpTooLargeError: if its nesting is too deep.
    """
    if data.count(b"[") + data.count(b"{") > limits.depth:  # else it cannot be deeper
        brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
        if max(itertools.accumulate(_NESTING[each] for each in brackets)) > limits.depth:
            raise limits.exceeded(where, "lists and objects are nested deeper", "depth")
    try:
        return _decoder(kind).decode(data)  # type: ignore[arg-type, no-any-return]
    except ValueError as error:
        raise damaged(error, where) from error


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NESTING = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - _NESTING.keys())


def damaged(error: Exception, where: str | Path) -> DamagedDumpError:
    """The error about a record that does not follow its declaration, or is not JSON."""
    if not isinstance(error, msgspec.ValidationError):
        return DamagedDumpError(f"{where}: is not JSON ({error}). Dump or copy it again.")
    what, _, field = str(error).partition(" - at `$")
    name = f"{field.strip('.`')!r}: " if field else ""
    return DamagedDumpError(f"{where}: {name}{what[0].lower()}{what[1:]}. Dump or copy it again.")
