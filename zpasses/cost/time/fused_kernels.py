"""Which operators Inductor fuses, so that a value that only one kernel's operators read is never
written to memory.

An elementwise operator has no kernel of its own if all of its readers are elementwise operators or
reductions. What it would read is then read where its own result would be. Inductor gives up on
expressions that read many tensors (`config.realize_reads_threshold` for those with several readers,
`realize_acc_reads_threshold` for all), and so does this model. Its code for a CPU does not compute
an exponential or a logarithm again for a reader that comes after a product. A matrix product and
the sum that only it goes into are one `addmm`, which runs where the sum does. Two kernels that read
the same values count them twice, although Inductor fuses some of these, too.

Only what runs operator by operator (`codegen="eager"`) does not count so, inside `use_fusion`.

Without this, a graph with Inductor's decompositions would count each of them as a pass over memory:
on an H200, 72 ms for a step that takes 43, and 157 for a loss that takes 40 (docs/measurements.md).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import heapq
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.time.target import current_target
from zpasses.graph.aliases import buffer_readers, elements_of, is_view, view_base
from zpasses.graph.queries import nbytes, numel, value_of

aten, prims = torch.ops.aten, torch.ops.prims

_MOST_READS = 8
"""Tensors that an expression reads at most before it becomes a kernel."""
_MOST_SHARED_READS = 4
"""The same for an expression with several readers."""

_COMPUTED_ONCE = frozenset(
    getattr(aten, name).default
    for name in ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")
)
"""Operators that code for a CPU does not compute again in each reader."""

_ELEMENTWISE = frozenset(
    {
        prims.convert_element_type.default,
        prims.iota.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.embedding.default,
        aten.full.default,
        aten.full_like.default,
        aten.gather.default,
        aten.scalar_tensor.default,
        aten.select_scatter.default,
        aten.slice_scatter.default,
    }
)
"""Elementwise operators that torch does not tag as such."""

_REDUCTIONS = frozenset(
    {
        aten.amax.default,
        aten.amin.default,
        aten.any.default,
        aten.any.dim,
        aten.mean.default,
        aten.mean.dim,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.var.correction,
        aten.var_mean.correction,
    }
)


_INTO_A_COPY = frozenset(
    {
        aten._unsafe_index_put.default,
        aten._unsafe_masked_index_put_accumulate.default,
        aten.index_put.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
    }
)
"""Operators that copy their first operand and write to the copy. The kernel that copies computes an
elementwise operand, such as zeros, itself, and so does the one that writes."""

BY_ROWS = frozenset(
    {
        aten._unsafe_index.Tensor,
        aten.embedding.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.index_select.default,
    }
)
"""Operators that load no more elements of their first operand than they return."""


_AVERAGES = {aten.avg_pool2d.default: 25, aten.avg_pool3d.default: 25}
"""Averages of neighbours -> the most elements of a window for which Inductor unrolls the sum."""
_AVERAGE_GRADIENTS = {aten.avg_pool2d_backward.default: 25, aten.avg_pool3d_backward.default: 125}
"""The same for the windows that an element is in."""

_ELSEWHERE = (
    BY_ROWS
    | _INTO_A_COPY
    | {aten.select_scatter.default, aten.slice_scatter.default}
    | _AVERAGES.keys()
    | _AVERAGE_GRADIENTS.keys()
)
"""Operators that read elements elsewhere than where they write them."""

_fusion: contextvars.ContextVar[bool] = contextvars.ContextVar("zpasses.fusion", default=True)


@contextlib.contextmanager
def use_fusion(fuses: bool) -> Iterator[None]:
    """Context manager in which the models of time and memory count the kernels of Inductor's code,
    or operators that run one by one.
    """
    token = _fusion.set(fuses)
    try:
        yield
    finally:
        _fusion.reset(token)


def fuses() -> bool:
    """Whether the models count fused kernels."""
    return _fusion.get()


class Load(NamedTuple):
    """How a kernel loads a value."""

    in_place: bool
    """Whether it loads elements only where it writes them, if both have one shape."""
    nbytes: int
    """Bytes of the elements that it loads."""


class FusedKernels:
    """What the kernels of a graph read and write. It holds while the graph does not change, and is
    equal on ranks that hold parts of other sizes.
    """

    def __init__(self) -> None:
        self._fuses = fuses()
        self.on_cpu = current_target().architecture == "cpu"
        """Whether kernels are C++, of which those in a row are one function."""
        self._slow: set[fx.Node] = set()
        """Inlined expressions with one of `_COMPUTED_ONCE`."""
        self._operators_before: dict[fx.Node, int] = {}
        self._convolves: bool | None = None
        """Whether the graph has convolutions, once asked."""
        self._leaves: dict[fx.Node, Mapping[fx.Node, Load]] = {}
        """Node -> the values that a kernel loads which reads this one."""
        self._inputs: dict[fx.Node, Mapping[fx.Node, Load]] = {}
        self._moved: dict[fx.Node, int | None] = {}

    def moved_bytes(self, node: fx.Node) -> int | None:
        """Returns the bytes that the kernel of a call reads and writes; None if it has none of its
        own.
        """
        if node not in self._moved:
            self._moved[node] = self._bytes_of(node)
        return self._moved[node]

    def _bytes_of(self, node: fx.Node) -> int | None:
        if is_elementwise(node) and self.is_inlined(node):
            return None
        written = nbytes(value_of(node))
        if self._fuses and (_is_fusible(node) or node.target in _INTO_A_COPY):
            return written + sum(load.nbytes for load in self.inputs(node).values())
        return written + sum(
            _loaded_by(node, each, nbytes(value_of(each))) for each in node.all_input_nodes
        )

    def is_inlined(self, node: fx.Node) -> bool:
        """Whether a call is computed where it is read, so that its value is in no memory."""
        return (
            self._fuses
            and (is_elementwise(node) or _is_in_addmm(node))
            and node not in self._leaves_of(node)
        )

    def has_kernel(self, node: fx.Node) -> bool:
        """Whether a call is an elementwise operator, or a reduction, that is not inlined."""
        return _is_fusible(node) and not self.is_inlined(node)

    def elements(self, node: fx.Node) -> int | None:
        """Returns the number of elements that the loops of a kernel go through, row by row; None if
        they reduce others than rows.
        """
        if _kind_of(node.target) != "reduction":
            return numel(value_of(node))
        is_by_rows = self._kept_within(node) == []
        return numel(value_of(node.all_input_nodes[0])) if is_by_rows else None

    def reduces_columns(self, node: fx.Node) -> bool:
        """Whether a call reduces columns: the elements of each result lie apart. Those of a square
        do not count: the loops of a kernel may go through its rows and its columns at once.
        """
        if not any(size > 1 for size in self._kept_within(node) or ()):
            return False
        return numel(value_of(node)) ** 2 != numel(value_of(node.all_input_nodes[0]))

    def _kept_within(self, node: fx.Node) -> list[int] | None:
        """Returns the sizes of the dimensions that a reduction keeps, and that follow one which it
        reduces; None if it reduces all of them, and among convolutions.
        """
        if _kind_of(node.target) != "reduction":
            return None
        source, dims, *_ = (*node.args, None)
        assert isinstance(source, fx.Node)
        if not isinstance(dims, (list, tuple)) or self._is_among_convolutions(elements_of(source)):
            return None
        rank: int = value_of(source).dim()
        if not dims or not rank:  # all elements
            return None
        reduced = {int(dim) % rank for dim in dims}  # type: ignore[arg-type]
        kept = (dim for dim in range(min(reduced), rank) if dim not in reduced)
        return [compat.planned_size(value_of(source).shape[dim]) for dim in kept]

    def inputs(self, node: fx.Node) -> Mapping[fx.Node, Load]:
        """Returns the values that a call loads, through those that are inlined in it."""
        if node not in self._inputs:
            self._inputs[node] = self._read_by(node)
        return self._inputs[node]

    def _read_by(self, node: fx.Node) -> Mapping[fx.Node, Load]:
        found: dict[fx.Node, Load] = {}
        for source in loaded_inputs(node):
            in_place = not reads_elsewhere(node)
            for leaf, load in self._leaves_of(source).items():
                loaded = _loaded_by(node, source, load.nbytes, leaf)
                before = found.get(leaf, Load(True, 0))
                found[leaf] = Load(
                    before.in_place and load.in_place and in_place, max(before.nbytes, loaded)
                )
        return found

    def _leaves_of(self, node: fx.Node) -> Mapping[fx.Node, Load]:
        known = self._leaves.get(node)
        if known is not None:
            return known
        pending = [node]  # no recursion, because chains may be long
        while pending:
            each = pending[-1]
            if each not in self._leaves:
                passes = (
                    loaded_inputs(each)
                    if is_view(each) or _is_fusible(each) or _is_in_addmm(each)
                    else ()
                )
                missing = [source for source in passes if source not in self._leaves]
                if missing:
                    pending += missing
                    continue
                self._leaves[each] = self._found(each)
            pending.pop()
        return self._leaves[node]

    def _found(self, node: fx.Node) -> Mapping[fx.Node, Load]:
        itself = {node: Load(True, _loaded_bytes(node))}
        if is_view(node):
            base = node.all_input_nodes[0]
            whole = elements_of(node) is not node
            if base in self._slow:
                self._slow.add(node)
            if base in self._leaves[base]:
                return {
                    node: Load(whole and self._leaves[base][base].in_place, _loaded_bytes(node))
                }
            leaves = self._leaves[base].items()
            return {leaf: Load(whole and each.in_place, each.nbytes) for leaf, each in leaves}
        if _is_in_addmm(node):
            return self.inputs(node)
        if not is_elementwise(node) or not node.users or not _is_read_by_kernels(node):
            return itself
        if compat.makes_random_numbers(node.target) and not _has_one_kernel(node):
            return itself
        leaves_of_inputs = self.inputs(node)
        most = _MOST_SHARED_READS if _is_shared(node) else _MOST_READS
        if any(_is_average(user) for user in node.users):  # reads each element several times
            most = 1
        is_slow = node.target in _COMPUTED_ONCE or not self._slow.isdisjoint(node.all_input_nodes)
        if len(leaves_of_inputs) > most or (is_slow and self.on_cpu and self._is_read_apart(node)):
            return itself
        if is_slow:
            self._slow.add(node)
        return leaves_of_inputs

    def _is_among_convolutions(self, node: fx.Node) -> bool:
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.dim() != 4:
            return False
        if self._convolves is None:
            self._convolves = any(each.target in _CONVOLUTIONS for each in node.graph.nodes)
        return self._convolves

    def _is_read_apart(self, node: fx.Node) -> bool:
        """Whether an operator stands between two readers, so that they are two kernels. Among
        convolutions, whose loops go through the channels last, kernels that read a value before and
        after a reduction are two as well. Elsewhere, they go through it row by row.
        """
        if not _is_shared(node):
            return False
        if node not in self._operators_before:
            before = 0
            for each in node.graph.nodes:
                self._operators_before[each] = before
                before += _is_operator(each) and not _is_ours(each)
        readers = (reader for reader in buffer_readers(node) if not is_view(reader))
        regions = {self._operators_before[reader] for reader in readers}
        if len(regions) != 1:
            return len(regions) > 1
        return self._is_among_convolutions(node) and self._is_read_after_reduction(node, *regions)

    def _is_read_after_reduction(self, node: fx.Node, region: int) -> bool:
        """Whether an elementwise kernel reads a value, and what a reduction makes of it, before the
        next operator runs.
        """
        before = self._operators_before
        elementwise, reduced = {node}, set[fx.Node]()
        pending, seen = list(node.users), set(node.users)
        heapq.heapify(pending)
        while pending:
            each = heapq.heappop(pending)  # in the order of the graph, so after all that it reads
            inputs = each.all_input_nodes
            if _kind_of(each.target) == "reduction":
                reduced.add(each)
            elif is_view(each) or is_elementwise(each) or each.target is operator.getitem:
                reads_it = not elementwise.isdisjoint(inputs)
                if not reduced.isdisjoint(inputs):
                    if reads_it:
                        return True
                    reduced.add(each)
                if reads_it:
                    elementwise.add(each)
            else:
                continue
            for user in each.users:
                if user not in seen and before[user] == region:
                    seen.add(user)
                    heapq.heappush(pending, user)
        return False


_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def _is_operator(node: fx.Node) -> bool:
    """Whether a call runs outside of kernels, such as a product, a collective or a wait."""
    inside = _is_fusible(node) or node.target in _INTO_A_COPY | BY_ROWS | {aten.cat.default}
    return (
        node.op == "call_function"
        and not inside
        and not is_view(node)
        and node.target is not operator.getitem
        and getattr(node.target, "namespace", None) != "prims"  # such as indices of a pool
    )


def _is_ours(node: fx.Node) -> bool:
    """Whether a call is a collective, a copy from the host or a wait, which schedules move."""
    return getattr(node.target, "namespace", None) in ("_c10d_functional", "zpasses")


def may_be_inlined(node: fx.Node) -> bool:
    """Whether some graph with a call computes it where it is read."""
    return fuses() and is_elementwise(node) and bool(node.users) and _is_read_by_kernels(node)


def may_write_in_place(node: fx.Node) -> bool:
    """Whether some graph with a call has its kernel write over a value that it reads."""
    return fuses() and _is_fusible(node)


def _loaded_bytes(node: fx.Node) -> int:
    """A kernel loads a part of a tensor alone, and what is expanded once."""
    return min(nbytes(value_of(node)), nbytes(value_of(view_base(node))))


def _loaded_by(user: fx.Node, source: fx.Node, most: int, leaf: fx.Node | None = None) -> int:
    """Returns how many of the bytes of a value, or of what it is computed from, a call loads."""
    if user.target not in BY_ROWS or source is not user.args[0]:
        return most
    element_size: int = value_of(leaf or source).element_size()
    return min(most, numel(value_of(user)) * element_size)


def _is_read_by_kernels(node: fx.Node) -> bool:
    """Whether the kernels of all readers can compute a value that they read."""
    for user in node.users:
        if user.target is aten.as_strided.default:  # needs what it views in memory
            return False
        if is_view(user):
            if not _is_read_by_kernels(user):
                return False
        elif not _is_fusible(user):
            written = {*_nodes_in(user.args[1:]), *_nodes_in(user.kwargs)}
            if user.target not in _INTO_A_COPY:
                return False
            if node in written and compat.scatters_by_operator(user):
                return False
    return True


def _is_shared(node: fx.Node) -> bool:
    """Whether a value has several readers, or a view of it does."""
    users = node.users
    return len(users) > 1 or any(is_view(user) and _is_shared(user) for user in users)


def _has_one_kernel(node: fx.Node) -> bool:
    """Whether one kernel reads a value, or what is computed from it."""
    while len(node.users) == 1:
        (node,) = node.users
        if _kind_of(node.target) == "reduction" or not _is_read_by_kernels(node):
            return True
    return not node.users


def _nodes_in(arguments: object) -> list[fx.Node]:
    return [each for each in compat.pytree.tree_leaves(arguments) if isinstance(each, fx.Node)]


def _is_fusible(node: fx.Node) -> bool:
    return _kind_of(node.target) == "reduction" or is_elementwise(node)


def is_addmm(node: fx.Node) -> bool:
    """Whether Inductor computes a sum with the matrix product in it, by one `addmm`."""
    return product_in(node) is not None


def product_in(node: fx.Node) -> fx.Node | None:
    """Returns the product that `addmm` computes with a sum; None if it computes none. On
    accelerators, sums that only elementwise operators read stay apart.
    """
    for product in products_in(node):
        on_cpu = value_of(product).device.type == "cpu"
        if len(product.users) == 1 and (on_cpu or not _is_read_elementwise(node)):
            return product
    return None


def products_in(node: fx.Node) -> list[fx.Node]:
    """Returns the products that `addmm` could compute with a sum in some graph, in the order in
    which Inductor tries them.
    """
    if node.target is not aten.add.Tensor or node.kwargs:
        return []
    found = []
    for product, term in (node.args[::-1], node.args):
        if not isinstance(product, fx.Node) or not isinstance(term, fx.Node):
            return []
        if product.target is aten.mm.default:
            result, added = value_of(product), value_of(term)
            if result.shape == value_of(node).shape and result.dtype == added.dtype:
                found.append(product)
    return found


def _is_read_elementwise(node: fx.Node) -> bool:
    return all(
        _is_read_elementwise(user)
        if is_view(user) or user.target is operator.getitem
        else isinstance(user.target, compat.OpOverload) and torch.Tag.pointwise in user.target.tags
        for user in node.users
    )


def _is_in_addmm(node: fx.Node) -> bool:
    """Whether a call is a matrix product that `addmm` computes with the sum that reads it."""
    if node.target is not aten.mm.default or len(node.users) != 1:
        return False
    (reader,) = node.users
    return product_in(reader) is node


def reads_elsewhere(node: fx.Node) -> bool:
    """Whether a call reads elements elsewhere than where it writes them."""
    return node.target in _ELSEWHERE


def loaded_inputs(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs of a call whose elements it loads. A kernel for the gradient of an average
    needs the shape of the second operand alone.
    """
    inputs = node.all_input_nodes
    if node.target in _AVERAGE_GRADIENTS and fuses() and _is_average(node):
        gradient, averaged = node.args[:2]
        if averaged is not gradient:
            inputs.remove(averaged)  # type: ignore[arg-type]
    return inputs


