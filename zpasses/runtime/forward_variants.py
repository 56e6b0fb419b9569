"""Forward variants: forms of one forward graph that pass full parameters from call to call, through
extra inputs and outputs.

A forward graph has one slot per full parameter that is marked as cached. A variant handles each
slot in one of three ways:

  - given: the full parameter is an extra input, and is not gathered.
  - kept: the full parameter is gathered, and is an extra output.
  - otherwise it is gathered as in the graph itself.

Extra inputs and outputs come after the graph's own, in slot order. No op has side effects, so
Inductor sees a plain graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.aliases import CLONES, is_view, view_base
from zpasses.graph.cached_params import gather_of, held_node, is_cached_param, nodes_by_slot
from zpasses.graph.encoding import records_of
from zpasses.graph.queries import (
    append_placeholder,
    erase_dead,
    returned_values,
    value_of,
)
from zpasses.graph.tags import retag, tag_of, tagged


def gather_ids(graph: fx.Graph) -> list[int]:
    """Return for each slot the number of the collective that gathers it.

    A collective gathers all of its slots or none, so slots with equal numbers are given together.
    """
    numbers: dict[fx.Node, int] = {}
    return [
        numbers.setdefault(gather_of(nodes[0]), len(numbers))
        for nodes in nodes_by_slot(graph).values()
    ]


def saved_params(graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    """Return the parameters whose shard or full value an output of a forward graph is, or is a view
    of.

    Returns:
        Name of the output's node, which is that of the backward graph's input -> the parameters.
    """
    found = {}
    for node in graph.output_node().all_input_nodes:
        source: fx.Node | None = node
        while source is not None:
            tag = tag_of(source)
            if tag is not None and tag.role in ("shard", "gathered", "full"):
                found[node.name] = tag.params
                break
            source = source.all_input_nodes[0] if is_view(source) else None
    return found


def unmark_returned(graph: fx.Graph, returned: Iterable[object]) -> None:
    """Do not cache parameters that the model returns, because the caller may write to them.

    Args:
        returned: output nodes of the graph that reach the caller.
    """
    memory = {view_base(node, CLONES) for node in returned if isinstance(node, fx.Node)}
    for node, tag in list(tagged(graph, "full")):
        if tag.cached and view_base(node, CLONES) in memory:
            retag(node, cached=False)


@dataclass(frozen=True)
class ForwardVariant:
    """How a variant handles each slot, by slot number. It gathers every slot that is not in
    `given`.
    """

    given: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


def build_forward_variant(
    gm: fx.GraphModule, variant: ForwardVariant
) -> tuple[fx.GraphModule, list[Any]]:
    """Build a variant as a new graph; `gm` is not changed.

    Returns:
        The graph, and the fake values of its extra inputs.
    """
    built = compat.clone_graph_module(gm)
    graph = built.graph
    extra_outputs, extra_inputs = [], []
    for number, nodes in enumerate(nodes_by_slot(graph).values()):
        if number in variant.given:
            held = list(map(held_node, nodes))
            given = append_placeholder(graph, f"kept_{number}", held[0])
            given.meta["zpasses"] = tag_of(records_of(nodes[0]) or nodes[0])
            extra_inputs.append(value_of(given))
            for node in held:
                node.replace_all_uses_with(given)
            erase_dead(graph, held)
        elif number in variant.kept:
            extra_outputs.append(held_node(nodes[0]))
    output, returned = graph.output_node(), returned_values(graph)
    count = len(returned)
    output.args = ((*returned, *extra_outputs),)
    pinned = _full_param_outputs(graph)
    for i, each in enumerate(map(value_of, returned)):
        if not _has_static_strides(each):
            pinned[i] = each.stride()
    full = {count + i: value_of(node).stride() for i, node in enumerate(extra_outputs)}
    compat.pin_output_strides(output, {**pinned, **full})
    graph.lint()
    built.recompile()
    return built, extra_inputs


def _full_param_outputs(graph: fx.Graph) -> dict[int, tuple[int, ...]]:
    """Position of each output that is a cached parameter, or a view of one -> its strides.

    A variant that is given the parameter returns it as it is. Inductor may prefer other strides
    for what backward reads, which would be a second copy of the parameter.
    """
    is_cached = is_cached_param(graph)
    return {
        i: value_of(node).stride()
        for i, node in enumerate(returned_values(graph))
        if isinstance(node, fx.Node) and is_cached(node)
    }


def pin_shards(graph: fx.Graph) -> None:
    """Has a graph return the shards among its outputs as they are.

    Inductor lays out what convolutions are computed from. It would return a copy of each shard, and
    make another one for the gather, as backward does of the copy.
    """
    shards = {
        i: value_of(node).stride()
        for i, node in enumerate(returned_values(graph))
        if isinstance(node, fx.Node) and node.op == "placeholder" and tag_of(node) is not None
    }
    compat.pin_output_strides(graph.output_node(), shards)


def static_strides(graph: fx.Graph, strides: OutputStrides) -> dict[int, tuple[int, ...]]:
    """Returns the position of each output whose strides hold in all runs -> the strides that an
    earlier variant returned.
    """
    values = map(value_of, returned_values(graph))
    pairs = enumerate(zip(strides, values, strict=False))
    return {i: each for i, (each, val) in pairs if each is not None and _has_static_strides(val)}


def _has_static_strides(value: Any) -> bool:
    """Whether strides that Inductor chooses for an output hold in all runs, although it reports
    those of one. Other outputs have the strides of the trace in every variant.

    A batch may vary: it comes first in every layout.
    """
    if not isinstance(value, Tensor):
        return True
    return all(isinstance(each, int) for each in (*value.shape[1:], *value.stride()))


OutputStrides = Sequence[tuple[int, ...] | None]
"""Strides of the outputs of a graph, in elements; None for outputs that are no tensors."""
