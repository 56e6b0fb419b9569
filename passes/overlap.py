"""Start all-gathers early and await reductions late, so that they overlap with compute.

Before                                      After
  a = wait_tensor(all_gather(shard_a))        started_a = all_gather(shard_a)
  y = mm(x, a)                                a = wait_tensor(started_a)
  b = wait_tensor(all_gather(shard_b))        started_b = all_gather(shard_b)
  z = mm(y, b)                                y = mm(x, a)
  ...                                         b = wait_tensor(started_b)
  da = wait_tensor(reduce_scatter(ga))        z = mm(y, b)
  gb = mm(..)                                 ...
  db = wait_tensor(reduce_scatter(gb))        started_a = reduce_scatter(ga)
                                              gb = mm(..)
                                              started_b = reduce_scatter(gb)
                                              da = wait_tensor(started_a)
                                              db = wait_tensor(started_b)

Contract: moves nodes and creates none, so results stay the same. A gather starts when the previous
gather has arrived, so at most one gather overlaps with compute. A reduction is awaited after the
next reduction has started. That costs the memory of one gather and one reduction. Which nodes move
depends only on the collectives, not on shapes or memory, so all ranks move the same nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zpasses.cost.memory.collective_moves import Launch, gather_launches, reduction_launches
from zpasses.graph.patterns import tag_foreign_gathers
from zpasses.pipeline.passes import Level, Pass


@dataclass(frozen=True)
class Overlap(Pass):
    """Overlap collectives with compute."""

    name: ClassVar[str] = "overlap"
    level: ClassVar[Level] = Level.PARTITIONED

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of collectives moved."""
        tag_foreign_gathers(graph, origin=self.name)
        return overlap_launches(graph)


def overlap_launches(graph: fx.Graph, movable: Collection[fx.Node] | None = None) -> int:
    """Moves starts and waits as `Overlap` does, and returns the number of collectives moved.

    Args:
        graph: the graph to edit.
        movable: the nodes that start the collectives that may move; None lets all of them move.
    """

    def ours(launches: list[Launch]) -> list[Launch]:
        return [each for each in launches if movable is None or each.started in movable]

    nodes_before = tuple(graph.nodes)
    early = _prefetch(ours(gather_launches(graph)), nodes_before)
    moved = {node for nodes, _ in early for node in nodes}
    plans = [*early, *_delay_waits(ours(reduction_launches(graph)), nodes_before, moved)]
    for nodes, anchor in plans:
        for node in nodes:
            anchor.prepend(node)
    return len(plans)


_Plan = tuple[tuple[fx.Node, ...], fx.Node]
"""Nodes to move, in order, and the node to insert them before."""


def _prefetch(launches: list[Launch], nodes: tuple[fx.Node, ...]) -> list[_Plan]:
    position = {node: index for index, node in enumerate(nodes)}
    plans: list[_Plan] = []
    arrived = next((index for index, node in enumerate(nodes) if node.op != "placeholder"), 0)
    for launch in launches:
        at = position[launch.started]
        while nodes[arrived] in launch.before:
            arrived += 1
        if any(
            node not in launch.before and node.op == "call_function" for node in nodes[arrived:at]
        ):
            plans.append(((*launch.before, launch.started, *launch.parts), nodes[arrived]))
        arrived = min(position[wait] for wait in launch.waits) + 1
        # A coalesced collective has several waits, and frees nothing before the last.
        while nodes[arrived] in launch.waits:
            arrived += 1
    return plans


def _delay_waits(
    launches: list[Launch], nodes: tuple[fx.Node, ...], moved: set[fx.Node]
) -> list[_Plan]:
    """Plans that move each wait after the start of the next reduction.

    Args:
        moved: nodes that move elsewhere, so they cannot serve as insertion points.
    """
    position = {node: index for index, node in enumerate(nodes)}
    plans: list[_Plan] = []
    for launch, following in itertools.zip_longest(launches, launches[1:]):
        own = {*launch.waits, *launch.after}
        at = max(position[node] for node in own) + 1
        end = position[following.started] + 1 if following is not None else len(nodes) - 1
        while nodes[end] in moved:
            end += 1
        if any(node not in own and node.op == "call_function" for node in nodes[at:end]):
            plans.append(((*launch.waits, *launch.after), nodes[end]))
    return plans
