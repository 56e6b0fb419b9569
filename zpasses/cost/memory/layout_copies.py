"""Copies in another layout that Inductor's code makes around convolutions, and a graph does not
show.

Inductor lays out the values around two-dimensional convolutions channels last. Kernels compute
their results in this layout at once, and forward saves them so. What comes in a layout of its own
is copied right before the convolution: gathered weights, the batch, and gradients of what the model
returns. What the model returns is copied back into the layout of eager code. A gathered weight that
forward saves is copied once, for both graphs, unless it is cached. A backward convolution runs
channels last if its input or its weight is so. Then its gradient of the weight is, too, and a
collective reads a copy of it. The operands of the backward of a depthwise convolution are copied.
On a CPU with several threads, the gradient of max pooling is scattered by an operator, which reads
copies of its indices and of the gradient.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.time.fused_kernels import fuses, is_elementwise, loaded_inputs
from zpasses.graph.aliases import GETITEM, elements_of, is_view, view_base
from zpasses.graph.queries import collective_of, is_wait, nbytes, numel, value_of
from zpasses.graph.tags import tag_of

aten = torch.ops.aten
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
_SAME_LAYOUT = (aten.slice.Tensor, aten.alias.default, aten.detach.default)
"""Views whose dimensions have the order of those of their base."""

_prefers: weakref.WeakKeyDictionary[fx.Graph, bool] = weakref.WeakKeyDictionary()
"""Graph -> whether its convolutions are laid out. No pass adds or removes one."""
_backwards: weakref.WeakKeyDictionary[fx.Graph, bool | None] = weakref.WeakKeyDictionary()
"""Graph -> whether all its backwards of convolutions run channels last, if Inductor decides so."""

_first_operands: contextvars.ContextVar[dict[fx.Node, fx.Node | None] | None]
_first_operands = contextvars.ContextVar("zpasses.first_operands", default=None)
"""Inside `remembered_layouts`: value -> the one whose layout it has."""


@contextlib.contextmanager
def remembered_layouts() -> Iterator[None]:
    """Context manager in which graphs do not change, so that layouts are found once."""
    token = _first_operands.set({})
    try:
        yield
    finally:
        _first_operands.reset(token)


def copied_inputs(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs of a call that Inductor's code copies."""
    if is_depthwise_backward(node):
        gradient, given = node.args[:2]
        return [given, gradient]  # type: ignore[list-item]
    if node.target in (_FORWARD, _BACKWARD):
        wanted = _is_last(node)
        operands: Any = node.args[: 2 if node.target is _FORWARD else 3]
        return [each for each in operands if _is_fixed(each, not wanted)]
    if collective_of(node) is not None:
        return [each for each in node.all_input_nodes if _is_fixed(each, True)]
    if node.target is aten.scatter_add.default and compat.scatters_by_operator(node):
        return [each for each in node.all_input_nodes if _is_reshaped_last(each)]
    return []


def is_saved_copy(node: fx.Node) -> bool:
    """Whether forward saves a copy of a gathered weight, or of an input, that a convolution reads.

    In a forward graph, the convolution reads the copy, too. In a backward graph, the copy is given.
    """
    tag, users = tag_of(node), {user.target for user in node.users}
    if not (is_wait(node) or (node.op == "placeholder" and tag is None)):
        return False
    is_given = node.name.startswith("primals") and _BACKWARD in users
    is_saved = _FORWARD in users and any(user.op == "output" for user in node.users)
    is_cached = tag is not None and tag.cached
    return (
        (is_given or is_saved)
        and not is_cached
        and _matters(node)
        and _prefers_channels_last(node.graph)
    )


def is_copied_back(node: fx.Node) -> bool:
    """Whether a convolution makes what the model returns, which is copied into the layout that the
    graph shows, for all that read it.
    """
    return (
        node.target is _FORWARD
        and compat.is_returned_by_model(node)
        and _matters(node)
        and not _shows_last(node)
        and _is_last(node)
    )


def has_shown_layout(node: fx.Node) -> bool:
    """Whether Inductor lays out a value as the graph shows it. If the graph prefers channels last,
    it does so with the result of a kernel that a view of another shape reads, or whose first whole
    operand is laid out so.
    """
    if not _matters(node) or not _prefers_channels_last(node.graph):
        return True
    if not is_elementwise(node):
        return False
    if any(user.target is aten.view.default for user in node.users):
        return True
    source = _first_operand(node)
    if source is None:
        return False
    return not _matters(view_base(source)) or _is_fixed(source, _shows_last(node))


def copied_bytes(node: fx.Node) -> int:
    """Returns the bytes of these copies."""
    return sum(nbytes(value_of(each)) for each in copied_inputs(node))


def runs_channels_last(convolution: fx.Node) -> bool:
    """Whether a convolution of any number of dimensions runs channels last."""
    if is_depthwise_backward(convolution):
        return False
    first = 0 if convolution.target is _FORWARD else 1
    operands: Any = convolution.args[first : first + 2]
    values = [value_of(each) for each in operands]
    if fuses() and values[0].dim() == 4 and _prefers_channels_last(convolution.graph):
        return _is_last(convolution)
    sizes = [[compat.planned_size(size) for size in each.shape] for each in values]
    return any(
        channels > 1 and max(image) > 1 and compat.planned_size(each.stride(1)) == 1
        for each, (_, channels, *image) in zip(values, sizes, strict=True)
    )


def is_depthwise_backward(node: fx.Node) -> bool:
    """Whether Inductor's code runs the backward of a depthwise convolution. Its weight has one
    channel, so its strides name no layout, and Inductor takes the other operands into one that is
    none of both.
    """
    if node.target is not _BACKWARD or not fuses() or _lays_out_backwards(node.graph) is not False:
        return False
    weight: Any = node.args[2]
    groups, mask = node.args[-2:]
    _, channels, *kernel = map(compat.planned_size, value_of(weight).shape)
    is_whole = channels == 1 < max(kernel, default=1) and len(kernel) == 2
    makes_weight = bool(mask[1])  # type: ignore[index]
    may_be = is_whole and bool(groups != 1) and makes_weight
    return may_be and _prefers_channels_last(node.graph)


def _is_last(convolution: fx.Node) -> bool:
    """Whether a convolution runs channels last, if its graph prefers that."""
    if is_depthwise_backward(convolution):
        return False
    first = 0 if convolution.target is _FORWARD else 1
    operands: Any = convolution.args[first : first + 2]
    if any(value_of(each).dim() != 4 for each in operands):
        return False
    if not _prefers_channels_last(convolution.graph):
        return False
    if convolution.target is _FORWARD or _lays_out_backwards(convolution.graph):
        return True
    return not all(_is_fixed(each, False) or not _matters(each) for each in operands)


def _prefers_channels_last(graph: fx.Graph) -> bool:
    if graph not in _prefers:
        _prefers[graph] = compat.prefers_channels_last(graph)
    return _prefers[graph]


def _lays_out_backwards(graph: fx.Graph) -> bool | None:
    if graph not in _backwards:
        _backwards[graph] = compat.lays_out_backwards(graph)
    return _backwards[graph]


def _is_fixed(node: fx.Node, last: bool) -> bool:
    """Whether a value has a layout that its reader cannot choose: channels last, or another."""
    if not _matters(node):
        return False
    if compat.is_returned_by_model(node):
        return _shows_last(node) == last
    is_read_apart = len(node.users) > 1 and any(user.target is _BACKWARD for user in node.users)
    if is_elementwise(node) and is_read_apart:
        # Inductor has it laid out as the operator does it alone: like its first whole operand.
        source = _first_operand(node)
        return not last if source is None else _is_fixed(source, last)
    while node.target in _SAME_LAYOUT:
        node = node.all_input_nodes[0]
    source = node.all_input_nodes[0] if node.target is GETITEM else node
    if source.target in (_FORWARD, _BACKWARD):
        return _is_last(source) == last
    if is_saved_copy(node) or (node.op == "placeholder" and _is_saved(node)):
        is_last = _prefers_channels_last(node.graph) and not compat.keeps_strides(node)
        return is_last == last
    if node.op == "placeholder" or is_view(node) or is_wait(node) or collective_of(source):
        return _shows_last(node) == last
    return False


def _shows_last(node: fx.Node) -> bool:
    """Whether the graph shows a value channels last."""
    return compat.planned_size(value_of(node).stride(1)) == 1


def _is_reshaped_last(node: fx.Node) -> bool:
    """Whether a value is a view in another shape of what is laid out channels last."""
    base = elements_of(node)
    if base is node or not _matters(base):
        return False
    source = _first_operand(base)
    return source is not None and _is_fixed(source, True)


def _first_operand(node: fx.Node) -> fx.Node | None:
    """Returns the value whose layout an elementwise value has; None if all are broadcast."""
    known = _first_operands.get()
    known = {} if known is None else known
    count, passed, found = numel(value_of(node)), list[fx.Node](), node
    while found not in known and (is_elementwise(found) or compat.makes_indices_of_pool(found)):
        passed.append(found)
        operands = [each for each in loaded_inputs(found) if not _is_constant(each)]
        whole = [each for each in operands if numel(value_of(view_base(each))) >= count]
        if not whole:
            known[found] = None
            break
        found = whole[0]
    first = known.get(found, found)
    known.update(dict.fromkeys(passed, first))
    return first


def _is_constant(node: fx.Node) -> bool:
    """Whether a call makes a tensor of nothing, which kernels do not load."""
    return is_elementwise(node) and not node.all_input_nodes


def _is_saved(node: fx.Node) -> bool:
    """Whether forward has computed an input of a backward graph."""
    tag = tag_of(node)
    return (tag is None or tag.kept) and not node.name.startswith(("primals", "tangents"))


def _matters(node: fx.Node) -> bool:
    """Whether the layouts of a value differ."""
    value = value_of(node)
    if not isinstance(value, Tensor) or value.dim() != 4:
        return False
    _, channels, *kernel = map(compat.planned_size, value.shape)
    return channels > 1 and max(kernel) > 1
