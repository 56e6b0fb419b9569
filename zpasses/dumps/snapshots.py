"""Reads snapshot files: a whole graph as JSON lines, or the nodes that differ from an earlier
snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zpasses.dumps.errors import DamagedDumpError
from zpasses.dumps.files import Record, parse_object, read_lines
from zpasses.dumps.format import (
    Argument,
    Buffer,
    Collective,
    Node,
    RecomputeMark,
    Ref,
    Repr,
    Snapshot,
    Source,
    Tag,
    Value,
    references,
)
from zpasses.dumps.limits import Limits
from zpasses.garbage import no_garbage_collection

__all__ = ["SnapshotFiles"]


class SnapshotFiles:
    """The snapshots of one compile. Each is read once, on first access."""

    def __init__(self, paths: Mapping[int, Path], limits: Limits) -> None:
        self._paths, self._limits = paths, limits
        self._read: dict[int, Snapshot] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._paths

    @no_garbage_collection()
    def load(self, number: int) -> Snapshot:
        """One snapshot. The snapshots that it is based on are read too.

        Raises:
            DumpError: if a file is missing, damaged or too large.
        """
        chain: list[_SnapshotFile] = []
        at: int | None = number
        while at is not None and at not in self._read:
            file = self._open(at)
            chain.append(file)
            if file.base is not None and file.base >= at:
                raise DamagedDumpError(
                    f"{file.where}: its base is snapshot {file.base}, which is not an earlier "
                    "one. Dump or copy it again."
                )
            at = file.base
        while chain:
            file = chain.pop()
            self._read[file.number] = file.snapshot(
                None if file.base is None else self._read[file.base]
            )
        return self._read[number]

    def _open(self, number: int) -> _SnapshotFile:
        if number not in self._paths:
            raise DamagedDumpError(
                f"snapshot {number} is missing: the dump is truncated, or was copied incompletely. "
                "Copy the whole folder."
            )
        return _SnapshotFile(self._paths[number], number, self._limits)


class _SnapshotFile:
    """One parsed file. Its nodes are not in graph order yet."""

    def __init__(self, path: Path, number: int, limits: Limits) -> None:
        self.where, self.number, self._limits = str(path), number, limits
        rows = read_lines(path, limits)
        first = next(rows, None)
        if first is None:
            raise DamagedDumpError(f"{path} is empty: it is truncated. Dump or copy it again.")
        self._header = parse_object(first[1], f"{path}, line 1", limits)
        if self._header.integer("snapshot") != number:
            raise self._header.fail("snapshot", f"{number}, the number in the file's name")
        self.base = self._header.optional_integer("base")
        self._sources = [_source(record) for record in self._header.records("sources")]
        self.nodes: dict[int, Node] = {}
        for line, text in rows:
            if len(self.nodes) >= limits.nodes:
                raise limits.exceeded(path, "has more nodes", "nodes")
            record = parse_object(text, f"{path}, line {line}", limits)
            node = self._node(record)
            if node.id in self.nodes:
                raise DamagedDumpError(
                    f"{path}, line {line}: node {node.id} occurs twice; expected unique ids."
                )
            self.nodes[node.id] = node
        if len(self.nodes) != self._header.integer("written"):
            raise DamagedDumpError(
                f"{path} has {len(self.nodes)} nodes; expected "
                f"{self._header.data['written']}: it is truncated. Dump or copy it again."
            )

    def snapshot(self, base: Snapshot | None) -> Snapshot:
        inherited: Mapping[int, Node] = {} if base is None else base.by_id
        order: Sequence[int] = (
            self._header.integers("order")
            if "order" in self._header.data
            else list(self.nodes if base is None else inherited)
        )
        if len(order) > self._limits.nodes:
            raise self._limits.exceeded(self.where, f"has {len(order):,} nodes, more", "nodes")
        known = {**inherited, **self.nodes}
        present = set(order)
        if (
            len(present) != len(order)
            or not present <= known.keys()
            or not self.nodes.keys() <= present
        ):
            raise self._header.fail("order", "the id of each node exactly once")
        nodes = tuple(known[id] for id in order)
        live, spans = self._header.integers("live_bytes"), self._header.spans("spans")
        for name, entries in (("live_bytes", live), ("spans", spans)):
            if len(entries) != len(nodes):
                raise DamagedDumpError(
                    f"{self.where}, line 1: '{name}' has {len(entries)} entries; expected one "
                    f"for each of {len(nodes)} nodes."
                )
        for node in nodes:
            buffers = {at for buffer in node.buffers for at in (buffer.first, buffer.last)}
            waits = node.collective.waits if node.collective else ()
            missing = [id for id in (*node.inputs, *buffers, *waits) if id not in present]
            if missing:
                raise DamagedDumpError(
                    f"{self.where}: node {node.id} ({node.name!r}) refers to node {missing[0]}, "
                    "which is not in the graph."
                )
        return Snapshot(self.number, nodes, live, spans)

    def _node(self, record: Record) -> Node:
        id = record.integer("id")
        args = tuple(_argument(item, record.where) for item in record.items("args"))
        kwargs = {
            key: _argument(item, record.where) for key, item in record.mapping("kwargs").items()
        }
        source = record.optional_integer("source")
        if source is not None and source >= len(self._sources):
            raise record.fail("source", f"a number below {len(self._sources)}")
        tag, collective, mark = (
            record.optional_record(name) for name in ("tag", "collective", "recompute")
        )
        stream = record.optional_text("stream")
        if stream not in (None, "compute", "communication"):
            raise record.fail("stream", "'compute', 'communication' or null")
        return Node(
            id=id,
            name=record.name("name", self._limits),
            op=record.text("op"),
            target=record.text("target"),
            args=args,
            kwargs=kwargs,
            vals=tuple(_value(item) for item in record.records("val")),
            params=record.texts("params"),
            tag=None if tag is None else _tag(tag),
            mark=None
            if mark is None
            else RecomputeMark(mark.text("policy"), mark.integer("region", 0)),
            source=None if source is None else self._sources[source],
            buffers=tuple(_buffer(item, id) for item in record.records("buffers")),
            cost_us=record.number("cost_us", 0.0),
            stream=stream,
            collective=None if collective is None else _collective(collective),
            inputs=tuple(
                dict.fromkeys(id for item in (*args, *kwargs.values()) for id in references(item))
            ),
        )


def _argument(value: Any, where: str) -> Argument:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return tuple(_argument(item, where) for item in value)
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == "node" and type(inner) is int:
            return Ref(inner)
        if key == "repr" and isinstance(inner, str):
            return Repr(inner)
        if key == "map" and isinstance(inner, dict):
            return {name: _argument(item, where) for name, item in inner.items()}
    raise DamagedDumpError(
        f'{where}: argument {str(value)[:80]} is invalid; expected {{"node": id}}, '
        f'{{"repr": text}}, '
        f'{{"map": object}}.'
    )


def _value(record: Record) -> Value:
    return Value(
        record.sizes("shape"),
        record.text("dtype"),
        record.text("device", ""),
        record.integer("bytes", 0),
    )


def _tag(record: Record) -> Tag:
    return Tag(
        role=record.text("role"),
        params=record.texts("params"),
        nbytes=record.integer("bytes", 0),
        bucket=record.optional_integer("bucket"),
        origin=record.text("origin", ""),
        cached=record.flag("cached"),
        kept=record.flag("kept"),
        deferrable=record.flag("deferrable"),
        note=record.text("note", ""),
    )


def _source(record: Record) -> Source:
    return Source(
        record.text("file", ""),
        record.integer("line"),
        record.text("text", ""),
        record.text("module", ""),
    )


def _buffer(record: Record, node: int) -> Buffer:
    return Buffer(
        nbytes=record.integer("bytes"),
        first=record.integer("first", node),
        last=record.integer("last"),
        kind=record.text("kind"),
        params=record.texts("params"),
    )


def _collective(record: Record) -> Collective:
    return Collective(
        kind=record.text("kind"),
        group=record.text("group"),
        ranks=record.integer("ranks"),
        nbytes=record.integer("bytes"),
        full_bytes=record.integer("full_bytes"),
        waits=record.integers("waits"),
        route=record.text("route", ""),
        decision=record.text("decision", ""),
        label=record.text("label", ""),
    )
