"""Recognise flattening that happens on the host: tensors laid end to end there, and the result
moved to a device.

As in `foreign`, graphs are matched by their shape here, because whoever wrote them knew nothing of
tags. Found are graphs of aten ops:

    cat([view(a, [-1]), view(_to_copy(b, device=cpu), [-1]), zeros([3])]) -> constant_pad_nd -> view
    -> _to_copy(device=...)

with or without each step between `cat` and the move, `flatten_dense_tensors` in place of views and
`cat`, concatenations within concatenations, and casts anywhere. What is found is normal form:
pieces, each the elements of one value in row-major order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zpasses.graph.nodes import value_of
from zpasses.graph.tags import tag_of

__all__ = ["ACCELERATOR", "Flattening", "Piece", "device_source", "find_flattenings", "is_shape_op"]

ACCELERATOR = "accelerator"
"""Stands for every device type that is not the host."""

aten, prims = torch.ops.aten, torch.ops.prims

_ROW_MAJOR = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.flatten.using_ints,
    aten.pin_memory.default,
    aten._pin_memory.default,
}
"""Keep the elements in row-major order."""

_SHAPE = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.view.default,
    aten.alias.default,
    aten.detach.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
}
"""Views that a device makes for free of what lies there."""

_MOVES = {aten._to_copy.default, prims.device_put.default}
_CONSTANTS = {
    aten.zeros.default: 0,
    aten.ones.default: 1,
    aten.new_zeros.default: 0,
    aten.zeros_like.default: 0,
}


@dataclass(frozen=True)
class Piece:
    """A run of elements of a flat buffer."""

    numel: int
    source: fx.Node | None = None
    """All elements of this value, in row-major order; None for a constant."""
    fill: float = 0
    """The constant, in the dtype that it ends in."""
    casts: tuple[torch.dtype, ...] = ()
    """Dtypes that the elements are converted to, in this order."""


@dataclass(frozen=True)
class Flattening:
    """One flat buffer that the host makes and a device gets."""

    move: fx.Node
    """Moves the flat buffer to the device; its value is what the graph goes on with."""
    pieces: tuple[Piece, ...]
    names: tuple[str, ...]
    """Names of the sources, in order."""

    @property
    def device(self) -> torch.device:
        return _tensor(self.move).device

    @property
    def dtype(self) -> torch.dtype:
        return _tensor(self.move).dtype

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def find_flattenings(graph: fx.Graph, device: str = ACCELERATOR) -> list[Flattening]:
    """Host flattenings whose result moves to a device of this type, in graph order.

    Left out are those of which the host needs the flat buffer as well, those with sizes that are
    not known when compiling, and those between whose first and last step the graph writes to
    memory."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = [order[node] for node in graph.nodes if _writes(node)]
    found = []
    for node in graph.nodes:
        if not _moves_to(node, device):
            continue
        steps: list[fx.Node] = []
        pieces = _expand(node.args[0], (_tensor(node).dtype,), steps)
        if pieces is None or any(not isinstance(piece.numel, int) for piece in pieces):
            continue
        if writes and any(_first_copy(steps, pieces, order) < at < order[node] for at in writes):
            continue
        names = tuple(
            dict.fromkeys(
                name
                for piece in pieces
                if piece.source is not None
                for name in _names(piece.source)
            )
        )
        found.append(Flattening(node, pieces, names))
    return found


def device_source(node: fx.Node, device: torch.device) -> fx.Node | None:
    """The value on `device` that a host value was copied from, views of it included; None if the
    host's is the original."""
    while True:
        value = _tensor(node)
        if value.device == device and value.device.type != "cpu":
            return node
        if value.device.type != "cpu" or node.op != "call_function":
            return None
        if not (
            is_shape_op(node)
            or (node.target in _MOVES and _tensor(node.all_input_nodes[0]).dtype == value.dtype)
        ):
            return None
        node = node.all_input_nodes[0]


def is_shape_op(node: fx.Node) -> bool:
    """Whether a node is a view of its one input that can be made of a copy of that input as
    well."""
    return node.op == "call_function" and node.target in _SHAPE


