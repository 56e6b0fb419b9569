"""Reads a dump, which may come from an untrusted source.

Every defect of a dump is reported as a DumpError. The reader never writes, and reads nothing
outside of the dump's folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zpasses.dumps.errors import (
    DamagedDumpError,
    DumpVersionError,
    NotADumpError,
)
from zpasses.dumps.files import Record, list_folder, parse_object, read_lines, read_text
from zpasses.dumps.format import (
    FORMAT,
    VERSION,
    Agreement,
    Compile,
    CompileInfo,
    Counts,
    Dump,
    Event,
    Failure,
    Graph,
    Param,
    PassRun,
    Prediction,
    Rank,
    Snapshot,
    Step,
)
from zpasses.dumps.limits import Limits
from zpasses.dumps.snapshots import SnapshotFiles

__all__ = ["HEADER", "read"]

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
    return Dump(root, VERSION, meta.data, dict(sorted(ranks.items())), limits)


def _meta(root: Path, limits: Limits) -> Record:
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
    meta = parse_object(read_text(root.resolve() / HEADER, limits), f"{root / HEADER}", limits)
    if meta.data.get("format") != FORMAT:
        raise NotADumpError(
            f"{root / HEADER}: 'format' is {str(meta.data.get('format'))[:80]!r}; expected "
            f"{FORMAT!r}."
        )
    version = meta.integer("version")
    if version < 1:
        raise meta.fail("version", "an integer >= 1")
    if version != VERSION:
        written_by = f"zpasses {str(meta.data.get('zpasses', '?'))[:40]}"
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
    record = parse_object(
        read_text(folder / "compile.json", limits), str(folder / "compile.json"), limits
    )
    files = SnapshotFiles(paths, limits)
    events = _events(folder / "events.jsonl", limits)
    error = record.optional_record("error")
    sources = _sources(folder / "sources.json", limits)
    return Compile(
        folder=folder.name,
        path=folder,
        info=_info(record, limits),
        events=tuple(Event(each.text("event"), each.data) for each in events),
        graphs=_graphs(events, files, limits),
        error=None if error is None else _failure(error),
        sources=sources,
    )


def _sources(path: Path, limits: Limits) -> Mapping[str, str]:
    if not path.is_symlink() and not path.exists():
        return {}
    record = parse_object(read_text(path, limits), str(path), limits)
    return {name: record.text(name) for name in record.data}


def _events(path: Path, limits: Limits) -> list[Record]:
    if not path.is_symlink() and not path.exists():
        return []  # the process died before its first event
    found = []
    for number, text in read_lines(path, limits):
        if number > limits.entries:
            raise limits.exceeded(path, "has more records", "entries")
        found.append(parse_object(text, f"{path}, line {number}", limits))
    return found


def _info(record: Record, limits: Limits) -> CompileInfo:
    state = record.text("state")
    if state not in ("compiling", "done", "failed"):
        raise record.fail("state", "'compiling', 'done' or 'failed'")
    groups = Record(record.mapping("groups"), f"{record.where}, 'groups'")
    labels = Record(record.mapping("group_labels"), f"{record.where}, 'group_labels'")
    params = Record(record.mapping("parameters"), f"{record.where}, 'parameters'")
    inputs: list[Mapping[str, Any]] = [each.data for each in record.records("inputs")]
    return CompileInfo(
        name=record.name("name", limits),
        rank=record.integer("rank"),
        world=record.integer("world"),
        state=state,
        created=record.text("created", ""),
        options=record.mapping("options"),
        pipeline=record.text("pipeline", ""),
        codegen=record.text("codegen", ""),
        recompile_reason=record.optional_text("recompile_reason") or "",
        target=record.mapping("target"),
        groups={name: groups.integers(name) for name in groups.data},
        group_labels={name: labels.text(name) for name in labels.data},
        inputs=tuple(inputs),
        parameters={name: _param(name, params.record(name)) for name in params.data},
    )


def _param(name: str, record: Record) -> Param:
    return Param(
        name=name,
        shape=record.sizes("shape"),
        dtype=record.text("dtype"),
        nbytes=record.integer("bytes"),
        shard_bytes=record.integer("shard_bytes"),
        rows=record.integer("rows"),
        group=record.text("group", ""),
    )


# --- events to graphs -----------------------------------------------------------------------------
class _GraphBuilder:
    """A graph while its events are read."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.agreements: list[Agreement] = []
        self.prediction: Prediction | None = None
        self.of = ""
        self.given: tuple[str, ...] = ()
        self.kept: tuple[str, ...] = ()


