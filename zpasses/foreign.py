"""Recognise parameter gathers in graphs that zpasses did not capture (FSDP2, SimpleFSDP, hand-written ones), and tag them.

This is the only place that matches on the shape of a graph. A parameter gather is an all-gather whose input comes from one graph input
through casts, padding and views alone; what a wait gives back is the full parameter.
"""

from __future__ import annotations

import torch
from torch import fx

from zpasses.graph import collective_of, is_wait, nbytes, value_of
from zpasses.tags import Tag, add_tag, tag_of

__all__ = ["tag_foreign_gathers"]

aten = torch.ops.aten
_TRANSPARENT = {
    aten._to_copy.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.view.default,
    aten.reshape.default,
    aten.alias.default,
    aten.detach.default,
    aten.slice.Tensor,
    torch.ops.prims.convert_element_type.default,
}


def tag_foreign_gathers(graph: fx.Graph, origin: str) -> int:
    """Tag untagged parameter gathers; returns how many were found."""
    found = 0
    for node in graph.nodes:
        if tag_of(node) is not None or not _is_all_gather(node):
            continue
        chain = _chain_to_input(node)
        waits = [user for user in node.users if is_wait(user)]
        if chain is None or len(waits) != 1:
            continue
        *between, shard = chain
        params = (shard.name,)
        add_tag(node, Tag("gather", params, nbytes(value_of(node.all_input_nodes[0])), origin=origin))
        add_tag(waits[0], Tag("full", params, origin=origin))
        for step in between:
            add_tag(step, Tag("gather_input", params, origin=origin))
        found += 1
    return found


def _is_all_gather(node: fx.Node) -> bool:
    collective = collective_of(node)
    return collective is not None and collective.op == "all_gather_into_tensor"


def _chain_to_input(gather: fx.Node) -> list[fx.Node] | None:
    """The nodes between a gather and the graph input it reads, that input last; None if it reads anything else."""
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
