"""Files of the compile cache: written at once or not at all, and read only if they are whole.

    DIR/v1/KEY/entry        the graph: what AOTAutograd made of it, and its facts
    DIR/v1/KEY/TOKEN/NAME   code and rewritten graphs that belong to one entry

A file starts with the SHA-256 of the rest. A damaged file counts as missing and is deleted. Files
are pickles, so the folder must belong to this user: its permissions are those of the user alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from zpasses import compat

log = logging.getLogger("zpasses")

_DIGEST_BYTES = 32


def cache_folder() -> Path:
    """Returns the folder of the cache: ZPASSES_CACHE_DIR, or `zpasses` in torch's own."""
    given = os.environ.get("ZPASSES_CACHE_DIR")
    return Path(given) if given else Path(compat.inductor_cache_folder()) / "zpasses"


def _make_private(folder: Path) -> None:
    """Creates a folder with its parents. New ones are for this user only.

    Raises:
        OSError: if that is not possible.
    """
    if not folder.is_dir():
        if folder.parent != folder:
            _make_private(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)


@dataclass(frozen=True)
class CacheFiles:
    """The files of one graph."""

    folder: Path

    @classmethod
    def of(cls, key: str) -> CacheFiles:
        return cls(cache_folder() / "v1" / key)

    def read(self, name: str) -> bytes | None:
        """Returns the contents of a file; None if it is missing, damaged or of another user."""
        path = self.folder / name
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.getuid():
                    log.warning("compile cache: %s belongs to another user and is not read", path)
                    return None
                data = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("compile cache: %s cannot be read: %s", path, error)
            return None
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]:
            return data[_DIGEST_BYTES:]
        log.warning("compile cache: %s is damaged and is deleted", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def write(self, name: str, data: bytes) -> bool:
        """Writes a file; returns whether that was possible."""
        path = self.folder / name
        try:
            _make_private(path.parent)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with open(handle, "wb") as file:
                    file.write(hashlib.sha256(data).digest())
                    file.write(data)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            log.warning("compile cache: %s cannot be written: %s", path, error)
            return False
        return True

    def remove_others(self, token: str) -> None:
        """Removes the files of earlier entries of this graph."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.is_dir() and path.name != token:
                    shutil.rmtree(path, ignore_errors=True)
