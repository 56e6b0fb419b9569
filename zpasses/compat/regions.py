"""Subgraphs that a graph calls several times, as torch's operator `invoke_subgraph`."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

__all__ = ["is_subgraph_call", "subgraph_of"]


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
