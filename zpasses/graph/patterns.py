"""Recognize and tag parameter gathers and gradient reductions that zpasses did not insert.

Examples are graphs of FSDP2, SimpleFSDP and hand-written collectives. Passes that optimize
collectives call this module first, so that they find all of them by tag. Two patterns are matched:

- A parameter gather is an all-gather whose input comes from one graph input through casts, padding
  and views only. Its wait returns the full parameter.
- A gradient reduction is a reduce-scatter or all-reduce (sum or average) whose result reaches one
  graph output through casts, views and scaling only.

In graphs that zpasses captured, the other collectives are of the model itself: those of tensor,
expert and context parallelism, or of a metric. They are marked as such, and never matched.
"""

from __future__ import annotations

import torch
from torch import fx

from zpasses.graph.aliases import CASTS_AND_PADDING, COPIES, WHOLE_VIEWS
from zpasses.graph.queries import collective_of, is_wait, nbytes, returned_values, value_of
from zpasses.graph.tags import Tag, add_tag, is_of_model, tag_of

aten = torch.ops.aten
_TRANSPARENT = COPIES | WHOLE_VIEWS | {aten.reshape.default, aten.slice.Tensor}
_SCALING = {aten.div.Tensor, aten.mul.Tensor, aten.div.Scalar, aten.mul.Scalar}


def tag_foreign_gathers(graph: fx.Graph, origin: str) -> int:
    """Tags untagged parameter gathers with `origin`, and returns how many it found."""
    found = 0
    for node in graph.nodes:
        if tag_of(node) is not None or is_of_model(node) or not _is_all_gather(node):
            continue
        chain = _chain_to_input(node)
        waits = [user for user in node.users if is_wait(user)]
        if chain is None or len(waits) != 1:
            continue
        *between, shard = chain
        params = (shard.name,)
        add_tag(
            node, Tag("gather", params, nbytes(value_of(node.all_input_nodes[0])), origin=origin)
        )
        add_tag(waits[0], Tag("full", params, origin=origin))
        for step in between:
            add_tag(step, Tag("gather_input", params, origin=origin))
        found += 1
    return found


def _is_all_gather(node: fx.Node) -> bool:
    collective = collective_of(node)
    return collective is not None and collective.op == "all_gather_into_tensor"


def _chain_to_input(gather: fx.Node) -> list[fx.Node] | None:
    """Returns the nodes from a gather's input back to the graph input, which comes last.

    Returns None if the gather reads anything else.
    """
    chain: list[fx.Node] = []
    node = gather
    while True:
        inputs = node.all_input_nodes
        if len(inputs) != 1:
            return None
        node = inputs[0]
        chain.append(node)
        if node.op == "placeholder":
            return None if "tangents" in node.name else chain
        if node.target not in _TRANSPARENT:
            return None


def tag_foreign_reductions(graph: fx.Graph, origin: str) -> int:
    """Tags untagged gradient reductions with `origin`, and returns how many it found.

    A gradient is named after its position among the graph's outputs: "output_0".
    """
    places = {node: i for i, node in enumerate(returned_values(graph)) if isinstance(node, fx.Node)}
    found = 0
    for node in graph.nodes:
        if tag_of(node) is not None or is_of_model(node) or not _is_reduction(node):
            continue
        after, before = _chain_to_output(node), _chain_before(node)
        if after is None:
            continue
        params = (f"output_{places[after[-1]]}",)
        add_tag(
            node, Tag("reduce", params, nbytes(value_of(node.all_input_nodes[0])), origin=origin)
        )
        for step in after[:-1]:
            add_tag(step, Tag("reduced", params, origin=origin))
        add_tag(after[-1], Tag("shard_grad", params, origin=origin))
        for step in before:
            add_tag(step, Tag("reduce_input", params, origin=origin))
        found += 1
    return found


def _is_reduction(node: fx.Node) -> bool:
    collective = collective_of(node)
    known = ("reduce_scatter_tensor", "all_reduce")
    return (
        collective is not None and collective.op in known and collective.reduce_op in ("sum", "avg")
    )


def _chain_to_output(reduction: fx.Node) -> list[fx.Node] | None:
    """Returns the nodes from a reduction to the value that the graph returns, which comes last.

    Returns None if anything else reads one of them.
    """
    chain: list[fx.Node] = []
    node = reduction
    while len(node.users) == 1:
        (node,) = node.users
        if node.op == "output":
            return chain or None
        if (
            not (is_wait(node) or node.target in _TRANSPARENT or node.target in _SCALING)
            or len(node.all_input_nodes) != 1
        ):
            return None
        chain.append(node)
    return None


def _chain_before(reduction: fx.Node) -> list[fx.Node]:
    """Returns the casts and the padding that prepare a gradient for its reduction."""
    steps: list[fx.Node] = []
    node = reduction.all_input_nodes[0]
    while node.target in CASTS_AND_PADDING and len(node.users) == 1:
        steps.append(node)
        node = node.all_input_nodes[0]
    return steps
