"""What reading and writing dumps raises. Every message says what was given, what was expected and
what to do."""

from __future__ import annotations

from zpasses.errors import ZpassesError

__all__ = [
    "DamagedDumpError",
    "DumpError",
    "DumpPathError",
    "DumpTooLargeError",
    "DumpVersionError",
    "NotADumpError",
]


class DumpError(ZpassesError):
    """A dump cannot be read or written."""


class NotADumpError(DumpError):
    """The path holds no dump."""


class DumpVersionError(DumpError):
    """The dump has another format version: a newer or older zpasses wrote it."""


class DamagedDumpError(DumpError):
    """A file of the dump is missing, cut off, or does not say what the format wants."""


class DumpTooLargeError(DumpError):
    """Something in the dump is larger than the limits allow."""


class DumpPathError(DumpError):
    """A path in the dump is a link or no plain file, or the dump cannot be written where it should
    go."""
