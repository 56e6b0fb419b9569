"""Writes snapshots as text: JSON lines for programs, Python for people. It does not import
torch."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from zpasses.dumps.format import Argument, Collective, Node, Ref, Repr, Snapshot, Source, Tag, Value

__all__ = ["json_line", "python_source", "snapshot_lines"]

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


# --- Python ---------------------------------------------------------------------------------------
_DTYPES = {"float": "f", "int": "i", "uint": "u", "complex": "c"}
_NAME = re.compile(r"[A-Za-z_]\w*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def python_source(snapshot: Snapshot, name: str, title: str) -> str:
    """A graph as a Python function for people to read. Comments give each value's shape, and its
    role for which parameters.
    """
    names = {node.id: _identifier(node.name) for node in snapshot.nodes}
    inputs, body = [], []
    for node in snapshot.nodes:
        if node.op == "placeholder":
            inputs.append((f"{names[node.id]},", _note(node)))
        elif node.op == "output":
            body.append((f"return {_text(node.args[0] if node.args else None, names)}", ""))
        elif node.op == "get_attr":
            body.append((f"{names[node.id]} = self.{_dotted(node.target)}", _note(node)))
        else:
            body.append((f"{names[node.id]} = {_call(node, names)}", _note(node)))
    text = "\n".join(f"# {line}" for line in title.splitlines())
    head = [text, f"def {_identifier(name)}(", *_aligned(inputs), "):"]
    return "\n".join([*head, *_aligned(body or [("pass", "")])]) + "\n"


def _aligned(lines: list[tuple[str, str]]) -> list[str]:
    width = min(max((len(code) for code, note in lines if note), default=0), 100)
    return [f"    {code:{width}}  # {note}" if note else f"    {code}" for code, note in lines]


@functools.lru_cache(maxsize=1 << 16)
def _identifier(name: str) -> str:
    cleaned = re.sub(r"\W", "_", name)
    return cleaned if _NAME.fullmatch(cleaned) else f"_{cleaned}"


@functools.lru_cache(maxsize=1 << 12)
def _dotted(name: str) -> str:
    return ".".join(_identifier(part) for part in name.split("."))


def _call(node: Node, names: Mapping[int, str]) -> str:
    arguments = [_text(item, names) for item in node.args]
    arguments += [f"{_identifier(key)}={_text(item, names)}" for key, item in node.kwargs.items()]
    if node.op == "call_method" and arguments:
        return f"({arguments[0]}).{_identifier(node.target)}({', '.join(arguments[1:])})"
    prefix = "self." if node.op == "call_module" else ""
    return f"{prefix}{_dotted(node.target)}({', '.join(arguments)})"


def _text(value: Argument, names: Mapping[int, str]) -> str:
    if isinstance(value, Ref):
        return names[value.node]
    if isinstance(value, Repr):
        return value.text if _DOTTED.fullmatch(value.text) else repr(value.text)
    if isinstance(value, tuple):
        return f"[{', '.join(_text(item, names) for item in value)}]"
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{key!r}: {_text(item, names)}" for key, item in value.items()) + "}"
        )
    return repr(value)


def _note(node: Node) -> str:
    notes = [", ".join(_value(value) for value in node.vals)] if node.vals else []
    if node.tag is not None:
        bucket = "" if node.tag.bucket is None else f" in bucket {node.tag.bucket}"
        notes.append(f"{node.tag.role}: {', '.join(node.tag.params)}{bucket}")
        notes += [
            word
            for word, present in (
                ("cached", node.tag.cached),
                ("kept", node.tag.kept),
                (node.tag.note, bool(node.tag.note)),
            )
            if present
        ]
    notes += [node.mark.text] if node.mark is not None else []
    return " ".join("; ".join(notes).split())


@functools.lru_cache(maxsize=1 << 12)
def _value(value: Value) -> str:
    match = re.fullmatch(r"(float|int|uint|complex)(\d+)", value.dtype)
    short = (
        _DTYPES[match[1]] + match[2]
        if match
        else {"bfloat16": "bf16"}.get(value.dtype, value.dtype)
    )
    return f"{short}[{', '.join(map(str, value.shape))}]" if value.device else short
