"""Subgraphs that a graph calls several times, as torch's operator `invoke_subgraph`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

__all__ = ["call_subgraph", "is_subgraph_call", "subgraph_of", "subgraphs_write_no_inputs"]


def call_subgraph(graph: fx.Graph, attribute: str, operands: tuple[fx.Node, ...]) -> fx.Node:
    """Adds a call of the subgraph that the graph's module holds, at the graph's insertion point.

    The call returns a tuple. Calls of one attribute are compiled once.
    """
    body = graph.get_attr(attribute)
    call: Any = invoke_subgraph
    return graph.call_function(call, (body, attribute, *operands))


def is_subgraph_call(node: fx.Node) -> bool:
    """Whether a node calls a subgraph."""
    return node.op == "call_function" and node.target is invoke_subgraph


def subgraph_of(node: fx.Node) -> fx.GraphModule | None:
    """Returns the graph that a subgraph call runs; None if it is not known."""
    if not is_subgraph_call(node):
        return None
    body: Any = node.args[0]
    found = getattr(node.graph.owning_module, str(body.target), None)
    return found if isinstance(found, fx.GraphModule) else None


@contextlib.contextmanager
def subgraphs_write_no_inputs() -> Iterator[None]:
    """Context manager: AOTAutograd does not look for writes to inputs of subgraphs inside it.

    For each call it would trace the subgraph once more, which is half of what the trace of the
    joint graph takes. The caller promises that no subgraph writes to its inputs.
    """
    operator: Any = invoke_subgraph
    checked = getattr(operator, "_supports_training_input_mutation", None)
    if checked is None:  # this torch does not look
        yield
        return
    operator._supports_training_input_mutation = True
    try:
        yield
    finally:
        operator._supports_training_input_mutation = checked