def _is_average(node: fx.Node) -> bool:
    """Whether a call averages neighbours, or is the gradient of that, and Inductor has a kernel for
    a window of the size.
    """
    dims = 3 if "3d" in str(node.target) else 2

    def whole(sizes: Any) -> list[int]:  # one size may stand for all
        return list(sizes) * (dims if len(sizes) == 1 else 1)

    if node.target in _AVERAGES:
        return math.prod(whole(node.args[1])) <= _AVERAGES[node.target]
    if node.target not in _AVERAGE_GRADIENTS:
        return False
    sizes = whole(node.args[2])
    most = 1
    for size, step in zip(sizes, whole(node.args[3] or sizes), strict=True):
        most *= max(1, *(at // step - max(0, (at - size) // step) for at in range(2 * size)))
    return most <= _AVERAGE_GRADIENTS[node.target]


def is_elementwise(node: fx.Node) -> bool:
    """Whether Inductor computes each element of a call's result by itself."""
    if is_addmm(node):
        return False
    if node.target in _AVERAGES or node.target in _AVERAGE_GRADIENTS:
        return _is_average(node)
    if node.target is aten.scatter.value:  # Inductor compares positions, if it writes to a constant
        base = node.args[0]
        return isinstance(base, fx.Node) and base.target is aten.full.default
    return _kind_of(node.target) == "elementwise"


@functools.lru_cache(maxsize=1 << 12)
def _kind_of(call: object) -> str | None:
    if not isinstance(call, compat.OpOverload):
        return None
    tagged = torch.Tag.pointwise in call.tags
    if tagged or call in _ELEMENTWISE or compat.makes_random_numbers(call):
        return "elementwise"
    return "reduction" if call in _REDUCTIONS else None
