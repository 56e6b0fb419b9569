"""Reads a dump, which may come from an untrusted source.

Every defect of a dump is reported as a DumpError. The reader never writes, and reads nothing
outside of the dump's folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from zpasses.dumps.dump_errors import (
    DamagedDumpError,
    DumpVersionError,
    NotADumpError,
)
from zpasses.dumps.files import decoded, list_folder, read_bytes, read_lines
from zpasses.dumps.format import (
    FORMAT,
    VERSION,
    Agreement,
    Compile,
    CompileInfo,
    Dump,
    Event,
    Graph,
    NoteEvent,
    Prediction,
    Rank,
    Step,
    StepEvent,
)
from zpasses.dumps.limits import Limits
from zpasses.dumps.nodes import Record
from zpasses.dumps.snapshots import SnapshotFiles

T = TypeVar("T")

HEADER = "zpasses-dump.json"
_RANK = re.compile(r"rank(0|[1-9]\d{0,6})")
_COMPILE = re.compile(r"\d{3,6}-[a-z0-9_.-]{1,80}")
_SNAPSHOT = re.compile(r"(\d{3,6})-[a-z0-9_.-]{1,120}\.jsonl")


def read(path: str | Path, limits: Limits | None = None) -> Dump:
    """Open a dump. Graphs are read on first access (`Step.snapshot`), everything else at once.

    Args:
        path: the folder that `options={"dump": ...}` named.
        limits: upper bounds for what is read; None is `Limits()`.

    Raises:
        NotADumpError: if there is no dump.
        DumpVersionError: if the dump has another format version.
        DamagedDumpError: if a file is missing, truncated or inconsistent.
        DumpTooLargeError: if the dump exceeds the limits.
        DumpPathError: if it contains a link or a device. All of these are DumpErrors.
    """
    limits, root = limits or Limits(), Path(path)
    meta = _meta(root, limits)
    root = root.resolve()
    ranks = {}
    for name in list_folder(root, limits):
        match = _RANK.fullmatch(name)
        if match:
            ranks[int(match[1])] = _rank(root / name, int(match[1]), limits)
    return Dump(root, VERSION, meta, dict(sorted(ranks.items())), limits)


def _meta(root: Path, limits: Limits) -> dict[str, Any]:
    if not root.exists():
        raise NotADumpError(
            f"{root} does not exist; expected the folder that options={{'dump': ...}} or "
            "ZPASSES_DUMP named."
        )
    if not root.is_dir():
        raise NotADumpError(
            f"{root} is a file; expected the folder that options={{'dump': ...}} or ZPASSES_DUMP "
            "named."
        )
    if not (root / HEADER).is_symlink() and not (root / HEADER).exists():
        raise NotADumpError(
            f"{root} is not a dump: it has no {HEADER}. Expected the folder that "
            f"options={{'dump': ...}} or ZPASSES_DUMP named"
            f"{_nearby_dump(root)}."
        )
    meta: dict[str, Any] = _read(root.resolve() / HEADER, dict[str, Any], limits)
    if meta.get("format") != FORMAT:
        raise NotADumpError(
            f"{root / HEADER}: 'format' is {str(meta.get('format'))[:80]!r}; expected {FORMAT!r}."
        )
    version = meta.get("version")
    if type(version) is not int or version < 1:
        raise DamagedDumpError(
            f"{root / HEADER}: 'version' is {str(version)[:80]}; expected an integer >= 1."
        )
    if version != VERSION:
        written_by = f"zpasses {str(meta.get('zpasses', '?'))[:40]}"
        advice = (
            "Update zpasses (pip install -U zpasses)."
            if version > VERSION
            else f"Run the program again with this zpasses, or read the dump with {written_by}."
        )
        raise DumpVersionError(
            f"{root} is a dump of version {version}, written by {written_by}; this zpasses reads "
            f"version {VERSION}. {advice}"
        )
    return meta


def _nearby_dump(root: Path) -> str:
    try:
        inside = next(
            (each.name for each in sorted(root.iterdir())[:1000] if (each / HEADER).is_file()), None
        )
        above = next((each for each in root.resolve().parents if (each / HEADER).is_file()), None)
    except OSError:
        return ""
    return (
        f"; its folder {inside} is a dump"
        if inside
        else f"; its parent {above} is a dump"
        if above
        else ""
    )


def _rank(folder: Path, rank: int, limits: Limits) -> Rank:
    names = [name for name in list_folder(folder, limits) if _COMPILE.fullmatch(name)]
    return Rank(rank, tuple(_compile(folder / name, limits) for name in names))


def _compile(folder: Path, limits: Limits) -> Compile:
    paths: dict[int, Path] = {}
    for name in list_folder(folder, limits):
        match = _SNAPSHOT.fullmatch(name)
        if match:
            if int(match[1]) in paths:
                raise DamagedDumpError(
                    f"{folder}: {name} and {paths[int(match[1])].name} have the same number. "
                    "Dump into an empty folder."
                )
            paths[int(match[1])] = folder / name
    info = _read(folder / "compile.json", CompileInfo, limits)
    limits.check_name(info.name, "name", folder / "compile.json")
    events = list(_events(folder / "events.jsonl", limits))
    return Compile(
        folder=folder.name,
        path=folder,
        info=info,
        notes=tuple(each.text for _, each in events if isinstance(each, NoteEvent)),
        graphs=_graphs(events, SnapshotFiles(paths, limits)),
        sources=_read(folder / "sources.json", dict[str, str], limits, {}),
    )


def _read(path: Path, kind: type[T], limits: Limits, default: T | None = None) -> T:
    """The record in a file; the default, if there is one, if the file does not exist."""
    if default is not None and not path.is_symlink() and not path.exists():
        return default
    return decoded(read_bytes(path, limits), kind, path, limits)


class _Kind(Record, frozen=True):
    """The field that every event has."""

    event: str


_KINDS = {str(kind.__struct_config__.tag): kind for kind in Event.__subclasses__()}


def _events(path: Path, limits: Limits) -> Iterator[tuple[str, Event]]:
    """Place and content of each event of a known kind."""
    if not path.is_symlink() and not path.exists():
        return  # the process died before its first event
    for number, line in read_lines(path, limits):
        if number > limits.entries:
            raise limits.exceeded(path, "has more records", "entries")
        where = f"{path}, line {number}"
        kind = _KINDS.get(decoded(line, _Kind, where, limits).event)
        if kind is not None:
            event = decoded(line, kind, where, limits)
            limits.check_name(getattr(event, "graph", ""), "graph", where)
            limits.check_name(getattr(event, "of", ""), "of", where)
            yield where, event


# --- events to graphs -----------------------------------------------------------------------------
def _graphs(events: Iterable[tuple[str, Event]], files: SnapshotFiles) -> dict[str, Graph]:
    graphs: dict[str, Graph] = {}
    for where, event in events:
        if not isinstance(event, (StepEvent, Agreement, Prediction)):
            continue
        graph = graphs.get(event.graph, Graph(event.graph, ()))
        match event:
            case Agreement():
                graph = replace(graph, agreements=(*graph.agreements, event))
            case Prediction():
                graph = replace(graph, prediction=event)
            case StepEvent():
                step = _step(event, len(graph.steps), files, where)
                graph = replace(graph, steps=(*graph.steps, step))
                if event.of:
                    graph = replace(graph, of=event.of, given=event.given, kept=event.kept)
                    graph = replace(graph, stepped=event.stepped)
        graphs[event.graph] = graph
    return {name: graph for name, graph in graphs.items() if graph.steps}


def _step(event: StepEvent, index: int, files: SnapshotFiles, where: str) -> Step:
    if event.number is not None and event.number not in files:
        raise DamagedDumpError(
            f"{where}: snapshot {event.number} is missing: the dump is truncated, or was copied "
            "incompletely. Copy the whole folder."
        )
    return Step(
        index=index,
        level=event.level,
        after=event.after,
        number=event.number,
        counts=event.counts or (event.run.after if event.run is not None else None),
        run=event.run,
        error=event.error,
        load=files.load,
    )
