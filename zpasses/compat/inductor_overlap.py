"""Inductor's own schedulers of collectives, as peers to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast
from unittest.mock import patch

from torch import fx

__all__ = ["schedule_blocks_by_inductor", "schedule_by_inductor"]


def schedule_by_inductor(
    gm: fx.GraphModule, node_ms: Callable[[fx.Node], float], more_memory_gib: float
) -> fx.GraphModule:
    """Merges and moves collectives with `schedule_overlap_bucketing`.

    Args:
        gm: the graph, which is rewritten in place.
        node_ms: duration of a node by itself, in milliseconds.
        more_memory_gib: how far the peak may rise, in GiB. Inductor allows at least 5 % of it.

    Returns:
        The rewritten graph.
    """
    from torch._inductor.fx_passes import overlap_scheduling

    def estimate(node: fx.Node, override_bytes: int | None = None) -> float:
        return node_ms(node)

    # Its own roofline asks triton for the device, which a machine without one cannot answer.
    with patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", node_ms):
        scheduled = overlap_scheduling.schedule_overlap_bucketing(
            gm,
            collective_bucketing=True,
            custom_runtime_estimation=estimate,
            compute_estimator="analytical",
            max_memory_increase_gb=more_memory_gib,
            max_in_flight_gb=max(5.0, more_memory_gib),
        )
    return cast(fx.GraphModule, scheduled)


def schedule_blocks_by_inductor(
    gm: fx.GraphModule, blocks: Sequence[list[str] | str]
) -> fx.GraphModule:
    """Merges the collectives of each block of modules and prefetches one block ahead, with
    `manual_overlap_bucketing`, as torchtitan does.

    Args:
        gm: the graph, which is rewritten in place.
        blocks: names of modules; those in one list share their collectives.

    Returns:
        The rewritten graph.
    """
    from torch._inductor.fx_passes import overlap_manual_scheduling, overlap_scheduling

    with patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", lambda node: 0.0):
        return cast(
            fx.GraphModule,
            overlap_manual_scheduling.manual_overlap_bucketing(
                gm, list(blocks), insert_overlap_deps=False
            ),
        )
