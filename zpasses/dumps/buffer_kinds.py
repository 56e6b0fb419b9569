"""Tells what each buffer of a graph holds, and for which parameters."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import Tensor, fx

from zpasses.cost.memory.buffers import Buffer
from zpasses.graph.aliases import UNSAFE_VIEWS, memory_base, view_base
from zpasses.graph.queries import value_of
from zpasses.graph.tags import GATHER_ROLES, REDUCE_ROLES, SOURCE_ROLES, Tag, tag_of

Contents = tuple[str, tuple[str, ...]]
"""Kind of a buffer ("parameter", "bucket", "gradient", "activation", "scratch" or "other"), and the
parameters that it holds data of."""


def buffer_contents(
    nodes: Sequence[fx.Node], buffers: Sequence[Buffer], saved: Mapping[str, Contents]
) -> list[Contents]:
    """What each buffer holds.

    Args:
        nodes: nodes of the graph, in order.
        buffers: its buffers, by the memory model.
        saved: what the values hold that an earlier graph saved for this one, by name.
    """
    gradients = _gradients(nodes)
    outputs: dict[fx.Node, int] = {}
    """Node -> number of its buffers that were seen. They are in the order of its outputs."""
    found = []
    for each in buffers:
        place = outputs.get(each.node, 0)
        if not each.scratch:
            outputs[each.node] = place + 1
        found.append(_contents(each, place, gradients, saved))
    return found


def output_contents(graph: fx.Graph) -> dict[str, Contents]:
    """Name -> what it holds, for each output of a graph that is a full parameter or a view of one.

    A backward graph receives these values as inputs without tags.
    """
    found = {}
    for node in graph.output_node().all_input_nodes:
        tagged: Tag | None = tag_of(node)
        base = memory_base(node)
        source = node
        while tagged is None and source is not base:
            source = source.all_input_nodes[0]
            tagged = tag_of(source)
        whole = tag_of(base)
        if whole is not None and whole.role == "flat":
            found[node.name] = ("bucket", whole.params)
        elif tagged is not None and tagged.role in GATHER_ROLES and base.op != "placeholder":
            found[node.name] = ("parameter", tagged.params)
    return found


def _gradients(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[str, ...]]:
    """Node that produces a full gradient -> the parameters. Full gradients are the inputs of
    reductions.
    """
    found: dict[fx.Node, tuple[str, ...]] = {}
    for node in nodes:
        tag = tag_of(node)
        if tag is None or tag.role not in ("reduce_input", "reduce", "flat"):
            continue
        for place, item in enumerate(node.all_input_nodes):
            source = view_base(item, UNSAFE_VIEWS)
            if tag_of(source) is None and source.op == "call_function":
                found.setdefault(source, _params_of_input(node, place, tag))
    return found


def _params_of_input(node: fx.Node, place: int, tag: Tag) -> tuple[str, ...]:
    """Parameters of one gradient that a reduction takes. A coalesced reduction has an output for
    each input. Which inputs of a flat bucket belong to which parameter is not known.
    """
    if tag.role == "flat":
        return ()
    inputs, value = len(node.all_input_nodes), value_of(node)
    if inputs == 1:
        return tag.params
    matches = isinstance(value, (list, tuple)) and len(value) == inputs
    params = _params_of_output(node, place, tag) if matches else ()
    return params if len(params) < len(tag.params) else ()


def _contents(
    buffer: Buffer,
    place: int,
    gradients: Mapping[fx.Node, tuple[str, ...]],
    saved: Mapping[str, Contents],
) -> Contents:
    node, tag = buffer.node, tag_of(buffer.node)
    if buffer.scratch:
        return "scratch", tag.params if tag is not None else ()
    if node.op == "output":
        return "parameter", ()  # cached ones, which a backward does not read
    if tag is not None and (tag.role == "flat" or (tag.bucket is not None and len(tag.params) > 1)):
        return "bucket", _params_of_output(node, place, tag)
    if tag is not None and (tag.role in GATHER_ROLES | SOURCE_ROLES):
        return "parameter", tag.params
    if tag is not None and tag.role in REDUCE_ROLES:
        return "gradient", tag.params
    if node in gradients:
        return "gradient", gradients[node]
    if node.op == "placeholder" and node.name in saved:
        return saved[node.name]
    value = value_of(node)
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    floating = isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex())
    return "activation" if floating else "other", ()


def _params_of_output(node: fx.Node, place: int, tag: Tag) -> tuple[str, ...]:
    """Parameters of one output of a node. Each output of a coalesced collective belongs to the
    parameters of the node that reads it.
    """
    value = value_of(node)
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        return tag.params
    for user in node.users:
        own = tag_of(user)
        if user.target is operator.getitem and user.args[1] == place and own is not None:
            return own.params
    return tag.params
