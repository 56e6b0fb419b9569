"""The folder of a dump while it is written: which run owns it, which folder each rank has, and
files that appear with their whole content.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from zpasses import compat
from zpasses.dumps import format as data
from zpasses.dumps.dump_errors import DumpPathError, DumpVersionError, NotADumpError, OtherRunError
from zpasses.dumps.json_lines import json_line
from zpasses.dumps.reader import HEADER
from zpasses.version import __version__

_HOW = "Name a new folder with options={'dump': ...} or ZPASSES_DUMP."
_TEMPORARY = ".zpasses-"
_PROCESS = uuid.uuid4().hex[:16]


def create_rank_folder(root: str | Path, rank: int, world: int) -> Path:
    """The folder of one rank in a dump. It is created if it does not exist.

    Raises:
        DumpPathError: if `root` is a file or cannot be written to, or if the rank's folder is a
            link.
        NotADumpError: if `root` contains something else.
        OtherRunError: if `root` contains the dump of another run.
        DumpVersionError: if `root` contains a dump of another format version.
    """
    root = Path(root).absolute()  # the program may change its working directory later
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DumpPathError(
            f"dump: {root} is a file or is below a file; expected a folder. {_HOW}"
        ) from error
    except OSError as error:
        raise DumpPathError(f"dump: {root} cannot be created: {error.strerror}. {_HOW}") from error
    try:
        folder = root / f"rank{rank}"
        if folder.is_symlink():
            raise DumpPathError(f"dump: {folder} is a symbolic link; expected a folder. {_HOW}")
        _write_header(root, world)
        _claim(folder, root)
    except OSError as error:
        raise DumpPathError(
            f"dump: {root} cannot be written to: {error.strerror}. {_HOW}"
        ) from error
    return folder


_claimed: set[Path] = set()
"""Folders of ranks that this process has created. One process may compile many models into one
dump, and may act as several ranks."""


def _claim(folder: Path, root: Path) -> None:
    """Create the folder of a rank, unless another process has created it: that was another run."""
    key = folder.resolve()
    if key in _claimed and folder.exists():
        return
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise OtherRunError(
            f"dump: {root} contains the dump of another run, which wrote {folder.name}; expected "
            f"an empty folder, because two runs in one dump cannot be told apart. Remove it, or "
            f"n{_HOW[1:]}"
        ) from error
    _claimed.add(key)


_runs: dict[Path, str] = {}
"""Dump -> the run of this process that writes to it."""


def _run_of(root: Path) -> str:
    """An id that all ranks of this run share, and no other run has.

    The first rank that asks writes it into the store of the default process group. A process that
    has no store, or acts as several ranks, is a run of its own.
    """
    key = root.resolve()
    if key not in _runs:
        own = f"{_PROCESS}{os.getpid():x}"  # forks share the first part
        shared = dist.is_initialized() and not compat.is_fake_world()
        found = compat.default_store().compare_set("zpasses_dump_run", "", own) if shared else own
        _runs[key] = found.decode() if isinstance(found, bytes) else str(found)
    return _runs[key]


def _create(path: Path, line: bytes) -> bool:
    """Write a file of one line, unless it exists. Returns whether this call has written it."""
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}-{path.name}")
    write(temporary, [line])
    try:
        os.link(temporary, path)  # unlike a rename, it replaces nothing
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        os.replace(temporary, path)
        return True
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _write_header(root: Path, world: int) -> None:
    header, run = root / HEADER, _run_of(root)
    if header.is_symlink():
        raise DumpPathError(f"dump: {header} is a symbolic link; expected a file. {_HOW}")
    if not header.exists():
        others = [each.name for each in root.iterdir() if not each.name.startswith(_TEMPORARY)]
        if others and not header.exists():  # another rank may have written it in the meantime
            raise NotADumpError(
                f"dump: {root} contains {others[0]!r} and no dump; expected an empty folder or "
                f"a dump. {_HOW}"
            )
        meta = {"format": data.FORMAT, "version": data.VERSION, "zpasses": __version__}
        meta |= {"torch": str(torch.__version__), "created": now(), "world": world, "run": run}
        if _create(header, json_line(meta)):
            return
    try:
        found = json.loads(header.read_text())
        version = found["version"] if found["format"] == data.FORMAT else None
    except (ValueError, KeyError, TypeError) as error:
        raise NotADumpError(
            f"dump: {header} is damaged ({error}); expected an empty folder or a dump. {_HOW}"
        ) from error
    if not isinstance(version, int):
        raise NotADumpError(f"dump: {header} is not the header of a dump. {_HOW}")
    if version == data.VERSION and found.get("world", world) != world:
        raise OtherRunError(
            f"dump: {root} contains the dump of another run on {found.get('world')} ranks; this "
            f"run has {world}. {_HOW}"
        )
    if version == data.VERSION and found.get("run") != run:
        created = found.get("created", "an unknown time")
        raise OtherRunError(
            f"dump: {root} contains the dump of another run, of {created}; expected an "
            f"empty folder, because two runs in one dump cannot be told apart. Remove it, or "
            f"n{_HOW[1:]}"
        )
    if version != data.VERSION:
        raise DumpVersionError(
            f"dump: {root} contains a dump of version {version}; this zpasses writes version "
            f"{data.VERSION}. {_HOW}"
        )


def now() -> str:
    """The time in ISO 8601, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write(path: Path, lines: Iterator[bytes] | Sequence[bytes]) -> None:
    """Write a file atomically: it appears with its whole content or not at all."""
    temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{threading.get_ident()}-{path.name}")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", buffering=1 << 20) as file:  # "x" does not follow a link
            for line in lines:
                file.write(line)
                file.write(b"\n")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
