"""What each rank did last, as its file of progress in a dump says. See `zpasses.dumps.progress`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zpasses.dumps.errors import DumpError
from zpasses.dumps.files import Record, list_folder, parse_object, read_text
from zpasses.dumps.format import Dump
from zpasses.dumps.limits import Limits
from zpasses.dumps.progress import FOLDER

__all__ = ["GroupState", "LastCollective", "RankState", "read_progress"]

_FILE = re.compile(r"rank(0|[1-9]\d{0,6})\.jsonl")


@dataclass(frozen=True)
class LastCollective:
    """One collective that a rank started or awaits."""

    number: int
    """The n-th collective of its group on this rank."""
    kind: str
    """ "all_gather", "reduce_scatter", ..."""
    nbytes: int | None = None
    """Bytes that this rank sends; None if only sizes are known."""
    elements: int | None = None
    """Elements of all inputs; None if only bytes are known."""
    graph: str = ""
    """ "COMPILE:KIND:DIGEST" of the graph that runs it; empty if it is unknown."""
    node: str = ""
    """Name of its node in that graph; empty if it is unknown."""
    at_s: float | None = None
    """When, in seconds since 1970; None if it is unknown."""


@dataclass(frozen=True)
class GroupState:
    """What a rank did last in one process group."""

    started: LastCollective | None = None
    """The last collective that it started."""
    waits: LastCollective | None = None
    """The collective that it waits for; None if it waits for none."""
    history: tuple[LastCollective, ...] = ()
    """Its last collectives, oldest first. Empty if only the last one is known."""


@dataclass(frozen=True)
class RankState:
    """What a rank did last."""

    rank: int
    source: Path
    """The file that says so."""
    groups: Mapping[str, GroupState]
    world: int | None = None
    activity: str = ""
    """What zpasses did on this rank last; empty if it is unknown."""
    activity_s: float | None = None
    outdated_since_s: float | None = None
    """When the rank started a collective after which it says nothing of what it does: with
    `agreement=False`, runs of graphs are no activities. None if the activity is its last.
    """
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Group -> its ranks, as far as the file says."""


def read_progress(dump: Dump) -> dict[int, RankState]:
    """The state of each rank that wrote a file of progress.

    Raises:
        DumpError: if a file is damaged or exceeds the limits.
    """
    folder = dump.path / FOLDER
    if not folder.exists() and not folder.is_symlink():
        return {}
    found = {}
    for name in list_folder(folder, dump.limits):
        if match := _FILE.fullmatch(name):
            found[int(match[1])] = _state(int(match[1]), folder / name, dump)
    return dict(sorted(found.items()))


def _state(rank: int, path: Path, dump: Dump) -> RankState:
    started: dict[str, LastCollective] = {}
    waits: dict[str, LastCollective | None] = {}
    world: int | None = None
    activity, activity_s = "", None
    limits = dump.limits
    for number, line in enumerate(read_text(path, dump.limits).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = parse_object(line, where, dump.limits)
        except DumpError:
            if line.startswith("{") and line.rstrip().endswith("}"):
                raise
            continue  # the process overwrites it at this moment
        if "activity" in record.data:
            activity, activity_s = record.text("activity"), record.number("at")
        elif "event" in record.data:
            group, last = record.name("group", limits), _last(record, limits)
            event = record.text("event")
            if event == "started":
                started[group] = last
            else:
                waits[group] = last if event == "waits" else None
        else:
            world = record.integer("world")
    groups = {name: GroupState(started.get(name), waits.get(name)) for name in {**started, **waits}}
    outdated = _outdated_since(groups.values(), activity, activity_s)
    return RankState(rank, path, groups, world, activity, activity_s, outdated)


def _outdated_since(
    groups: Iterable[GroupState], activity: str, activity_s: float | None
) -> float | None:
    """When the rank did something else than what its activity says; None if that is not known.

    A checked run of a graph says that it is running before it starts a collective.
    """
    if activity_s is None or activity.startswith("running "):
        return None
    times = [each.started.at_s for each in groups if each.started is not None]
    latest = max((at for at in times if at is not None), default=activity_s)
    return latest if latest > activity_s else None


def _last(record: Record, limits: Limits) -> LastCollective:
    return LastCollective(
        number=record.integer("number"),
        kind=record.name("kind", limits),
        nbytes=record.integer("bytes"),
        graph=record.name("graph", limits, ""),
        node=record.name("node", limits, ""),
        at_s=record.number("at"),
    )
