"""What a call computes of each row, for calls that can run on some rows at a time.

A value has T rows if its first dimensions have T elements, as `[T, V]` and `[B, S, V]` with T = B *
S have. Of n rows, it is `[n, V]`. A call runs on some rows at a time if row i of its result depends
only on row i of its operands and on values that have no rows. A call that adds up over all rows is
the sum of what it is for parts of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zpasses.graph.aliases import written_arguments
from zpasses.graph.queries import named_arguments, value_of

aten, prims = torch.ops.aten, torch.ops.prims

Emit = Callable[..., fx.Node]
"""(target, arguments) -> a new call."""
Kind = Literal["rows", "turned", "sum", "whole", "several"]


class NoRowsError(Exception):
    """A call cannot run on some rows at a time. The message says why."""


@dataclass(frozen=True)
class Read:
    """An operand of a call."""

    node: fx.Node
    by_rows: bool
    """Whether it has rows, of which the call reads those that it computes."""
    shape: tuple[int, ...]
    """Its shape after the rows; if it has no rows, the shape as which it is read."""


@dataclass(frozen=True, eq=False)
class Step:
    """What a call computes of some rows."""

    node: fx.Node
    kind: Kind
    """The result has rows; it has them transposed, `[V, T]`; it is a sum over rows; it needs no
    rows and is computed as a whole, by `finish`; or it is several values, of which others read."""
    reads: tuple[Read, ...]
    build: Callable[[Emit, int, Sequence[fx.Node], fx.Node | None], fx.Node]
    """(emit, number of rows, what is read, sum over earlier rows or None) -> the result."""
    shape: tuple[int, ...]
    """Shape of the result after its rows, or of the sum."""
    finish: Callable[[Emit, fx.Node | None], fx.Node] | None = None
    """(emit, the result for all rows) -> what the call returns; None if that is the result."""

    @property
    def width(self) -> int:
        """Elements per row."""
        return math.prod(self.shape)


def row_dims(shape: Sequence[int], rows: int) -> int | None:
    """Returns how many of the first dimensions are the rows; None if the shape has no such rows."""
    count = 1
    for at, size in enumerate(shape, 1):
        count *= size
        if count == rows:
            return at
    return None


@dataclass(frozen=True)
class RowRules:
    """Makes the steps of calls whose results have a number of rows, or that add these up."""

    rows: int
    _cached: dict[fx.Node, Step] = field(default_factory=dict, compare=False)

    def step(self, node: fx.Node) -> Step:
        """Returns what a call computes of some rows.

        Raises:
            NoRowsError: if it cannot run on some rows at a time.
        """
        if node not in self._cached:
            rule = _RULES.get(node.target)
            tags = getattr(node.target, "tags", ())
            if rule is None and torch.Tag.pointwise in tags:
                rule = _pointwise
            random = torch.Tag.nondeterministic_seeded in tags
            if node.op != "call_function" or rule is None or random or _writes(node.target):
                raise NoRowsError(f"{node.name} is {node.target}")
            self._cached[node] = rule(self, node)
        return self._cached[node]

    def dims(self, node: fx.Node) -> int:
        """Returns how many of the first dimensions of a value are its rows."""
        found = row_dims(_shape(node), self.rows)
        if found is None:
            raise NoRowsError(f"{node.name} {list(_shape(node))} has no {self.rows} rows")
        return found

    def tail(self, node: fx.Node) -> tuple[int, ...]:
        return _shape(node)[self.dims(node) :]

    def row_read(self, node: fx.Node) -> Read:
        return Read(node, True, self.tail(node))

    def whole_read(self, node: fx.Node) -> Read:
        return Read(node, False, _shape(node))

    def broadcast_read(self, node: fx.Node, result: Sequence[int], dims: int) -> Read:
        """Returns how an operand is read that is broadcast to a result with rows."""
        shape = _shape(node)
        missing = len(result) - len(shape)
        padded = (*(1 for _ in range(missing)), *shape)
        if padded[:dims] == tuple(result[:dims]):
            return Read(node, True, padded[dims:])
        if all(size == 1 for size in padded[:dims]):
            return Read(node, False, shape[max(0, dims - missing) :])
        raise NoRowsError(f"{node.name} {list(shape)} is broadcast over a part of the rows")


def _writes(target: Any) -> bool:
    return bool(written_arguments(target))


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = value_of(node)
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        raise NoRowsError(f"{node.name} is no tensor of static shape")
    return tuple(value.shape)


def contiguous_view(emit: Emit, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    """Inserts a view of a value in another shape, of a copy if its strides need one."""
    if tuple(value_of(node).shape) == tuple(shape):
        return node
    if not value_of(node).is_contiguous():
        node = emit(aten.clone.default, node, memory_format=torch.contiguous_format)
    return emit(aten.view.default, node, list(shape))


# --- rules ----------------------------------------------------------------------------------------
def _pointwise(rules: RowRules, node: fx.Node) -> Step:
    result = _shape(node)
    dims = rules.dims(node)
    operands = [item for item in node.all_input_nodes if isinstance(value_of(item), Tensor)]
    reads = tuple(rules.broadcast_read(item, result, dims) for item in operands)
    target: Any = node.target
    given = node.args, node.kwargs

    def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
        args, kwargs = map_arg(given, dict(zip(operands, values, strict=True)).__getitem__)
        return emit(target, *args, **kwargs)

    return Step(node, "rows", reads, build, result[dims:])


def _view(rules: RowRules, node: fx.Node) -> Step:
    tail = rules.tail(node)

    def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
        return contiguous_view(emit, values[0], (n, *tail))

    return Step(node, "rows", (rules.row_read(node.all_input_nodes[0]),), build, tail)


def _expand(rules: RowRules, node: fx.Node) -> Step:
    dims, tail = rules.dims(node), rules.tail(node)
    read = rules.broadcast_read(node.all_input_nodes[0], _shape(node), dims)

    def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
        return emit(aten.expand.default, values[0], [n, *tail])

    return Step(node, "rows", (read,), build, tail)


def _full(rules: RowRules, node: fx.Node) -> Step:
    tail = rules.tail(node)

    def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
        return emit(aten.full.default, [n, *tail], *node.args[1:], **node.kwargs)

    return Step(node, "rows", (), build, tail)


def _reduction(rules: RowRules, node: fx.Node) -> Step:
    """A reduction over dimensions; of the rows, only a sum."""
    target: Any = node.target
    (source,) = node.all_input_nodes
    given = named_arguments(node, target)
    size, dims = len(_shape(source)), rules.dims(source)
    over: Any = given.get("dim")
    over = [over] if isinstance(over, int) else over or list(range(size))
    over = [at % size for at in over]
    keepdim, dtype = given.get("keepdim", False), given.get("dtype")
    tail = [at - dims + 1 for at in over if at >= dims]
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if not set(over) & set(range(dims)):
        if target in _ONE_DIM:

            def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
                return emit(target, values[0], tail[0], keepdim, **options)
        else:

            def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
                return emit(target, values[0], tail, keepdim, **options)

        return Step(node, "rows", (rules.row_read(source),), build, rules.tail(node))
    value = value_of(node)
    if target not in _SUMS or not set(range(dims)) <= set(over):
        raise NoRowsError(f"{node.name} reduces rows by {target}")
    exact = torch.float32 if value.dtype in (torch.bfloat16, torch.float16) else value.dtype

    def add_up(emit: Emit, n: int, values: Sequence[fx.Node], acc: fx.Node | None) -> fx.Node:
        part = emit(aten.sum.dim_IntList, values[0], [0, *tail], False, dtype=exact)
        return part if acc is None else emit(aten.add.Tensor, acc, part)

    def finish(emit: Emit, total: fx.Node | None) -> fx.Node:
        assert total is not None
        if exact != value.dtype:
            total = emit(prims.convert_element_type.default, total, value.dtype)
        return contiguous_view(emit, total, value.shape)

    left = [each for at, each in enumerate(_shape(source)) if at >= dims and at not in over]
    return Step(node, "sum", (rules.row_read(source),), add_up, tuple(left), finish)


def _along_dim(rules: RowRules, node: fx.Node) -> Step:
    """A call along one dimension after the rows, whose tensor operands all have rows."""
    target: Any = node.target
    given = named_arguments(node, target)
    operands = node.all_input_nodes
    dims = rules.dims(node)
    size = len(_shape(node))
    dim = given.get("dim", 0) % size
    if dim < dims or any(rules.dims(item) != dims for item in operands):
        raise NoRowsError(f"{node.name} calls {target} along the rows")

    def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
        known = dict(zip(operands, values, strict=True))
        arguments = {**map_arg(given, known.__getitem__), "dim": dim - dims + 1}
        if "input_sizes" in arguments:
            arguments["input_sizes"] = [n, *given["input_sizes"][dims:]]
        names = [each.name for each in target._schema.arguments if not each.kwarg_only]
        keywords = {name: value for name, value in arguments.items() if name not in names}
        schema = {each.name: each for each in target._schema.arguments}
        values_of = [arguments.get(name, schema[name].default_value) for name in names]
        return emit(target, *values_of, **keywords)

    reads = tuple(rules.row_read(item) for item in operands)
    return Step(node, "rows", reads, build, rules.tail(node))


def _pad(rules: RowRules, node: fx.Node) -> Step:
    source, tail = node.all_input_nodes[0], rules.tail(node)
    padding: Any = node.args[1]
    if len(padding) > 2 * len(tail):
        raise NoRowsError(f"{node.name} pads rows")

    def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
        return emit(aten.constant_pad_nd.default, values[0], padding, *node.args[2:])

    return Step(node, "rows", (rules.row_read(source),), build, tail)


def _turned(rules: RowRules, node: fx.Node) -> Step:
    source = node.all_input_nodes[0]
    shape = _shape(source)
    if len(shape) != 2 or _shape(node) != shape[::-1] or shape[0] != rules.rows:
        raise NoRowsError(f"{node.name} moves rows")

    def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
        return emit(aten.permute.default, values[0], [1, 0])

    return Step(node, "turned", (rules.row_read(source),), build, shape[1:])


def _product(rules: RowRules, node: fx.Node) -> Step:
    """A matrix product: of rows with a matrix, or a sum over rows of outer products."""
    target: Any = node.target
    *bias, left, right = node.args[: 3 if target is aten.addmm.default else 2]
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    (height, inner), (_, width) = _shape(left), _shape(right)
    if height == rules.rows and inner != rules.rows:
        reads = [rules.row_read(left), rules.whole_read(right)]
        if bias:
            assert isinstance(bias[0], fx.Node)
            reads.insert(0, rules.broadcast_read(bias[0], (height, width), 1))

        def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
            return emit(target, *values, **node.kwargs)

        return Step(node, "rows", tuple(reads), build, (width,))
    if inner != rules.rows or height == rules.rows or width == rules.rows or bias:
        raise NoRowsError(f"{node.name} {target} does not say which of its sizes are rows")
    source = left.all_input_nodes[0] if left.target in _TURNS else None
    if source is None or _shape(source) != _shape(left)[::-1]:
        raise NoRowsError(f"{node.name} reads no transposed rows")

    def add_up(emit: Emit, n: int, values: Sequence[fx.Node], acc: fx.Node | None) -> fx.Node:
        turned = emit(aten.permute.default, values[0], [1, 0])
        if acc is None:
            return emit(aten.mm.default, turned, values[1])
        return emit(aten.addmm.default, acc, turned, values[1])

    both = (rules.row_read(source), rules.row_read(right))
    return Step(node, "sum", both, add_up, (height, width))


def _nll_loss_backward(rules: RowRules, node: fx.Node) -> Step:
    given = named_arguments(node, aten.nll_loss_backward.default)
    tensors = ("grad_output", "self", "target", "weight", "total_weight")
    names = [name for name in tensors if given.get(name) is not None]
    by_rows = {"self", "target"} | ({"grad_output"} if given["reduction"] == 0 else set())
    reads = tuple(
        rules.row_read(given[name])
        if name in by_rows
        else Read(given[name], False, _shape(given[name]))
        for name in names
    )

    def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
        arguments = {**given, **dict(zip(names, values, strict=True))}
        order = [each.name for each in aten.nll_loss_backward.default._schema.arguments]
        return emit(aten.nll_loss_backward.default, *(arguments[name] for name in order))

    return Step(node, "rows", reads, build, rules.tail(node))


def _nll_loss(rules: RowRules, node: fx.Node) -> Step:
    def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
        raise AssertionError("its results are computed instead")

    source = node.args[0]
    assert isinstance(source, fx.Node)
    if len(_shape(source)) != 2:
        raise NoRowsError(f"{node.name} has no rows")
    return Step(node, "several", (), build, ())


def _loss_of_nll(rules: RowRules, node: fx.Node) -> Step:
    """The loss or the sum of weights that `nll_loss_forward` returns: losses by rows, which are
    added up as a whole.
    """
    loss, at = node.args
    if not isinstance(loss, fx.Node) or loss.target is not aten.nll_loss_forward.default:
        raise NoRowsError(f"{node.name} takes a part of {loss}")
    given = named_arguments(loss, aten.nll_loss_forward.default)
    logs, labels, weight = given["self"], given["target"], given.get("weight")
    reduction, ignored, dtype = given["reduction"], given["ignore_index"], value_of(node).dtype
    reads = [rules.row_read(logs), rules.row_read(labels)]
    if weight is not None:
        reads.append(rules.whole_read(weight))

    def weights(emit: Emit, values: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Which labels count, the labels with 0 for others, and their weights."""
        counts = emit(aten.ne.Scalar, values[0], ignored)
        none = emit(aten.zeros_like.default, values[0])
        safe = emit(aten.where.self, counts, values[0], none)
        if len(values) > 1:
            of_rows = emit(aten.index.Tensor, values[1], [safe])
            of_rows = emit(aten.mul.Tensor, of_rows, counts)
        else:
            of_rows = emit(prims.convert_element_type.default, counts, dtype)
        return counts, safe, of_rows

    def build(emit: Emit, n: int, values: Sequence[fx.Node], _: fx.Node | None) -> fx.Node:
        counts, safe, of_rows = weights(emit, values[1:])
        picked = emit(aten.gather.default, values[0], 1, emit(aten.unsqueeze.default, safe, 1))
        lost = emit(aten.neg.default, emit(aten.squeeze.dim, picked, 1))
        lost = emit(aten.mul.Tensor, lost, of_rows) if weight is not None else lost
        return emit(aten.where.self, counts, lost, emit(aten.zeros_like.default, lost))

    def total_weight(emit: Emit, _: fx.Node | None) -> fx.Node:
        operands = [labels] if weight is None else [labels, weight]
        return emit(aten.sum.default, weights(emit, operands)[2])

    def finish(emit: Emit, lost: fx.Node | None) -> fx.Node:
        assert lost is not None
        if reduction == 0:
            return lost
        total = emit(aten.sum.default, lost)
        return total if reduction == 2 else emit(aten.div.Tensor, total, total_weight(emit, None))

    if at == 0:
        return Step(node, "rows", tuple(reads), build, (), finish)
    return Step(node, "whole", (), build, (), total_weight)


_SUMS: frozenset[Any] = frozenset({aten.sum.default, aten.sum.dim_IntList})
_ONE_DIM: frozenset[Any] = frozenset({aten.argmax.default, aten.argmin.default, aten.any.dim})
_TURNS: frozenset[Any] = frozenset({aten.t.default, aten.permute.default, aten.transpose.int})

Rule = Callable[[RowRules, fx.Node], Step]
_RULES: dict[Any, Rule] = {
    aten.mm.default: _product,
    aten.addmm.default: _product,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    operator.getitem: _loss_of_nll,
    aten.expand.default: _expand,
    aten.full.default: _full,
    aten.constant_pad_nd.default: _pad,
    **dict.fromkeys(_TURNS, _turned),
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.squeeze.default,
            aten.unsqueeze.default,
        ),
        _view,
    ),
    **dict.fromkeys(
        (
            prims.convert_element_type.default,
            aten._to_copy.default,
            aten.detach.default,
            aten.alias.default,
            aten.full_like.default,
            aten.zeros_like.default,
            aten.ones_like.default,
        ),
        _pointwise,
    ),
    **dict.fromkeys(
        (
            *_SUMS,
            *_ONE_DIM,
            aten.mean.dim,
            aten.amax.default,
            aten.amin.default,
            aten.logsumexp.default,
        ),
        _reduction,
    ),
    **dict.fromkeys(
        (
            aten._softmax.default,
            aten._log_softmax.default,
            aten._softmax_backward_data.default,
            aten._log_softmax_backward_data.default,
            aten.gather.default,
            aten.scatter.src,
            aten.scatter.value,
            aten.slice.Tensor,
            aten.slice_backward.default,
            aten.slice_scatter.default,
        ),
        _along_dim,
    ),
}
