"""Lower every `reduce_grad` to one collective that averages a gradient and keeps this rank's rows.

Before
  mine = zpasses.reduce_grad(grad, 10, ...)
After, form=reduce_scatter                  After, form=all_reduce
  cast = _to_copy(grad, f32)                  cast = _to_copy(grad, f32)
  padded = constant_pad_nd(cast, [.., 2])     started = all_reduce(cast, ...)
  started = reduce_scatter_tensor(padded)     total = wait_tensor(started)
  block = wait_tensor(started)                mine = slice_copy(total, 0, 3, 6)
  mine = slice_copy(block, 0, 0, 3)
After, encode=int8                          After, encode=int8, on several nodes
  records = zpasses.encode(grad, ...)         sorted = clone(permute(grad, ...))
  started = all_to_all_single(records)        started = reduce_scatter(in_node)
  arrived = wait_tensor(started)              sums = wait_tensor(started)
  mine = zpasses.decode_mean(arrived, ...)    mine = average_grad(across_nodes)

Contract: the result has the shard's rows and dtype, and owns its memory. A result that is a slice
of a larger tensor is copied, so the larger tensor can be freed. Casts, padding and slices exist
only if they change something.

With `encode`, every rank rounds its gradient to codes of one byte (zpasses.graph.encoding), sends
each rank the codes of its rows, and sums what it decodes in fp32, in the order of ranks. The graph
equals, bit for bit, the one whose `reduce_grad` has the argument `encoding`. A window of gradient
accumulation adds up exact gradients, and encodes their sum. With `feedback=on`, the text of the
encoding says so, and the runtime adds residuals (zpasses.graph.error_feedback).

Over several nodes of several ranks, an exchange can take two hops: exact sums within a node, and
codes of these between nodes (zpasses.passes.writers.two_hops). `average-replicas` lowers the second
one, so it needs that pass. The graph equals the one with these two operators of the dialect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.time.target import current_target
from zpasses.errors import OptionError
from zpasses.graph.dialect import AVERAGE_GRAD, REDUCE_GRAD, group_size, rows_per_rank
from zpasses.graph.encoding import DECODE_MEAN, ENCODE, Encoding
from zpasses.graph.error_feedback import planned_residuals
from zpasses.graph.padding import call_padded
from zpasses.graph.queries import (
    Editor,
    calls,
    nbytes,
    replace_node,
    value_of,
)
from zpasses.graph.tags import Reduction, Tag, add_tag, retag, tag_of
from zpasses.option_values import format_size
from zpasses.passes.writers.encode_options import (
    EXACT_BELOW_KIB,
    EncodeOptions,
    EncodingPass,
    warn_once,
)
from zpasses.passes.writers.two_hops import (
    Nodes,
    ReduceArguments,
    Traffic,
    is_second_hop,
    write_two_hops,
)
from zpasses.pipeline.base_pass import Level
from zpasses.pipeline.events import note
from zpasses.pipeline.facts import Facts

aten = torch.ops.aten


@dataclass(frozen=True)
class ReduceGrads(EncodingPass):
    """Insert one reduction per gradient."""

    name: ClassVar[str] = "reduce-grads"
    encoded: ClassVar[compat.OpOverload] = REDUCE_GRAD
    level: ClassVar[Level] = Level.JOINT

    form: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter"
    """`reduce_scatter` moves the fewest bytes. `all_reduce` moves twice as many, and needs no
    padding. It is for backends without a reduce-scatter.
    """
    encode: Literal["int8", "fp8"] | None = None
    """Exchange codes of one byte per value instead of exact values: integers or `float8_e4m3fn`.
    Scalars and vectors, such as gradients of norms and biases, and small ones stay exact.
    `average-replicas` encodes averages over replicas. See docs/encoding.md."""
    block: int | None = None
    """Most values that share one scale; `none` takes 128. Needs `encode`."""
    exact_below_kib: float = EXACT_BELOW_KIB
    """Gradients that are smaller than this in full, in KiB, stay exact."""
    feedback: Literal["off", "on"] = "off"
    """`on` adds what encoding has lost of a gradient to the parameter's next gradient. On each
    rank, this holds 4 bytes per value of the full parameters whose gradients are encoded. Needs
    `encode`. See docs/encoding.md."""
    hops: Literal["auto", "one", "two", "two-encoded"] = "auto"
    """How encoded gradients get to the ranks of other nodes. `one` exchanges codes between all
    ranks. `two` adds up exactly within each node first, and then exchanges codes between nodes,
    which takes a group over several nodes with several ranks each. `two-encoded` exchanges codes
    within nodes, too. `auto` takes `one` or `two`, whichever the cost model of the target predicts
    to be faster. Needs `encode`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encode is None and self.hops != "auto":
            raise OptionError(
                f"pass {self.name!r}: hops={self.hops} without 'encode' has no effect. Give a "
                "format, such as encode=int8, or leave hops out."
            )
        if self.encode is not None and self.form == "all_reduce":
            raise OptionError(
                f"pass {self.name!r}: encode={self.encode} and form=all_reduce exclude each other, "
                "because an all-reduce cannot add codes. Leave form out."
            )

    def _encode_options(self) -> EncodeOptions | None:
        return EncodeOptions.of(
            self.name,
            self.encode,
            self.block,
            self.exact_below_kib,
            feedback=self.feedback == "on",
        )

    @property
    def facts(self) -> Facts:
        # The ranks of a group make the groups of its hops together.
        return replace(super().facts, votes=self.encode is not None and self.hops != "one")

    def choose_encoding(self, node: fx.Node, options: EncodeOptions) -> None:
        given = ReduceArguments.of(node)
        value = value_of(given.grad)
        chosen = options.chosen(value, given.rows, given.between, given.group)
        if chosen is None or given.encoding is not None:
            return
        given = replace(given, encoding=str(chosen))
        node.args, node.kwargs = tuple(vars(given).values()), {}
        at = Nodes.of(given.group, current_target())
        if self._takes_two_hops(node, given, at):
            within = self.hops == "two-encoded"
            write_two_hops(node.graph, node, at, self.name, encodes_within=within)

    def _takes_two_hops(self, node: fx.Node, given: ReduceArguments, at: Nodes) -> bool:
        has_replicas = _average_of(node) is not None
        is_asked_for = self.hops in ("two", "two-encoded")
        if is_asked_for and (has_replicas or not at.have_two_hops):
            target = current_target()
            found = (
                "has replicas"
                if has_replicas
                else f"has {at.ranks} ranks on {at.nodes} nodes (target {target.name} with "
                f"{target.ranks_per_node} ranks per node)"
            )
            raise OptionError(
                f"pass {self.name!r}, option 'hops': got {self.hops}, but process group "
                f"{given.group!r} {found}; expected several nodes that have the same number of "
                "ranks, more than one, next to each other, and no replicas. Leave hops out, or set "
                "ranks_per_node in the option 'target'."
            )
        if self.hops == "one" or has_replicas or not at.have_two_hops:
            return False
        traffic = Traffic.of(given, str(given.encoding), at.ranks)
        return is_asked_for or traffic.gains_by_two_hops(at, current_target())

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of reductions lowered."""
        self.choose_encodings(graph)
        self.say_if_exact(graph)
        for text in _slower_exchanges(graph):
            note(f"{self.name}: {text}")
            warn_once(f"{self.name}: {text}")
        found = calls(graph, REDUCE_GRAD)
        for node in found:
            self._lower(graph, node)
        residuals = planned_residuals(graph)
        if residuals:
            held = format_size(sum(each.nbytes for each in residuals))
            note(
                f"error feedback holds residuals of {len(residuals)} parameters, {held} on each "
                "rank, as long as the parameters live"
            )
        return len(found)

    def _lower(self, graph: fx.Graph, node: fx.Node) -> None:
        given = ReduceArguments.of(node)
        grad, rows, shard_rows, dtype, reduce_dtype, group, encoding = vars(given).values()
        tag = tag_of(node)
        lowering = _Lowering(
            Editor(graph, before=node),
            tag.params if tag else (grad.name,),
            self.name,
            group,
            reduce_dtype,
        )
        value = value_of(grad)
        if value.dim() and nbytes(value) == 0:
            mine = lowering.edit.call(
                aten.new_empty.default, grad, [shard_rows, *value.shape[1:]], dtype=dtype
            )
        elif value.dim() == 0:
            mine = lowering.all_reduce(lowering.cast(grad))
        elif encoding is not None:
            how = Encoding.parse(encoding)
            mine = lowering.exchange(grad, rows, shard_rows, dtype, how)
        elif lowering.size == 1:
            mine = lowering.cast(grad)
        elif self.form == "all_reduce":
            mine = lowering.slice_of_all_reduce(grad, rows, shard_rows, dtype)
        else:
            mine = lowering.reduce_scatter(grad, rows, shard_rows, dtype)
        mine = lowering.finish(mine, grad, dtype)
        full_rows = max(value.shape[0], 1) if value.dim() else 1
        whole = (
            nbytes(value)
            // value.element_size()
            // full_rows
            * rows_per_rank(full_rows, lowering.size)
            * dtype.itemsize
        )
        reduction = Reduction(rows, dtype, reduce_dtype, lowering.group)
        done = Tag("shard_grad", lowering.params, origin=self.name, block_bytes=whole)
        average = _average_of(node)
        if average is None:
            done = replace(done, reduction=reduction)
        elif not is_second_hop(average):  # which knows the whole reduction
            _complete_tag(average, reduction, whole)
        add_tag(mine, done)
        replace_node(node, mine)


def _slower_exchanges(graph: fx.Graph) -> list[str]:
    """Returns what to say of each group over several nodes in which exact reductions are faster
    than exchanges in one hop.

    An exact reduction adds up within a node before it crosses the network. So do two hops, which
    use links within and between nodes at once, for different gradients.
    """
    traffic: dict[str, Traffic] = {}
    for node in calls(graph, REDUCE_GRAD):
        given = ReduceArguments.of(node)
        if given.encoding is not None:
            added = Traffic.of(given, given.encoding, group_size(given.group))
            traffic.setdefault(given.group, Traffic()).add(added)
    target, said = current_target(), []
    for group, moved in traffic.items():
        at = Nodes.of(group, target)
        took, without = moved.one_hop_us(at, target) / 1e3, moved.exact_us(at, target) / 1e3
        if at.nodes > 1 and took > without:
            said.append(
                f"the encoded gradients of {at.ranks} ranks on {at.nodes} nodes are predicted to "
                f"take {took:.3g} ms, and {without:.3g} ms if they were exact, because only exact "
                "ones are added up within a node first. Leave encode out, or shard within nodes "
                "and give average-replicas.encode (docs/encoding.md)."
            )
    return said


@dataclass
class _Lowering:
    """Inserts the nodes that reduce one gradient to a shard."""

    edit: Editor
    params: tuple[str, ...]
    origin: str
    group: str
    reduce_dtype: torch.dtype | None

    @property
    def size(self) -> int:
        return group_size(self.group)

    def cast(self, grad: fx.Node) -> fx.Node:
        if self.reduce_dtype is None or value_of(grad).dtype == self.reduce_dtype:
            return grad
        return self._prepare(self.edit.call(aten._to_copy.default, grad, dtype=self.reduce_dtype))

    def all_reduce(self, source: fx.Node) -> fx.Node:
        return self._await(
            self.edit.call(compat.functional.all_reduce.default, source, "avg", self.group), source
        )

    def slice_of_all_reduce(
        self, grad: fx.Node, rows: Any, shard_rows: Any, dtype: torch.dtype
    ) -> fx.Node:
        total = self.all_reduce(self.cast(grad))
        start = min(_group_rank(self.group) * rows_per_rank(rows, self.size), rows)
        return self._owning_slice(total, start, start + shard_rows, dtype)

    def reduce_scatter(
        self, grad: fx.Node, rows: Any, shard_rows: Any, dtype: torch.dtype
    ) -> fx.Node:
        source = self.cast(grad)
        block = rows_per_rank(rows, self.size)
        if block * self.size != rows:
            source = self._prepare(call_padded(self.edit.call, source, block * self.size - rows))
        started = self.edit.call(
            compat.functional.reduce_scatter_tensor.default, source, "avg", self.size, self.group
        )
        mine = self._await(started, source)
        return mine if shard_rows == block else self._owning_slice(mine, 0, shard_rows, dtype)

    def exchange(
        self, grad: fx.Node, rows: Any, shard_rows: Any, dtype: torch.dtype, how: Encoding
    ) -> fx.Node:
        size, shape = self.size, [shard_rows, *value_of(grad).shape[1:]]
        count = rows_per_rank(rows, size) * math.prod(shape[1:])
        records = self._prepare(self.edit.call(ENCODE, grad, count, size, str(how)))
        splits = [how.record_bytes(count)] * size
        started = self.edit.call(
            compat.functional.all_to_all_single.default, records, splits, splits, self.group
        )
        arrived = self._await(started, records, str(how))
        return self.edit.call(DECODE_MEAN, arrived, shape, count, size, dtype, str(how))

    def _owning_slice(self, whole: fx.Node, start: Any, end: Any, dtype: torch.dtype) -> fx.Node:
        # A slice and a clone would not do: Inductor drops the clone, so the larger tensor could not
        # be freed. A cast copies in any case.
        copies = value_of(whole).dtype == dtype
        return self.edit.call(
            aten.slice_copy.Tensor if copies else aten.slice.Tensor, whole, 0, start, end
        )

    def finish(self, mine: fx.Node, grad: fx.Node, dtype: torch.dtype) -> fx.Node:
        dense = value_of(mine).is_contiguous()
        strides = {} if dense else {"memory_format": torch.contiguous_format}
        if value_of(mine).dtype != dtype:
            return self.edit.call(aten._to_copy.default, mine, dtype=dtype, **strides)
        if mine is grad or not dense:
            return self.edit.call(aten.clone.default, mine, **strides)
        return mine

    def _prepare(self, node: fx.Node) -> fx.Node:
        add_tag(node, Tag("reduce_input", self.params, origin=self.origin))
        return node

    def _await(self, started: fx.Node, source: fx.Node, encoding: str = "") -> fx.Node:
        tag = Tag("reduce", self.params, nbytes(value_of(source)), origin=self.origin)
        add_tag(started, replace(tag, encoding=encoding))
        done = self.edit.call(compat.functional.wait_tensor.default, started)
        add_tag(done, Tag("reduced", self.params, origin=self.origin))
        return done


def _average_of(reduced: fx.Node) -> fx.Node | None:
    """Returns the average over replicas that reads a reduced gradient, if it is the only reader."""
    readers = list(reduced.users)
    return readers[0] if len(readers) == 1 and readers[0].target is AVERAGE_GRAD else None


def _complete_tag(average: fx.Node, within: Reduction, block_bytes: int) -> None:
    """Tags an average over replicas with the whole reduction of its gradient.

    Args:
        within: the reduction within a replica.
        block_bytes: bytes of a full block, in the dtype of that reduction.
    """
    _, dtype, group = average.args[:3]
    assert isinstance(dtype, torch.dtype)
    how = replace(within, dtype=dtype, replicate_group=compat.group_name(group))
    if tag_of(average) is not None:
        whole = block_bytes // within.dtype.itemsize * dtype.itemsize
        retag(average, reduction=how, block_bytes=whole)


def _group_rank(group: str) -> int:
    return compat.process_group(group).rank()
