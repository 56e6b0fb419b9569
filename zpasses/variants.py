"""Variants: forms of one compiled graph that hand values from call to call through extra inputs and outputs.

A forward graph whose full parameters are marked as retained has one slot a parameter. In a variant each slot is either gathered, and
its value perhaps an extra output, or given, as an extra input; extras come after the graph's own, in slot order. No op with side
effects is involved, so Inductor sees a plain graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.graph import erase_dead, value_of
from zpasses.tags import tag_of, tagged

__all__ = ["Slot", "Variant", "cut_variant", "slots"]


@dataclass(frozen=True)
class Slot:
    """One retained parameter of a forward graph."""

    param: str
    """Name of the parameter."""
    dtype: torch.dtype
    """Dtype in which it is gathered."""


def slots(graph: fx.Graph) -> list[Slot]:
    """The retained parameters of a graph, in graph order, each once."""
    return list(_nodes_by_slot(graph))


def _nodes_by_slot(graph: fx.Graph) -> dict[Slot, list[fx.Node]]:
    inputs = {tag.params[0] for _, tag in tagged(graph, "shard")}
    found: dict[Slot, list[fx.Node]] = {}
    for node, tag in tagged(graph, "full"):
        if tag.retained and tag.params[0] in inputs:
            found.setdefault(Slot(tag.params[0], value_of(node).dtype), []).append(node)
    return found


@dataclass(frozen=True)
class Variant:
    """Which slots a variant is given and which it hands out; it gathers all that it is not given."""

    given: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


def cut_variant(gm: fx.GraphModule, variant: Variant) -> tuple[fx.GraphModule, list[Any]]:
    """The variant as a graph of its own.

    Returns:
        The graph, and the fake values of its extra inputs.
    """
    cut = compat.clone_graph_module(gm)
    graph = cut.graph
    extra_outputs, extra_inputs = [], []
    for number, nodes in enumerate(_nodes_by_slot(graph).values()):
        if number in variant.given:
            given = _add_input(graph, f"kept_{number}", nodes[0])
            extra_inputs.append(value_of(given))
            for node in nodes:
                node.replace_all_uses_with(given)
            erase_dead(graph, nodes)
        elif number in variant.kept:
            extra_outputs.append(nodes[0])
    output = graph.output_node()
    output.args = ((*output.args[0], *extra_outputs),)  # type: ignore[misc]
    graph.lint()
    cut.recompile()
    return cut, extra_inputs


def _add_input(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta = {key: like.meta[key] for key in ("val", "tensor_meta") if key in like.meta}
    node.meta["zpasses"] = tag_of(like)
    return node