def _graphs(events: list[Record], files: SnapshotFiles, limits: Limits) -> dict[str, Graph]:
    growing: dict[str, _GraphBuilder] = {}
    for event in events:
        kind = event.text("event")
        if kind == "note":
            event.text("text", "")
        if kind not in ("snapshot", "pass", "variant", "agreement", "prediction"):
            continue
        graph = growing.setdefault(event.name("graph", limits), _GraphBuilder())
        if kind == "agreement":
            graph.agreements.append(_agreement(event))
            continue
        if kind == "prediction":
            graph.prediction = _prediction(event)
            continue
        if kind == "variant":
            graph.of, graph.given, graph.kept = (
                event.name("of", limits),
                event.texts("given"),
                event.texts("kept"),
            )
        graph.steps.append(_step(event, len(graph.steps), files))
    return {
        name: Graph(
            name,
            tuple(each.steps),
            each.of,
            each.given,
            each.kept,
            tuple(each.agreements),
            each.prediction,
        )
        for name, each in growing.items()
        if each.steps
    }


def _step(event: Record, index: int, files: SnapshotFiles) -> Step:
    number = event.optional_integer("snapshot")
    if number is not None and number not in files:
        raise DamagedDumpError(
            f"{event.where}: snapshot {number} is missing: the dump is truncated, or was copied "
            "incompletely. Copy the whole folder."
        )
    run, recorded = event.optional_record("pass"), event.optional_record("counts")
    error = event.optional_record("error")
    load: Callable[[int], Snapshot] = files.load
    return Step(
        index=index,
        level=event.text("level"),
        after=event.optional_text("after"),
        number=number,
        counts=_counts(recorded)
        if recorded is not None
        else _counts(run.record("after"))
        if run is not None
        else None,
        run=None if run is None else _run(run),
        error=None if error is None else _failure(error),
        load=load,
    )


def _run(record: Record) -> PassRun:
    return PassRun(
        name=record.text("name"),
        text=record.text("text"),
        options=record.mapping("options"),
        changes=record.integer("changes"),
        time_us=record.number("time_us"),
        check_us=record.number("check_us"),
        checks=record.texts("checks"),
        before=_counts(record.record("before")),
        after=_counts(record.record("after")),
        notes=record.texts("notes"),
    )


def _counts(record: Record) -> Counts:
    return Counts(record.integer("nodes"), record.integer("collectives"), record.integer("bytes"))


def _failure(record: Record) -> Failure:
    return Failure(
        record.text("type"),
        record.text("message"),
        record.text("where", ""),
        record.text("traceback", ""),
        record.text("raised", ""),
    )


def _prediction(record: Record) -> Prediction:
    return Prediction(
        total_us=record.number("total_us"),
        waited_us=record.number("waited_us"),
        possible_us=record.number("possible_us"),
        bound_us=record.number("bound_us"),
        peak_bytes=record.integer("peak_bytes"),
        limit_bytes=record.integer("limit_bytes"),
        collectives=record.integer("collectives"),
        number=record.optional_integer("snapshot"),
    )


def _agreement(record: Record) -> Agreement:
    return Agreement(
        graph=record.text("graph"),
        group=record.text("group"),
        digest=record.text("digest"),
        collectives=record.integer("collectives"),
        result=record.text("result"),
        label=record.text("label", ""),
    )
