"""Flatten on the device what a graph flattens on the host.

Before                                          plain                                   distributed (rank 1 of 2)
  a = _to_copy(p, device=cpu)                     b = _to_copy(q, device=cuda)            b = _to_copy(slice(q, 2, 6), device=cuda)
  flat = cat([view(a, [-1]), view(q, [-1])])      flat = cat([view(p, [-1]), b])          part = cat([b, full([2], 0)])
  out = _to_copy(flat, device=cuda)               out = flat                              started = all_gather_into_tensor(part, 2, group)
                                                                                          out =
                                                                                          slice(wait_tensor(started),
                                                                                          0, 0, 10)

Three tiers, by the memory that is free on the device. plain: everything is laid end to end there.
distributed: each rank does so with its part, and one all-gather assembles the rest. host: the graph
stays as it is. What a tier needs on top of what lies on the device:

  plain         the flat buffer, and a copy of every piece that comes from the host or changes its dtype
  distributed   the larger of: this rank's part twice (its pieces, and the part itself); the part and the gathered buffer, less the
                device's own pieces where nothing reads them later
  host          nothing that any rank could save

Contract: values, shape and dtype of the result stay as they were, and so does the place of every
tensor in it. Ranks of a group take the worst tier that one of them needs, by vote. Graphs of aten
ops are rewritten; nothing is added that a gradient could flow through."""

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
    is_shape_op,
)
from zpasses.graph.nodes import Editor, erase_dead, nbytes, replace_node, value_of
from zpasses.graph.ops import group_size
from zpasses.graph.tags import Tag, add_tag, tag_of
from zpasses.pipeline.pipeline import THIS_PROCESS, Level, Pass
from zpasses.pipeline.recorder import note
from zpasses.ranks.vote import exchange

__all__ = ["CHOICE", "Choice", "FlattenOnDevice", "Tier"]

log = logging.getLogger("zpasses")

aten = torch.ops.aten

Tier = Literal["plain", "distributed", "host"]
_TIERS: tuple[Tier, ...] = ("plain", "distributed", "host")

CHOICE = "zpasses_flatten"
"""Key of a flat buffer's node under which its Choice lies."""


@dataclass(frozen=True)
class Choice:
    """How one flat buffer is made, and why."""

    tier: Tier
    reason: str


