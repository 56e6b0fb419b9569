"""Writes averages over replicas or nodes whose values are encoded: codes are exchanged, averaged,
and, over replicas, gathered again.

Each replica averages a part of the values in fp32, in the order of replicas, and encodes the
result. All replicas decode the same codes, so their shards stay equal. Between nodes, each rank
keeps the part that it averages: its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.dialect import group_size
from zpasses.graph.encoding import DECODE, DECODE_MEAN, ENCODE, Encoding
from zpasses.graph.queries import Editor, nbytes, value_of
from zpasses.graph.tags import Role, Tag, add_tag

aten = torch.ops.aten


@dataclass(frozen=True)
class EncodedMember:
    """A gradient of a shard that is averaged together with others."""

    source: fx.Node
    """The gradient before the average."""
    params: tuple[str, ...]
    dtype: torch.dtype
    """Dtype of the result."""
    shape: tuple[Any, ...]
    """Shape of the result."""


class EncodedAverage:
    """The launches of one average: an exchange of records, then a gather of records if all ranks
    get the result.

    Args:
        edit: where the exchange starts.
        members: gradients that share launches.
        encoding: how their values are encoded.
        group: process group of the replicas, or of ranks of different nodes.
        origin: name of the pass.
        scatters: whether each rank keeps the part that it averages.
    """

    def __init__(
        self,
        edit: Editor,
        members: Sequence[EncodedMember],
        encoding: str,
        group: str,
        origin: str,
        *,
        scatters: bool,
    ) -> None:
        self._members, self._encoding, self._scatters = members, encoding, scatters
        self._group, self._origin, self._ranks = group, origin, group_size(group)
        packed = self._packed(edit, [each.source for each in members], self._ranks)
        splits = [value_of(packed).numel() // self._ranks] * self._ranks
        self._exchange = edit.call(
            compat.functional.all_to_all_single.default, packed, splits, splits, group
        )
        self._tag_start(self._exchange, packed)
        self._gather: fx.Node | None = None
        self._own: list[fx.Node] = []

    def advance(self, edit: Editor) -> None:
        """Awaits the exchange, and starts to gather the averages if all ranks get them. Further
        calls do nothing.
        """
        if self._gather is not None or self._own:
            return
        if self._scatters:
            self._own = self._own_parts(edit)
            return
        means = []
        for each, records in zip(self._members, self._parts(edit, self._exchange), strict=True):
            count = self._count(each)
            dtype = torch.float32
            mean = edit.call(
                DECODE_MEAN, records, [count], count, self._ranks, dtype, self._encoding
            )
            means.append(self._tagged(mean, "reduce_input", each.params))
        packed = self._packed(edit, means, 1)
        self._gather = edit.call(
            compat.functional.all_gather_into_tensor.default, packed, self._ranks, self._group
        )
        self._tag_start(self._gather, packed)

    def results(self, edit: Editor) -> list[fx.Node]:
        """Awaits the last launch, and returns the averages in the order of the members."""
        self.advance(edit)
        if self._scatters:
            return self._own
        assert self._gather is not None
        made = []
        for each, records in zip(self._members, self._parts(edit, self._gather), strict=True):
            value = value_of(each.source)
            arguments = [value.numel()], self._ranks, each.dtype, self._encoding
            flat = edit.call(DECODE, records, *arguments)
            self._tagged(flat, "reduced", each.params)
            made.append(edit.call(aten.view.default, flat, list(value.shape)))
        return made

    def _own_parts(self, edit: Editor) -> list[fx.Node]:
        made = []
        for each, records in zip(self._members, self._parts(edit, self._exchange), strict=True):
            count = self._count(each)
            how = list(each.shape), count, self._ranks, each.dtype, self._encoding
            made.append(edit.call(DECODE_MEAN, records, *how))
        return made

    def _count(self, member: EncodedMember) -> Any:
        """Values of a member that one rank averages."""
        return -(-value_of(member.source).numel() // self._ranks)

    def _packed(self, edit: Editor, values: list[fx.Node], parts: int) -> fx.Node:
        """Returns the records of values, those of each part together."""
        rows = []
        for each, value in zip(self._members, values, strict=True):
            records = edit.call(ENCODE, value, self._count(each), parts, self._encoding)
            self._tagged(records, "reduce_input", each.params)
            if len(values) == 1:
                return records
            row = edit.call(aten.view.default, records, [parts, -1])
            rows.append(self._tagged(row, "reduce_input", each.params))
        packed = self._tagged(edit.call(aten.cat.default, rows, 1), "reduce_input")
        return self._tagged(edit.call(aten.view.default, packed, [-1]), "reduce_input")

    def _parts(self, edit: Editor, started: fx.Node) -> list[fx.Node]:
        """Awaits a collective, and returns the records of each member, from all ranks."""
        arrived = edit.call(compat.functional.wait_tensor.default, started)
        self._tagged(arrived, "reduced")
        if len(self._members) == 1:
            return [arrived]
        by_rank = edit.call(aten.view.default, arrived, [self._ranks, -1])
        how, made, end = Encoding.parse(self._encoding), [], 0
        for each in self._members:
            start, end = end, end + how.record_bytes(self._count(each))
            part = edit.call(aten.slice.Tensor, by_rank, 1, start, end)
            part = edit.call(aten.clone.default, part, memory_format=torch.contiguous_format)
            self._tagged(part, "reduced", each.params)
            made.append(edit.call(aten.view.default, part, [-1]))
        return made

    def _tag_start(self, started: fx.Node, packed: fx.Node) -> None:
        params = tuple(each.params[0] for each in self._members)
        sent = nbytes(value_of(packed))
        add_tag(
            started,
            Tag("reduce", params, sent, origin=self._origin, encoding=self._encoding),
        )

    def _tagged(self, node: fx.Node, role: Role, params: tuple[str, ...] = ()) -> fx.Node:
        params = params or tuple(each.params[0] for each in self._members)
        add_tag(node, Tag(role, params, origin=self._origin))
        return node
