"""States of a folder that a kill would leave: copies of it, made while a program writes into it."""

import contextlib
import filecmp
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

_recorder = None


def _on_event(event, args):
    if _recorder is not None and event in ("open", "os.rename", "os.remove", "os.rmdir"):
        _recorder(event, args)


@contextlib.contextmanager
def recorded(folder, target, when=True):
    """On rank 0, if `when`, copy `folder` to `target`/0, `target`/1, ... before each change in it.

    Python sees what it opens, renames and removes itself, and calls of `torch.save`, after which it
    copies, too.
    """
    global _recorder
    if not when or dist.get_rank():
        yield
        return
    sys.addaudithook(_on_event)
    folder, target = Path(folder), Path(target)
    count = 0

    def copy():
        nonlocal count
        global _recorder
        active, _recorder = _recorder, None  # a copy opens files, too
        # A file of another rank may disappear meanwhile.
        with contextlib.suppress(shutil.Error, FileNotFoundError):
            shutil.copytree(folder, target / str(count))
        count += 1
        _recorder = active

    def record(event, args):
        path = str(args[0])
        writes = event != "open" or (len(args) > 1 and any(c in str(args[1]) for c in "wax+"))
        if path.startswith(str(folder)) and writes:
            copy()

    original = torch.save

    def save(*args, **kwargs):
        original(*args, **kwargs)
        copy()

    torch.save, _recorder = save, record
    try:
        yield
    finally:
        torch.save, _recorder = original, None
    copy()


def states(target):
    """The copies, in order."""
    return sorted(Path(target).iterdir(), key=lambda path: int(path.name))


def is_copy(folder, complete):
    """Whether a folder holds the files of a complete checkpoint, with their bytes."""
    files = [path.relative_to(complete) for path in Path(complete).rglob("*") if path.is_file()]
    assert files
    return not any(filecmp.cmpfiles(complete, folder, files, shallow=False)[1:])
