"""Which operators return views, which arguments calls write, and whose memory a value has.

The schema of an operator says whether it returns a view (`is_view`). Some callers count further
operators as views:

- `CLONES`: Inductor removes clones that it finds unnecessary. A check that two values do not share
  memory counts a clone as a view. Code that looks for a value with memory of its own does not,
  and does not rely on the clone either.
- `UNSAFE_VIEWS`: views that autograd does not track. Their schema looks like that of a copy.

The schemas of `reshape` and `contiguous` are those of views, although they copy if strides need it.
`elements_of` counts fewer: only views that keep all elements in their order.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.queries import WAIT, value_of
from zpasses.graph.walks import reachable

aten = torch.ops.aten
GETITEM = operator.getitem

CLONES: Set[Any] = frozenset({aten.clone.default})
UNSAFE_VIEWS: Set[Any] = frozenset({aten._unsafe_view.default})

WHOLE_VIEWS: Set[Any] = frozenset({aten.view.default, aten.alias.default, aten.detach.default})
"""Views of all elements, in the same order."""

CASTS_AND_PADDING: Set[Any] = frozenset(
    {
        aten._to_copy.default,
        aten.constant_pad_nd.default,
        torch.ops.prims.convert_element_type.default,
    }
)

COPIES: Set[Any] = CASTS_AND_PADDING | CLONES
"""Operators that return their first argument in memory of its own, maybe cast or padded."""

_IN_PLACE_FUNCTIONS = {
    operator.setitem,
    operator.iadd,
    operator.imul,
    operator.isub,
    operator.itruediv,
}
_VIEW_METHODS = {"view", "reshape", "t", "transpose", "permute", "detach", "expand", "narrow"}


# --- operators ------------------------------------------------------------------------------------
@functools.cache
def written_arguments(target: Any) -> tuple[str | int, ...]:
    """Returns the arguments that a call writes to: names, or positions if it has no schema."""
    if isinstance(target, compat.OpOverload):
        return tuple(
            argument.name
            for argument in target._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    name = target if isinstance(target, str) else ""
    in_place = name.endswith("_") and not name.endswith("__")
    return (0,) if in_place or target in _IN_PLACE_FUNCTIONS else ()


@functools.cache
def shared_arguments(target: Any) -> tuple[str | int, ...]:
    """Returns the arguments that share memory with the result, as `written_arguments` does."""
    if target is WAIT:
        return ("tensor",)
    if isinstance(target, compat.OpOverload):
        return _aliased(target)
    return (0,) if target in _VIEW_METHODS else written_arguments(target)


def _aliased(target: compat.OpOverload) -> tuple[str, ...]:
    if target in UNSAFE_VIEWS:
        return ("self",)
    if not target._schema.returns:
        return ()
    returned = any(each.alias_info is not None for each in target._schema.returns)
    return tuple(
        argument.name
        for argument in target._schema.arguments
        if argument.alias_info is not None and (returned or target.is_view)
    )


# --- views ----------------------------------------------------------------------------------------
def is_view(node: fx.Node, also: Set[Any] = frozenset()) -> bool:
    """Whether a node's value is a view of its first input.

    Args:
        node: any node.
        also: operators that count as views besides those whose schema says so.
    """
    target = node.target
    if isinstance(target, compat.OpOverload) and target.is_view:
        return True
    return bool(also) and target in also  # hashes of operators are computed in Python


def view_base(node: fx.Node, also: Set[Any] = frozenset()) -> fx.Node:
    """Returns the first value that is not a view, as `is_view` says, from a node back."""
    while is_view(node, also):
        node = node.all_input_nodes[0]
    return node


def elements_of(node: fx.Node) -> fx.Node:
    """Returns the first value, from a node back, of which the node is not a view of all elements in
    the same order.
    """
    while node.target in WHOLE_VIEWS:
        node = node.all_input_nodes[0]
    return node


# --- memory ---------------------------------------------------------------------------------------
def memory_base(node: fx.Node) -> fx.Node:
    """Returns the node that allocates the memory of this node's value."""
    while is_alias(node):
        node = node.all_input_nodes[0]
    return node


def memory_root(node: fx.Node) -> fx.Node:
    """Like `memory_base`, but returns the `getitem` that picks one of several outputs of a call."""
    while is_alias(node) and not _picks_output(node):
        node = node.all_input_nodes[0]
    return node


def root_output(root: fx.Node) -> tuple[fx.Node, int]:
    """Returns the call that allocates the memory of a `memory_root`, and which of its outputs that
    is, as `Buffer.node` and `Buffer.output` name them.
    """
    if not _picks_output(root):
        return root, 0
    at: Any = root.args[1]
    return root.all_input_nodes[0], at


def _picks_output(node: fx.Node) -> bool:
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return False
    source = node.all_input_nodes[0]
    value = value_of(source)
    return isinstance(value, (list, tuple)) and len(value) > 1 and not is_alias(source)


def buffer_readers(base: fx.Node) -> Iterator[fx.Node]:
    """Yields the users of a value and of all its aliases."""
    for alias in reachable([base], lambda node: filter(is_alias, node.users)):
        yield from alias.users


def is_alias(node: fx.Node) -> bool:
    """Whether a call returns a part or a view of its first input, or that input, which it awaited
    or wrote to.
    """
    return node.op == "call_function" and _returns_alias(node.target) and bool(node.all_input_nodes)


@functools.lru_cache(maxsize=1 << 12)
def _returns_alias(call: Any) -> bool:
    if call is GETITEM or call is aten.lift_fresh_copy.default:
        return True
    if not isinstance(call, compat.OpOverload):
        return False
    return len(call._schema.returns) == 1 and bool(shared_arguments(call))
