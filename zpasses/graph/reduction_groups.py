"""Gradient reductions of a graph, and the process groups that they run on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from zpasses import compat
from zpasses.graph.dialect import AVERAGE_GRAD
from zpasses.graph.queries import calls, collective_of, is_dialect, is_wait
from zpasses.graph.tags import tag_of


def is_regroupable(node: fx.Node) -> bool:
    """Whether a node starts a gradient reduction that could run on the second group of its ranks.

    A group of one rank needs no second one.
    """
    collective, tag = collective_of(node), tag_of(node)
    return (
        collective is not None
        and tag is not None
        and tag.role == "reduce"
        and not is_wait(node)
        and not is_dialect(node)
        and compat.parent_group(collective.group) == collective.group
        and compat.process_group(collective.group).size() > 1
    )


def reducing_groups(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Returns the process groups of these nodes' reductions that could run on a second group."""
    return tuple(dict.fromkeys(_group_of(node) for node in nodes if is_regroupable(node)))


def regroup_reductions(graph: fx.Graph, groups: Mapping[str, str]) -> int:
    """Moves gradient reductions to other process groups of the same ranks.

    Args:
        graph: the graph to edit.
        groups: name of a process group -> name of the group that its reductions move to.

    Returns:
        The number of reductions that moved.
    """
    moved = 0
    for node in graph.nodes:
        if not is_regroupable(node) or (name := _group_of(node)) not in groups:
            continue
        assert isinstance(node.target, compat.OpOverload)
        names = [argument.name for argument in node.target._schema.arguments]
        place = names.index("group_name")
        if place < len(node.args):
            node.update_arg(place, groups[name])
        else:
            node.update_kwarg("group_name", groups[name])
        moved += 1
    return moved


def replicate_groups(graph: fx.Graph) -> list[str]:
    """Returns the process groups over which gradients are averaged between replicas, in order. For
    averages between nodes, it is the group that all these ranks are of.

    All replicas must reduce in one order. So what the ranks of a replica decide about reductions,
    the ranks of these groups have to agree on as well.
    """
    averages = calls(graph, AVERAGE_GRAD)
    return list(dict.fromkeys(compat.parent_group(_group_of(node)) for node in averages))


def _group_of(node: fx.Node) -> str:
    collective = collective_of(node)
    assert collective is not None
    return collective.group
