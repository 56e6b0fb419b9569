"""Notes in the store: ranks compare what they were given, without waiting for each other.

The first rank that writes about a matter is right. A rank that would write something else raises an
error and leaves a conflict, which the other ranks find when they next compile, step an optimizer,
or wait in a vote.
"""

from __future__ import annotations

import json
import time
import weakref
from typing import Any

import torch.distributed as dist

from zpasses import compat
from zpasses.errors import AgreementError

_MOST_CHECKS = 200
"""Checks of a note that some rank never writes, as ranks of other pipeline stages may not."""

_RECOVERY_S = 1.0
"""How long a rank that finds a conflict waits for the rank that left it to start over."""


class _World:
    """The notes of this rank in one world."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        # A store outlives its worlds: number them, so that old conflicts are not read again.
        entered = compat.default_store().add("zpasses/notes/entered", 1)
        self.conflict_key = f"zpasses/notes/{(entered - 1) // world.size()}/conflict"
        self.open: dict[str, int] = {}
        """Key of a note that some rank has not written yet -> number of ranks that write it."""
        self.checks = 0
        self.left_conflict = False
        """Whether this rank left a conflict that it has not taken back."""


_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, _World] = weakref.WeakKeyDictionary()


def _world() -> _World | None:
    """The notes of the current world; None where there are no other ranks."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1 or compat.is_fake_world():
        return None
    found = _worlds.get(world)
    if found is None:
        found = _worlds[world] = _World(world)
    return found


def compare_note(key: str, ranks: int, mine: Any) -> tuple[int, Any] | None:
    """Write a note, and compare it with that of the first rank that wrote it.

    Args:
        key: what the note is about; equal on all ranks that write it.
        ranks: number of ranks that write it.
        mine: this rank's note, of plain JSON values.

    Returns:
        None if the notes are equal, else the first rank and its note.
    """
    world = _world()
    if world is None:
        return None
    store, text = compat.default_store(), json.dumps([dist.get_rank(), mine])
    rank, first = json.loads(store.compare_set(key, "", text).decode())
    if first != json.loads(json.dumps(mine)):
        return rank, first
    store.add(f"{key}/written", 1)
    world.open[key] = ranks
    world.checks = 0
    return None


def leave_conflict(error: str) -> None:
    """Let every other rank raise an error when it next compiles, steps or waits in a vote."""
    world = _world()
    if world is not None:
        conflict = json.dumps({"rank": dist.get_rank(), "error": error})
        compat.default_store().set(world.conflict_key, conflict)
        world.left_conflict = True


def end_conflict() -> None:
    """Take back the conflict that this rank has left: its program has caught the error, and all
    ranks start over.
    """
    world = _world()
    if world is None or not world.left_conflict:
        return
    world.left_conflict = False
    store = compat.default_store()
    if store.check([world.conflict_key]):
        conflict = json.loads(store.get(world.conflict_key).decode())
        if conflict["rank"] == dist.get_rank():
            store.delete_key(world.conflict_key)


def found_conflict() -> str | None:
    """Returns the error that some rank has left, unless that rank takes it back within a second."""
    world = _world()
    if world is None:
        return None
    store, started, error = compat.default_store(), time.monotonic(), None
    while store.check([world.conflict_key]):
        error = str(json.loads(store.get(world.conflict_key).decode())["error"])
        if time.monotonic() > started + _RECOVERY_S:
            return error
        time.sleep(_RECOVERY_S / 20)
    return None


def check_conflicts() -> None:
    """Raise what another rank has left, unless all ranks are known to have written equal notes.

    Raises:
        AgreementError: if another rank has left a conflict.
    """
    world = _world()
    if world is None or not world.open:
        return
    error = found_conflict()
    if error is not None:
        raise AgreementError(error)
    store = compat.default_store()
    for key, ranks in list(world.open.items()):
        if store.add(f"{key}/written", 0) < ranks:
            break
        del world.open[key]
    world.checks += 1
    if world.checks >= _MOST_CHECKS:
        world.open.clear()
