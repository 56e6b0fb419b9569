"""Writes records as JSON lines. It does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import structs

from zpasses.dumps.format import StepEvent
from zpasses.dumps.nodes import Snapshot, SnapshotHeader, Source


def json_line(value: Any) -> bytes:
    """One line of JSON as UTF-8, without the line break."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair, as in the name of a file
        plain = msgspec.to_builtins(value)
        return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")


def snapshot_lines(
    snapshot: Snapshot, step: StepEvent, base: Snapshot | None = None
) -> Iterator[bytes]:
    """The lines of a snapshot's file. With a base, only nodes that differ from the base are
    written.
    """
    known = {} if base is None else base.by_id
    written = [
        node
        for node in snapshot.nodes
        if (old := known.get(node.id)) is None or not (old is node or old == node)
    ]
    sources: dict[Source, int] = {}
    for node in written:
        if node.source is not None:
            sources.setdefault(node.source, len(sources))
    order = tuple(node.id for node in snapshot.nodes)
    same = base is None or order == tuple(node.id for node in base.nodes)
    yield json_line(
        SnapshotHeader(
            number=snapshot.number,
            graph=step.graph,
            level=step.level,
            after=step.after,
            base=None if base is None else base.number,
            written=len(written),
            live_bytes=tuple(snapshot.live_bytes),
            spans=snapshot.spans,
            sources=tuple(sources),
            order=None if same else order,
        )
    )
    for node in written:
        if node.source is not None:
            node = structs.replace(node, source=None, source_index=sources[node.source])
        yield json_line(node)
