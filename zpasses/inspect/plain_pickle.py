"""Reads pickles of plain values from untrusted files: numbers, texts, None, lists, tuples and
dictionaries.

No class, function or object of any other kind can be named, so nothing of the file is executed.
Python's own unpickler is not used: it would also reserve memory as the file asks for it.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zpasses.dumps.errors import DamagedDumpError
from zpasses.dumps.limits import Work

__all__ = ["load_plain_pickle"]

_VALUES = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
}
_CONSTANTS: dict[str, Any] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_TUPLE": (),
}
_MAKE: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
_PUT = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GET = {"BINGET", "LONG_BINGET"}
_MARK: Any = object()
_COPY = 4
"""Work of copying a value, in that of a byte of the file."""


def load_plain_pickle(data: bytes, path: Path, work: Work) -> Any:
    """The value of a pickle.

    Args:
        data: the pickle.
        path: its file, for errors.
        work: counts the work.

    Raises:
        DamagedDumpError: if it is damaged, or has anything but plain values.
        DumpTooLargeError: if it exceeds the limits.
    """
    work.pickle(str(path), len(data))
    machine = _Machine(path, work)
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.result()
            machine.step(opcode.name, argument, position or 0)
    except _RefusedError as error:
        raise DamagedDumpError(
            f"{path}: {error}; expected the plain values of a flight recorder. Nothing of it was "
            "executed."
        ) from error
    except (ValueError, IndexError, TypeError, KeyError, OverflowError) as error:
        raise DamagedDumpError(
            f"{path}: is a damaged pickle ({str(error)[:200]}). Copy it again."
        ) from error
    raise DamagedDumpError(f"{path}: is a pickle without an end. Copy it again.")


class _RefusedError(Exception):
    """An instruction that makes something other than plain values."""


class _Machine:
    """Executes the instructions of a pickle that make plain values."""

    def __init__(self, path: Path, work: Work) -> None:
        self._path, self._work = path, work
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        (value,) = self._stack
        return value

    def step(self, name: str, argument: Any, position: int) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _MAKE:
            stack.append(_MAKE[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _PUT:
            key = len(self._memo) if name == "MEMOIZE" else argument
            self._memo[key] = stack[-1]
        elif name in _GET:
            value = self._memo[argument]
            # A copy, whose work counts: values that are shared often would be read as often.
            stack.append(self._copied(value, self._work.limits.depth))
        elif name in ("APPENDS", "SETITEMS", "TUPLE"):
            self._marked(name)
        elif name in ("APPEND", "SETITEM"):
            count = 1 if name == "APPEND" else 2
            items = stack[-count:]
            del stack[-count:]
            self._extend(name, items)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            if len(stack) < count:
                raise ValueError("a tuple of too few values")
            made = tuple(stack[-count:])
            del stack[-count:]
            stack.append(made)
        elif name not in ("PROTO", "FRAME"):
            raise _RefusedError(f"the instruction {name} at byte {position} is refused")

    def _copied(self, value: Any, depth: int) -> Any:
        if value is _MARK:
            raise ValueError("a mark as a value")
        if not isinstance(value, (list, dict, tuple)):
            return value
        if depth < 0:
            raise _RefusedError("repeated containers are nested too deep")
        self._work.pickle(str(self._path), _COPY * (1 + len(value)))
        if isinstance(value, dict):
            return {key: self._copied(item, depth - 1) for key, item in value.items()}
        copies = [self._copied(item, depth - 1) for item in value]
        return tuple(copies) if isinstance(value, tuple) else copies

    def _marked(self, name: str) -> None:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        if name == "TUPLE":
            self._stack.append(tuple(items))
        else:
            self._extend(name, items)

    def _extend(self, name: str, items: list[Any]) -> None:
        into = self._stack[-1]
        if name.startswith("APPEND"):
            if not isinstance(into, list):
                raise ValueError("no list to append to")
            into.extend(items)
            return
        if not isinstance(into, dict) or len(items) % 2:
            raise ValueError("no dictionary to fill")
        into.update(zip(items[::2], items[1::2], strict=True))