@dataclass(frozen=True)
class FlattenOnDevice(Pass):
    """Flatten tensors on the device instead of the host, if the device has room."""

    name: ClassVar[str] = "flatten-on-device"
    level: ClassVar[Level] = Level.JOINT

    tier: Literal["auto", "plain", "distributed", "host"] = "auto"
    """`auto` takes the first of `plain`, `distributed` and `host` for which every rank has room;
    the others force that tier."""
    group: str = ""
    """Process group whose ranks run this graph together and choose the same tier; `0` is the group
    of all ranks. Without a group, this rank chooses by itself."""
    replicated: bool = False
    """The flattened tensors hold equal values on all ranks of the group. The distributed tier
    assumes that, and a graph cannot prove it."""
    headroom: float = 0.1
    """Share of the device's free memory to leave unused, from 0 to below 1."""
    align_bytes: int = 16
    """In the distributed tier, every rank's part starts at a multiple of this many bytes."""
    free_bytes: int | None = None
    """Plan for this much free memory on the device; `none` asks the device."""
    donate_inputs: bool = False
    """Free graph inputs on the device after their last use; the caller of the graph must keep no
    reference to them."""
    device: str = ACCELERATOR
    """Type of the device whose flat buffers are rewritten; `accelerator` means any except the host,
    and `cpu` lets the host stand in for one."""
    timeout_s: float = 300.0
    """Seconds to wait for the votes of the other ranks."""

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise OptionError(
                f"{self.name}: headroom={self.headroom}; expected a share of the free memory, at "
                "least 0 and below 1."
            )
        if self.align_bytes < 1 or self.timeout_s <= 0:
            raise OptionError(
                f"{self.name}: align_bytes={self.align_bytes}, timeout_s={self.timeout_s}; "
                "expected numbers above 0."
            )
        if self.tier == "distributed" and not (self.group and self.replicated):
            raise OptionError(
                f"{self.name}: tier=distributed takes each rank's part from another rank; name the "
                "ranks (group=...) and say that all of "
                "them hold the same values (replicated=true)."
            )

    def votes(self) -> bool:
        return self.tier == "auto" and bool(self.group)

    def digest(self) -> str:
        """As every pass's; but a choice by free memory must not be taken from another process's
        cache."""
        return super().digest() + (f"-{THIS_PROCESS}" if self.tier == "auto" else "")

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of flat buffers that the device now makes."""
        if self.group and self.group not in compat.group_backends():
            known = (
                ", ".join(map(repr, compat.group_backends()))
                or "none; call torch.distributed.init_process_group() first"
            )
            raise PassError(
                f"pass {self}: group {self.group!r} is no process group of this process. Known: "
                f"{known}."
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
            what = f"{str(plan.flattening.dtype).removeprefix('torch.')}[{plan.flattening.numel}] of {len(plan.flattening.names)} tensors"
            note(f"{self.name}: {what} flattened as {choice.tier}: {choice.reason}")
            if choice.tier != "host":
                flat = plan.apply(graph, choice.tier)
            add_tag(flat, plan.tag(f"{choice.tier}: {choice.reason}"))
            flat.meta[CHOICE] = choice
        return sum(plan.applied for plan in plans)

    def _plan(self, graph: fx.Graph, flattening: Flattening) -> _Plan:
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
        return _Plan(flattening, self.group if self.replicated else "", self.align_bytes, freed)

    # --- choosing ---------------------------------------------------------------------------------
    def _choose(self, plans: Sequence[_Plan]) -> list[Choice]:
        if self.tier != "auto":
            return [Choice(self.tier, "asked for") for _ in plans]
        mine = [
            self._vote(plan, sum(each.flattening.nbytes for each in plans[:i]))
            for i, plan in enumerate(plans)
        ]
        if not self.group:
            return [Choice(_TIERS[tier], reason) for tier, reason in mine]
        sizes = ", ".join(f"{plan.flattening.dtype}[{plan.flattening.numel}]" for plan in plans)
        # A rank may compile alone, for a new batch shape: inside a compile, a graph that was asked
        # about keeps its answer.
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
                Choice(_TIERS[tier], f"rank {ranks[worst]}: {reason}" if len(votes) > 1 else reason)
            )
        return choices

    def _vote(self, plan: _Plan, spent: int) -> tuple[int, str]:
        free = (
            self.free_bytes
            if self.free_bytes is not None
            else device_memory.free_bytes(plan.flattening.device)
        )
        if free is None:
            return (
                2,
                f"how much memory {plan.flattening.device} has free is not known (free_bytes=... "
                "says so)",
            )
        usable = int(free * (1 - self.headroom)) - spent
        needs = plan.needs()
        tier = next((i for i, need in enumerate(needs) if need is not None and need <= usable), 2)
        told = ", ".join(
            f"{name} needs {_size(need)}"
            for name, need in zip(_TIERS, needs, strict=False)
            if need is not None
        )
        return tier, f"{told}, of {_size(free)} free {_size(max(usable, 0))} can be used"


@dataclass(frozen=True)
class _Run:
    """Elements first..end of a piece."""

    piece: Piece
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def whole(self) -> bool:
        return len(self) == self.piece.numel


class _Plan:
    """One flattening, and what its tiers are on this rank.

    Args:
        flattening: what to rewrite.
        group: ranks that hold the same values; "" if there are none.
        align_bytes: alignment of each rank's part.
        freed: bytes that leave the device once the pieces are read.
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
    def needs(self) -> tuple[int, int | None]:
        """Device bytes that plain and distributed need on top of what is there; None where there is
        no distributed."""
        flat = self.flattening.nbytes
        plain = self._gathering(self._all(), flat)
        if self._size == 1 or not flat:
            return plain, None
        part = self._part * self.flattening.dtype.itemsize
        return plain, max(
            self._gathering(self._mine(), part), part + self._size * part - self._freed
        )

    def _gathering(self, runs: Sequence[_Run], result: int) -> int:
        """All pieces are made, one after the other, and then the result."""
        held, making = 0, 0
        for run in runs:
            sizes = self._made(run)
            held += sum(sizes[-1:])
            making = max(making, *sizes[:-1], 0)
        return held + max(result, making)

    def _made(self, run: _Run) -> list[int]:
        """Bytes of each tensor that is made of a run on the device, in order."""
        piece = run.piece
        if piece.source is None:
            return [len(run) * self.flattening.dtype.itemsize]
        value, (moved, contiguous) = value_of(piece.source), self._lies(piece)
        count = len(run) if self._can_slice_on_host(piece) else piece.numel
        made = [count * value.element_size()] if moved else []
        if not contiguous and not (run.whole and piece.casts):
            made.append(piece.numel * value.element_size())
        return made + [len(run) * dtype.itemsize for dtype in piece.casts]

    def _lies(self, piece: Piece) -> tuple[bool, bool]:
        """Whether a piece has to be moved to the device, and whether it is contiguous there."""
        assert piece.source is not None
        return device_source(piece.source, self._device) is None, bool(
            value_of(piece.source).is_contiguous()
        )

    # --- forms ------------------------------------------------------------------------------------
    def apply(self, graph: fx.Graph, tier: Tier) -> fx.Node:
        """Rewrite to this tier; returns the node of the flat buffer."""
        move = self.flattening.move
        host = move.all_input_nodes[0]
        edit = Editor(graph, before=move)
        flat = (
            self._gathered(edit)
            if tier == "distributed" and self._size > 1
            else self._concatenated(edit, self._all())
        )
        shape = value_of(move).shape
        if value_of(flat).shape != shape:
            flat = edit.call(aten.view.default, flat, list(shape))
        replace_node(move, flat)
        erase_dead(graph, [host])
        self.applied = 1
        return flat

    def _gathered(self, edit: Editor) -> fx.Node:
        flattening, size = self.flattening, self._size
        runs = self._mine()
        missing = self._part - sum(map(len, runs))
        part = self._concatenated(
            edit, [*runs, *([_Run(Piece(missing), 0, missing)] if missing else [])]
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

    def _all(self) -> list[_Run]:
        return [_Run(piece, 0, piece.numel) for piece in self.flattening.pieces if piece.numel]

    def _mine(self) -> list[_Run]:
        """What of each piece lies in this rank's part."""
        start = compat.process_group(self._group).rank() * self._part
        runs, at = [], 0
        for piece in self.flattening.pieces:
            first, end = max(start - at, 0), min(start + self._part - at, piece.numel)
            if first < end:
                runs.append(_Run(piece, first, end))
            at += piece.numel
        return runs

    def _concatenated(self, edit: Editor, runs: Sequence[_Run]) -> fx.Node:
        if not runs:
            return self._full(edit, 0, 0)
        return edit.call(aten.cat.default, [self._make(edit, run) for run in runs])

    def _make(self, edit: Editor, run: _Run) -> fx.Node:
        """A run on the device, [length], in the dtype of the flat buffer."""
        piece = run.piece
        if piece.source is None:
            return self._full(edit, len(run), piece.fill)
        if not run.whole and self._can_slice_on_host(piece):
            return self._cast(
                edit, self._move(edit, _cut(edit, _row(edit, piece.source), run)), piece
            )
        lifted = self._lift(edit, piece.source)
        return (
            _row(edit, self._cast(edit, lifted, piece))
            if run.whole
            else self._cast(edit, _cut(edit, _row(edit, lifted), run), piece)
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

    def _lift(self, edit: Editor, source: fx.Node) -> fx.Node:
        """A host value on the device: made of what it was copied from, or moved there."""
        if device_source(source, self._device) is None:
            return self._move(edit, source)
        if value_of(source).device == self._device:
            return source
        inner = self._lift(edit, source.all_input_nodes[0])
        if not is_shape_op(source):
            return inner
        if source.target is aten.view.default:
            inner = _contiguous(edit, inner)
        return edit.call(source.target, inner, *source.args[1:], **source.kwargs)  # type: ignore[arg-type]

    def _move(self, edit: Editor, source: fx.Node) -> fx.Node:
        return edit.call(aten._to_copy.default, source, device=self._device)

    def _can_slice_on_host(self, piece: Piece) -> bool:
        return piece.source is not None and self._lies(piece) == (True, True)


def _cut(edit: Editor, row: fx.Node, run: _Run) -> fx.Node:
    return edit.call(aten.slice.Tensor, row, 0, run.first, run.end)


def _contiguous(edit: Editor, node: fx.Node) -> fx.Node:
    if value_of(node).is_contiguous():
        return node
    return edit.call(aten.clone.default, node, memory_format=torch.contiguous_format)


def _row(edit: Editor, node: fx.Node) -> fx.Node:
    """All elements in row-major order, [numel]."""
    node = _contiguous(edit, node)
    return node if value_of(node).dim() == 1 else edit.call(aten.view.default, node, [-1])


def _last_use(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """Place of the last node that reads a value or a view of it."""
    last = order[node]
    for user in node.users:
        last = max(last, _last_use(user, order) if is_shape_op(user) else order[user])
    return last


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB" if count >= 1 << 20 else f"{count} bytes"
