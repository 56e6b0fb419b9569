"""Full parameters that outlive the call of a graph, as those of stages 1 and 2.

A later call finds them unchanged. In memory they stay until their gradients are reduced, or the
parameters change: so they count until the end of forward and throughout backward, whether backward
reads them or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.aliases import CLONES, view_base
from zpasses.graph.encoding import records_of
from zpasses.graph.queries import collective_of, nbytes, returned_values, value_of
from zpasses.graph.tags import params_of, tag_of, tagged


@dataclass(frozen=True)
class ParamSlot:
    """One cached parameter of a forward graph."""

    param: str
    """Name of the parameter."""
    dtype: torch.dtype
    """Dtype in which it is gathered."""
    encoding: str = ""
    """How it is encoded (`zpasses.graph.encoding`); "" for exact values."""


def param_slots(graph: fx.Graph) -> list[ParamSlot]:
    """Return the cached parameters of a graph, each once, in graph order.

    If a parameter is gathered in two dtypes or encodings, only the first has a slot.
    """
    return list(nodes_by_slot(graph))


def nodes_by_slot(graph: fx.Graph) -> dict[ParamSlot, list[fx.Node]]:
    """Returns the nodes with each cached parameter of a graph."""
    return _by_slot(graph, [node for node, tag in tagged(graph, "full") if tag.cached])


def _by_slot(graph: fx.Graph, full: Sequence[fx.Node]) -> dict[ParamSlot, list[fx.Node]]:
    inputs = {tag.params[0] for _, tag in tagged(graph, "shard")}
    found: dict[ParamSlot, list[fx.Node]] = {}
    first: dict[str, ParamSlot] = {}
    for node in full:
        param, records = params_of(node)[0], records_of(node)
        encoding = "" if records is None else str(node.args[-1])
        slot = ParamSlot(param, value_of(records or node).dtype, encoding)
        if param in inputs and first.setdefault(param, slot) == slot:
            found.setdefault(slot, []).append(node)
    return found


def is_cached_param(graph: fx.Graph) -> Callable[[fx.Node], bool]:
    """Returns a predicate: whether a node of the graph is a cached parameter or a view of one."""
    memory = cached_params(graph)
    return lambda node: view_base(node, CLONES) in memory


def cached_params(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return the nodes of a graph whose memory its cached parameters have."""
    # Inductor may remove a clone, and then it is the parameter.
    held = (held_node(node) for nodes in nodes_by_slot(graph).values() for node in nodes)
    return {view_base(node, CLONES): None for node in held}


def held_node(full: fx.Node) -> fx.Node:
    """Returns the node whose value is cached: the codes of an encoded parameter, or that with the
    padding, if there is any.

    The partitioner may save either of the latter for backward.
    """
    if (records := records_of(full)) is not None:
        return records
    if full.target is torch.ops.aten.slice.Tensor:
        whole = full.all_input_nodes[0]
        tag, own = tag_of(whole), tag_of(full)
        if (
            tag is not None
            and own is not None
            and (tag.role, tag.params) == ("gathered", own.params)
        ):
            return whole
    return full


# --- marks ----------------------------------------------------------------------------------------
def gather_of(full: fx.Node) -> fx.Node:
    """Returns the collective that a full parameter comes from; without one, what is first read or
    made on the way to it.
    """
    node = full
    while node.op == "call_function" and collective_of(node) is None and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def mark_held(graph: fx.Graph) -> list[fx.Node]:
    """Marks the full parameters of a graph that a later pass will have cached. Returns what holds
    them.
    """
    slots = _by_slot(graph, [node for node, _ in tagged(graph, "full")]).values()
    held = [held_node(node) for nodes in slots for node in nodes]
    for node in held:
        node.meta[compat.HELD] = 0
    return held


def mark_held_in_step(forward: fx.Graph, backward: fx.Graph) -> None:
    """Marks what will be cached: full parameters in forward, inputs that hold them in backward, and
    there how many bytes of others are held.
    """
    left = {view_base(node, CLONES): None for node in mark_held(forward)}
    saved = {
        node.name: view_base(node, CLONES)
        for node in returned_values(forward)
        if isinstance(node, fx.Node)
    }
    read = [node for node in backward.find_nodes(op="placeholder") if saved.get(node.name) in left]
    for node in read:
        node.meta[compat.HELD] = 0
    for base in {saved[node.name] for node in read}:
        del left[base]
    backward.output_node().meta[compat.HELD] = nbytes(list(map(value_of, left)))


def is_held(node: fx.Node) -> bool:
    """Whether the memory of a value outlives the graph, as `mark_held` found."""
    return compat.HELD in node.meta


def held_bytes(graph: fx.Graph) -> int:
    """Returns the bytes of cached parameters that a backward does not read."""
    return int(graph.output_node().meta.get(compat.HELD, 0))