def _expand(
    node: Any, casts: tuple[torch.dtype, ...], steps: list[fx.Node]
) -> tuple[Piece, ...] | None:
    """The pieces of a flat host buffer, of which nothing but the next step may know; None if it is
    no such buffer."""
    if (
        not isinstance(node, fx.Node)
        or not _is_on_host(node)
        or len(node.users) != 1
        or node.op != "call_function"
    ):
        return None
    steps.append(node)
    if node.target is aten.cat.default:
        return _expand_cat(node, casts, steps)
    if node.target is aten.flatten_dense_tensors.default:
        return tuple(_piece(item, casts, steps) for item in _inputs_of(node))
    if node.target is aten.constant_pad_nd.default:
        padding, fill = list(node.args[1]), node.args[2] if len(node.args) > 2 else 0  # type: ignore[arg-type]
        inner = (
            _expand(node.args[0], casts, steps)
            if _tensor(node).dim() == 1 and padding[0] == 0 and padding[1] >= 0
            else None
        )
        return (
            inner
            if inner is None
            else (*inner, Piece(padding[1], fill=_cast(fill, (_tensor(node).dtype, *casts))))
        )
    if node.target in _ROW_MAJOR:
        return _expand(node.args[0], casts, steps)
    if _is_cast(node):
        return _expand(node.args[0], (_tensor(node).dtype, *casts), steps)
    return None


def _expand_cat(
    node: fx.Node, casts: tuple[torch.dtype, ...], steps: list[fx.Node]
) -> tuple[Piece, ...] | None:
    value = _tensor(node)
    if value.dim() != 1:
        return None
    pieces: list[Piece] = []
    for item in _inputs_of(node):
        inner = (
            _expand(item, (value.dtype, *casts), steps)
            if item.target in (aten.cat.default, aten.constant_pad_nd.default)
            else None
        )
        pieces += inner if inner is not None else (_piece(item, (value.dtype, *casts), steps),)
    return tuple(pieces)


def _piece(node: fx.Node, casts: tuple[torch.dtype, ...], steps: list[fx.Node]) -> Piece:
    """A value as a piece, taken from as far back as its elements are in the same order."""
    numel = _tensor(node).numel()
    while True:
        steps.append(node)
        if node.op != "call_function" or not node.all_input_nodes:
            break
        if node.target in _ROW_MAJOR:
            node = node.all_input_nodes[0]
        elif _is_cast(node) or (node.target in _MOVES and _is_on_host(node)):
            if _tensor(node).dtype != _tensor(node.all_input_nodes[0]).dtype:
                casts = (_tensor(node).dtype, *casts)
            node = node.all_input_nodes[0]
        else:
            break
    own = _tensor(node).dtype
    fill = _constant(node)
    if fill is not None:
        return Piece(numel, fill=_cast(fill, (own, *casts)))
    return Piece(numel, node, casts=_distinct(own, casts))


def _first_copy(steps: list[fx.Node], pieces: tuple[Piece, ...], order: dict[fx.Node, int]) -> int:
    """Place of the first node whose result the device would make later; inputs of the graph are not
    made."""
    made = list(steps)
    for piece in pieces:
        node = piece.source
        while (
            node is not None
            and node.op == "call_function"
            and (is_shape_op(node) or node.target in _MOVES)
        ):
            made.append(node)
            node = node.all_input_nodes[0]
    return min(order[node] for node in made if node.op == "call_function")


def _names(node: fx.Node) -> tuple[str, ...]:
    tag = tag_of(node)
    return tag.params if tag is not None else (node.name,)


def _distinct(dtype: torch.dtype, casts: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    changed = []
    for cast in casts:
        if cast != dtype:
            changed.append(cast)
            dtype = cast
    return tuple(changed)


def _cast(number: Any, dtypes: tuple[torch.dtype, ...]) -> float:
    value = torch.tensor(number)
    for dtype in dtypes:
        value = value.to(dtype)
    return value.item()


def _constant(node: fx.Node) -> float | None:
    if node.op != "call_function":
        return None
    if node.target in _CONSTANTS:
        return float(_CONSTANTS[node.target])
    value = node.args[1] if node.target is aten.full.default else None
    return value if isinstance(value, (int, float, bool)) else None


def _moves_to(node: fx.Node, device: str) -> bool:
    if (
        node.op != "call_function"
        or node.target not in _MOVES
        or not node.all_input_nodes
        or not _is_on_host(node.all_input_nodes[0])
    ):
        return False
    target = _tensor(node).device.type
    if device != "cpu":
        return target != "cpu" if device == ACCELERATOR else target == device
    named = node.kwargs.get("device") if node.target is aten._to_copy.default else node.args[1]
    return target == "cpu" and named is not None


def _is_cast(node: fx.Node) -> bool:
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if node.target is prims.convert_element_type.default:
        return True
    plain = node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype", "memory_format"}
    return plain and source is not None and _tensor(source).device == _tensor(node).device


def _is_on_host(node: fx.Node) -> bool:
    value = value_of(node)
    return (
        isinstance(value, Tensor) and value.device.type == "cpu" and value.layout is torch.strided
    )


def _inputs_of(node: fx.Node) -> list[fx.Node]:
    items: Any = node.args[0]
    return list(items)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _tensor(node: fx.Node) -> Tensor:
    value = value_of(node)
    assert isinstance(value, Tensor)
    return value
