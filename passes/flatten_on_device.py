"""Flatten tensors on the device where a graph flattens them on the host.

Before
  a = _to_copy(p, device=cpu)
  flat = cat([view(a, [-1]), view(q, [-1])])
  out = _to_copy(flat, device=cuda)
After, tier=plain
  b = _to_copy(q, device=cuda)
  out = cat([view(p, [-1]), b])
After, tier=distributed (rank 1 of 2)
  b = _to_copy(slice(q, 2, 6), device=cuda)
  part = cat([b, full([2], 0)])
  started = all_gather_into_tensor(part, 2, group)
  out = slice(wait_tensor(started), 0, 0, 10)

The pass chooses one of three tiers by the free memory of the device. `plain` concatenates
everything on the device. `distributed` lets each rank concatenate its part, and one all-gather
assembles the whole buffer. `host` leaves the graph unchanged. Each tier needs this much device
memory on top of what the device holds already:

- `plain`: the flat buffer, and a copy of every piece that comes from the host or changes its dtype.
- `distributed`: the larger of two sums. The first is this rank's part twice: its pieces, and the
  part itself. The second is the part and the gathered buffer, less those of the device's own pieces
  that nothing reads later.
- `host`: nothing that any rank could save.

Contract: the values, shape and dtype of the result and the offset of every tensor in it stay the
same. The ranks of a group vote, and all take the worst tier that one of them needs. The pass
rewrites graphs of aten ops, and adds nothing that a gradient could flow through.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.cost import device_memory
from zpasses.errors import OptionError, PassError
from zpasses.graph.flatten_patterns import (
    ACCELERATOR,
    Flattening,
    Piece,
    device_source,
    find_flattenings,
    is_view_op,
)
from zpasses.graph.nodes import Editor, erase_dead, nbytes, replace_node, value_of
from zpasses.graph.ops import group_size
from zpasses.graph.tags import Tag, add_tag, tag_of
from zpasses.pipeline.events import note
from zpasses.pipeline.facts import Facts
from zpasses.pipeline.passes import Level, Pass, process_token
from zpasses.ranks.vote import exchange

__all__ = ["TIER_DECISION_KEY", "FlattenOnDevice", "Tier", "TierDecision"]

log = logging.getLogger("zpasses")

aten = torch.ops.aten

Tier = Literal["plain", "distributed", "host"]
_TIERS: tuple[Tier, ...] = ("plain", "distributed", "host")

TIER_DECISION_KEY = "zpasses_flatten"
"""Key in the `meta` of a flat buffer's node that holds its TierDecision."""


@dataclass(frozen=True)
class TierDecision:
    """Which tier makes one flat buffer, and why."""

    tier: Tier
    reason: str


