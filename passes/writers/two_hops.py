"""Writes an encoded `reduce_grad` over several nodes as two hops, in the dialect.

Before
  mine = zpasses.reduce_grad(grad, 14, 2, f32, None, ranks, 'int8/128')
After, on 2 nodes of 4 ranks each
  blocks = view(constant_pad_nd(grad, [.., 2]), [2, 4, 2, ..])
  sorted = view(clone(permute(blocks, [1, 0, 2, ..])), [16, ..])
  sums = zpasses.reduce_grad(sorted, 16, 4, f32, None, in_node)
  mine = zpasses.average_grad(sums, f32, across_nodes, 'int8/128', 2)

The first hop adds up exactly within a node. Each of its L ranks keeps the rows of the ranks with
its place on each node, which the order of blocks makes neighbours. The second hop exchanges codes
between the ranks with this place, one per node. So a rank sends 1/L of the codes over the network
that it would send in one hop, and a value is rounded once per node and not once per rank.

After, if the first hop exchanges codes, too
  places = permute(blocks, [1, 0, 2, ..])
  sums = view(zpasses.reduce_grad(places, 4, 1, f32, None, in_node, 'int8/128'), [4, ..])
  mine = zpasses.average_grad(sums, f32, across_nodes, 'int8/128', 2)

Codes are written in the order of places, so nothing copies the gradient before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.time.roofline import latency_us, nodes_of, ring_collective_us
from zpasses.cost.time.target import Target
from zpasses.graph.dialect import AVERAGE_GRAD, REDUCE_GRAD, rows_per_rank
from zpasses.graph.encoding import Encoding
from zpasses.graph.padding import call_padded
from zpasses.graph.queries import Editor, named_arguments, nbytes, replace_node, value_of
from zpasses.graph.tags import Reduction, Tag, add_tag, tag_of
from zpasses.ranks.new_groups import node_groups

aten = torch.ops.aten


@dataclass(frozen=True)
class ReduceArguments:
    """The arguments of a `reduce_grad`."""

    grad: fx.Node
    rows: Any
    shard_rows: Any
    dtype: torch.dtype
    reduce_dtype: torch.dtype | None
    group: str
    encoding: str | None

    @classmethod
    def of(cls, node: fx.Node) -> ReduceArguments:
        given = named_arguments(node, REDUCE_GRAD)
        values: list[Any] = [given.get(each.name) for each in REDUCE_GRAD._schema.arguments]
        found = cls(*values)
        return replace(found, group=compat.group_name(found.group))

    @property
    def between(self) -> torch.dtype:
        """Dtype of exact communication."""
        found: torch.dtype = self.reduce_dtype or value_of(self.grad).dtype
        return found

    def values_per_rank(self, ranks: int) -> Any:
        """Values of a full block."""
        width = math.prod(value_of(self.grad).shape[1:])
        return rows_per_rank(self.rows, ranks) * width


@dataclass(frozen=True)
class Nodes:
    """On which nodes the ranks of a group are."""

    ranks: int
    nodes: int
    per_node: int
    """Ranks on each node; 0 if the nodes have different numbers of them, or ranks of one node are
    not neighbours in the group."""

    @classmethod
    def of(cls, group: str, target: Target) -> Nodes:
        ranks = compat.group_ranks(group)
        nodes = nodes_of(ranks, target)
        per_node = len(ranks) // nodes
        starts = ranks[::per_node]
        even = nodes * per_node == len(ranks) and all(
            rank // target.ranks_per_node == starts[at // per_node] // target.ranks_per_node
            for at, rank in enumerate(ranks)
        )
        return cls(len(ranks), nodes, per_node if even else 0)

    @property
    def have_two_hops(self) -> bool:
        return self.nodes > 1 and self.per_node > 1


@dataclass
class Traffic:
    """Bytes of gradients of one group: those of the full tensors."""

    exact: int = 0
    codes: int = 0
    """As records of all ranks."""

    @classmethod
    def of(cls, reduction: ReduceArguments, encoding: str, ranks: int) -> Traffic:
        count = compat.planned_size(reduction.values_per_rank(ranks))
        codes = ranks * Encoding.parse(encoding).record_bytes(count)
        return cls(ranks * count * reduction.between.itemsize, codes)

    def add(self, other: Traffic) -> None:
        self.exact += other.exact
        self.codes += other.codes

    def exact_us(self, at: Nodes, target: Target) -> float:
        """Returns how long exact reductions take."""
        return ring_collective_us("reduce_scatter", self.exact, at.ranks, target, at.nodes)

    def one_hop_us(self, at: Nodes, target: Target) -> float:
        """Returns how long an exchange between all ranks takes."""
        return ring_collective_us("all_to_all", self.codes, at.ranks, target, at.nodes)

    def two_hops_us(self, at: Nodes, target: Target) -> tuple[float, float]:
        """Returns how long each of two hops takes. They use different links."""
        within = ring_collective_us("reduce_scatter", self.exact, at.per_node, target, 1)
        part = self.codes // at.per_node
        return within, ring_collective_us("all_to_all", part, at.nodes, target, at.nodes)

    def gains_by_two_hops(self, at: Nodes, target: Target) -> bool:
        """Whether both hops, one after the other, move the bytes faster than one hop.

        Latencies do not count, as gradients share launches. So the choice for a gradient does not
        depend on the others of its graph.
        """
        one = latency_us("all_to_all", at.ranks, target, at.nodes)
        within = latency_us("reduce_scatter", at.per_node, target, 1)
        across = latency_us("all_to_all", at.nodes, target, at.nodes)
        hops = sum(self.two_hops_us(at, target)) - within - across
        return hops < self.one_hop_us(at, target) - one


def write_two_hops(
    graph: fx.Graph, node: fx.Node, at: Nodes, origin: str, *, encodes_within: bool
) -> None:
    """Replaces an encoded `reduce_grad` by two hops.

    Args:
        graph: the graph to edit.
        node: the call. It is no part of an average over replicas.
        at: where the ranks of its group are, equally many neighbours on each node.
        origin: name of the pass, for tags.
        encodes_within: whether the ranks of a node exchange codes, too.

    Raises:
        AgreementError: if a rank of the group does not come to make the groups of the hops.
    """
    how = ReduceArguments.of(node)
    tag, groups = tag_of(node), node_groups(how.group, at.per_node)
    params = tag.params if tag is not None else (how.grad.name,)
    edit = Editor(graph, before=node)
    if encodes_within:
        sums = _exchanged_sums(edit, how, at, groups.inside, params, origin)
    else:
        ordered = _by_place(edit, how, at, params, origin)
        rows, between = value_of(ordered).shape[0], how.between
        inside = rows, rows // at.per_node, between, None, groups.inside
        sums = edit.call(REDUCE_GRAD, ordered, *inside)
        add_tag(sums, Tag("reduce", params, nbytes(value_of(ordered)), origin=origin))
    across = how.dtype, groups.across, how.encoding, how.shard_rows
    mine = edit.call(AVERAGE_GRAD, sums, *across)
    block = compat.planned_size(how.values_per_rank(at.ranks)) * how.dtype.itemsize
    whole = Reduction(how.rows, how.dtype, how.reduce_dtype, how.group)
    sent = nbytes(value_of(sums))
    add_tag(mine, Tag("reduce", params, sent, origin=origin, block_bytes=block, reduction=whole))
    replace_node(node, mine)


def is_second_hop(average: fx.Node) -> bool:
    """Whether an `average_grad` is between nodes, and not over replicas."""
    return named_arguments(average, AVERAGE_GRAD).get("shard_rows") is not None


_Call = Callable[..., fx.Node]


def _tagging(edit: Editor, params: tuple[str, ...], origin: str) -> _Call:
    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = edit.call(target, *args, **kwargs)
        add_tag(made, Tag("reduce_input", params, origin=origin))
        return made

    return call


def _places(call: _Call, how: ReduceArguments, at: Nodes) -> fx.Node:
    """Returns a view of the blocks of a gradient, padded, as [places, nodes, rows, ...]."""
    block, source = rows_per_rank(how.rows, at.ranks), how.grad
    inner = list(value_of(source).shape[1:])
    if block * at.ranks != how.rows:
        source = call_padded(call, source, block * at.ranks - how.rows)
    blocks = call(aten.view.default, source, [at.nodes, at.per_node, block, *inner])
    return call(aten.permute.default, blocks, [1, 0, *range(2, 3 + len(inner))])


def _by_place(
    edit: Editor, how: ReduceArguments, at: Nodes, params: tuple[str, ...], origin: str
) -> fx.Node:
    """Returns the blocks of a gradient, those of ranks with equal places on their nodes together,
    contiguous and in the dtype of communication.
    """
    call = _tagging(edit, params, origin)
    places = _places(call, how, at)
    contiguous = {"memory_format": torch.contiguous_format}
    if value_of(places).dtype == how.between:
        copied = call(aten.clone.default, places, **contiguous)
    else:
        copied = call(aten._to_copy.default, places, dtype=how.between, **contiguous)
    _, _, block, *inner = value_of(places).shape
    return call(aten.view.default, copied, [at.ranks * block, *inner])


def _exchanged_sums(
    edit: Editor,
    how: ReduceArguments,
    at: Nodes,
    group: str,
    params: tuple[str, ...],
    origin: str,
) -> fx.Node:
    """Returns the mean of what the ranks of a node decode, for the ranks with this rank's place."""
    call = _tagging(edit, params, origin)
    places = _places(call, how, at)
    _, nodes, block, *inner = value_of(places).shape
    exact = replace(Encoding.parse(str(how.encoding)), feedback=False)
    arguments = at.per_node, 1, torch.float32, None, group, str(exact)
    sums = edit.call(REDUCE_GRAD, places, *arguments)
    add_tag(sums, Tag("reduce", params, nbytes(value_of(places)), origin=origin))
    as_rows = edit.call(aten.view.default, sums, [nodes * block, *inner])
    add_tag(as_rows, Tag("reduced", params, origin=origin))
    return as_rows
