"""Find tensors that a graph concatenates on the host and then copies to a device.

Like `zpasses.graph.patterns`, this module matches on the structure of a graph, because the code
that builds such buffers knows nothing of tags. It matches graphs of aten ops such as

    cat([view(a, [-1]), view(_to_copy(b, device=cpu), [-1]), zeros([3])]) -> constant_pad_nd -> view
    -> _to_copy(device=...)

Every step between `cat` and the copy is optional. `flatten_dense_tensors` may replace the views and
`cat`, concatenations may be nested, and casts may appear anywhere. A match is returned in a normal
form: a list of pieces, each of which holds the elements of one value in row-major order. The pass
`flatten-on-device` uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zpasses.graph.queries import value_of
from zpasses.graph.tags import tag_of

aten, prims = torch.ops.aten, torch.ops.prims

_ORDER_PRESERVING = {
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
"""Ops that keep all elements in row-major order."""

_VIEW_OPS = {
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
"""Views that can be repeated on the device, at no cost, on a copy of their input."""

_COPIES_TO_DEVICE = {aten._to_copy.default, prims.device_put.default}
_CONSTANTS = {
    aten.zeros.default: 0,
    aten.ones.default: 1,
    aten.new_zeros.default: 0,
    aten.zeros_like.default: 0,
}


@dataclass(frozen=True)
class Piece:
    """A contiguous range of elements of a flat buffer."""

    numel: int
    source: fx.Node | None = None
    """The value whose elements fill the range, in row-major order; None for a constant."""
    fill: float = 0
    """The constant, in the dtype of the flat buffer."""
    casts: tuple[torch.dtype, ...] = ()
    """Dtypes that the elements are converted to, in this order."""


@dataclass(frozen=True)
class Flattening:
    """A flat buffer that the host builds and the graph copies to a device."""

    move: fx.Node
    """The copy to the device. The rest of the graph reads its value."""
    pieces: tuple[Piece, ...]
    names: tuple[str, ...]
    """Names of the sources, in order: parameters where a source is tagged, else the node's name."""

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


def find_flattenings(graph: fx.Graph) -> list[Flattening]:
    """Returns the flat host buffers that are copied to a device, in graph order.

    A buffer is skipped if the host also reads it, if it has sizes that are unknown at compile time,
    or if the graph writes to memory between the first and the last step that builds it.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = [order[node] for node in graph.nodes if _writes(node)]
    found = []
    for node in graph.nodes:
        if not _is_copy_to_device(node):
            continue
        steps: list[fx.Node] = []
        pieces = _expand(node.args[0], (_tensor(node).dtype,), steps)
        if pieces is None or any(not isinstance(piece.numel, int) for piece in pieces):
            continue
        if writes and any(
            _first_deferred_step(steps, pieces, order) < at < order[node] for at in writes
        ):
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
    """Returns the value on `device` that a host value is a copy of, or a view of such a copy.

    Returns None if the original is on the host.
    """
    while True:
        value = _tensor(node)
        if value.device == device and value.device.type != "cpu":
            return node
        if value.device.type != "cpu" or node.op != "call_function":
            return None
        if not (
            is_view_op(node)
            or (
                node.target in _COPIES_TO_DEVICE
                and _tensor(node.all_input_nodes[0]).dtype == value.dtype
            )
        ):
            return None
        node = node.all_input_nodes[0]


def is_view_op(node: fx.Node) -> bool:
    """Whether a node is a view of its only input that can be repeated on a copy of that input."""
    return node.op == "call_function" and node.target in _VIEW_OPS


def _expand(
    node: Any, casts: tuple[torch.dtype, ...], steps: list[fx.Node]
) -> tuple[Piece, ...] | None:
    """Returns the pieces of a flat host buffer that only the next step reads, else None."""
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
        padding = list(node.args[1])  # type: ignore[arg-type]
        fill = node.args[2] if len(node.args) > 2 else 0
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
    if node.target in _ORDER_PRESERVING:
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
    """Returns a value as a piece. The source is the earliest value with the same element order."""
    numel = _tensor(node).numel()
    while True:
        steps.append(node)
        if node.op != "call_function" or not node.all_input_nodes:
            break
        if node.target in _ORDER_PRESERVING:
            node = node.all_input_nodes[0]
        elif _is_cast(node) or (node.target in _COPIES_TO_DEVICE and _is_on_host(node)):
            if _tensor(node).dtype != _tensor(node.all_input_nodes[0]).dtype:
                casts = (_tensor(node).dtype, *casts)
            node = node.all_input_nodes[0]
        else:
            break
    own = _tensor(node).dtype
    fill = _constant(node)
    if fill is not None:
        return Piece(numel, fill=_cast(fill, (own, *casts)))
    return Piece(numel, node, casts=_effective_casts(own, casts))


def _first_deferred_step(
    steps: list[fx.Node], pieces: tuple[Piece, ...], order: dict[fx.Node, int]
) -> int:
    """Returns the position of the first node that the device would execute later than the host
    does.

    Graph inputs do not count, because no node computes them.
    """
    made = list(steps)
    for piece in pieces:
        node = piece.source
        while (
            node is not None
            and node.op == "call_function"
            and (is_view_op(node) or node.target in _COPIES_TO_DEVICE)
        ):
            made.append(node)
            node = node.all_input_nodes[0]
    return min(order[node] for node in made if node.op == "call_function")


def _names(node: fx.Node) -> tuple[str, ...]:
    tag = tag_of(node)
    return tag.params if tag is not None else (node.name,)


def _effective_casts(dtype: torch.dtype, casts: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
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


def _is_copy_to_device(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target in _COPIES_TO_DEVICE
        and _is_on_host(node.all_input_nodes[0])
        and _tensor(node).device.type != "cpu"
    )


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
