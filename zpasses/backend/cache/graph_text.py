"""A captured graph and its inputs as text: equal texts compile to equal code.

The text covers what AOTAutograd, Inductor and the passes of zpasses read. It leaves out source
lines, which only errors show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.backend.cache.function_text import PLAIN, functions_digest
from zpasses.graph.tags import Tag

_NAMESPACES = frozenset({"aten", "prims", "prim", "_c10d_functional", "zpasses", "torchvision"})
"""Operators whose code belongs to torch or zpasses, whose versions are in the key."""


class NotCacheableError(Exception):
    """A graph that has no text. The message says why."""


def graph_text(gm: fx.GraphModule) -> str:
    """Returns the nodes of a graph and of its subgraphs.

    Raises:
        NotCacheableError: if something in the graph has no text that determines it.
    """
    lines = []
    for path, module in gm.named_modules():
        if isinstance(module, fx.GraphModule):
            lines.append(f"graph {path}")
            if (policy := compat.checkpoint_policy(module)) is not None:
                lines.append(f"policy {_functions_text([policy], 'has a policy of checkpoints')}")
            lines += [_node_text(node) for node in module.graph.nodes]
        elif path:
            raise NotCacheableError(f"it calls the module {path!r} ({type(module).__name__})")
    held = [*gm.named_parameters(), *gm.named_buffers()]
    if held:
        raise NotCacheableError(f"it holds the tensor {held[0][0]!r}")
    return "\n".join(lines)


def _node_text(node: fx.Node) -> str:
    if node.op == "get_attr" and not isinstance(
        getattr(node.graph.owning_module, str(node.target), None), fx.GraphModule
    ):
        raise NotCacheableError(f"it holds the value {node.target!r}")
    parts = [node.op, node.name, _target_text(node), _value_text(node.args)]
    parts.append(_value_text(dict(node.kwargs)))
    parts.append(_value_text(node.meta.get("custom")))
    stack = node.meta.get("nn_module_stack") or {}
    parts.append(" ".join(f"{path}:{kind}" for path, kind in stack.values()))
    return "|".join(parts)


def _target_text(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, (compat.OpOverload, compat.OpOverloadPacket)):
        if compat.op_namespace(target) not in _NAMESPACES:
            return f"{target} {_custom_op_digest(target)}"
        return str(target)
    if isinstance(target, compat.HigherOrderOperator):
        if "triton" in target.name():
            raise NotCacheableError(f"it calls {target.name()}, whose kernel has no stable name")
        return str(target.name())
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None or "<locals>" in name or "<lambda>" in name:
        raise NotCacheableError(f"it calls {target!r}, which has no name")
    return f"{getattr(target, '__module__', '')}.{name}"


def _custom_op_digest(op: compat.OpOverload | compat.OpOverloadPacket) -> str:
    functions = compat.custom_op_functions(op)
    if not functions:
        raise NotCacheableError(f"it calls the operator {op}, whose source is not known")
    return _functions_text(functions, f"calls the operator {op}")


def _functions_text(functions: Sequence[Callable[..., Any]], what: str) -> str:
    try:
        return functions_digest(functions)
    except ValueError as error:
        raise NotCacheableError(f"it {what}, {error}") from None


def _value_text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _symbol_text(value)
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_value_text, value))})"
    if isinstance(value, dict):
        pairs = (f"{_value_text(key)}: {_value_text(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, slice):
        return f"slice{_value_text((value.start, value.stop, value.step))}"
    if isinstance(value, (compat.OpOverload, compat.OpOverloadPacket, Tag)):
        return str(value)
    raise NotCacheableError(f"it holds a constant of type {type(value).__name__}")


def _symbol_text(value: Any) -> str:
    return f"{value}={compat.size_hint(value)}"


def input_text(inputs: Sequence[Any]) -> str:
    """Returns what a compile reads of the example inputs of a graph.

    Raises:
        NotCacheableError: for a tensor subclass.
    """
    memory: dict[int, int] = {}
    return "\n".join(_input_line(value, memory) for value in inputs)


def _input_line(value: Any, memory: dict[int, int]) -> str:
    if not isinstance(value, torch.Tensor):
        return _value_text(value)
    if type(value) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(
        value, compat.FakeTensor
    ):
        raise NotCacheableError(f"it takes a {type(value).__name__}")
    parts: list[Any] = [value.dtype, value.device, value.layout, list(map(_size, value.shape))]
    if value.layout is torch.strided:
        parts += [list(map(_size, value.stride())), _size(value.storage_offset())]
        # Inputs that share memory are compiled in another form.
        storage = compat.storage_id(value)
        parts.append(None if storage is None else memory.setdefault(storage, len(memory)))
    parts += [value.requires_grad, value.is_conj(), value.is_neg()]
    parts.append(getattr(value, "_dynamo_static_input_type", None))
    return ", ".join(map(str, parts))


def _size(size: Any) -> str:
    return str(size) if isinstance(size, int) else _symbol_text(size)


def state_text() -> str:
    """Returns the global state of torch that a compile reads."""
    return "\n".join(_state())


def _state() -> Iterator[str]:
    settings: tuple[Callable[[], Any], ...] = (
        torch.is_grad_enabled,
        torch.is_inference_mode_enabled,
        torch.get_default_dtype,
        torch.get_default_device,
        torch.are_deterministic_algorithms_enabled,
        torch.get_num_threads,
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        compat.attention_backends,
    )
    for each in settings:
        yield f"{each.__name__}={each()}"
    for device in ("cpu", "cuda"):
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        yield f"autocast {device}={enabled and dtype}"
    yield f"autocast cache={torch.is_autocast_cache_enabled()}"
    yield f"ranges={compat.size_ranges()}"
