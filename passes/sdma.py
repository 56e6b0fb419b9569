"""Replace all-gathers that would compete with kernels for compute units by copy-engine all-gathers.

Before
  a = all_gather_into_tensor(shard_a, 8, group)
  b = all_gather_into_tensor_coalesced([s, t], 8, group)
  c = all_gather_into_tensor_out(s, 8, group, out=buf)
  y = mm(x, w)
  full = wait_tensor(a)
After
  a = zpasses.sdma_all_gather(shard_a, 8, group)
  b = zpasses.sdma_all_gather_coalesced([s, t], 8, group)
  c = zpasses.sdma_all_gather_out(s, 8, group, out=buf)
  y = mm(x, w)
  full = wait_tensor(a)

Contract: runs last, when the order of the nodes is final. The pass creates no nodes and moves none,
and results stay equal bit for bit. Which gathers are replaced follows only from the target and the
graph, and all ranks of a group agree on it. Whether a copy engine then does the work is decided at
run time by a vote (`zpasses.sdma`), with the functional collective as the fallback. The tag of
every gather holds the decision.

No stage runs this pass: there, `schedule` chooses routes while it plans. It is for pipelines
without `schedule`.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.time.route_figures import engine_obstacle, engine_routes, route_figures
from zpasses.cost.time.step_time import Timeline
from zpasses.cost.time.target import Target, current_target
from zpasses.graph.patterns import tag_foreign_gathers
from zpasses.graph.queries import Collective, collective_of, value_of
from zpasses.graph.tags import params_of
from zpasses.option_values import format_size
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.facts import Facts
from zpasses.ranks.agree import adopt
from zpasses.sdma.engine_gathers import can_take_engine, gather_by_engine, note_route

log = logging.getLogger("zpasses")


Outcome = Literal["replaced", "no gain", "group", "dtype", "route missing", "other ranks"]


@dataclass(frozen=True)
class Decision:
    """The decision of the pass on one gather."""

    node: fx.Node
    outcome: Outcome
    reason: str
    group: str
    """Name of the process group."""
    route: str = ""
    """The copy-engine route of a gather that is replaced."""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}"


@dataclass(frozen=True)
class Sdma(Pass):
    """Replace all-gathers by copy-engine all-gathers where that is faster."""

    name: ClassVar[str] = "sdma"
    level: ClassVar[Level] = Level.PARTITIONED
    facts: ClassVar[Facts] = Facts(votes=True, uses_engines=True)

    gathers: Literal["gaining", "all"] = "gaining"
    """Which gathers are replaced: those with which the predicted time of the graph gets shorter, or
    `all` that a copy engine can run."""

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of gathers replaced."""
        tag_foreign_gathers(graph, origin=self.name)
        decisions = _agree_on_decisions(self.decide(graph), str(self))
        for decision in decisions:
            if decision.outcome == "replaced":
                gather_by_engine(decision.node, decision.route)
            note_route(decision.node, f"sdma {decision}", self.name)
        if decisions:
            counts = Counter(decision.outcome for decision in decisions)
            log.info(
                "sdma: %d gathers: %s",
                len(decisions),
                ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())),
            )
        return sum(decision.outcome == "replaced" for decision in decisions)

    def decide(self, graph: fx.Graph) -> list[Decision]:
        """Returns this rank's own decision on each gather, in graph order. The decisions on earlier
        gathers determine the schedule that a gather is weighed in.
        """
        target = current_target()
        timeline, replaced = Timeline(graph, target), dict[fx.Node, str]()
        decisions = []
        for node in graph.nodes:
            collective = _gather_of(node)
            if collective is not None:
                decisions.append(self._decide(node, collective, timeline, replaced, target))
                if decisions[-1].outcome == "replaced":
                    replaced[node] = decisions[-1].route
        return decisions

    def _decide(
        self,
        node: fx.Node,
        collective: Collective,
        timeline: Timeline,
        replaced: dict[fx.Node, str],
        target: Target,
    ) -> Decision:
        def decision(outcome: Outcome, reason: str, route: str = "") -> Decision:
            return Decision(node, outcome, reason, collective.group, route)

        routes = engine_routes(target)
        if not routes:
            return decision("route missing", f"{target.name} has no copy-engine route")
        unfit = engine_obstacle(compat.group_ranks(collective.group), target)
        if unfit:
            return decision("group", unfit)
        opaque = [value.dtype for value in _inputs(node) if value.is_quantized]
        if opaque:
            return decision("dtype", f"{opaque[0]} is not plain bytes")
        total_us = {route: timeline.run(replaced | {node: route}).total_us for route in routes}
        route = min(routes, key=lambda each: total_us[each])
        took = timeline.timing(node, route).duration_us
        gain = timeline.run(replaced).total_us - total_us[route]
        taken = gain > 0 or self.gathers == "all"
        effect = f"{'gain' if gain > 0 else 'lose'}{'s' if taken else ''} {abs(gain):.0f} us"
        return decision(
            "replaced" if taken else "no gain",
            f"{format_size(collective.nbytes)} per rank in {took:.0f} us by {route}, "
            f"{'' if taken else 'would '}{effect}",
            route if taken else "",
        )


# --- gathers --------------------------------------------------------------------------------------
def _gather_of(node: fx.Node) -> Collective | None:
    return collective_of(node) if can_take_engine(node) else None


def _inputs(node: fx.Node) -> list[torch.Tensor]:
    given = node.args[0] if node.args else node.kwargs["input"]
    return [
        value_of(item)
        for item in (given if isinstance(given, (list, tuple)) else [given])
        if isinstance(item, fx.Node)
    ]


# --- agreement ------------------------------------------------------------------------------------
def _agree_on_decisions(decisions: list[Decision], options: str) -> list[Decision]:
    """Mark a gather as replaced only if every rank of its group would give it the same route.

    The predicted times depend on shapes. The same gathers always get the same answer.
    """
    agreed, target = {}, current_target()
    for group in dict.fromkeys(decision.group for decision in decisions):
        own = [decision for decision in decisions if decision.group == group]
        described = [
            (
                str(decision.node.target),
                [str(value.dtype) for value in _inputs(decision.node)],
                params_of(decision.node),
            )
            for decision in own
        ]
        routes, same_gathers = adopt(
            [group],
            "the choice of copy-engine gathers",
            (options, described),
            [decision.route for decision in own],
            planned_for=(target, route_figures(target)),
            merge=lambda choices: [
                each[0] if len(set(each)) == 1 else "" for each in zip(*choices, strict=True)
            ],
        )
        for decision, route in zip(own, routes, strict=True):
            agreed[decision.node] = _apply_vote(decision, route if same_gathers else "")
    return [agreed[decision.node] for decision in decisions]


def _apply_vote(decision: Decision, route: str) -> Decision:
    """Combine this rank's decision with the route of all ranks, which may come from an earlier
    compile of the same gathers; "" if they have none.
    """
    if decision.route and not route:
        reason = "not all ranks would give it the same route"
        return replace(decision, outcome="other ranks", reason=reason, route="")
    if decision.route != route:
        return replace(
            decision,
            outcome="replaced",
            route=route,
            reason=f"as in an earlier compile of these gathers; this compile: {decision}",
        )
    return decision
