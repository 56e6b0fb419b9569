"""Dynamo: where placeholders come from, compile ids, errors, and its structured trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

from torch import fx
from torch._dynamo import disable as _dynamo_disable
from torch._guards import CompileContext

__all__ = [
    "compile_name",
    "dynamo_disable",
    "is_restart",
    "is_structured_trace_on",
    "is_to_local",
    "is_tracing",
    "parameter_name",
    "placeholder_source",
    "trace_artifact",
    "wrapped_error",
]


_SOURCE_PART = re.compile(r"_(modules|parameters|buffers)\[['\"]([^'\"]+)['\"]\]")


def placeholder_source(node: fx.Node) -> str:
    """The Python expression that a Dynamo placeholder stands for, or "" for graphs from
    elsewhere."""
    argument = node.meta.get("grapharg")
    source = getattr(node, "_dynamo_source", None) or getattr(argument, "source", None)
    if source is None:
        return ""
    name = source.name  # a method until torch 2.11, a property since
    return str(name() if callable(name) else name)


def parameter_name(node: fx.Node) -> str:
    """The parameter's name below the compiled module ("layers.0.weight"); the placeholder's own
    name for anything else."""
    parts = [match.group(2) for match in _SOURCE_PART.finditer(placeholder_source(node))]
    return ".".join(parts) or node.name


def is_to_local(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph is `dtensor.to_local()`, without arguments.

    A method call, until torch 2.11 a function made for the occasion that closes over the arguments.
    """
    if len(node.args) != 1 or node.kwargs:
        return False
    if node.op == "call_method":
        return node.target == "to_local"
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "prim_to_local":
        return False
    captured = [cell.cell_contents for cell in getattr(node.target, "__closure__", None) or ()]
    return not any(captured)


def compile_name() -> str:
    """Dynamo's id of the graph being compiled ("0/1": second compile of the first frame), or "-"
    outside a compile."""
    return str(CompileContext.current_compile_id() or "-")


def is_tracing() -> bool:
    """Whether Dynamo is at work, which looks at attributes of the tensors that it is given."""
    return CompileContext.current_compile_id() is not None


def is_restart(error: BaseException) -> bool:
    """Whether an exception is Dynamo's way of tracing a frame once more, and no failure."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def wrapped_error(error: BaseException) -> BaseException | None:
    """What a backend raised, of the exception that Dynamo makes of it."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else None


def dynamo_disable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo out of a function that runs inside compiled code."""
    return cast(Callable[..., Any], _dynamo_disable(fn))


def is_structured_trace_on() -> bool:
    """Whether somebody listens to torch's structured trace: TORCH_TRACE is set, or torch's own
    tests listen."""
    from torch._logging._internal import trace_log

    return bool(trace_log.handlers) and trace_log.isEnabledFor(10)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text into torch's structured trace, where tlparse shows it with the compile under
    way."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )
