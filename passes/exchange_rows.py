"""Exchange the rows of an embedding that a step needs, instead of the whole table.

Before
  table = zpasses.unshard(shard, ...)
  y = embedding(table, ids)
  ...
  g = index_put(full([50000, 256], 0), [ids], gy, True)
  mine = zpasses.reduce_grad(g, ...)
After
  d = zpasses.distinct_rows([ids], 50000, 2)
  asked = wait(all_to_all_single(d[0], ...))
  rows = wait(zpasses.all_to_all_rows(shard, asked, ...))
  y = embedding(rows, d[1])
  ...
  g = index_put(full([512, 256], 0), [d[1]], gy, True)
  mine = wait(zpasses.all_to_all_grad_rows(g, ...))

Contract: a read is exchanged only if all its readers are embeddings. Each rank marks the rows that
its tokens name, with one bit per row of the table, and the owners send these rows. The tokens then
look up in a table of as many rows as there are tokens. The gradients of the rows go back the same
way, and each owner averages them in the order of ranks, so results stay equal bit for bit where
`reduce_grad` adds in this order, as it does over gloo. If the gradient has other summands, such as
that of a tied head, it stays a gradient of the table, and only the read is exchanged. Several
lookups in one table share an exchange, before the first of them. Exchanges stay where the pass puts
them: `schedule` moves other collectives around them. Runs after `merge-reads`, on the dialect.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.time.roofline import nodes_of, ring_collective_us
from zpasses.cost.time.target import Target, current_target
from zpasses.graph.dialect import AVERAGE_GRAD, REDUCE_GRAD, UNSHARD, group_size, rows_per_rank
from zpasses.graph.queries import (
    WAIT,
    Editor,
    calls,
    collective_of,
    erase_dead,
    named_arguments,
    replace_node,
    value_of,
)
from zpasses.graph.row_exchange import (
    ALL_TO_ALL_GRAD_ROWS,
    ALL_TO_ALL_ROWS,
    DISTINCT_ROWS,
    expected_distinct,
    mark_bytes,
)
from zpasses.graph.tags import Role, Tag, add_tag, params_of, retag, tag_of
from zpasses.graph.walks import reachable
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.events import note
from zpasses.pipeline.facts import Facts
from zpasses.ranks.agree import adopt

aten = torch.ops.aten
_SYNC_US = 100.0
"""What it costs that the host waits for a device, and then no longer runs ahead of it."""


@dataclass(frozen=True)
class ExchangeRows(Pass):
    """Exchange rows of embeddings instead of whole tables."""

    name: ClassVar[str] = "exchange-rows"
    level: ClassVar[Level] = Level.JOINT

    rows: Literal["auto", "on", "off"] = "auto"
    """`auto` exchanges the rows of a table where this takes less time than its gather, by the cost
    model of the target and the number of tokens. `on` exchanges them wherever it can, and `off`
    nowhere."""

    @property
    def facts(self) -> Facts:
        return Facts(votes=self.rows == "auto")

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of reads and gradients whose rows are exchanged."""
        tables = _tables(graph) if self.rows != "off" else []
        changed = 0
        for table, form in zip(tables, self._forms(tables), strict=True):
            if form != "table":
                changed += _lower(graph, table, self.name, with_grads=form == "both")
                note(f"{self.name}: {_describe(table, form)}")
        if self.rows == "on" and not changed:
            note(
                f"{self.name}: no rows to exchange. There are none on one rank, after "
                "gather-params, or if no parameter is read by embeddings only"
            )
        return changed

    def _forms(self, tables: Sequence[_Table]) -> list[str]:
        """Returns "table", "read" or "both" for each table, equal on all ranks."""
        if self.rows == "on" or not tables:
            return ["both"] * len(tables)
        target = current_target()
        groups = [group for table in tables for group in table.groups if group is not None]
        signature = [(table.params, table.rows, bool(table.reductions)) for table in tables]
        forms, _ = adopt(
            dict.fromkeys(map(compat.parent_group, groups)),
            "which rows are exchanged",
            (str(self), signature),
            [_cheapest(table, target) for table in tables],
            planned_for=target,
        )
        return list(forms)


def _describe(table: _Table, form: str) -> str:
    what = "rows are exchanged, and those of its gradient" if form == "both" else "rows are read"
    return (
        f"{', '.join(table.params)}: {what} for {table.tokens:,} tokens, "
        f"instead of {table.rows:,} rows"
    )


# --- what is exchanged ----------------------------------------------------------------------------
@dataclass
class _Table:
    """The reads of one table by embeddings, and its gradients that come from these alone."""

    reads: list[fx.Node]
    lookups: list[fx.Node]
    reductions: list[fx.Node] = field(default_factory=list)

    @property
    def _arguments(self) -> dict[str, Any]:
        return named_arguments(self.reads[0], UNSHARD)

    @property
    def shard(self) -> fx.Node:
        return self._arguments["shard"]  # type: ignore[no-any-return]

    @property
    def rows(self) -> int:
        return self._arguments["rows"]  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        given: torch.dtype | None = self._arguments["param_dtype"]
        return given or value_of(self.shard).dtype

    @property
    def group(self) -> str:
        return self._arguments["group_name"]  # type: ignore[no-any-return]

    @property
    def groups(self) -> tuple[str | None, str | None]:
        """The group that shards the table, and that of its replicas."""
        return self.group, self._arguments.get("replicate_group")

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for read in self.reads for name in params_of(read)))

    @property
    def indices(self) -> list[fx.Node]:
        return list(dict.fromkeys(_indices(lookup) for lookup in self.lookups))

    @property
    def tokens(self) -> int:
        return sum(compat.size_hint(value_of(each).numel()) for each in self.indices)


def _tables(graph: fx.Graph) -> list[_Table]:
    found: dict[Any, _Table] = {}
    for read in calls(graph, UNSHARD):
        if _is_read_by_rows(read):
            table = found.setdefault(read.args, _Table([], []))
            table.reads.append(read)
            table.lookups += read.users
    order = {node: at for at, node in enumerate(graph.nodes)}
    tables = []
    for table in found.values():
        table.lookups.sort(key=order.__getitem__)
        if _late_indices(table, order) is not None:
            tables.append(table)
    for reduction in calls(graph, REDUCE_GRAD):
        for table in tables:
            if _is_gradient_of_rows(reduction, table):
                table.reductions.append(reduction)
    return tables


def _is_read_by_rows(read: fx.Node) -> bool:
    arguments, value = named_arguments(read, UNSHARD), value_of(read)
    return (
        value.dim() == 2
        and value.numel() > 0
        and arguments.get("encoding") is None
        and group_size(arguments["group_name"]) > 1
        and bool(read.users)
        and all(_is_lookup(user, read) for user in read.users)
    )


def _is_lookup(node: fx.Node, table: fx.Node) -> bool:
    return (
        node.target is aten.embedding.default
        and node.args[0] is table
        and _indices(node) is not table
        and named_arguments(node, aten.embedding.default).get("sparse", False) is False
    )


def _indices(lookup: fx.Node) -> fx.Node:
    return lookup.args[1]  # type: ignore[return-value]


def _late_indices(table: _Table, order: dict[fx.Node, int]) -> list[fx.Node] | None:
    """Returns the nodes that have to move before the first lookup, so that the indices of all
    lookups are known there; None if they cannot.
    """
    first = order[table.lookups[0]]

    def late_inputs(node: fx.Node) -> Iterable[fx.Node]:
        return [each for each in node.all_input_nodes if order[each] >= first]

    starts = [each for each in table.indices if order[each] >= first]
    late = list(reachable(starts, late_inputs))
    if not all(_can_move(node, table) for node in late):
        return None
    return sorted(late, key=order.__getitem__)


def _can_move(node: fx.Node, table: _Table) -> bool:
    target = node.target
    return (
        isinstance(target, compat.OpOverload)
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and collective_of(node) is None
        and target is not WAIT
        and node not in table.lookups
    )


# --- gradients ------------------------------------------------------------------------------------
def _is_gradient_of_rows(reduction: fx.Node, table: _Table) -> bool:
    arguments = named_arguments(reduction, REDUCE_GRAD)
    return (
        bool(set(params_of(reduction)) & set(table.params))
        and arguments["rows"] == table.rows
        and compat.group_name(arguments["group_name"]) == compat.group_name(table.group)
        and arguments.get("encoding") is None
        and _sums_rows(arguments["grad"], set(table.indices))
    )


_CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_DENSE = aten.embedding_dense_backward.default
_MASKED = aten._unsafe_masked_index_put_accumulate.default


def _sums_rows(node: fx.Node, indices: set[fx.Node]) -> bool:
    """Whether a gradient is zero but for the rows of these indices: sums and casts of
    `embedding_dense_backward`, or of what Inductor decomposes it to.
    """
    arguments: Any = node.args
    if len(node.users) != 1:
        return False
    if node.target in _CASTS:
        return _sums_rows(node.all_input_nodes[0], indices)
    if node.target is aten.add.Tensor and not node.kwargs:
        return all(isinstance(each, fx.Node) and _sums_rows(each, indices) for each in node.args)
    if node.target is _DENSE:
        _, named, _, _, scales = arguments
        return named in indices and not scales
    if node.target is _MASKED:
        zeros, _, named, _ = arguments
    elif node.target is aten.index_put.default and arguments[3:] == (True,):
        zeros, named = arguments[:2]
    else:
        return False
    return _is_zero(zeros) and len(named) == 1 and named[0] in indices


def _is_zero(node: Any) -> bool:
    is_full = node.target is aten.full.default and node.args[1] == 0
    return is_full or node.target is aten.new_zeros.default


# --- cost -----------------------------------------------------------------------------------------
def _cheapest(table: _Table, target: Target) -> str:
    """Returns what is cheapest by the cost model: "table", "read", or "both" with the gradients."""
    size, width = group_size(table.group), value_of(table.reads[0]).shape[1]
    nodes = nodes_of(compat.group_ranks(table.group), target)
    rows = expected_distinct(table.rows, table.tokens)
    sync_us = 0.0 if target.architecture == "cpu" else _SYNC_US

    def took(kind: str, bytes_: float) -> float:
        return target.issue_us + ring_collective_us(kind, int(bytes_), size, target, nodes)

    def saved(kind: str, dtype: torch.dtype, launches: int) -> float:
        row = width * dtype.itemsize
        exchange = took("all_to_all", rows * row) + sync_us
        return launches * took(kind, table.rows * row) - exchange

    marks = took("all_to_all", size * mark_bytes(table.rows, size))
    read = saved("all_gather", table.dtype, len(table.reads)) - marks
    grads = sum(saved("reduce_scatter", _reduced_dtype(each), 1) for each in table.reductions)
    gains = {"table": 0.0, "read": read, "both": read + grads}
    return max(gains, key=lambda form: gains[form])


def _reduced_dtype(reduction: fx.Node) -> torch.dtype:
    arguments = named_arguments(reduction, REDUCE_GRAD)
    given: torch.dtype | None = arguments["reduce_dtype"]
    return given or value_of(arguments["grad"]).dtype


# --- rewriting ------------------------------------------------------------------------------------
def _lower(graph: fx.Graph, table: _Table, origin: str, *, with_grads: bool) -> int:
    first = table.lookups[0]
    order = {node: at for at, node in enumerate(graph.nodes)}
    for node in _late_indices(table, order) or ():
        first.prepend(node)
    exchange = _Exchange(graph, table, origin)
    exchange.read()
    for reduction in table.reductions if with_grads else ():
        exchange.reduce(reduction)
    return len(table.reads) + (len(table.reductions) if with_grads else 0)


