"""Writes snapshots as JSON lines. It does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from zpasses.dumps.format import Argument, Collective, Node, Ref, Repr, Snapshot, Source, Tag

__all__ = ["json_line", "snapshot_lines"]

_ENCODER = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")
)


def json_line(value: Any) -> bytes:
    """One line of JSON as UTF-8, without the line break."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def snapshot_lines(
    snapshot: Snapshot, header: Mapping[str, Any], base: Snapshot | None = None
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
    head: dict[str, Any] = {
        "snapshot": snapshot.number,
        **header,
        "base": None if base is None else base.number,
        "written": len(written),
    }
    order = [node.id for node in snapshot.nodes]
    if base is not None and order != [node.id for node in base.nodes]:
        head["order"] = order
    head["live_bytes"] = list(snapshot.live_bytes)
    head["spans"] = snapshot.spans
    head["sources"] = [
        _full({"file": each.file, "line": each.line, "text": each.text, "module": each.module})
        for each in sources
    ]
    yield json_line(head)
    for node in written:
        yield json_line(_node(node, None if node.source is None else sources[node.source]))


def _full(record: dict[str, Any]) -> dict[str, Any]:
    """The record without empty fields, which readers fill with defaults. A line number of 0 is
    kept.
    """
    return {
        key: value
        for key, value in record.items()
        if value not in (None, "", [], {}, (), False) or key == "line"
    }


def _node(node: Node, source: int | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": node.id,
        "name": node.name,
        "op": node.op,
        "target": node.target,
    }
    optional = {
        "args": [_argument(item) for item in node.args],
        "kwargs": {key: _argument(item) for key, item in node.kwargs.items()},
        "val": [
            {"shape": each.shape, "dtype": each.dtype, "device": each.device, "bytes": each.nbytes}
            for each in node.vals
        ],
        "params": node.params,
        "tag": None if node.tag is None else _tag(node.tag),
        "recompute": None
        if node.mark is None
        else _full({"policy": node.mark.policy, "region": node.mark.region or None}),
        "buffers": [
            {
                "bytes": each.nbytes,
                **({} if each.first == node.id else {"first": each.first}),
                "last": each.last,
                "kind": each.kind,
                **({"params": each.params} if each.params else {}),
            }
            for each in node.buffers
        ],
        "stream": node.stream,
        "collective": None if node.collective is None else _collective(node.collective),
    }
    record.update((key, value) for key, value in optional.items() if value)
    if source is not None:
        record["source"] = source
    if node.cost_us:
        record["cost_us"] = node.cost_us
    return record


def _argument(value: Argument) -> Any:
    if isinstance(value, Ref):
        return {"node": value.node}
    if isinstance(value, Repr):
        return {"repr": value.text}
    if isinstance(value, tuple):
        return [_argument(item) for item in value]
    if isinstance(value, Mapping):
        return {"map": {key: _argument(item) for key, item in value.items()}}
    return value


def _tag(tag: Tag) -> dict[str, Any]:
    record = {
        "role": tag.role,
        "params": tag.params,
        "bytes": tag.nbytes or None,
        "origin": tag.origin,
        "cached": tag.cached,
        "kept": tag.kept,
        "deferrable": tag.deferrable,
        "note": tag.note,
    }
    return {
        **_full(record),
        "role": tag.role,
        **({} if tag.bucket is None else {"bucket": tag.bucket}),
    }


def _collective(collective: Collective) -> dict[str, Any]:
    required = {"kind": collective.kind, "group": collective.group, "ranks": collective.ranks}
    sizes = {"bytes": collective.nbytes, "full_bytes": collective.full_bytes}
    return {
        **required,
        **sizes,
        **_full(
            {
                "waits": collective.waits,
                "route": collective.route,
                "decision": collective.decision,
                "label": collective.label,
            }
        ),
    }
