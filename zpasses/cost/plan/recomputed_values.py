"""Which saved values backward is best to compute again.

A value that is computed again frees its memory from its last use in forward to its first use in
backward, as one that rests on the host does (`zpasses.cost.plan.offloaded_values`), and costs the
kernels from the nearest values that backward has. Those that cost least per byte come first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from zpasses.cost.plan.leaving_values import Recompute
from zpasses.cost.plan.offloaded_values import SavedValue
from zpasses.cost.time.roofline import compute_us
from zpasses.cost.time.step_time import transfer_of
from zpasses.cost.time.target import current_target
from zpasses.graph.aliases import written_arguments
from zpasses.graph.tags import GATHER_ROLES, tag_of
from zpasses.graph.walks import reachable


def kernels_again(
    forward: fx.Graph, backward: fx.Graph, names: Collection[str]
) -> dict[str, list[fx.Node]]:
    """Returns for each of the saved values what backward would run to have it, in any order: nodes
    of forward. Values are left out if that would communicate, draw random numbers or write.

    Args:
        forward, backward: the two graphs of a partition.
        names: of the values that backward shall no longer find. A chain runs through them.
    """
    had = {node.name for node in backward.nodes}.difference(names)
    found = {}
    for node in (each for each in forward.nodes if each.name in names):
        chain = _chain(node, had)
        if all(map(_repeats, chain)):
            found[node.name] = chain
    return found


def cheapest_first(
    values: Sequence[SavedValue], kernels: Mapping[str, Sequence[fx.Node]]
) -> list[SavedValue]:
    """Returns the values that can be computed again, those first that take the least time per byte.

    Args:
        values: the candidates.
        kernels: as `kernels_again` returns them.
    """
    target = current_target()
    cost_us = {
        name: sum(compute_us(node, target) for node in chain) for name, chain in kernels.items()
    }
    return sorted(
        (each for each in values if each.name in cost_us),
        key=lambda each: (cost_us[each.name] / each.nbytes, -each.held_us, each.name),
    )


def recomputes(
    forward: fx.Graph, backward: fx.Graph, names: Collection[str]
) -> dict[str, Recompute]:
    """Returns what each of the saved values takes to be computed again from what backward finds.

    Args:
        forward, backward: the two graphs of a partition.
        names: of the candidates. What `kernels_again` leaves out of them is left out here.
    """
    target, had = current_target(), {node.name for node in backward.nodes}
    found = {}
    for node in (each for each in forward.nodes if each.name in names):
        chain = _chain(node, had)
        if all(map(_repeats, chain)):
            read = {each.name for one in chain for each in one.all_input_nodes}
            kernels = {each.name: compute_us(each, target) for each in chain}
            found[node.name] = Recompute(kernels, frozenset(read & had))
    return found


def _chain(node: fx.Node, had: Collection[str]) -> list[fx.Node]:
    """Returns a node of forward and what it is computed from, without what backward has."""
    return list(
        reachable(
            [node],
            lambda at: [
                each
                for each in at.all_input_nodes
                if each.op == "call_function" and each.name not in had and not _is_param(each)
            ],
        )
    )


def _is_param(node: fx.Node) -> bool:
    """Whether a node is a full parameter, or on the way to one, which backward gathers again."""
    tag = tag_of(node)
    return tag is not None and tag.role in GATHER_ROLES


def _repeats(node: fx.Node) -> bool:
    """Whether a second run of a node has the same result and no other effect."""
    tags = getattr(node.target, "tags", ())
    return (
        transfer_of(node) is None
        and torch.Tag.nondeterministic_seeded not in tags
        and not written_arguments(node.target)
    )
