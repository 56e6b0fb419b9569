"""Replace several collectives of a graph by one, as a plan of the pass `schedule` says."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.memory.collective_moves import SchedulableCollective
from zpasses.cost.plan.bucket_keys import Mode, row_shape
from zpasses.cost.time.step_time import transfer_of
from zpasses.graph.dialect import group_size
from zpasses.graph.queries import Editor, collective_of, is_wait, nbytes, value_of
from zpasses.graph.tags import Role, Tag, add_tag, retag, tag_of

aten = torch.ops.aten


@dataclass(frozen=True)
class LaunchNodes:
    """The nodes of one collective, which move together, in two groups."""

    start: tuple[fx.Node, ...]
    """What prepares the inputs from graph inputs, the collective and its `getitem` nodes."""
    wait: tuple[fx.Node, ...]
    """The waits and what completes the results."""

    @property
    def collective(self) -> fx.Node:
        return next(node for node in self.start if transfer_of(node) is not None)

    @classmethod
    def of(cls, item: SchedulableCollective) -> LaunchNodes:
        """Returns the nodes of a collective of one tensor."""
        return cls((*item.inputs, item.started), (item.wait, *item.results))


def merge_collectives(
    graph: fx.Graph,
    items: Sequence[SchedulableCollective],
    mode: Mode,
    number: int,
    origin: str,
) -> LaunchNodes:
    """Replaces collectives of equal bucket keys by one.

    A launch of gathers is inserted where the first member started, and one of reductions where the
    last member did. The waits come after the first wait and after the launch.

    Args:
        graph: the graph to edit.
        items: the members, in graph order.
        mode: "coalesced" or "flat".
        number: of the bucket, for tags.
        origin: name of the pass, for tags.
    """
    writer = _BucketWriter(graph, items, number, origin)
    _WRITERS[items[0].is_gather, mode](writer)
    writer.erase_members()
    made = writer.made
    split = next((at for at, node in enumerate(made) if is_wait(node)), len(made))
    waits = made[split:] or [item.wait for item in items]
    inputs = [node for item in items for node in item.inputs]
    results = [node for item in items for node in item.results]
    return LaunchNodes((*inputs, *made[:split]), (*waits, *results))


class _RecordingEditor(Editor):
    """An editor that lists the nodes that it makes."""

    def __init__(
        self, made: list[fx.Node], graph: fx.Graph, before: fx.Node, like: fx.Node | None = None
    ) -> None:
        super().__init__(graph, before, like)
        self._made = made

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = super().call(target, *args, **kwargs)
        self._made.append(node)
        return node


class _BucketWriter:
    """Rewrites the graph for one bucket."""

    def __init__(
        self, graph: fx.Graph, items: Sequence[SchedulableCollective], number: int, origin: str
    ) -> None:
        self.items, self._number, self._origin = items, number, origin
        collective = collective_of(items[0].started)
        assert collective is not None
        self._group, self._op, self._reduce_op = (
            collective.group,
            collective.op,
            collective.reduce_op,
        )
        self.ranks = group_size(collective.group)
        self.params = tuple(item.tag.params[0] for item in items)  # one per member, in order
        self.nbytes = sum(item.tag.nbytes for item in items)
        self._graph = graph
        self.made: list[fx.Node] = []

    # A bucket of gathers starts where its first member started.
    def gather_coalesced(self) -> None:
        edit = self._gather_at()
        started = edit.call(
            compat.functional.all_gather_into_tensor_coalesced.default,
            [item.source for item in self.items],
            self.ranks,
            self._group,
        )
        self._tag(started, "gather", self.nbytes)
        self._distribute_outputs(edit, started)

    def gather_flat(self) -> None:
        edit = self._gather_at()
        flat = edit.call(
            aten.cat.default,
            [edit.call(aten.reshape.default, item.source, [-1]) for item in self.items],
        )
        self._tag(flat, "gather_input")
        started = edit.call(
            compat.functional.all_gather_into_tensor.default, flat, self.ranks, self._group
        )
        self._tag(started, "gather", self.nbytes)
        gathered = edit.call(compat.functional.wait_tensor.default, started)
        self._tag(gathered, "gathered")
        by_rank = edit.call(aten.view.default, gathered, [self.ranks, -1])
        offset = 0
        for item in self.items:
            shape, count = value_of(item.started).shape, value_of(item.source).numel()
            part = edit.call(aten.slice.Tensor, by_rank, 1, offset, offset + count)
            if self.ranks > 1:
                part = edit.call(aten.clone.default, part, memory_format=torch.contiguous_format)
            full = edit.call(aten.view.default, part, list(shape))
            self._replace_result(full, item)
            offset += count

    def _gather_at(self) -> Editor:
        first = self.items[0].started
        for item in self.items[1:]:
            for node in item.inputs:
                first.prepend(node)
        return _RecordingEditor(self.made, self._graph, before=first)

    # A bucket of reductions starts where its last member started.
    def reduce_coalesced(self) -> None:
        edit = self._reduce_at()
        sources = [item.source for item in self.items]
        if self._op == "all_reduce":
            sources = [self._contiguous(edit, item) for item in self.items]
            started = edit.call(
                compat.functional.all_reduce_coalesced.default,
                sources,
                self._reduce_op,
                self._group,
            )
        else:
            started = edit.call(
                compat.functional.reduce_scatter_tensor_coalesced.default,
                sources,
                self._reduce_op,
                self.ranks,
                self._group,
            )
        self._tag(started, "reduce", self.nbytes)
        self._distribute_outputs(edit, started)

    def reduce_flat(self) -> None:
        edit = self._reduce_at()
        {
            "all_reduce": self._reduce_flat_all_reduce,
            "all_to_all_single": self._reduce_flat_records,
            "reduce_scatter_tensor": self._reduce_flat_reduce_scatter,
        }[self._op](edit)

    def _reduce_flat_all_reduce(self, edit: Editor) -> None:
        sources = [item.source for item in self.items]
        stacked = row_shape(self.items[0]) is not None
        flat = edit.call(
            aten.cat.default,
            sources if stacked else [self._reshaped(edit, item, [-1]) for item in self.items],
        )
        self._tag(flat, "reduce_input")
        started = edit.call(
            compat.functional.all_reduce.default, flat, self._reduce_op, self._group
        )
        reduced = self._await(edit, started)
        offset = 0
        for item in self.items:
            value = value_of(item.source)
            count = value.shape[0] if stacked else value.numel()
            # A graph output must not keep the whole bucket alive, so it is copied out. Other
            # results are sliced further by the nodes that follow.
            own = any(user.op == "output" for user in item.wait.users)
            part = edit.call(
                aten.slice_copy.Tensor if own else aten.slice.Tensor,
                reduced,
                0,
                offset,
                offset + count,
            )
            if not stacked:
                part = edit.call(aten.view.default, part, list(value.shape))
            self._replace_result(part, item)
            offset += count

    def _reduce_flat_reduce_scatter(self, edit: Editor) -> None:
        """Pack the bucket so that each rank's block consists of its block of every gradient. The
        reduced block then splits into views.
        """
        flat = self._packed_by_rank(edit)
        started = edit.call(
            compat.functional.reduce_scatter_tensor.default,
            flat,
            self._reduce_op,
            self.ranks,
            self._group,
        )
        reduced = self._await(edit, started)
        offset = 0
        for item in self.items:
            value = value_of(item.wait)
            part = edit.call(aten.slice.Tensor, reduced, 0, offset, offset + value.numel())
            self._replace_result(edit.call(aten.view.default, part, list(value.shape)), item)
            offset += value.numel()

    def _reduce_flat_records(self, edit: Editor) -> None:
        """As `_reduce_flat_reduce_scatter`, for records that ranks exchange: what arrives is one
        block of each rank.
        """
        flat = self._packed_by_rank(edit)
        splits = [value_of(flat).numel() // self.ranks] * self.ranks
        started = edit.call(
            compat.functional.all_to_all_single.default, flat, splits, splits, self._group
        )
        by_rank = edit.call(aten.view.default, self._await(edit, started), [self.ranks, -1])
        offset = 0
        for item in self.items:
            size = value_of(item.wait).numel() // self.ranks
            part = edit.call(aten.slice.Tensor, by_rank, 1, offset, offset + size)
            part = edit.call(aten.clone.default, part, memory_format=torch.contiguous_format)
            add_tag(part, Tag("reduced", item.tag.params, 0, self._number, self._origin))
            self._replace_result(edit.call(aten.view.default, part, [-1]), item)
            offset += size

    def _packed_by_rank(self, edit: Editor) -> fx.Node:
        parts = [self._reshaped(edit, item, [self.ranks, -1]) for item in self.items]
        packed = edit.call(aten.cat.default, parts, 1)
        flat = edit.call(aten.view.default, packed, [-1])
        for node in (packed, flat):
            self._tag(node, "reduce_input")
        return flat

    def _contiguous(self, edit: Editor, item: SchedulableCollective) -> fx.Node:
        """The member's input with the strides of its result: the fake all_reduce returns contiguous
        tensors, as the real ones do, but the fake all_reduce_coalesced keeps strides.
        """
        if value_of(item.source).is_contiguous():
            return item.source
        dense = torch.contiguous_format
        node = edit.call(aten.clone.default, item.source, memory_format=dense)
        add_tag(node, Tag("reduce_input", item.tag.params, 0, self._number, self._origin))
        return node

    def _reshaped(self, edit: Editor, item: SchedulableCollective, shape: list[int]) -> fx.Node:
        node = edit.call(aten.reshape.default, item.source, shape)
        add_tag(node, Tag("reduce_input", item.tag.params, 0, self._number, self._origin))
        return node

    def _reduce_at(self) -> Editor:
        """Move the waits and results of all members to a place after the last member starts."""
        moving = {node: None for item in self.items for node in (item.wait, *item.results)}
        after = self.items[-1].started.next
        while after in moving:
            after = after.next
        for node in moving:
            after.prepend(node)
        return _RecordingEditor(
            self.made, self._graph, before=self.items[0].wait, like=self.items[-1].started
        )

    # Gathers and reductions.
    def _await(self, edit: Editor, started: fx.Node) -> fx.Node:
        self._tag(started, "reduce", self.nbytes)
        done = edit.call(compat.functional.wait_tensor.default, started)
        self._tag(done, "reduced")
        return done

    def _distribute_outputs(self, edit: Editor, started: fx.Node) -> None:
        """Let each member's wait read its output of the coalesced collective. All waits move to the
        first one, because nothing is freed before the last wait.
        """
        after = self.items[0].wait
        for at, item in enumerate(self.items):
            part = edit.call(operator.getitem, started, at)
            role: Role = "gathered" if item.is_gather else "reduced"
            add_tag(part, Tag(role, item.tag.params, 0, self._number, self._origin))
            item.wait.replace_input_with(item.started, part)
            if tag_of(item.wait) is not None:
                retag(item.wait, bucket=self._number)
            if at:
                after.append(item.wait)
                after = item.wait

    def _replace_result(self, node: fx.Node, item: SchedulableCollective) -> None:
        """Replace the result of `item` by `node`, which holds the same value."""
        tag = tag_of(item.wait)
        if tag is not None:
            add_tag(node, replace(tag, bucket=self._number, origin=self._origin))
        item.wait.replace_all_uses_with(node)

    def erase_members(self) -> None:
        """Erase the members' own collectives. Runs last, because the first member's nodes mark
        where new nodes are inserted.
        """
        for item in self.items:
            if not item.wait.users:
                self._graph.erase_node(item.wait)
            self._graph.erase_node(item.started)

    def _tag(self, node: fx.Node, role: Role, sent_bytes: int = 0) -> None:
        whole = nbytes(value_of(node)) if role == "gather_input" else 0
        tag = Tag(role, self.params, sent_bytes, self._number, self._origin, block_bytes=whole)
        encoding = self.items[0].tag.encoding if role in ("gather", "reduce") else ""
        add_tag(node, replace(tag, encoding=encoding))


_WRITERS: dict[tuple[bool, str], Any] = {
    (True, "coalesced"): _BucketWriter.gather_coalesced,
    (True, "flat"): _BucketWriter.gather_flat,
    (False, "coalesced"): _BucketWriter.reduce_coalesced,
    (False, "flat"): _BucketWriter.reduce_flat,
}
