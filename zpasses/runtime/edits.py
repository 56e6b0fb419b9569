"""Edits of sharded parameters: the memory of a shard counts them, and logs say to other ranks which
they were.

Every rank makes the same edits: operators in place, assignments, loaded values, steps of
optimizers. Nothing else would notice a rank that edits alone, or whose optimizer step raised, or
that loads other values: the next gather would put parts of different values together. So each
process group has a log of the edits of its parameters, and its next event, such as a run of a
graph, says which edits came before it (zpasses.ranks.edit_log, zpasses.runtime.run_checks).
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses.ranks.edit_log import EditLog
from zpasses.runtime.checksum import checksum


@functools.cache
def log_of(group: str) -> EditLog:
    """Returns the log of a process group."""
    return EditLog()


@functools.cache
def logs_of(groups: Sequence[str]) -> tuple[EditLog, ...]:
    """Returns the logs of the process groups of a parameter; one object for equal groups."""
    return tuple(map(log_of, groups))


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

    def edited(self, what: str, number: int, value: int) -> None:
        """Count an edit.

        Args:
            what: the operation, for errors.
            number: that of the operation.
            value: that of its arguments.
        """
        for log in self.logs:
            log.add(self.name, what, self.number ^ number, value)


# --- memory ---------------------------------------------------------------------------------------
class ShardMemory:
    """The memory of a shard, and how often it was edited."""

    __slots__ = ("copied", "edits", "exposed", "history", "owner")

    def __init__(self, owner: EditedParam | None = None) -> None:
        self.owner = owner
        """The parameter of a sharded model whose memory it is; None for copies."""
        self.edits = 0
        self.history = 0
        """Depends on all edits and their order, equal on all ranks."""
        self.copied = False
        """Whether there is a full copy on every rank that may serve another read: one was gathered
        since the last edit, and since the last reduction of its gradient."""
        self.exposed: _Seen | None = None
        """What the memory was when code outside, which has the local tensor, was last looked after;
        None if no code has it. Nobody sees its writes through `.data` of the local tensor."""

    def expose(self, local: Tensor) -> None:
        """Called when code outside gets the local tensor."""
        if self.exposed is None:
            self.exposed = _Seen.of(self, local)

    def look_after(self, local: Tensor) -> None:
        """Count an edit if code that has the local tensor has written to it.

        Reads on one rank change nothing, so ranks may differ in which of them has it. Writes may
        differ, too, unless a rank that has not written would read a copy while others gather: then
        other ranks are told.
        """
        if self.exposed is None:
            return
        before, now = self.exposed, _Seen.of(self, local)
        if before.edits == now.edits and not before.equals(now):
            if self.copied:
                self.edit(_WRITE, number_of(_WRITE), 0)  # the rows are different ones on each rank
            else:
                self.edits += 1
            now.edits = self.edits
        self.exposed = now

    def count(self, number: int) -> None:
        """Count an edit, which has this number on all ranks."""
        self.edits += 1
        self.copied = False
        self.history = hash((self.history, number))

    def edit(self, what: str, number: int, value: int) -> None:
        """The same, and tell other ranks.

        Args:
            number: of the operation.
            value: of its arguments.
        """
        self.count(value)
        if self.owner is not None:
            self.owner.edited(what, number, value)


@dataclass(slots=True)
class _Seen:
    """The state of a memory."""

    edits: int
    version: int
    checksum: Tensor | None
    """None for shards without values, and for subclasses such as quantized ones."""

    @classmethod
    def of(cls, memory: ShardMemory, local: Tensor) -> _Seen:
        version = 0 if local.is_inference() else local._version
        is_plain = type(local) is Tensor and not local.is_meta
        return cls(memory.edits, version, checksum(local) if is_plain else None)

    def equals(self, other: _Seen) -> bool:
        if self.version != other.version:
            return False
        if self.checksum is None or other.checksum is None:
            return self.checksum is other.checksum
        return bool(self.checksum == other.checksum)


_WRITE = "a write to `to_local()`"


def count_edit(target: Any, what: str, value: Tensor | None = None) -> None:
    """Count an edit of a parameter that no operator made.

    Args:
        what: the edit, for errors.
        value: what the parameter gets: a DTensor, or full values, equal on every rank.
    """
    memory, number = memory_of(target), number_of(what)
    given = hash((number, argument_number(value)))
    if memory is not None:
        memory.edit(what + named_source(value), number, given)
    elif hasattr(target, "_zpasses_origin"):
        target._zpasses_origin = hash((target._zpasses_origin, given))


def note_edit(param: Any, what: str, value: Tensor | None = None) -> None:
    """Tell other ranks of an edit of what belongs to a parameter, such as its moments.

    Args:
        value: as for `count_edit`.
    """
    owner = owner_of(param)
    if owner is not None:
        owner.edited(what, number_of(what), argument_number(value))


@contextlib.contextmanager
def counted_as_one_edit(params: Iterable[Any], what: str) -> Iterator[None]:
    """What the block does to parameters, and to what belongs to them, counts as one edit of each.

    So ranks have made the same edits also if the block fails on one of them, and may try again. The
    block runs nothing that ranks check.

    Args:
        what: the edit, for errors.
    """
    memories = {id(found): found for each in params if (found := memory_of(each)) is not None}
    owners = [each.owner for each in memories.values() if each.owner is not None]
    logs = {id(log): (log, log.copy()) for owner in owners for log in owner.logs}
    histories = [(each, each.history) for each in memories.values()]
    try:
        yield
    finally:
        for log, earlier in logs.values():
            log.return_to(earlier)
        number = number_of(what)
        for memory, history in histories:
            memory.history = history
            memory.edit(what, number, number)


# --- where values come from -----------------------------------------------------------------------
def argument_number(value: Any) -> int:
    """Returns a number of an argument of an operator, which must be equal on all ranks: of a number
    itself, of full values, and of where the values of a DTensor come from.

    0 for what has none, or cannot be read at once: a scalar on an accelerator, values in traces.
    """
    if isinstance(value, (bool, int)):
        return hash(value)
    if isinstance(value, float):
        return hash(value) if value == value else 0  # that of NaN is an address
    if isinstance(value, DTensor):
        return origin_of(value)
    if isinstance(value, Tensor):
        return _number_of_values(value)
    if isinstance(value, (list, tuple)):
        return hash(tuple(map(argument_number, value)))
    return number_of(value) if isinstance(value, str) else 0


def _number_of_values(full: Tensor) -> int:
    is_slow = not full.dim() and full.device.type != "cpu"
    if full.is_meta or is_slow or type(full) not in (Tensor, torch.nn.Parameter):
        return 0
    return int(checksum(full))


def origin_of(value: Any) -> int:
    """Returns a number of what the values of a DTensor are: those of a parameter after its edits,
    or what an operator made of them.
    """
    memory: ShardMemory | None = getattr(value, "_zpasses_memory", None)
    if memory is None:
        return int(getattr(value, "_zpasses_origin", 0))
    name = 0 if memory.owner is None else memory.owner.number
    return hash((name, memory.history, getattr(value, "_zpasses_view", 0)))


def named_source(value: object) -> str:
    """Returns which parameter's memory a tensor is, in words; "" if it is none's."""
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
