"""Marks on a joint graph that say what the partitioner saves and what backward computes again."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.encoding import records_of
from zpasses.graph.queries import value_of
from zpasses.graph.tags import GATHER_ROLES, retag, tag_of


def mark_as_partitioned(
    joint: fx.Graph,
    graphs: tuple[fx.GraphModule, fx.GraphModule],
) -> None:
    """Have the partitioner save and recompute the same values as in a trial.

    With an activation budget instead, it would count kept parameters as activations, and recompute
    others in exchange.

    Args:
        joint: the graph to mark.
        graphs: forward and backward of the trial.
    """
    mark(joint, marks_of(joint, graphs))


def marks_of(
    joint: fx.Graph,
    graphs: tuple[fx.GraphModule, fx.GraphModule],
    twins: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, bool]:
    """Returns the marks that `mark_as_partitioned` sets: name of a node of the joint graph ->
    whether it is saved, and not computed again.

    Args:
        joint: the graph to mark.
        graphs: forward and backward of the trial.
        twins: name of a node -> name of the node whose choice in the trial it takes instead.
    """
    forward, backward = (
        {node.name: node for node in each.graph.nodes if node.op != "output"} for each in graphs
    )
    found: dict[str, bool] = {}
    for node in reversed(joint.nodes):
        name = twins.get(node.name, node.name)
        if node.op != "call_function" or name not in forward or name not in backward:
            continue
        if backward[name].op == "placeholder":
            if isinstance(value_of(node), Tensor):
                found[node.name] = True
        elif compat.recompute_policy(node) is None or _is_saved_for_later(node, found):
            found[node.name] = False
    return found


def _is_saved_for_later(node: fx.Node, marks: Mapping[str, bool]) -> bool:
    """Whether the partitioner would save a value of a checkpoint because a later one reads it, or
    a value with a mark to compute it again.
    """
    own = compat.recompute_policy(node)
    for user in node.users:
        theirs = compat.recompute_policy(user)
        is_later = own and theirs and "recompute" in theirs[0] and theirs[1] > own[1]
        if is_later or marks.get(user.name) is False:
            return True
    return False


def mark(joint: fx.Graph, marks: Mapping[str, bool]) -> None:
    """Sets the marks that `marks_of` returned."""
    for node in joint.nodes:
        if node.name in marks:
            (compat.mark_saved if marks[node.name] else compat.mark_recompute)(node)


def mark_kept(full: fx.Node) -> None:
    """Have the partitioner save a full parameter, or its codes, instead of gathering it again."""
    held = records_of(full) or full
    compat.mark_saved(held)
    for node in (held, full):
        retag(node, kept=True)
    queue = list(held.all_input_nodes)
    while queue:
        node = queue.pop()
        tag = tag_of(node)
        if tag is not None and tag.role in GATHER_ROLES:
            compat.unmark_recompute(node)
            queue += node.all_input_nodes
