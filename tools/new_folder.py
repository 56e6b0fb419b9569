"""Folders that a command fills."""

from __future__ import annotations

from pathlib import Path

from zpasses.dumps.reader import HEADER
from zpasses.errors import ZpassesError


class FolderError(ZpassesError):
    """A folder cannot be filled."""


def check_new(folder: Path) -> None:
    """Refuse a folder with files, before anything is built or runs.

    Raises:
        FolderError: if it is no folder, or not empty.
    """
    if not folder.is_dir():
        found = "is a file" if folder.exists() else None
    elif (folder / HEADER).exists():
        found = "contains the dump of another run"
    else:
        first = next(folder.iterdir(), None)
        found = None if first is None else f"contains {first.name!r}"
    if found is not None:
        raise FolderError(
            f"--output {folder} {found}; expected an empty folder, or none. Name a new folder "
            "with -o, or remove this one."
        )