class _Exchange:
    """Inserts the nodes that exchange the rows of one table."""

    def __init__(self, graph: fx.Graph, table: _Table, origin: str) -> None:
        self._graph, self._table, self._origin = graph, table, origin
        edit, rows, group = Editor(graph, before=table.lookups[0]), table.rows, table.group
        size = group_size(group)
        numbered = edit.call(DISTINCT_ROWS, table.indices, rows, size)
        self._marks = edit.call(operator.getitem, numbered, 0)
        self._places = {
            each: edit.call(operator.getitem, numbered, number)
            for number, each in enumerate(table.indices, 1)
        }
        splits = [mark_bytes(rows, size)] * size
        self._asked = self._awaited(
            edit, "rows", compat.functional.all_to_all_single.default, self._marks, splits, splits,
            group,
        )  # fmt: skip
        self._capacity = _capacity(edit, table)
        for node in (numbered, *numbered.users, self._asked.all_input_nodes[0], self._asked):
            compat.unmark_recompute(node)

    def read(self) -> None:
        """Lets the lookups read rows, and erases the reads of the table."""
        table = self._table
        edit = Editor(self._graph, before=table.lookups[0])
        fetched = self._awaited(
            edit, "gather", ALL_TO_ALL_ROWS, table.shard, self._marks, self._asked, self._capacity,
            table.rows, table.dtype, table.group,
        )  # fmt: skip
        for node in (fetched, fetched.all_input_nodes[0]):
            compat.unmark_recompute(node)
        for lookup in table.lookups:
            # The argument `padding_idx` of the forward has no effect.
            lookup.args = (fetched, self._places[_indices(lookup)])
            lookup.kwargs = {}
        for read in table.reads:
            self._graph.erase_node(read)

    def reduce(self, reduction: fx.Node) -> None:
        """Replaces the reduction of a gradient of the table."""
        arguments = named_arguments(reduction, REDUCE_GRAD)
        shard_rows, dtype, reduce_dtype = (
            arguments[name] for name in ("shard_rows", "dtype", "reduce_dtype")
        )
        edit, grad = Editor(self._graph, before=reduction), arguments["grad"]
        rows = self._of_rows(edit, grad)
        mine = self._awaited(
            edit, "reduce", ALL_TO_ALL_GRAD_ROWS, rows, self._marks, self._asked, self._table.rows,
            shard_rows, dtype, reduce_dtype, self._table.group,
        )  # fmt: skip
        block = rows_per_rank(self._table.rows, group_size(self._table.group))
        whole = block * value_of(grad).shape[1] * dtype.itemsize
        add_tag(mine, Tag("shard_grad", params_of(reduction), 0, None, self._origin))
        retag(mine, block_bytes=whole)
        for user in reduction.users:
            if user.target is AVERAGE_GRAD and tag_of(user) is not None:
                retag(user, block_bytes=whole)
        replace_node(reduction, mine)
        erase_dead(self._graph, [grad])

    def _of_rows(self, edit: Editor, node: Any) -> fx.Node:
        """Returns a gradient of the table as one of the exchanged rows."""
        target: Callable[..., Any] = node.target
        if target in _CASTS or target is aten.add.Tensor:
            args = [
                self._of_rows(edit, each) if isinstance(each, fx.Node) else each
                for each in node.args
            ]
            return edit.call(target, *args, **node.kwargs)
        if target is _DENSE:
            grad, indices, _, padding, _ = node.args
            return self._of_dense(edit, grad, indices, padding)
        zeros, *between, (indices,), values = node.args[: 4 if target is _MASKED else 3]
        value = value_of(zeros)
        shape = [self._capacity, *value.shape[1:]]
        small = edit.call(aten.full.default, shape, 0, dtype=value.dtype, device=value.device)
        accumulate = () if target is _MASKED else (True,)
        return edit.call(target, small, *between, [self._places[indices]], values, *accumulate)

    def _of_dense(self, edit: Editor, grad: Any, indices: Any, padding: Any) -> fx.Node:
        if padding >= 0:
            skipped = edit.call(aten.eq.Scalar, indices, padding)
            skipped = edit.call(aten.unsqueeze.default, skipped, -1)
            grad = edit.call(aten.masked_fill.Scalar, grad, skipped, 0.0)
        return edit.call(_DENSE, grad, self._places[indices], self._capacity, -1, False)

    def _awaited(self, edit: Editor, role: Role, target: Any, *args: Any) -> fx.Node:
        """Starts a collective with this role, and returns its wait."""
        started = edit.call(target, *args)
        found = collective_of(started)
        assert found is not None
        params = self._table.params
        add_tag(started, Tag(role, params, found.nbytes, origin=self._origin))
        done = edit.call(WAIT, started)
        add_tag(done, Tag("rows", params, origin=self._origin))
        return done


def _capacity(edit: Editor, table: _Table) -> Any:
    """Returns the most rows that the indices can name: a number, or a node if it is dynamic."""
    counts = [value_of(each).numel() for each in table.indices]
    if all(isinstance(each, int) for each in counts):
        return min(sum(counts), table.rows)
    first, *others = (edit.call(aten.sym_numel.default, each) for each in table.indices)
    for each in others:
        first = edit.call(operator.add, first, each)
    return first
