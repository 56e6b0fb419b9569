"""Start gathers early and await reductions late, so that they run beside compute.

Before                                          After
  a = wait_tensor(all_gather(shard_a))            started_a = all_gather(shard_a)
  y = mm(x, a)                                    a = wait_tensor(started_a)
  b = wait_tensor(all_gather(shard_b))            started_b = all_gather(shard_b)
  z = mm(y, b)                                    y = mm(x, a)
  ...                                             b = wait_tensor(started_b)
  da = wait_tensor(reduce_scatter(ga))            z = mm(y, b)
  gb = mm(..)                                     ...
  db = wait_tensor(reduce_scatter(gb))            started_a = reduce_scatter(ga)
                                                  gb = mm(..)
                                                  started_b = reduce_scatter(gb)
                                                  da = wait_tensor(started_a)
                                                  db = wait_tensor(started_b)

Contract: moves nodes and makes none, so numbers stay the same. A gather starts once the one before it has arrived: one is under way
beside compute, never more. A reduction is awaited once the next one has started. Where that would raise the graph's peak above the
budget, by the liveness model of `zpasses.memory`, a collective moves as far as it fits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zpasses.foreign import tag_foreign_gathers
from zpasses.pipeline import Level, Pass
from zpasses.schedule import Launch, MemoryCurve, gather_launches, parse_budget, reduction_launches


@dataclass(frozen=True)
class Overlap(Pass):
    """Run collectives beside compute, under a memory budget."""

    name: ClassVar[str] = "overlap"
    level: ClassVar[Level] = Level.PARTITIONED

    memory_budget: str = "5%"
    """How far the graph's peak may rise ("5%"), or the peak it may reach ("300MiB"; never below what it is without this pass)."""

    def __post_init__(self) -> None:
        parse_budget(self.memory_budget, f"pass {self.name!r}, option 'memory_budget'")

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of collectives moved."""
        tag_foreign_gathers(graph, origin=self.name)
        curve = MemoryCurve(graph, parse_budget(self.memory_budget, self.name))
        early = _prefetch(gather_launches(graph), curve)
        moved = {node for nodes, _ in early for node in nodes}
        plans = [*early, *_delay(reduction_launches(graph), curve, moved)]
        for nodes, anchor in plans:
            for node in nodes:
                anchor.prepend(node)
        return len(plans)


_Plan = tuple[tuple[fx.Node, ...], fx.Node]
"""Nodes to move, in order, and the node that they go in front of."""


def _prefetch(launches: list[Launch], curve: MemoryCurve) -> list[_Plan]:
    plans: list[_Plan] = []
    arrived = 0
    for launch in launches:
        at = curve.position[launch.started]
        first = curve.earliest(max(arrived, curve.first_call), at, launch.nbytes)
        if any(node not in launch.before and node.op == "call_function" for node in curve.base.nodes[first:at]):
            plans.append(((*launch.before, launch.started, *launch.parts), curve.base.nodes[first]))
            curve.add(first, at, launch.nbytes)
        arrived = min(curve.position[wait] for wait in launch.waits) + 1
    return plans


def _delay(launches: list[Launch], curve: MemoryCurve, gone: set[fx.Node]) -> list[_Plan]:
    """`gone`: nodes that will have moved, and mark no place any more."""
    plans: list[_Plan] = []
    for launch, following in itertools.zip_longest(launches, launches[1:]):
        own = {*launch.waits, *launch.after}
        at = max(curve.position[node] for node in own) + 1
        end = curve.position[following.started] + 1 if following is not None else len(curve.base.nodes) - 1
        last = curve.latest(at, end, launch.nbytes)
        while curve.base.nodes[last] in gone:
            last += 1
        if any(node not in own and node.op == "call_function" for node in curve.base.nodes[at:last]):
            plans.append(((*launch.waits, *launch.after), curve.base.nodes[last]))
            curve.add(at, last, launch.nbytes)
    return plans
