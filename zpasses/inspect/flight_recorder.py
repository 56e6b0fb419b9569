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
from typing import Any

import msgspec

from zpasses.dumps.dump_errors import DamagedDumpError, NotADumpError
from zpasses.dumps.files import damaged, decoded, read_bytes
from zpasses.dumps.limits import Limits
from zpasses.dumps.nodes import Count, Record
from zpasses.inspect.launches import kind_of
from zpasses.inspect.plain_pickle import load_plain_pickle

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
        NotADumpError: if the file is missing, or has no rank in its name.
        DumpError: if it is damaged, is something else, or exceeds the limits.
    """
    if not path.exists():
        raise NotADumpError(f"{path} does not exist; {_EXPECTED}.")
    match = _RANK.search(path.name.split(".")[0])
    if match is None:
        raise NotADumpError(
            f"{path}: its name does not end in a rank; expected a name such as trace_rank_3 or "
            "fr-0.json, as the recorder gives it."
        )
    data, where = read_bytes(path.resolve(), limits), f"{path}: {_EXPECTED}"
    try:
        if data[:1] == b"\x80":
            whole = msgspec.convert(load_plain_pickle(data, path), _File)
        else:
            whole = decoded(data, _File, where, limits)
    except msgspec.ValidationError as error:
        raise damaged(error, where) from error
    return _state(int(match[1]), whole, path)


class _Entry(Record, frozen=True):
    """A collective, or an exchange between two ranks."""

    process_group: tuple[str, str]
    """Name and description of the group."""
    collective_seq_id: Count
    profiling_name: str
    record_id: Count = 0
    state: str = ""
    is_p2p: bool = False
    retired: bool = False
    time_created_ns: Any = None
    input_sizes: Any = None


class _File(Record, frozen=True):
    """What the recorder writes."""

    entries: list[_Entry]
    pg_config: dict[Any, Any] = {}


def _state(rank: int, whole: _File, path: Path) -> RankState:
    history: dict[str, list[LastCollective]] = defaultdict(list)
    waiting: dict[str, LastCollective] = {}
    # The recorder is a ring: its order is that of `record_id`.
    for entry in sorted(whole.entries, key=lambda each: each.record_id):
        if entry.is_p2p:
            continue
        group = entry.process_group[0][:256]
        last = _last(entry)
        history[group].append(last)
        if entry.state != "completed" and not entry.retired and group not in waiting:
            waiting[group] = last
    groups = {name: GroupState(tuple(items), waiting.get(name)) for name, items in history.items()}
    return RankState(rank, groups, _members(whole, path))


def _last(entry: _Entry) -> LastCollective:
    created = entry.time_created_ns
    return LastCollective(
        number=entry.collective_seq_id,
        kind=kind_of(entry.profiling_name.partition(":")[2])[:256],
        elements=_elements(entry.input_sizes),
        at_s=created / 1e9 if type(created) is int and 0 < created < 1 << 63 else None,
    )


def _elements(sizes: Any) -> int | None:
    if not isinstance(sizes, (list, tuple)):
        return None
    total = 0
    for shape in sizes:
        known = isinstance(shape, (list, tuple)) and len(shape) <= 64
        if not known or not all(type(size) is int and 0 <= size < 1 << 50 for size in shape):
            return None
        total += math.prod(shape)
    return total


def _members(whole: _File, path: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, config in whole.pg_config.items():
        text = config.get("ranks") if isinstance(config, dict) else None
        if not isinstance(name, str) or not isinstance(text, str) or len(text) > 1 << 20:
            continue
        try:
            ranks = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedDumpError(
                f"{path}: the ranks of group {name[:80]!r} are {text[:80]!r}; expected a "
                "list of numbers."
            ) from error
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
            found[name[:256]] = tuple(ranks)
    return found
