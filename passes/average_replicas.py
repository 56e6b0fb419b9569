"""Average gradients over the replicas of hybrid sharding, once they are reduced within a replica.

Before
  a, b = wait(reduce_scatter(ga)), wait(reduce_scatter(gb))
  mean_a = zpasses.average_grad(a, ...)
  mean_b = zpasses.average_grad(b, ...)
  gc = mm(..)
  return mean_a, mean_b, ...
After
  a, b = wait(reduce_scatter(ga)), wait(reduce_scatter(gb))
  s = all_reduce_coalesced([a, b], "avg", replicate_group)
  gc = mm(..)
  mean_a = wait(s[0]);  mean_b = wait(s[1])
  return mean_a, mean_b, ...

Contract: gradients that are awaited together are averaged together, as soon as they are there. They
share one all-reduce; only over gloo, which copies what shares one, large gradients have one each.
Averages are awaited before their first reader, mostly the graph's output. They so run beside the
kernels that are left, on links that gathers and reductions within a replica do not use. Runs after
the passes that move reductions, since these take the average for a part of what completes a
reduction.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.memory.liveness import gloo_packs
from zpasses.graph.dialect import AVERAGE_GRAD, group_size
from zpasses.graph.queries import (
    Editor,
    calls,
    collective_of,
    is_wait,
    nbytes,
    replace_node,
    value_of,
)
from zpasses.graph.tags import REDUCE_ROLES, Tag, add_tag, tag_of
from zpasses.pipeline.passes import Level, Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class AverageReplicas(Pass):
    """Insert the all-reduces of hybrid sharding."""

    name: ClassVar[str] = "average-replicas"
    level: ClassVar[Level] = Level.BACKWARD

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of averages lowered."""
        found = 0
        for before, members in _launches(graph):
            found += len(members)
            _lower(graph, before, members)
        return found


def _launches(graph: fx.Graph) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Returns averages that can start together, and the node before which they start.

    They have one group and dtype, and nothing but parts of reductions lies between them.
    """
    found: list[tuple[fx.Node, list[fx.Node]]] = []
    together: dict[Any, list[fx.Node]] = {}
    completing: set[fx.Node] = set()
    for node in graph.nodes if calls(graph, AVERAGE_GRAD) else ():
        if node.target is AVERAGE_GRAD:
            value = value_of(node.all_input_nodes[0])
            together.setdefault((node.args[2], value.dtype, value.device), []).append(node)
        elif not _reads_average(node) and _completes_reduction(node, completing):
            completing.add(node)
        else:
            found += [(node, members) for members in together.values()]
            together.clear()
    return found


def _reads_average(node: fx.Node) -> bool:
    return any(each.target is AVERAGE_GRAD for each in node.all_input_nodes)


def _completes_reduction(node: fx.Node, completing: set[fx.Node]) -> bool:
    """Whether a node awaits a reduction, or computes something from awaited ones only."""
    if node.op != "call_function" or collective_of(node) is not None:
        return False
    tag = tag_of(node)
    if tag is not None:
        return tag.role in ("reduced", "shard_grad")
    inputs = node.all_input_nodes
    if is_wait(node) or node.target is operator.getitem:
        source = tag_of(inputs[0])
        if source is not None and source.role in REDUCE_ROLES:
            return True
    return bool(inputs) and all(each in completing for each in inputs)


def _lower(graph: fx.Graph, before: fx.Node, members: list[fx.Node]) -> None:
    sources = {node: node.all_input_nodes[0] for node in members}
    group: Any = members[0].args[2]
    sent = [
        node
        for node in members
        if nbytes(value_of(sources[node])) and group_size(compat.group_name(group)) > 1
    ]
    results = dict(sources)
    for together in _sharing(sent, sources, group):
        edit = Editor(graph, before, like=together[0])
        if len(together) == 1:
            (node,) = together
            started = edit.call(compat.functional.all_reduce.default, sources[node], "avg", group)
            results[node] = started
        else:
            started = edit.call(
                compat.functional.all_reduce_coalesced.default,
                [sources[node] for node in together],
                "avg",
                group,
            )
            for at, node in enumerate(together):
                results[node] = edit.call(operator.getitem, started, at)
        _tag_start(started, together)
    order = {node: at for at, node in enumerate(graph.nodes)}
    for node in members:
        first = min((*node.users, graph.output_node()), key=order.__getitem__)
        _finish(graph, node, results[node], first, awaits=node in sent)


def _sharing(
    members: list[fx.Node], sources: dict[fx.Node, fx.Node], group: Any
) -> list[list[fx.Node]]:
    """Returns which averages share an all-reduce."""
    if not members or not compat.is_gloo(compat.group_name(group)):
        return [members] if members else []
    packed = [members[at] for at in gloo_packs([nbytes(value_of(sources[m])) for m in members])]
    return [*([packed] if packed else []), *([node] for node in members if node not in packed)]


def _tag_start(started: fx.Node, members: list[fx.Node]) -> None:
    params = tuple(_params(node)[0] for node in members)
    sent = sum(nbytes(value_of(node.all_input_nodes[0])) for node in members)
    add_tag(started, Tag("reduce", params, sent, origin=AverageReplicas.name))


def _params(node: fx.Node) -> tuple[str, ...]:
    tag = tag_of(node)
    return tag.params if tag is not None else (node.name,)


def _finish(
    graph: fx.Graph, node: fx.Node, result: fx.Node, before: fx.Node, *, awaits: bool
) -> None:
    """Replaces an average by its result, which is awaited before a node."""
    edit = Editor(graph, before, like=node)
    tag, dtype = tag_of(node), value_of(node).dtype
    if awaits:
        result = edit.call(compat.functional.wait_tensor.default, result)
        add_tag(result, Tag("reduced", _params(node), origin=AverageReplicas.name))
    if value_of(result).dtype != dtype:
        result = edit.call(aten._to_copy.default, result, dtype=dtype)
    elif not awaits:
        # Of no bytes, or on one replica. The gradient before the average stays a node of its own.
        result = edit.call(aten.clone.default, result)
    if tag is not None:
        add_tag(result, replace(tag, role="shard_grad", nbytes=0, origin=AverageReplicas.name))
    replace_node(node, result)
