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

After, encode=int8, for each launch
  records = zpasses.encode(a, ...)
  s = all_to_all_single(records, ..., replicate_group)
  gc = mm(..)
  mine = zpasses.encode(zpasses.decode_mean(wait(s), ...), ...)
  mean_a = zpasses.decode(wait(all_gather(mine, replicate_group)), ...)

After, between nodes (reduce-grads.encode)
  records = zpasses.encode(sums, ...)
  s = all_to_all_single(records, ..., across_nodes)
  gc = mm(..)
  mean_a = zpasses.decode_mean(wait(s), ...)

Contract: gradients that are awaited together are averaged together, as soon as they are there. They
share one all-reduce; only over gloo, which copies what shares one, large gradients have one each.
Averages are awaited before their first reader, mostly the graph's output. They so run beside the
kernels that are left, on links that gathers and reductions within a replica do not use. Runs after
the passes that move reductions, since these take the average for a part of what completes a
reduction. Averages go to the host at the end of the graph, each beside the all-reduces after it.

With `encode`, each replica averages a part of the values in fp32, of which the others send it codes
of one byte (zpasses.graph.encoding), and sends codes of the result to them. The gather starts where
the next launch does, or before the first reader. The graph equals, bit for bit, the one whose
`average_grad` has the argument `encoding`. All replicas get the same values. Averages between nodes
are the second hop of `reduce-grads{encode=...}`: they are encoded as that pass says, and each rank
gets its own shard. Their records are larger than shards, so each exchange is awaited where the next
one has started.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.memory.collective_memory import gloo_packs
from zpasses.graph.dialect import AVERAGE_GRAD, REDUCE_GRAD, TO_HOST, group_size, rows_per_rank
from zpasses.graph.host_copies import is_only_returned, on_device, split_copy
from zpasses.graph.queries import (
    Editor,
    calls,
    collective_of,
    is_wait,
    named_arguments,
    nbytes,
    replace_node,
    value_of,
)
from zpasses.graph.tags import REDUCE_ROLES, Tag, add_tag, tag_of
from zpasses.passes.writers.encode_options import EXACT_BELOW_KIB, EncodeOptions, EncodingPass
from zpasses.passes.writers.encoded_average import EncodedAverage, EncodedMember
from zpasses.passes.writers.two_hops import is_second_hop
from zpasses.pipeline.base_pass import Level

aten = torch.ops.aten


