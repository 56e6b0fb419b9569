"""Writes the tiers of `flatten-on-device`: a flat buffer that the device lays out, as a whole or in
one part per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.dialect import group_size
from zpasses.graph.queries import Editor, erase_dead, nbytes, replace_node, value_of
from zpasses.graph.tags import Tag, add_tag
from zpasses.passes.writers.flatten_patterns import Flattening, Piece, device_source, is_view_op

aten = torch.ops.aten

Tier = Literal["plain", "distributed", "host"]

_ALIGN_BYTES = 16
"""Alignment in bytes of every rank's part in the distributed tier."""


@dataclass(frozen=True)
class _PieceSlice:
    """Elements first..end - 1 of a piece."""

    piece: Piece
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def whole(self) -> bool:
        return len(self) == self.piece.numel


class FlattenPlan:
    """One flattening, and the graph of each tier on this rank.

    Args:
        flattening: what to rewrite.
        group: the ranks that hold the same values; "" if there are none.
        freed: device bytes that are freed after the pieces have been read.
        origin: name of the pass, for tags.
    """

    def __init__(self, flattening: Flattening, group: str, freed: int, origin: str) -> None:
        self.flattening, self.applied = flattening, 0
        self._group, self._freed, self._origin = group, freed, origin
        self._size = group_size(group) if group else 1
        grain = _ALIGN_BYTES // flattening.dtype.itemsize
        self._part = -(-flattening.numel // (self._size * grain)) * grain
        self._device = flattening.device

    def tag(self, note: str = "") -> Tag:
        return Tag("flat", self.flattening.names, origin=self._origin, note=note)

    # --- memory -----------------------------------------------------------------------------------
    def needed_bytes(self) -> tuple[int, int | None]:
        """Device bytes that `plain` and `distributed` need on top of what the device holds; None in
        place of `distributed` if it is not possible.
        """
        flat = self.flattening.nbytes
        plain = self._concat_peak_bytes(self._all_slices(), flat)
        if self._size == 1 or not flat:
            return plain, None
        part = self._part * self.flattening.dtype.itemsize
        return plain, max(
            self._concat_peak_bytes(self._local_slices(), part),
            part + self._size * part - self._freed,
        )

    def _concat_peak_bytes(self, runs: Sequence[_PieceSlice], result: int) -> int:
        """Peak bytes of making all pieces one after the other, and then the result."""
        held, making = 0, 0
        for run in runs:
            sizes = self._temporary_bytes(run)
            held += sum(sizes[-1:])
            making = max(making, *sizes[:-1], 0)
        return held + max(result, making)

    def _temporary_bytes(self, run: _PieceSlice) -> list[int]:
        """Bytes of each tensor that is made on the device for one slice, in order."""
        piece = run.piece
        if piece.source is None:
            return [len(run) * self.flattening.dtype.itemsize]
        value, (moved, contiguous) = value_of(piece.source), self._placement(piece)
        count = len(run) if self._can_slice_on_host(piece) else piece.numel
        made = [count * value.element_size()] if moved else []
        if not contiguous and not (run.whole and piece.casts):
            made.append(piece.numel * value.element_size())
        return made + [len(run) * dtype.itemsize for dtype in piece.casts]

    def _placement(self, piece: Piece) -> tuple[bool, bool]:
        """Whether a piece must be moved to the device, and whether it is contiguous there."""
        assert piece.source is not None
        return device_source(piece.source, self._device) is None, bool(
            value_of(piece.source).is_contiguous()
        )

    # --- forms ------------------------------------------------------------------------------------
    def apply(self, graph: fx.Graph, tier: Tier) -> fx.Node:
        """Rewrite the graph to this tier. Returns the node of the flat buffer."""
        move = self.flattening.move
        host = move.all_input_nodes[0]
        edit = Editor(graph, before=move)
        flat = (
            self._all_gathered(edit)
            if tier == "distributed" and self._size > 1
            else self._concatenated(edit, self._all_slices())
        )
        shape = value_of(move).shape
        if value_of(flat).shape != shape:
            flat = edit.call(aten.view.default, flat, list(shape))
        replace_node(move, flat)
        erase_dead(graph, [host])
        self.applied = 1
        return flat

    def _all_gathered(self, edit: Editor) -> fx.Node:
        flattening, size = self.flattening, self._size
        runs = self._local_slices()
        missing = self._part - sum(map(len, runs))
        part = self._concatenated(
            edit, [*runs, *([_PieceSlice(Piece(missing), 0, missing)] if missing else [])]
        )
        add_tag(part, self.tag())
        started = edit.call(
            compat.functional.all_gather_into_tensor.default, part, size, self._group
        )
        add_tag(
            started,
            Tag("flat", flattening.names, nbytes(value_of(part)), origin=self._origin),
        )
        flat = edit.call(compat.functional.wait_tensor.default, started)
        if size * self._part != flattening.numel:
            add_tag(flat, self.tag())
            flat = edit.call(aten.slice.Tensor, flat, 0, 0, flattening.numel)
        return flat

    def _all_slices(self) -> list[_PieceSlice]:
        return [
            _PieceSlice(piece, 0, piece.numel) for piece in self.flattening.pieces if piece.numel
        ]

    def _local_slices(self) -> list[_PieceSlice]:
        """The slices of the pieces that lie in this rank's part."""
        start = compat.process_group(self._group).rank() * self._part
        runs, at = [], 0
        for piece in self.flattening.pieces:
            first, end = max(start - at, 0), min(start + self._part - at, piece.numel)
            if first < end:
                runs.append(_PieceSlice(piece, first, end))
            at += piece.numel
        return runs

    def _concatenated(self, edit: Editor, runs: Sequence[_PieceSlice]) -> fx.Node:
        if not runs:
            return self._full(edit, 0, 0)
        return edit.call(aten.cat.default, [self._make(edit, run) for run in runs])

    def _make(self, edit: Editor, run: _PieceSlice) -> fx.Node:
        """A slice on the device, [length], in the dtype of the flat buffer."""
        piece = run.piece
        if piece.source is None:
            return self._full(edit, len(run), piece.fill)
        if not run.whole and self._can_slice_on_host(piece):
            return self._cast(
                edit, self._move(edit, _slice(edit, _flatten(edit, piece.source), run)), piece
            )
        lifted = self._on_device(edit, piece.source)
        return (
            _flatten(edit, self._cast(edit, lifted, piece))
            if run.whole
            else self._cast(edit, _slice(edit, _flatten(edit, lifted), run), piece)
        )

    def _full(self, edit: Editor, numel: int, fill: float) -> fx.Node:
        return edit.call(
            aten.full.default, [numel], fill, dtype=self.flattening.dtype, device=self._device
        )

    def _cast(self, edit: Editor, node: fx.Node, piece: Piece) -> fx.Node:
        for dtype in piece.casts:
            strides = (
                {} if value_of(node).is_contiguous() else {"memory_format": torch.contiguous_format}
            )
            node = edit.call(aten._to_copy.default, node, dtype=dtype, **strides)
        return node

    def _on_device(self, edit: Editor, source: fx.Node) -> fx.Node:
        """A host value on the device: recomputed from the device value that it was copied from, or
        moved there.
        """
        if device_source(source, self._device) is None:
            return self._move(edit, source)
        if value_of(source).device == self._device:
            return source
        inner = self._on_device(edit, source.all_input_nodes[0])
        if not is_view_op(source):
            return inner
        if source.target is aten.view.default:
            inner = _contiguous(edit, inner)
        return edit.call(source.target, inner, *source.args[1:], **source.kwargs)  # type: ignore[arg-type]

    def _move(self, edit: Editor, source: fx.Node) -> fx.Node:
        return edit.call(aten._to_copy.default, source, device=self._device)

    def _can_slice_on_host(self, piece: Piece) -> bool:
        return piece.source is not None and self._placement(piece) == (True, True)


def freed_bytes(graph: fx.Graph, flattening: Flattening) -> int:
    """Returns the device bytes of the pieces that the graph frees once it has read them."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    sources = {
        device_source(piece.source, flattening.device)
        for piece in flattening.pieces
        if piece.source is not None
    }
    return sum(
        nbytes(value_of(node))
        for node in sources
        if node is not None
        and node.op != "placeholder"
        and _last_use(node, order) <= order[flattening.move]
    )


def _slice(edit: Editor, row: fx.Node, run: _PieceSlice) -> fx.Node:
    return edit.call(aten.slice.Tensor, row, 0, run.first, run.end)


def _contiguous(edit: Editor, node: fx.Node) -> fx.Node:
    if value_of(node).is_contiguous():
        return node
    return edit.call(aten.clone.default, node, memory_format=torch.contiguous_format)


def _flatten(edit: Editor, node: fx.Node) -> fx.Node:
    """All elements in row-major order, [numel]."""
    node = _contiguous(edit, node)
    return node if value_of(node).dim() == 1 else edit.call(aten.view.default, node, [-1])


def _last_use(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """Index of the last node that reads a value or a view of it."""
    last = order[node]
    for user in node.users:
        last = max(last, _last_use(user, order) if is_view_op(user) else order[user])
    return last
