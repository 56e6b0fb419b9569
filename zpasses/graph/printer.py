"""Print graphs as short text, for reading and for expected listings in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.queries import value_of
from zpasses.graph.tags import tag_of
from zpasses.short_names import SHORT_DTYPES


def listing(graph: fx.Graph | fx.GraphModule) -> str:
    """Returns a graph as text, one line per node.

        x: f32[2, 5]
        w_shard: f32[3, 5]                                    # shard: w
        w = zpasses.unshard(w_shard, 6, None, None, '0')      # f32[6, 5]; gather: w
        return (w,)

    The comment of a line gives the value's dtype and shape, the role of the node's tag with the
    parameters it works for, and `recomputed` if backward recomputes the value instead of saving it.
    Op names omit the namespaces `aten` and `_c10d_functional`.
    """
    lines = [
        _line(node) for node in (graph.graph if isinstance(graph, fx.GraphModule) else graph).nodes
    ]
    width = max((len(code) for code, note in lines if note), default=0)
    return "\n".join(f"{code:{width}}  # {note}" if note else code for code, note in lines)


def _line(node: fx.Node) -> tuple[str, str]:
    notes = _notes(node)
    if node.op == "placeholder":
        return f"{node.name}: {_value(value_of(node))}", "; ".join(notes)
    if node.op == "output":
        return f"return {_argument(node.args[0])}", ""
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}", "; ".join(notes)
    value = _value(value_of(node))
    return f"{node.name} = {_call(node)}", "; ".join([value, *notes] if value else notes)


def _call(node: fx.Node) -> str:
    arguments = [_argument(arg) for arg in node.args] + [
        f"{key}={_argument(arg)}" for key, arg in node.kwargs.items()
    ]
    if node.op == "call_function":
        return f"{_op_name(node.target)}({', '.join(arguments)})"
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    return f"self.{node.target}({', '.join(arguments)})"


def _op_name(target: str | Callable[..., Any]) -> str:
    if isinstance(target, (compat.OpOverload, compat.OpOverloadPacket)):
        namespace, _, name = str(target).partition(".")
        name = name.partition(".")[0]
        return name if namespace in ("aten", "_c10d_functional") else f"{namespace}.{name}"
    return str(getattr(target, "__name__", target))


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_argument(item) for item in value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, torch.dtype):
        name = str(value).removeprefix("torch.")
        return SHORT_DTYPES.get(name, name)
    if isinstance(value, (torch.memory_format, torch.layout, torch.device)):
        return str(value).removeprefix("torch.")
    return repr(value)


def _value(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{_argument(value.dtype)}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_value(item) for item in value)})"
    return "" if value is None else type(value).__name__


def _notes(node: fx.Node) -> list[str]:
    notes, tag = [], tag_of(node)
    if tag is not None:
        bucket = f" in bucket {tag.bucket}" if tag.bucket is not None else ""
        notes.append(f"{tag.role}: {', '.join(tag.params)}{bucket}")
        if tag.cached:
            notes.append("cached")
        if tag.kept:
            notes.append("kept until backward")
        if tag.note:
            notes.append(tag.note)
    if compat.is_marked_recompute(node):
        notes.append("recomputed")
    return notes
