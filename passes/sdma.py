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
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.time.route_figures import engine_obstacle, engine_route, route_figures
from zpasses.cost.time.step_time import Timeline
from zpasses.cost.time.target import Target, current_target
from zpasses.errors import OptionError
from zpasses.graph.patterns import tag_foreign_gathers
from zpasses.graph.queries import Collective, collective_of, value_of
from zpasses.graph.tags import params_of
from zpasses.passes.writers.route_writer import can_take_engine, gather_by_engine, note_route
from zpasses.pipeline.facts import Facts
from zpasses.pipeline.passes import Level, Pass
from zpasses.ranks.agree import adopt

log = logging.getLogger("zpasses")

_MIB = 1 << 20

Outcome = Literal[
    "replaced",
    "too small",
    "too little overlap",
    "group",
    "dtype",
    "route missing",
    "other ranks",
]


@dataclass(frozen=True)
class Decision:
    """The decision of the pass on one gather."""

    node: fx.Node
    outcome: Outcome
    reason: str
    group: str
    """Name of the process group."""
    route: str = ""
    """The copy-engine route that was considered: the one that the target prefers."""
    gather_us: float = 0.0
    """Predicted time of the gather by that route, in microseconds."""
    compute_us: float = 0.0
    """Predicted time of the compute between its start and its wait, in microseconds."""
    gain_us: float = 0.0
    """Predicted reduction of the graph's time compared with the functional collective, in
    microseconds.
    """

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}"


@dataclass(frozen=True)
class Sdma(Pass):
    """Replace all-gathers that compute hides by copy-engine all-gathers."""

    name: ClassVar[str] = "sdma"
    level: ClassVar[Level] = Level.PARTITIONED
    facts: ClassVar[Facts] = Facts(votes=True, uses_engines=True)

    min_mb: float = 16.0
    """Smallest size of one rank's part of a gather, in MiB. Smaller gathers stay, because copy
    engines take longer to start.
    """
    min_hidden: float = 0.5
    """Smallest fraction of a gather's time that the compute between its start and its wait must
    cover; 0 also replaces gathers that no compute hides.
    """

    def __post_init__(self) -> None:
        if not self.min_mb >= 0:
            raise OptionError(
                f"pass {self.name!r}, option 'min_mb': got {self.min_mb}; expected MiB >= 0."
            )
        if not self.min_hidden >= 0:
            raise OptionError(
                f"pass {self.name!r}, option 'min_hidden': got {self.min_hidden}; expected a "
                "fraction of a gather's time, >= 0."
            )

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of gathers replaced."""
        tag_foreign_gathers(graph, origin=self.name)
        decisions = _agree_on_decisions(self.decide(graph), str(self))
        for decision in decisions:
            if decision.outcome == "replaced":
                gather_by_engine(decision.node)
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
        timeline, replaced = Timeline(graph, target), set[fx.Node]()
        decisions = []
        for node in graph.nodes:
            collective = _gather_of(node)
            if collective is not None:
                decisions.append(self._decide(node, collective, timeline, replaced, target))
                if decisions[-1].outcome == "replaced":
                    replaced.add(node)
        return decisions

    def _decide(
        self,
        node: fx.Node,
        collective: Collective,
        timeline: Timeline,
        replaced: set[fx.Node],
        target: Target,
    ) -> Decision:
        def decision(outcome: Outcome, reason: str, **figures: Any) -> Decision:
            return Decision(node, outcome, reason, collective.group, **figures)

        route = engine_route(target)
        if route is None:
            return decision("route missing", f"{target.name} has no copy-engine route")
        unfit = engine_obstacle(compat.group_ranks(collective.group), target)
        if unfit:
            return decision("group", unfit)
        opaque = [value.dtype for value in _inputs(node) if value.is_quantized]
        if opaque:
            return decision("dtype", f"{opaque[0]} is not plain bytes")
        if collective.nbytes < self.min_mb * _MIB:
            return decision(
                "too small", f"{collective.nbytes / _MIB:.3g} of {self.min_mb:g} MiB per rank"
            )
        gather, compute = timeline.timing(node, True).duration_us, timeline.compute_until_wait(node)
        gain = timeline.run(replaced).total_us - timeline.run(replaced | {node}).total_us
        figures = {
            "route": route,
            "gather_us": gather,
            "compute_us": compute,
            "gain_us": gain,
        }
        timing = (
            f"{collective.nbytes / _MIB:.3g} MiB per rank in {gather:.0f} us by "
            f"{route}, overlapping {compute:.0f} us of compute"
        )
        if compute < self.min_hidden * gather:
            return decision("too little overlap", timing, **figures)
        if self.min_hidden and gain <= 0:
            return decision("too little overlap", f"{timing}, would lose {-gain:.0f} us", **figures)
        return decision(
            "replaced",
            f"{timing}, {'gains' if gain > 0 else 'loses'} {abs(gain):.0f} us",
            **figures,
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
    """Mark a gather as replaced only if every rank of its group would replace it.

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
        all_would_replace, same_gathers = adopt(
            [group],
            "the choice of copy-engine gathers",
            (options, described),
            [decision.outcome == "replaced" for decision in own],
            planned_for=(target, route_figures(target)),
            merge=lambda choices: [all(each) for each in zip(*choices, strict=True)],
        )
        for decision, would in zip(own, all_would_replace, strict=True):
            agreed[decision.node] = _apply_vote(decision, bool(same_gathers) and would)
    return [agreed[decision.node] for decision in decisions]


def _apply_vote(decision: Decision, all_would_replace: bool) -> Decision:
    """Combine this rank's decision with the answer of all ranks, which may come from an earlier
    compile of the same gathers.
    """
    if decision.outcome == "replaced" and not all_would_replace:
        return replace(decision, outcome="other ranks", reason="not all ranks would replace it")
    if decision.outcome != "replaced" and all_would_replace:
        return replace(
            decision,
            outcome="replaced",
            reason=f"as in an earlier compile of these gathers; this compile: {decision}",
        )
    return decision
