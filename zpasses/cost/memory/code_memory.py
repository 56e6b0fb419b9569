"""What Inductor's code takes beyond what its graph shows, once that has been counted."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

_ADDED = "zpasses_added_by_code"


def mark_added_by_code(graph: fx.Graph, added: Mapping[str, int]) -> None:
    """Has nodes of a graph need so many bytes more while they run, as Inductor's code does.

    Args:
        added: name of a node -> bytes.
    """
    for node in graph.nodes:
        if node.name in added:
            node.meta[_ADDED] = added[node.name]
        else:
            node.meta.pop(_ADDED, None)


def added_by_code(node: fx.Node) -> int:
    """Returns the bytes that `mark_added_by_code` was given, or 0."""
    return int(node.meta.get(_ADDED, 0))
