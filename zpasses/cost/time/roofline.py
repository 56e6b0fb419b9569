"""Estimate the duration of collectives, copies and kernels on a target, in microseconds.

A collective takes a latency that does not depend on its size, plus the time of its bytes on the
slowest link of a ring (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication
Operations in MPICH, 2005). A kernel takes the longer of its memory time and its arithmetic time
(Williams, Waterman, Patterson: Roofline, 2009). These estimates are good enough to compare two
forms of one graph, and do not predict real durations.

A collective can take several routes: "c10d" (RCCL, NCCL or gloo) competes with kernels for compute
units, and copy engines do not. `zpasses.cost.time.route_figures` has the figures of each route.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.time.fused_kernels import FusedKernels, fuses
from zpasses.cost.time.route_figures import MAX_CHUNK_BYTES, RouteFigures
from zpasses.cost.time.target import Target
from zpasses.graph.aliases import is_view
from zpasses.graph.dialect import TO_HOST
from zpasses.graph.host_copies import FROM_HOST, HOST_STARTS, HOST_WAITS
from zpasses.graph.queries import collective_of, nbytes, value_of


def nodes_of(ranks: Iterable[int], target: Target) -> int:
    """Returns on how many nodes ranks are. Ranks fill one node after the other."""
    return len({rank // target.ranks_per_node for rank in ranks})


def latency_us(kind: str, ranks: int, target: Target, nodes: int | None = None) -> float:
    """Returns the part of a collective's duration that does not depend on its bytes.

    Args:
        kind: name of the collective, with or without suffixes: it contains "gather",
            "reduce_scatter", "all_reduce" or "all_to_all".
        ranks: size of the group.
        target: hardware that the graph runs on.
        nodes: on how many nodes the group is (`nodes_of`). None for one that fills its nodes.
    """
    nodes = nodes or math.ceil(ranks / target.ranks_per_node)
    rounds = 2 if _is_all_reduce(kind) else 1
    between = rounds * (nodes - 1)
    within = rounds * (ranks - 1) - between
    return target.launch_us + within * target.hop_us + between * target.network_hop_us


def ring_collective_us(
    kind: str, full_bytes: int, ranks: int, target: Target, nodes: int | None = None
) -> float:
    """Returns the duration of one collective over a ring, or of an all-to-all.

    Args:
        kind: as in `latency_us`.
        full_bytes: bytes of the full tensor: an all-gather's output, the input of others.
        ranks: size of the group.
        target: hardware that the graph runs on.
        nodes: as in `latency_us`.
    """
    if ranks <= 1:
        return 0.0
    nodes = nodes or math.ceil(ranks / target.ranks_per_node)
    local = ranks / nodes
    link = target.link_gb_s * target.link_share(round(local)) if local > 1 else math.inf
    latency = latency_us(kind, ranks, target, nodes)
    if "all_to_all" in kind:
        # No rank passes on what another sends, so a rank has its own network adapter alone.
        parts = max((local - 1) / link, (ranks - local) / target.network_gb_s)
        return latency + parts * full_bytes / ranks / 1e3
    # Rings of a group use the network adapters of all its ranks, each for a part of the bytes.
    bandwidth = min(link, target.network_gb_s * local if nodes > 1 else math.inf)
    passes = 2 if _is_all_reduce(kind) else 1
    return latency + passes * (ranks - 1) / ranks * full_bytes / (bandwidth * 1e3)


def collective_on_route_us(
    figures: RouteFigures, kind: str, full_bytes: int, ranks: int, target: Target
) -> float:
    """Returns the duration of one collective by a route within a node, with nothing running beside
    it.

    Args:
        figures: of the route.
        kind, full_bytes, ranks, target: as in `ring_collective_us`.
    """
    if ranks <= 1:
        return 0.0
    passes = 2 if _is_all_reduce(kind) else 1
    bandwidth = figures.gb_s * target.link_share(ranks)
    moving = passes * (ranks - 1) / ranks * full_bytes / (bandwidth * 1e3)
    copied = figures.copied_full * full_bytes + figures.copied_parts * full_bytes / ranks
    return figures.latency_us + moving + (copy_us(int(copied), target) if copied else 0.0)


def copy_engine_launch_us(
    figures: RouteFigures, kind: str, full_bytes: Sequence[int], ranks: int, target: Target
) -> float:
    """Returns the duration of one copy-engine launch of several tensors.

    The tensors are packed, gathered in chunks, and copied out. A single tensor needs no packing.

    Args:
        figures: of the route.
        full_bytes: bytes of each full tensor.
        kind, ranks, target: as in `ring_collective_us`.
    """
    total = sum(full_bytes)
    pieces = math.ceil(total / ranks / MAX_CHUNK_BYTES) if ranks else 0
    packing = copy_us(total + total // ranks, target) if len(full_bytes) > 1 else 0.0
    return (
        collective_on_route_us(figures, kind, total, ranks, target)
        + max(pieces - 1, 0) * figures.latency_us
        + packing
    )


def _is_all_reduce(kind: str) -> bool:
    return "all_reduce" in kind or "allreduce" in kind


def copy_us(copied_bytes: int, target: Target) -> float:
    """Returns the duration of one kernel that copies so many bytes: it reads and writes each."""
    return target.kernel_us + 2 * copied_bytes / (target.memory_gb_s * 1e3) if copied_bytes else 0.0


def compute_us(node: fx.Node, target: Target, kernels: FusedKernels | None = None) -> float:
    """Returns the duration of one call; 0 for views, graph inputs, communication, and calls that
    are fused into the kernels of their readers.

    The call of a subgraph takes as long as all calls in it.

    Args:
        node: the call.
        target: hardware that the graph runs on.
        kernels: those of the node's graph, to look them up once for many calls.
    """
    call: Any = compat.operator_call(node)[0]
    body = compat.subgraph_of(node)
    if body is not None:
        return sum(durations_us(body.graph.nodes, target))
    if (
        node.op != "call_function"
        or not isinstance(call, compat.OpOverload)
        or is_view(node)
        or collective_of(node) is not None
        or call in HOST_STARTS
        or call in HOST_WAITS
    ):
        return 0.0
    if call.namespace == "_c10d_functional":
        return 0.0
    if call in (FROM_HOST, TO_HOST):
        speed = target.host_in_gb_s if call is FROM_HOST else target.host_out_gb_s
        return target.kernel_us + nbytes(value_of(node)) / (speed * 1e3)
    moved = (kernels or FusedKernels()).moved_bytes(node)
    if moved is None:
        return 0.0
    copied = copy_us(_copied_first(node), target)
    return copied + _kernel_us(node, moved, target)


def _copied_first(node: fx.Node) -> int:
    """Returns the bytes that a product copies into its result before it adds to them: a matrix that
    ATen's `addmm` is given. A vector is added by the kernel of the product.
    """
    if node.target not in (torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default):
        return 0
    added = value_of(node.args[0])  # type: ignore[arg-type]
    return nbytes(added) if added.dim() > 1 else 0


def _kernel_us(node: fx.Node, moved: int, target: Target) -> float:
    return max(
        target.kernel_us, moved / (target.memory_gb_s * 1e3), _flops(node) / (target.tflops * 1e6)
    )


def durations_us(
    nodes: Iterable[fx.Node], target: Target, kernels: FusedKernels | None = None
) -> list[float]:
    """Returns the duration of each call. Calls of equal shapes are computed once.

    Args:
        nodes: of one graph.
        target: hardware that the graph runs on.
        kernels: those of the graph, if the caller has them.
    """
    known: dict[Any, float] = {}
    shapes: dict[fx.Node, object] = {}
    kernels = (kernels or FusedKernels()) if fuses() else None

    def shape_of(node: fx.Node) -> object:
        if node not in shapes:
            shapes[node] = _shape(value_of(node))
        return shapes[node]

    found = []
    for node in nodes:
        if node.op != "call_function":
            found.append(0.0)
            continue
        constants = [each for each in node.args if not isinstance(each, fx.Node)]
        key = (
            node.target,
            repr(constants) if constants else "",
            kernels and kernels.moved_bytes(node),
            *map(shape_of, (node, *node.all_input_nodes)),
        )
        if key not in known:
            known[key] = compute_us(node, target, kernels)
        found.append(known[key])
    return found


def _shape(value: object) -> object:
    """What a value's bytes and operations depend on."""
    if isinstance(value, (list, tuple)):  # the text of a list of tensors takes milliseconds
        return tuple(map(_shape, value))
    return (str(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)


def _flops(node: fx.Node) -> float:
    call, given = compat.operator_call(node)
    count = compat.flop_formula(call)
    if count is None:
        return 0.0
    args = torch.fx.node.map_arg(given, value_of)
    kwargs = torch.fx.node.map_arg(node.kwargs, value_of)
    value = value_of(node)
    sizes = _with_hinted_sizes((args, kwargs))
    return float(count(*sizes[0], **sizes[1], out_val=_with_hinted_sizes(value)))


def _with_hinted_sizes(value: Any) -> Any:
    """Replaces fake tensors of dynamic shape by ones of their hinted shape.

    FLOP formulas need integer sizes.
    """

    def fixed(tensor: Tensor) -> Tensor:
        if all(isinstance(size, int) for size in tensor.shape):
            return tensor
        return torch.empty(
            [compat.planned_size(size) for size in tensor.shape], dtype=tensor.dtype, device="meta"
        )

    return compat.pytree.tree_map_only(Tensor, fixed, value)
