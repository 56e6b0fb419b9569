"""Reads dumps of torch's flight recorder: JSON, or pickles of plain values.

The recorder writes one file per rank, whose name ends in the rank, when a collective of NCCL times
out (TORCH_FR_BUFFER_SIZE, TORCH_FR_DUMP_TEMP_FILE), or on demand.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zpasses.dumps.errors import DamagedDumpError, NotADumpError
from zpasses.dumps.files import Record, parse_object, read_bytes
from zpasses.dumps.limits import Limits
from zpasses.inspect.launches import kind_of
from zpasses.inspect.plain_pickle import load_plain_pickle

__all__ = ["GroupState", "LastCollective", "RankState", "read_recorder"]

_RANK = re.compile(r"(\d{1,7})$")
_EXPECTED = "expected what torch's flight recorder writes, as JSON or as a pickle"


@dataclass(frozen=True)
class LastCollective:
    """One collective that a rank started or awaits."""

    number: int
    """The n-th collective of its group on this rank."""
    kind: str
    """ "all_gather", "reduce_scatter", ..."""
    elements: int | None
    """Elements of all inputs; None if the file does not say."""
    at_s: float | None
    """When it started, in seconds since 1970; None if the file does not say."""


@dataclass(frozen=True)
class GroupState:
    """What a rank did last in one process group."""

    history: tuple[LastCollective, ...] = ()
    """The last collectives that it started, oldest first. Empty if it started none."""
    waits: LastCollective | None = None
    """The collective that it waits for; None if it waits for none."""

    @property
    def started(self) -> LastCollective | None:
        """The last collective that it started."""
        return self.history[-1] if self.history else None


@dataclass(frozen=True)
class RankState:
    """What a rank did last."""

    rank: int
    groups: Mapping[str, GroupState]
    members: Mapping[str, tuple[int, ...]]
    """Group -> its ranks, as far as the file says."""


def read_recorder(path: Path, limits: Limits) -> RankState:
    """The state of one rank.

    Args:
        path: a file whose name ends in the rank, before its extensions: "trace_rank_3",
            "fr-0.json".
        limits: upper bounds for what is read.

    Raises:
        NotADumpError: if the file is missing, has no rank in its name, or is something else.
        DumpError: if it is damaged or exceeds the limits.
    """
    if not path.exists():
        raise NotADumpError(f"{path} does not exist; {_EXPECTED}.")
    match = _RANK.search(path.name.split(".")[0])
    if match is None:
        raise NotADumpError(
            f"{path}: its name does not end in a rank; expected a name such as trace_rank_3 or "
            "fr-0.json, as the recorder gives it."
        )
    data = read_bytes(path.resolve(), limits)
    if data[:1] == b"\x80":
        loaded = load_plain_pickle(data, path)
        if not isinstance(loaded, dict):
            raise NotADumpError(f"{path}: is no dictionary; {_EXPECTED}.")
        whole = Record(loaded, str(path))
    else:
        try:
            whole = parse_object(data.decode(), str(path), limits)
        except UnicodeDecodeError as error:
            raise NotADumpError(f"{path}: is neither JSON nor a pickle; {_EXPECTED}.") from error
    if not isinstance(whole.data.get("entries"), list):
        raise NotADumpError(
            f"{path}: has no list 'entries'; {_EXPECTED}, with its collectives "
            "(TORCH_INCLUDE_STACK_TRACE and similar settings do not matter)."
        )
    return _state(int(match[1]), whole)


def _state(rank: int, whole: Record) -> RankState:
    history: dict[str, list[LastCollective]] = defaultdict(list)
    waiting: dict[str, LastCollective] = {}
    entries = whole.records("entries")
    # The recorder is a ring: its order is that of `record_id`.
    for entry in sorted(entries, key=lambda each: each.integer("record_id", 0)):
        if entry.flag("is_p2p"):
            continue
        group = _group(entry)
        last = _last(entry)
        history[group].append(last)
        unfinished = entry.text("state", "") != "completed" and not entry.flag("retired")
        if unfinished and group not in waiting:
            waiting[group] = last
    groups = {name: GroupState(tuple(items), waiting.get(name)) for name, items in history.items()}
    return RankState(rank, groups, _members(whole))


def _group(entry: Record) -> str:
    named = entry.data.get("process_group")
    if isinstance(named, (list, tuple)) and named and isinstance(named[0], str):
        return named[0][:256]
    raise entry.fail("process_group", "the name and the description of a group")


def _last(entry: Record) -> LastCollective:
    created = entry.data.get("time_created_ns")
    return LastCollective(
        number=entry.integer("collective_seq_id"),
        kind=kind_of(entry.text("profiling_name").partition(":")[2])[:256],
        elements=_elements(entry),
        at_s=created / 1e9 if type(created) is int and 0 < created < 1 << 63 else None,
    )


def _elements(entry: Record) -> int | None:
    sizes = entry.data.get("input_sizes")
    if not isinstance(sizes, (list, tuple)):
        return None
    total = 0
    for shape in sizes:
        known = isinstance(shape, (list, tuple)) and len(shape) <= 64
        if not known or not all(type(size) is int and 0 <= size < 1 << 50 for size in shape):
            return None
        total += math.prod(shape)
    return total


def _members(whole: Record) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, config in whole.mapping("pg_config").items():
        text = config.get("ranks") if isinstance(config, dict) else None
        if not isinstance(name, str) or not isinstance(text, str) or len(text) > 1 << 20:
            continue
        try:
            ranks = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedDumpError(
                f"{whole.where}: the ranks of group {name[:80]!r} are {text[:80]!r}; expected a "
                "list of numbers."
            ) from error
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
            found[name[:256]] = tuple(ranks)
    return found