@dataclass(frozen=True)
class FlattenOnDevice(Pass):
    """Flatten tensors on the device instead of the host if the device has room."""

    name: ClassVar[str] = "flatten-on-device"
    level: ClassVar[Level] = Level.JOINT

    tier: Literal["auto", "plain", "distributed", "host"] = "auto"
    """`auto` takes the first of `plain`, `distributed` and `host` for which every rank has room.
    The others force that tier.
    """
    group: str = ""
    """Process group whose ranks run this graph together and choose the same tier; `0` is the group
    of all ranks. Without a group, this rank chooses on its own.
    """
    replicated: bool = False
    """Whether the flattened tensors hold equal values on all ranks of the group. The distributed
    tier assumes that. A graph cannot prove it.
    """
    headroom: float = 0.1
    """Fraction of the device's free memory to leave unused, at least 0 and below 1."""
    align_bytes: int = 16
    """Alignment in bytes of every rank's part in the distributed tier."""
    free_bytes: int | None = None
    """Free bytes of the device to plan for; `none` queries the device."""
    donate_inputs: bool = False
    """Free graph inputs on the device after their last use. The caller of the graph must keep no
    reference to them.
    """
    device: str = ACCELERATOR
    """Device type whose flat buffers are rewritten. `accelerator` means any type except the host,
    and `cpu` treats the host as a device.
    """
    timeout_s: float | None = None
    """Seconds to wait for the votes of the other ranks. `none` takes the option
    `agreement_timeout_s` of the compile.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise OptionError(
                f"{self.name}: headroom={self.headroom}; expected a fraction of the free memory, "
                "at least 0 and below 1."
            )
        if self.align_bytes < 1 or (self.timeout_s is not None and self.timeout_s <= 0):
            raise OptionError(
                f"{self.name}: align_bytes={self.align_bytes}, timeout_s={self.timeout_s}; "
                "expected numbers above 0."
            )
        if self.tier == "distributed" and not (self.group and self.replicated):
            raise OptionError(
                f"{self.name}: tier=distributed gathers parts from other ranks. Set group=... to "
                "name the ranks, and replicated=true to state that they hold the same values."
            )

    @property
    def facts(self) -> Facts:
        return Facts(
            votes=self.tier == "auto" and bool(self.group),
            simulatable=not self.replicated,  # simulated ranks hold different values
            cacheable=self.tier != "auto"
            or self.free_bytes is not None,  # else free memory decides
        )

    def digest(self) -> str:
        """Returns the digest of the pass. With `tier=auto` it also identifies the process, because
        a choice by free memory must not come from another process's cache.
        """
        return super().digest() + (f"-{process_token()}" if self.tier == "auto" else "")

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of flat buffers that are now made on the device."""
        if self.group and self.group not in compat.group_backends():
            known = (
                ", ".join(map(repr, compat.group_backends()))
                or "none; call torch.distributed.init_process_group() first"
            )
            raise PassError(
                f"pass {self}: this process has no process group {self.group!r}. Known: {known}."
            )
        plans = [
            self._plan(graph, each)
            for each in find_flattenings(graph, self.device)
            if tag_of(each.move) is None
        ]
        if not plans:
            return 0
        for plan, choice in zip(plans, self._choose(plans), strict=True):
            flat = plan.flattening.move
            dtype = str(plan.flattening.dtype).removeprefix("torch.")
            what = f"{dtype}[{plan.flattening.numel}] of {len(plan.flattening.names)} tensors"
            note(f"{self.name}: {what} flattened as {choice.tier}: {choice.reason}")
            if choice.tier != "host":
                flat = plan.apply(graph, choice.tier)
            add_tag(flat, plan.tag(f"{choice.tier}: {choice.reason}"))
            flat.meta[TIER_DECISION_KEY] = choice
        return sum(plan.applied for plan in plans)

    def _plan(self, graph: fx.Graph, flattening: Flattening) -> _FlattenPlan:
        order = {node: i for i, node in enumerate(graph.nodes)}
        freed = sum(
            nbytes(value_of(node))
            for node in {
                piece.source: device_source(piece.source, flattening.device)
                for piece in flattening.pieces
                if piece.source
            }.values()
            if node is not None
            and (node.op != "placeholder" or self.donate_inputs)
            and _last_use(node, order) <= order[flattening.move]
        )
        return _FlattenPlan(
            flattening, self.group if self.replicated else "", self.align_bytes, freed
        )

    # --- choosing ---------------------------------------------------------------------------------
    def _choose(self, plans: Sequence[_FlattenPlan]) -> list[TierDecision]:
        if self.tier != "auto":
            return [TierDecision(self.tier, "requested") for _ in plans]
        mine = [
            self._local_vote(plan, sum(each.flattening.nbytes for each in plans[:i]))
            for i, plan in enumerate(plans)
        ]
        if not self.group:
            return [TierDecision(_TIERS[tier], reason) for tier, reason in mine]
        sizes = ", ".join(f"{plan.flattening.dtype}[{plan.flattening.numel}]" for plan in plans)
        # A rank may recompile for a new batch shape when the other ranks do not. Inside a compile,
        # the answer for the same graph is therefore remembered.
        question = f"{self} of {sizes}"
        votes = exchange(
            self.group,
            question,
            mine,
            self.timeout_s,
            remember=question if compat.is_tracing() else None,
        )
        ranks = compat.group_ranks(self.group) if len(votes) > 1 else [torch.distributed.get_rank()]
        choices = []
        for column in zip(*votes, strict=True):
            worst = max(range(len(column)), key=lambda i: (column[i][0], -i))
            tier, reason = column[worst]
            choices.append(
                TierDecision(
                    _TIERS[tier], f"rank {ranks[worst]}: {reason}" if len(votes) > 1 else reason
                )
            )
        return choices

    def _local_vote(self, plan: _FlattenPlan, spent: int) -> tuple[int, str]:
        free = (
            self.free_bytes
            if self.free_bytes is not None
            else device_memory.free_bytes(plan.flattening.device)
        )
        if free is None:
            device = plan.flattening.device
            return 2, f"the free memory of {device} is unknown; set free_bytes=..."
        usable = int(free * (1 - self.headroom)) - spent
        needed = plan.needed_bytes()
        tier = next((i for i, need in enumerate(needed) if need is not None and need <= usable), 2)
        requirements = ", ".join(
            f"{name} needs {_format_size(need)}"
            for name, need in zip(_TIERS, needed, strict=False)
            if need is not None
        )
        available = f"{_format_size(max(usable, 0))} of {_format_size(free)} free are usable"
        return tier, f"{requirements}; {available}"


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


class _FlattenPlan:
    """One flattening, and the graph of each tier on this rank.

    Args:
        flattening: what to rewrite.
        group: the ranks that hold the same values; "" if there are none.
        align_bytes: alignment of each rank's part.
        freed: device bytes that are freed after the pieces have been read.
    """

    def __init__(self, flattening: Flattening, group: str, align_bytes: int, freed: int) -> None:
        self.flattening, self.applied = flattening, 0
        self._group, self._freed = group, freed
        self._size = group_size(group) if group else 1
        grain = max(1, -(-align_bytes // flattening.dtype.itemsize))
        self._part = -(-flattening.numel // (self._size * grain)) * grain
        self._device = flattening.device

    def tag(self, note: str = "") -> Tag:
        return Tag("flat", self.flattening.names, origin=FlattenOnDevice.name, note=note)

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
            Tag("flat", flattening.names, nbytes(value_of(part)), origin=FlattenOnDevice.name),
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


def _format_size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB" if count >= 1 << 20 else f"{count} bytes"
