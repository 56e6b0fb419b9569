"""What a captured graph does with gathered parameters: which it returns, and that none is written.

Eager code gets copies that refuse writes (zpasses.sharding.guard). In a graph, they are plain
tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.graph.dialect import UNSHARD
from zpasses.graph.encoding import DECODE
from zpasses.graph.queries import value_of
from zpasses.graph.tags import tag_of


def is_unshard(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (UNSHARD, UNSHARD.overloadpacket)


def is_decode(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (DECODE, DECODE.overloadpacket)


def returned_params(graph: fx.Graph, given: Mapping[fx.Node, str]) -> dict[int, str]:
    """Return which outputs of Dynamo's graph are gathered parameters.

    Args:
        given: inputs that are gathered parameters -> labels.
    """
    labels = dict(given)
    for node in graph.nodes:
        if is_unshard(node) and (tag := tag_of(node)) is not None:
            labels[node] = f"parameter {tag.params[0]!r}"
    returned = {
        value: label
        for read, label in labels.items()
        for value, user in _uses_of_storage(read)
        if user.op == "output"
    }
    outputs = graph.output_node().args[0]
    nodes = outputs if isinstance(outputs, (list, tuple)) else ()
    return {
        i: returned[node]
        for i, node in enumerate(nodes)
        if isinstance(node, fx.Node) and node in returned
    }


def check_no_writes(read: fx.Node, label: str) -> None:
    """Raise ShardingError if a graph writes to a gathered parameter, or to a view of one.

    Args:
        label: the parameter, for the error.
    """
    uses = list(_uses_of_storage(read))
    writers = (name for value, user in uses if (name := _in_place_name(value, user)))
    # Dynamo counts other writes to its fake values, such as by `out=` and `inplace=True`.
    is_written = any(compat.version_of(value_of(each)) for each, _ in uses)
    if (how := next(writers, "in place" if is_written else "")) != "":
        raise ShardingError(
            f"the model writes to {label} ({how}), which is sharded. "
            "A read returns a gathered copy, so the write would be lost. Write to the shards "
            "outside the compiled function: to model.parameters(), or to module attributes "
            f"inside `with zpasses.local_shards(model):`.\n{read.stack_trace or ''}"
        )


def _in_place_name(value: fx.Node, user: fx.Node) -> str:
    """Return the name of what a node calls if it writes to a value; "" for others."""
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    writes = name in ("setitem", "iadd", "imul", "isub", "itruediv") or (
        name.endswith("_") and not name.endswith("__")
    )
    return name if writes and _is_first_of(value, user) else ""


def _is_first_of(value: fx.Node, user: fx.Node) -> bool:
    """Whether a value is the first argument, or in a list that is (`torch._foreach_mul_`)."""
    first = user.args[0] if user.args else None
    return first is value or (isinstance(first, (list, tuple)) and value in first)


def _uses_of_storage(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (value, user) for each use of a node and of its views."""
    queue, memory = [node], _storage_of(node)
    while queue:
        value = queue.pop()
        for user in value.users:
            yield value, user
            if memory is not None and _storage_of(user) == memory:
                queue.append(user)


def _storage_of(node: fx.Node) -> int | None:
    value = value_of(node)
    return (
        compat.storage_id(value)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
        else None
    )
