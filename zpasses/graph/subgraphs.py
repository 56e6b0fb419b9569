"""Calls of subgraphs that a model marks, as by `torch.compiler.nested_compile_region`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.graph.aliases import is_view
from zpasses.graph.queries import returned_values, value_of


def read_subgraph_inputs_directly(gm: fx.GraphModule) -> None:
    """Drop results of subgraph calls that are inputs of the same call, or views of one, in place.

    torch's partitioner returns what a subgraph's backward needs from its forward, also inputs and
    views of them. A full parameter would then be saved for backward, whatever the passes decide.
    """
    users: dict[fx.GraphModule, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        body = compat.subgraph_of(node)
        if body is not None:
            users.setdefault(body, []).append(node)
    for body, calls in users.items():
        outputs = returned_values(body.graph)
        chains = [_views_of_input(each) for each in outputs]
        if not any(chains):
            continue
        left = [number for number, chain in enumerate(chains) if not chain]
        for call in calls:
            _read_inputs_of(call, body, chains)
            call.meta["val"] = tuple(value_of(call)[number] for number in left)
            for part in list(call.users):
                number: Any = part.args[1]
                part.args = (call, left.index(number))
        body.graph.output_node().args = (tuple(outputs[number] for number in left),)
        body.recompile()


def _read_inputs_of(
    call: fx.Node, body: fx.GraphModule, chains: Sequence[Sequence[fx.Node]]
) -> None:
    """Replace results of one call by views of what it is given.

    Args:
        chains: for each result, the nodes of the subgraph from an input to it; empty for others.
    """
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    copies: dict[fx.Node, Any] = dict(zip(inputs, call.args[2:], strict=True))
    for part in list(call.users):
        number: Any = part.args[1]
        chain = chains[number]
        if not chain:
            continue
        with call.graph.inserting_before(call):
            for node in chain:
                if node not in copies:
                    copies[node] = call.graph.node_copy(node, copies.__getitem__)
        part.replace_all_uses_with(copies[chain[-1]])
        call.graph.erase_node(part)


def _views_of_input(node: Any) -> list[fx.Node]:
    """The nodes from an input of a subgraph to a view of it; empty for other values."""
    chain = [node]
    while isinstance(node, fx.Node) and node.op == "call_function":
        if not is_view(node) or len(node.all_input_nodes) != 1:
            return []
        node = node.all_input_nodes[0]
        chain.append(node)
    return chain[::-1] if isinstance(node, fx.Node) and node.op == "placeholder" else []
