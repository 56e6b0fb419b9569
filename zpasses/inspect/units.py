"""Formats bytes, microseconds, counts and lists of names for people."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: float) -> str:
    """1536 -> "1.5 KiB", with three digits."""
    size, unit = float(count), 0
    while abs(size) >= 1023.95 and unit < len(_BYTES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{_digits(size)} {_BYTES[unit]}"


def time_text(us: float) -> str:
    """1234.5 microseconds -> "1.23 ms", with three digits."""
    size, unit = us, "us"
    if abs(us) >= 999.5:
        size, unit = us / 1e3, "ms"
    if abs(us) >= 999.5e3:
        size, unit = us / 1e6, "s"
    return "0" if us == 0 else f"{_digits(size)} {unit}"


def count_text(count: int) -> str:
    """17857 -> "17,857"."""
    return f"{count:,}"


def count(number: int, what: str) -> str:
    """ "17,857 nodes"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def change_text(before: float, after: float) -> str:
    """The relative change from `before` to `after`: "+20.0%", "-3.1%", "=" for no change, "new" if
    `before` is 0.
    """
    if before == after:
        return "="
    return "new" if before == 0 else f"{(after - before) / before:+.1%}"


def _digits(size: float) -> str:
    digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    text = f"{size:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
