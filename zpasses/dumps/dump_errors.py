"""Errors of reading and writing dumps.

Every message names what was given, what was expected, and what to do.
"""

from __future__ import annotations

from zpasses.errors import ZpassesError


class DumpError(ZpassesError):
    """A dump cannot be read or written."""


class NotADumpError(DumpError):
    """The path contains no dump."""


class NotATraceError(DumpError):
    """The file is no trace of `torch.profiler`, or belongs to another run."""


class OtherRunError(DumpError):
    """The folder contains the dump of another run, which this run would mix with its own."""


class DumpVersionError(DumpError):
    """The dump has another format version: a newer or an older zpasses wrote it."""


class DamagedDumpError(DumpError):
    """A file of the dump is missing, truncated, or does not follow the format."""


class DumpTooLargeError(DumpError):
    """A part of the dump exceeds `Limits`."""


class DumpPathError(DumpError):
    """A path in the dump is a link or no regular file, or the dump cannot be written to its
    folder."""
