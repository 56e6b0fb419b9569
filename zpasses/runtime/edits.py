"""Edits of sharded parameters: the memory of a shard counts them, and logs say to other ranks which
they were.

Every rank makes the same edits: operators in place, assignments, loaded values, steps of
optimizers. Nothing else would notice a rank that edits alone, or whose optimizer step raised, or
that loads other values: the next gather would put parts of different values together. So each
process group has a log of the edits of its parameters, and its next event, such as a run of a
graph, says which edits came before it (zpasses.runtime.run_checks).

A log is a number that depends on all edits and their order, equal on all ranks, and the last edits
in words, for errors.
"""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zpasses.runtime.checksum import checksum

__all__ = [
    "EditLog",
    "EditedParam",
    "ShardMemory",
    "count_edit",
    "memory_of",
    "named_source",
    "number_of",
    "owner_of",
    "take_edits",
]

_MOST_TOLD = 64


@dataclass(slots=True)
class EditLog:
    """The edits of the parameters of one process group since its last event."""

    count: int = 0
    digest: int = 0
    last: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_MOST_TOLD))
    """Parameter and operation of the last edits."""

    def add(self, param: str, number: int, what: str) -> None:
        """Args:
        param: "" if the edit is one of many parameters.
        number: of the edit, equal on all ranks.
        what: for errors.
        """
        self.count += 1
        self.digest = hash((self.digest, number))  # of integers: equal in all processes
        self.last.append((param, what))

    def told(self) -> list[str]:
        """The last edits in words: "mul_ of parameter 'layers.0.weight'"."""
        return [
            f"{what} of parameter {param.partition(':')[2]!r}" if param else what
            for param, what in self.last
        ]


@functools.cache
def log_of(group: str) -> EditLog:
    """Returns the log of a process group."""
    return EditLog()


@functools.cache
def logs_of(groups: Sequence[str]) -> tuple[EditLog, ...]:
    """Returns the logs of the process groups of a parameter; one object for equal groups."""
    return tuple(map(log_of, groups))


def take_edits(group: str) -> EditLog | None:
    """Returns the edits since the last call for a group, and starts anew; None if none came."""
    log = log_of(group)
    if not log.count:
        return None
    taken = EditLog(log.count, log.digest, log.last)
    log.count, log.digest, log.last = 0, 0, deque(maxlen=_MOST_TOLD)
    return taken


@functools.lru_cache(maxsize=1 << 12)
def number_of(text: str) -> int:
    """Returns a number that stands for a text in all processes."""
    return zlib.crc32(text.encode())


class EditedParam:
    """What edits of a parameter are counted by, equally on all ranks."""

    __slots__ = ("logs", "name", "number")

    def __init__(self, identity: str, groups: Sequence[str]) -> None:
        self.name = identity
        self.number = number_of(identity)
        self.logs = logs_of(tuple(groups))

    def edited(self, what: str, number: int) -> None:
        """Count an edit.

        Args:
            what: the operation, for errors.
            number: that of the operation.
        """
        for log in self.logs:
            log.add(self.name, self.number ^ number, what)

    def edited_by_values(self, what: str, full: Tensor) -> None:
        """Count an edit that takes full values, which must be equal on every rank."""
        if not full.is_meta and type(full) in (Tensor, torch.nn.Parameter):
            number = int(checksum(full))
            self.edited(f"{what} of values with checksum {number & 0xFFFFFFFF:08x}", number)


# --- memory ---------------------------------------------------------------------------------------
class ShardMemory:
    """The memory of a shard, and how often it was edited."""

    __slots__ = ("edits", "exposed", "owner")

    def __init__(self, owner: EditedParam | None = None) -> None:
        self.owner = owner
        """The parameter of a sharded model whose memory it is; None for copies."""
        self.edits = 0
        self.exposed = False
        """Whether code outside has the local tensor, whose `.data` nobody sees, since the last step
        of an optimizer."""


def count_edit(target: Any, what: str, full: Tensor | None = None) -> None:
    """Count an edit of a parameter that no operator made.

    Args:
        what: the edit, for errors.
        full: the values that it takes, equal on every rank, if they are plain.
    """
    memory = memory_of(target)
    if memory is None:
        return
    memory.edits += 1
    if memory.owner is None:
        return
    if full is None:
        memory.owner.edited(what, number_of(what))
    else:
        memory.owner.edited_by_values(what, full)


def named_source(value: object) -> str:
    """Returns which parameter's memory a tensor is, for `count_edit`; "" if it is none's."""
    owner = owner_of(value)
    if owner is None:
        return ""
    call, _, name = owner.name.partition(":")
    return f" from {name!r} (sharded in call {call} of zpasses.shard)"


def owner_of(value: object) -> EditedParam | None:
    memory = memory_of(value)
    return None if memory is None else memory.owner


def memory_of(value: object) -> ShardMemory | None:
    """Return what counts the edits of a tensor; None if nothing does."""
    found: ShardMemory | None = getattr(value, "_zpasses_memory", None)
    return found
