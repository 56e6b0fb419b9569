"""What a Python function computes, as text: its source, and what it reads besides its arguments."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Types whose values are equal if their `repr` is."""

_VERSIONED = frozenset({"torch", "zpasses", "triton", "numpy", *sys.stdlib_module_names})
"""Packages whose versions or sources are in the key of the cache."""


def functions_digest(functions: Sequence[Callable[..., Any]]) -> str:
    """Returns a digest of functions, and of what they find in closures, in defaults and among the
    names of their modules and of modules that they read: constants, functions, other modules.

    Raises:
        ValueError: if the source of one is not known, or a closure holds something else. The
            message ends a sentence about it.
    """
    reader = _Reader()
    for each in functions:
        reader.add_function(each)
    digest = hashlib.sha256("\n".join(reader.values).encode())
    for path in sorted(reader.files):
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


class _Reader:
    def __init__(self) -> None:
        self.files: set[str] = set()
        self.values: list[str] = []
        self._seen: set[int] = set()
        self._seen_names: set[tuple[int, str]] = set()

    def add_function(self, function: Callable[..., Any]) -> None:
        if isinstance(function, functools.partial):
            for each in (*function.args, *function.keywords.items()):
                self._add_value(each, f"{function.func!r}")
            function = function.func
        if isinstance(function, types.MethodType):
            self._add_value(function.__self__, function.__qualname__)
            function = function.__func__
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            self.add_function(wrapped)
        if _is_versioned(_module_of(function)):
            name = getattr(function, "__qualname__", str(function))  # an operator has only a text
            if " at 0x" in name:
                raise ValueError(f"whose function holds a {type(function).__name__}")
            self.values.append(name)
            return
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self._add_source(function)
        if not isinstance(function, types.FunctionType):
            return
        where = function.__qualname__
        variables = inspect.getclosurevars(function)
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())
        for value in (*variables.nonlocals.items(), *given):
            self._add_value(value, where)
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        self._add_names(names, function.__globals__)
        for value in variables.nonlocals.values():
            self._add_names(names, _own_names(value))

    def _add_names(self, names: Set[str], found: Mapping[str, Any]) -> None:
        """Add the values that code with these names may read of a module."""
        for name in sorted(names & found.keys()):
            if (id(found), name) not in self._seen_names:
                self._seen_names.add((id(found), name))
                self._add_global(name, found[name])
                self._add_names(names, _own_names(found[name]))

    def _add_global(self, name: str, value: Any) -> None:
        if isinstance(value, PLAIN):
            self.values.append(f"{name}={value!r}")
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self.add_function(value)
        elif isinstance(value, (tuple, list, dict, set, frozenset, torch.Tensor)):
            self._add_value(value, f"reads {name}, and")
        elif callable(value) or isinstance(value, types.ModuleType):  # such as a kernel of Triton
            module = getattr(value, "__module__", getattr(value, "__name__", None))
            if not _is_versioned(module) and module in sys.modules:
                self._add_source(sys.modules[module])

    def _add_value(self, value: Any, where: str) -> None:
        if isinstance(value, PLAIN):
            self.values.append(repr(value))
        elif isinstance(value, (tuple, list, dict)):
            self.values.append(type(value).__name__)
            for each in value.items() if isinstance(value, dict) else value:
                self._add_value(each, where)
        elif isinstance(value, (set, frozenset)):
            self._add_value(sorted(value, key=repr), where)
        elif callable(value) and not isinstance(value, torch.nn.Module):
            self.add_function(value)
        elif isinstance(value, types.ModuleType):
            self._add_global("", value)
        else:
            raise ValueError(f"whose function {where} holds a {type(value).__name__}")

    def _add_source(self, source: Any) -> None:
        try:
            path = inspect.getsourcefile(source)
        except TypeError:
            path = None
        if path is None:
            raise ValueError("whose source is not known")
        self.files.add(path)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _own_names(value: Any) -> Mapping[str, Any]:
    """What code finds in a value by name: in a module that no version stands for."""
    is_own = isinstance(value, types.ModuleType) and not _is_versioned(value.__name__)
    return vars(value) if is_own else {}


def _module_of(function: Any) -> str | None:
    """The module whose code it is: `functools.wraps` gives a wrapper the name of another one."""
    if isinstance(function, types.FunctionType):
        return str(function.__globals__.get("__name__"))
    return getattr(function, "__module__", None)


def _is_versioned(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _VERSIONED
