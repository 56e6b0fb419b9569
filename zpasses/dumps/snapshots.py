"""Reads snapshot files: a whole graph as JSON lines, or the nodes that differ from an earlier
snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zpasses.dumps.dump_errors import DamagedDumpError
from zpasses.dumps.files import decoded, read_lines
from zpasses.dumps.limits import Limits
from zpasses.dumps.nodes import Node, Snapshot, SnapshotHeader
from zpasses.garbage import no_garbage_collection


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
        self._header = decoded(first[1], SnapshotHeader, f"{path}, line 1", limits)
        if self._header.number != number:
            raise DamagedDumpError(
                f"{path}, line 1: 'number' is {self._header.number}; expected {number}, the number "
                "in the file's name."
            )
        self.base = self._header.base
        self.nodes: dict[int, Node] = {}
        for line, text in rows:
            if len(self.nodes) >= limits.nodes:
                raise limits.exceeded(path, "has more nodes", "nodes")
            node = decoded(text, Node, f"{path}, line {line}", limits)
            if node.id in self.nodes:
                raise DamagedDumpError(
                    f"{path}, line {line}: node {node.id} occurs twice; expected unique ids."
                )
            limits.check_name(node.name, "name", f"{path}, line {line}")
            try:
                node.resolve(self._header.sources)
            except ValueError as error:
                raise DamagedDumpError(f"{path}, line {line}: {error}.") from error
            self.nodes[node.id] = node
        if len(self.nodes) != self._header.written:
            raise DamagedDumpError(
                f"{path} has {len(self.nodes)} nodes; expected {self._header.written}: it is "
                "truncated. Dump or copy it again."
            )

    def snapshot(self, base: Snapshot | None) -> Snapshot:
        inherited: Mapping[int, Node] = {} if base is None else base.by_id
        order = self._header.order
        if order is None:
            order = tuple(self.nodes if base is None else inherited)
        if len(order) > self._limits.nodes:
            raise self._limits.exceeded(self.where, f"has {len(order):,} nodes, more", "nodes")
        known = {**inherited, **self.nodes}
        present = set(order)
        if (
            len(present) != len(order)
            or not present <= known.keys()
            or not self.nodes.keys() <= present
        ):
            raise DamagedDumpError(
                f"{self.where}, line 1: 'order' is invalid; expected the id of each node exactly "
                "once."
            )
        nodes = tuple(known[id] for id in order)
        live, spans = self._header.live_bytes, self._header.spans
        for name, entries in (("live_bytes", live), ("spans", spans)):
            if len(entries) != len(nodes):
                raise DamagedDumpError(
                    f"{self.where}, line 1: '{name}' has {len(entries)} entries; expected one "
                    f"for each of {len(nodes)} nodes."
                )
        if any(start > end for start, end in spans):
            raise DamagedDumpError(
                f"{self.where}, line 1: 'spans' is invalid; expected 0 <= start <= end."
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
