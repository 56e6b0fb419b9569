"""Memory of collectives: which write over their inputs, and what backends take for scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.memory.layout_copies import copied_bytes
from zpasses.cost.time.fused_kernels import fuses
from zpasses.graph.aliases import buffer_readers, memory_root
from zpasses.graph.dialect import AVERAGE_GRAD, group_size
from zpasses.graph.encoding import Encoding
from zpasses.graph.queries import (
    Collective,
    collective_of,
    named_arguments,
    nbytes,
    numel,
    value_of,
)
from zpasses.graph.row_exchange import ROW_EXCHANGES


def reinplaceable_all_reduces(graph: fx.Graph) -> set[fx.Node]:
    """Returns the all-reduces that may write over their inputs. Generated code runs them in place.

    The graph must have computed the input, and nothing may read it after the all-reduce.
    """
    reductions = [node for node in graph.nodes if node.target in _ALL_REDUCES]
    if not reductions:
        return set()
    position = {node: index for index, node in enumerate(graph.nodes)}
    found = set()
    for node in reductions:
        bases = [memory_root(item) for item in node.all_input_nodes]
        whole = all(
            isinstance(value := value_of(item), Tensor) and value.is_contiguous()
            for item in node.all_input_nodes
        )
        own = (
            whole
            and len(set(bases)) == len(bases)
            and all(base.op == "call_function" for base in bases)
        )
        if own and all(
            position[reader] <= position[node] for base in bases for reader in buffer_readers(base)
        ):
            found.add(node)
    return found


_ALL_REDUCES = (
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_reduce_coalesced.default,
)


GLOO_PACKED_BYTES = 64 << 10
"""Largest message over gloo that is packed with others. The copies of a larger one take longer than
the message that they save."""


def gloo_packs(message_bytes: Sequence[int]) -> list[int]:
    """Returns which tensors of one collective over gloo share a message, by their indices.

    Args:
        message_bytes: for each tensor, the bytes that each other rank receives.
    """
    small = [number for number, size in enumerate(message_bytes) if size <= GLOO_PACKED_BYTES]
    return small if len(small) > 1 else []


def gloo_packing_bytes(message_bytes: int, ranks: int) -> int:
    """Returns the bytes of the buffers that one tensor of a merged collective over gloo adds.

    Args:
        message_bytes: bytes that each other rank receives.
        ranks: size of the group.
    """
    return (1 + ranks) * message_bytes if message_bytes <= GLOO_PACKED_BYTES else 0


def scratch_bytes(node: fx.Node, collective: Collective | None = None) -> int:
    """Returns the bytes that a collective needs besides its inputs and outputs.

    Over gloo, small tensors are packed, and a reduce-scatter receives a part from every other rank,
    one of them in its output. gloo itself packs the tensors of an all-reduce. A copy engine that
    gathers several tensors in one call packs them, and copies them out of a flat tensor. An
    exchange of rows packs what it sends. An average between nodes will exchange records. Gradients
    of convolutions are copied, because their layout is another.

    Args:
        node: a node that communicates.
        collective: what `collective_of` returns for it, if the caller knows it.
    """
    collective = collective or collective_of(node)
    assert collective is not None
    return backend_bytes(node, collective) + (copied_bytes(node) if fuses() else 0)


def engine_packing_bytes(node: fx.Node, collective: Collective) -> int:
    """Returns what a copy engine packs for a gather: several tensors, before and after it."""
    several = len(collective.shapes) > 1
    return collective.nbytes + nbytes(value_of(node)) if several else 0


def backend_bytes(node: fx.Node, collective: Collective) -> int:
    call: Any = node.target
    if collective.op.startswith("sdma_"):
        return engine_packing_bytes(node, collective)
    if call in ROW_EXCHANGES:
        return collective.nbytes
    if call is AVERAGE_GRAD:
        how = named_arguments(node, call)
        if how.get("shard_rows") is None:
            return 0
        ranks = group_size(collective.group)
        count = numel(value_of(node.all_input_nodes[0])) // ranks
        return 2 * ranks * int(Encoding.parse(how["encoding"]).record_bytes(count))
    is_plain = call.namespace == "_c10d_functional" or collective.op.startswith("gloo_")
    if not is_plain or not compat.is_gloo(collective.group):
        return 0
    if "all_reduce" in collective.op:
        return collective.nbytes if len(collective.shapes) > 1 else 0
    ranks = len(compat.group_ranks(collective.group))
    given: Any = node.args[0]
    sizes = [nbytes(value_of(each)) for each in (given if isinstance(given, list) else [given])]
    if "gather" in collective.op:
        return sum(gloo_packing_bytes(sizes[number], ranks) for number in gloo_packs(sizes))
    if "reduce_scatter" not in collective.op:
        return 0
    parts = [size // ranks for size in sizes]
    packing = sum(gloo_packing_bytes(parts[number], ranks) for number in gloo_packs(parts))
    return packing + max(ranks - 2, 0) * sum(parts)