@dataclass(frozen=True)
class AverageReplicas(EncodingPass):
    """Insert the all-reduces of hybrid sharding, and exchanges between nodes."""

    name: ClassVar[str] = "average-replicas"
    encoded: ClassVar[compat.OpOverload] = AVERAGE_GRAD
    exact_because: ClassVar[str] = (
        "Without replicas there is no average, as on a mesh of one dimension; reduce-grads.encode "
        f"encodes the reduction there. {EncodingPass.exact_because}"
    )
    level: ClassVar[Level] = Level.BACKWARD

    encode: Literal["int8", "fp8"] | None = None
    """Exchange and gather codes of one byte per value instead of exact values: integers or
    `float8_e4m3fn`. Scalars and vectors, such as gradients of norms and biases, and small ones stay
    exact. See docs/encoding.md."""
    block: int | None = None
    """Most values that share one scale; `none` takes 128. Needs `encode`."""
    exact_below_kib: float = EXACT_BELOW_KIB
    """Gradients of which a full block of a shard is smaller than this, in KiB, stay exact."""

    def choose_encoding(self, node: fx.Node, options: EncodeOptions) -> None:
        value, group = value_of(node.all_input_nodes[0]), compat.group_name(node.args[2])
        chosen = options.chosen(value, _block_rows(node), value.dtype, group)
        if chosen is not None and _encoding_of(node) is None and nbytes(value):
            node.args = (*node.args[:3], str(chosen))

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of averages lowered."""
        self.choose_encodings(graph)
        self.say_if_exact(graph)
        copies = _move_copies_last(graph)
        launches, found = _launches(graph), 0
        order = {node: at for at, node in enumerate(graph.nodes)}
        encoded: list[tuple[EncodedAverage, list[fx.Node], fx.Node]] = []
        for before, members in launches:
            found += len(members)
            under_way = encoded[-1:]
            encoding = _encoding_of(members[0])
            if encoding is None:
                _lower(graph, before, members)
            else:
                reader = min(
                    (_first_reader(graph, each, order) for each in members), key=order.__getitem__
                )
                average = _start_encoded(graph, before, members, encoding)
                encoded.append((average, members, reader))
            for average, _, reader in under_way:
                if order[before] < order[reader]:
                    average.advance(Editor(graph, before, like=members[0]))
        for average, members, reader in encoded:
            results = average.results(Editor(graph, reader, like=members[0]))
            for node, result in zip(members, results, strict=True):
                _replace(node, result)
        for copy in copies:
            split_copy(copy, self.name)
        return found


def _move_copies_last(graph: fx.Graph) -> list[fx.Node]:
    """Moves the copies of averages to the host to the end of the graph, and returns them."""
    copies = [
        node
        for node in calls(graph, TO_HOST)
        if on_device(node).target is AVERAGE_GRAD and is_only_returned(node)
    ]
    for node in copies:
        graph.output_node().prepend(node)
    return copies


def _encoding_of(average: fx.Node) -> str | None:
    encoding = named_arguments(average, AVERAGE_GRAD).get("encoding")
    return None if encoding is None else str(encoding)


def _block_rows(average: fx.Node) -> Any:
    """Returns the rows of a full block of the shard, equal on all ranks that share a parameter."""
    reduced = average.all_input_nodes[0]
    value, tag = value_of(reduced), tag_of(reduced)
    if reduced.target is REDUCE_GRAD:
        given = named_arguments(reduced, REDUCE_GRAD)
        return rows_per_rank(given["rows"], group_size(compat.group_name(given["group_name"])))
    rows = value.shape[0] if value.dim() else 1
    if tag is not None and tag.block_bytes and nbytes(value):
        return tag.block_bytes * rows // nbytes(value)
    return rows


def _launches(graph: fx.Graph) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Returns averages that can start together, and the node before which they start.

    They have one group, dtype and form, and nothing but parts of reductions lies between them.
    """
    found: list[tuple[fx.Node, list[fx.Node]]] = []
    together: dict[Any, list[fx.Node]] = {}
    completing: set[fx.Node] = set()
    for node in graph.nodes if calls(graph, AVERAGE_GRAD) else ():
        if node.target is AVERAGE_GRAD:
            value = value_of(node.all_input_nodes[0])
            key = node.args[2], value.dtype, value.device, _encoding_of(node), is_second_hop(node)
            together.setdefault(key, []).append(node)
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
        first = _first_reader(graph, node, order)
        _finish(graph, node, results[node], first, awaits=node in sent)


def _first_reader(graph: fx.Graph, node: fx.Node, order: Mapping[fx.Node, int]) -> fx.Node:
    return min((*node.users, graph.output_node()), key=order.__getitem__)


def _start_encoded(
    graph: fx.Graph, before: fx.Node, members: list[fx.Node], encoding: str
) -> EncodedAverage:
    group: Any = members[0].args[2]
    given = [
        EncodedMember(
            node.all_input_nodes[0], _params(node), value_of(node).dtype, value_of(node).shape
        )
        for node in members
    ]
    edit = Editor(graph, before, like=members[0])
    name = compat.group_name(group)
    scatters = is_second_hop(members[0])
    return EncodedAverage(edit, given, encoding, name, AverageReplicas.name, scatters=scatters)


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
    dtype = value_of(node).dtype
    if awaits:
        result = edit.call(compat.functional.wait_tensor.default, result)
        add_tag(result, Tag("reduced", _params(node), origin=AverageReplicas.name))
    if value_of(result).dtype != dtype:
        result = edit.call(aten._to_copy.default, result, dtype=dtype)
    elif not awaits:
        # Of no bytes, or on one replica. The gradient before the average stays a node of its own.
        result = edit.call(aten.clone.default, result)
    _replace(node, result)


def _replace(node: fx.Node, result: fx.Node) -> None:
    tag = tag_of(node)
    if tag is not None:
        add_tag(result, replace(tag, role="shard_grad", nbytes=0, origin=AverageReplicas.name))
    replace_node(node, result)
