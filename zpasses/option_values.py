"""Conversion of option values between text and Python objects.

Options are fields of frozen dataclasses. The same rules apply to the options of passes and to those
of the backend.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

import torch

from zpasses.errors import OptionError, suggestion

T = typing.TypeVar("T")


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The types of a dataclass's init fields, by field name. Text annotations are resolved."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def build_dataclass(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """Build a dataclass from values by field name. Text is converted to the field's type.

    Args:
        what: what the dataclass is, for error messages, such as "pass 'schedule'".

    Raises:
        OptionError: for a name that is not a field, or a value of the wrong type.
    """
    known = field_types(cls)  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise OptionError(f"{what} has no option {name!r}.{suggestion(name, known)}")
    converted = {
        name: parse_value(value, known[name], f"{what}, option {name!r}")
        for name, value in values.items()
    }
    try:
        return cls(**converted)
    except TypeError as error:
        raise OptionError(f"{what}: {error}") from error


def parse_value(value: Any, kind: Any, where: str) -> Any:
    """Convert `value` to the type `kind`.

    Text is parsed. Any other value must have the type already, except that an int is accepted for a
    float.

    Args:
        where: what the value belongs to, for the error message.

    Raises:
        OptionError: if the value does not have the type and cannot be parsed as it.
    """
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for choice in choices:
        converted, result = _convert(value, choice)
        if converted:
            return result
    raise OptionError(
        f"{where}: got {value!r} ({type(value).__name__}); expected {describe_type(kind)}."
    )


def _convert(value: Any, kind: Any) -> tuple[bool, Any]:
    if get_origin(kind) is Literal:
        return _convert_literal(value, get_args(kind))
    if kind is type(None):
        return (True, None) if value is None or value == "none" else (False, None)
    if kind is torch.dtype:
        found = (
            getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
        )
        return isinstance(found, torch.dtype), found
    if isinstance(value, str) and kind in (bool, int, float):
        return _parse_scalar(value, kind)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return True, float(value)
    if kind is int and isinstance(value, bool):
        return False, None
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and isinstance(value, origin), value


def _convert_literal(value: Any, allowed: tuple[Any, ...]) -> tuple[bool, Any]:
    for item in allowed:
        if value == item and type(value) is type(item):
            return True, item
        if isinstance(value, str) and not isinstance(item, str) and value == format_value(item):
            return True, item
    return False, None


def _parse_scalar(text: str, kind: type) -> tuple[bool, Any]:
    if kind is bool:
        return text in ("true", "false"), text == "true"
    try:
        return True, kind(text)
    except ValueError:
        return False, None


def format_value(value: Any) -> str:
    """Format a value as text that `parse_value` parses back to the same value."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def describe_type(kind: Any) -> str:
    """Describe a type in an error message, such as "float or none"."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe_type(item) for item in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(repr(item) for item in get_args(kind))
    if kind is type(None):
        return "none"
    return (
        "a dtype such as bfloat16" if kind is torch.dtype else str(getattr(kind, "__name__", kind))
    )


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_AMOUNT = r"(\d+(?:\.\d+)?)\s*"
_BUDGET = re.compile(
    rf"\s*(\+?){_AMOUNT}(%|B|KiB|MiB|GiB)(?:\s+up to\s+{_AMOUNT}(B|KiB|MiB|GiB))?"
    rf"(?:\s+of\s+{_AMOUNT}(B|KiB|MiB|GiB))?\s*"
)


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """How far the peak memory of a graph may rise, or the peak that it may reach."""

    most_bytes: int | None = None
    """The allowed peak; None if the budget counts from the peak of the graph."""
    rise: float = 0.0
    """Fraction of its peak by which a graph may exceed it."""
    rise_bytes: int = 0
    """Bytes by which a graph may exceed its peak."""
    most_rise_bytes: int | None = None
    """Largest rise in bytes; None if nothing else bounds it."""
    of_bytes: int | None = None
    """The peak from which it counts, such as that of a step; None for that of each graph."""

    def limit_bytes(self, peak_bytes: int) -> int:
        """Returns the allowed peak of a graph that has this peak."""
        if self.most_bytes is not None:
            return self.most_bytes
        peak_bytes = peak_bytes if self.of_bytes is None else self.of_bytes
        rise = int(peak_bytes * self.rise) + self.rise_bytes
        return peak_bytes + (
            rise if self.most_rise_bytes is None else min(rise, self.most_rise_bytes)
        )


def parse_budget(text: str, where: str) -> MemoryBudget:
    """Parse a memory budget: "5%", "+300MiB" and "25% up to 16MiB" say how far the peak may rise,
    "5% of 60GiB" from which peak, and "60GiB" is the allowed peak.

    Raises:
        OptionError: for anything else.
    """
    match = _BUDGET.fullmatch(text)
    is_peak = match is not None and not match[1] and match[3] != "%"
    if match is None or (match[4] and match[3] != "%") or (match[6] and is_peak):
        raise OptionError(
            f"{where}: got {text!r}; expected how far the peak may rise ('5%', '+300MiB' or "
            "'25% up to 16MiB', each also 'of 60GiB') or the allowed peak ('60GiB'; units B, KiB, "
            "MiB, GiB)."
        )
    sign, number, unit, most, most_unit, peak, peak_unit = match.groups()
    of_bytes = int(float(peak) * _UNITS[peak_unit]) if peak else None
    if unit == "%":
        limit = int(float(most) * _UNITS[most_unit]) if most else None
        return MemoryBudget(rise=float(number) / 100, most_rise_bytes=limit, of_bytes=of_bytes)
    size = int(float(number) * _UNITS[unit])
    if sign:
        return MemoryBudget(rise_bytes=size, of_bytes=of_bytes)
    return MemoryBudget(most_bytes=size)


_SIZE = re.compile(rf"\s*{_AMOUNT}(B|KiB|MiB|GiB)\s*")


def parse_size(text: object, where: str) -> int:
    """Parse a number of bytes, such as "2GiB".

    Raises:
        OptionError: for anything else.
    """
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise OptionError(
            f"{where}: got {text!r}; expected a size such as '2GiB' (units B, KiB, MiB, GiB)."
        )
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(nbytes: int, *, up: bool = False) -> str:
    """Format a number of bytes for a message: "1.5 GiB".

    Args:
        up: round up, for a number of bytes that is needed.
    """
    unit = next(name for name in reversed(_UNITS) if nbytes >= _UNITS[name] or name == "B")
    count = nbytes / _UNITS[unit]
    if count >= 1e4:
        return f"{count:,.0f} {unit}"
    if up and nbytes and float(f"{count:.4g}") * _UNITS[unit] < nbytes:
        count += 10.0 ** (math.floor(math.log10(count)) - 3)
    return f"{count:.4g} {unit}"
