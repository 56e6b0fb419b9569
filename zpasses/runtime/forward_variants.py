"""Variants: forms of one compiled graph that hand values from call to call through extra inputs and
outputs.

A forward graph whose full parameters are marked as cached has one slot a parameter. In a variant
each slot is either gathered, and its value perhaps an extra output, or given, as an extra input;
extras come after the graph's own, in slot order. No op with side effects is involved, so Inductor
sees a plain graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.nodes import append_placeholder, collective_of, erase_dead, value_of
from zpasses.graph.tags import retag, tag_of, tagged

__all__ = [
    "ForwardVariant",
    "ParamSlot",
    "cut_forward",
    "gather_ids",
    "is_cached_param",
    "param_slots",
    "unmark_returned",
]


@dataclass(frozen=True)
class ParamSlot:
    """One cached parameter of a forward graph."""

    param: str
    """Name of the parameter."""
    dtype: torch.dtype
    """Dtype in which it is gathered."""


def param_slots(graph: fx.Graph) -> list[ParamSlot]:
    """The cached parameters of a graph, in graph order, each once: of one that is gathered in two
    dtypes, the first."""
    return list(_nodes_by_slot(graph))


def gather_ids(graph: fx.Graph) -> list[int]:
    """For each slot, which collective gathers it: slots with one number are gathered together or
    not at all."""
    numbers: dict[fx.Node, int] = {}
    return [
        numbers.setdefault(_launch(nodes[0]), len(numbers))
        for nodes in _nodes_by_slot(graph).values()
    ]


def _launch(full: fx.Node) -> fx.Node:
    node = full
    while node.op == "call_function" and collective_of(node) is None and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_cached_param(graph: fx.Graph) -> Callable[[fx.Node], bool]:
    """Whether a value of the graph is a cached parameter or a view of one."""
    memory = {_viewed(node) for nodes in _nodes_by_slot(graph).values() for node in nodes}
    return lambda node: _viewed(node) in memory


def unmark_returned(graph: fx.Graph, returned: Iterable[object]) -> None:
    """Do not retain what the model returns: its caller may write to it."""
    memory = {_viewed(node) for node in returned if isinstance(node, fx.Node)}
    for node, tag in list(tagged(graph, "full")):
        if tag.cached and _viewed(node) in memory:
            retag(node, cached=False)


def _viewed(node: fx.Node) -> fx.Node:
    # Inductor may drop a clone.
    while isinstance(node.target, compat.OpOverload) and (
        node.target.is_view or node.target is torch.ops.aten.clone.default
    ):
        node = node.all_input_nodes[0]
    return node


def _nodes_by_slot(graph: fx.Graph) -> dict[ParamSlot, list[fx.Node]]:
    inputs = {tag.params[0] for _, tag in tagged(graph, "shard")}
    found: dict[ParamSlot, list[fx.Node]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for node, tag in tagged(graph, "full"):
        param, dtype = tag.params[0], value_of(node).dtype
        if tag.cached and param in inputs and dtypes.setdefault(param, dtype) is dtype:
            found.setdefault(ParamSlot(param, dtype), []).append(node)
    return found


@dataclass(frozen=True)
class ForwardVariant:
    """Which slots a variant is given and which it hands out; it gathers all that it is not
    given."""

    given: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


def cut_forward(gm: fx.GraphModule, variant: ForwardVariant) -> tuple[fx.GraphModule, list[Any]]:
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
    compat.pin_output_strides(output)
    graph.lint()
    cut.recompile()
    return cut, extra_inputs


def _add_input(graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    node = append_placeholder(graph, name)
    node.meta = {key: like.meta[key] for key in ("val", "tensor_meta") if key in like.meta}
    node.meta["zpasses"] = tag_of(like)
    return node
