"""Reads files from an untrusted folder: regular files below one folder, within limits, as JSON of
known types.

File names come from directory listings that match a pattern, never from the content of a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zpasses.dumps.errors import DamagedDumpError, DumpPathError
from zpasses.dumps.limits import Limits

__all__ = ["Record", "list_folder", "parse_object", "read_bytes", "read_lines", "read_text"]

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


def read_text(path: Path, limits: Limits) -> str:
    """The text of one file.

    Raises:
        DamagedDumpError: if the file is missing or is not UTF-8.
        DumpPathError: if it is a link or no regular file.
        DumpTooLargeError: if it exceeds the limits.
    """
    return _text(read_bytes(path, limits), path, 0)


def read_bytes(path: Path, limits: Limits) -> bytes:
    """The content of one file. If it is compressed by gzip, what it contains, within the limit on
    a file. Raises as `read_text` does.
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


def read_lines(path: Path, limits: Limits) -> Iterator[tuple[int, str]]:
    """(number, text) of each line of one file. Raises as `read_text` does.

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
            yield number, _text(data, path, number)


def _text(data: bytes, path: Path, number: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedDumpError(
            f"{path}{f', line {number}' if number else ''}: is not UTF-8 text ({error.reason})."
        ) from error


def parse_object(text: str, where: str, limits: Limits) -> Record:
    """A JSON object. `where` names its place in error messages.

    Raises:
        DamagedDumpError: if the text is not a JSON object.
        DumpTooLargeError: if its nesting is too deep.
    """
    try:
        loaded = _DECODER.decode(text)
        if "\\ud" in text.lower():
            json.dumps(
                loaded, ensure_ascii=False
            ).encode()  # half a surrogate pair cannot be encoded or printed
    except (ValueError, RecursionError) as error:
        raise DamagedDumpError(
            f"{where}: is not JSON ({str(error) or type(error).__name__}). Dump or copy it again."
        ) from error
    if text.count("[") + text.count("{") > limits.depth:  # else it cannot be deeper
        _check_depth(loaded, where, limits)
    if not isinstance(loaded, dict):
        raise DamagedDumpError(f"{where}: is {_name(loaded)}; expected an object.")
    return Record(loaded, where)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
"""`json.loads` would make one for each line."""


def _check_depth(value: Any, where: str, limits: Limits) -> None:
    level, left = [value], limits.depth
    while level:
        if left < 0:
            raise limits.exceeded(where, "lists and objects are nested deeper", "depth")
        inner = []
        for item in level:
            if isinstance(item, dict):
                inner += [each for each in item.values() if isinstance(each, (dict, list))]
            elif isinstance(item, list):
                inner += [each for each in item if isinstance(each, (dict, list))]
        level, left = inner, left - 1


def _name(value: Any) -> str:
    return {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }.get(type(value), "null")


_REQUIRED: Any = object()
_MOST = 1 << 63


@dataclass(frozen=True)
class Record:
    """A JSON object whose fields are read with their expected types. Unknown fields are ignored.

    Each method raises DamagedDumpError if the field has another type, or is missing without a
    default.
    """

    data: Mapping[str, Any]
    where: str

    def fail(self, key: str, expected: str) -> DamagedDumpError:
        given = repr(self.data[key])[:80] if key in self.data else "nothing"
        return DamagedDumpError(f"{self.where}: {key!r} is {given}; expected {expected}.")

    def text(self, key: str, default: str = _REQUIRED) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "text")
        return value

    def name(self, key: str, limits: Limits, default: str = _REQUIRED) -> str:
        """A text of bounded length, which pages repeat."""
        value = self.text(key, default)
        if len(value) > limits.name_chars:
            raise limits.exceeded(
                self.where, f"{key!r} has {len(value):,} characters, more", "name_chars"
            )
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self.data.get(key) is None else self.text(key)

    def integer(self, key: str, default: int = _REQUIRED) -> int:
        """An integer that is not negative."""
        value = self.data.get(key, default)
        if type(value) is not int or not 0 <= value < _MOST:
            raise self.fail(key, "an integer >= 0")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.data.get(key) is None else self.integer(key)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A finite number that is not negative."""
        value = self.data.get(key, default)
        if type(value) not in (int, float) or not 0 <= value < _MOST:  # a NaN fails the comparison
            raise self.fail(key, "a number >= 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.data.get(key, False)
        if type(value) is not bool:
            raise self.fail(key, "true or false")
        return value

    def items(self, key: str) -> list[Any]:
        """A list; empty if the field is missing."""
        value = self.data.get(key, [])
        if not isinstance(value, list):
            raise self.fail(key, "a list")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.items(key)
        if value and not all(isinstance(item, str) for item in value):
            raise self.fail(key, "a list of texts")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.items(key)
        if not all(type(item) is int and 0 <= item < _MOST for item in value):
            raise self.fail(key, "a list of integers >= 0")
        return tuple(value)

    def spans(self, key: str) -> tuple[tuple[float, float], ...]:
        """A list of [start, end]."""
        value = self.items(key)
        for item in value:
            if not (
                isinstance(item, list)
                and len(item) == 2
                and all(type(each) in (int, float) for each in item)
                and 0 <= item[0] <= item[1] < _MOST
            ):
                raise self.fail(key, "a list of [start, end] with 0 <= start <= end")
        return tuple((float(start), float(end)) for start, end in value)

    def sizes(self, key: str) -> tuple[int | str, ...]:
        value = self.items(key)
        if not all(
            (type(item) is int and abs(item) < _MOST) or isinstance(item, str) for item in value
        ):
            raise self.fail(key, "a list of sizes: integers or texts")
        return tuple(value)

    def mapping(self, key: str) -> dict[str, Any]:
        """An object; empty if the field is missing."""
        value = self.data.get(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return value

    def record(self, key: str) -> Record:
        if not isinstance(self.data.get(key), dict):
            raise self.fail(key, "an object")
        return Record(self.data[key], f"{self.where}, {key!r}")

    def optional_record(self, key: str) -> Record | None:
        return None if self.data.get(key) is None else self.record(key)

    def records(self, key: str) -> list[Record]:
        value = self.items(key)
        if not all(isinstance(item, dict) for item in value):
            raise self.fail(key, "a list of objects")
        return [Record(item, f"{self.where}, {key!r}") for item in value]
