"""Let copy engines gather where that takes compute units away from compute: swaps all-gathers for
`zpasses::sdma` ops.

Before                                                     After
  a = all_gather_into_tensor(shard_a, 8, group)              a = zpasses.sdma_all_gather(shard_a, 8, group)
  b = all_gather_into_tensor_coalesced([s, t], 8, group)     b = zpasses.sdma_all_gather_coalesced([s, t], 8, group)
  c = all_gather_into_tensor_out(s, 8, group, out=buf)       c = zpasses.sdma_all_gather_out(s, 8, group, out=buf)
  y = mm(x, w)                                               y = mm(x, w)
  full = wait_tensor(a)                                      full = wait_tensor(a)

Contract: runs last, since what starts where is settled then; makes no nodes and moves none; numbers
stay the same bit for bit. What is swapped follows from the target and the graph alone, on which all
ranks of a group agree; whether a copy engine then does the work is decided at run time, by vote
(`zpasses.sdma`), with the functional collective as the fallback. Every gather's tag says what
became of it."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.routes import known_figures
from zpasses.cost.step_time import Timeline
from zpasses.cost.target import Target, current_target
from zpasses.errors import OptionError
from zpasses.graph.nodes import Collective, collective_of, named_arguments, nbytes, value_of
from zpasses.graph.patterns import tag_foreign_gathers
from zpasses.graph.tags import Tag, add_tag, retag, tag_of
from zpasses.pipeline.pipeline import Level, Pass
from zpasses.ranks.vote import exchange
from zpasses.sdma import chosen
from zpasses.sdma.ops import SDMA_ALL_GATHER, SDMA_ALL_GATHER_COALESCED, SDMA_ALL_GATHER_OUT

__all__ = ["Sdma", "Verdict"]

log = logging.getLogger("zpasses")

_MIB = 1 << 20
_TIMEOUT_S = 300.0
MAX_RANKS = 8
_SWAPS: dict[Any, compat.OpOverload] = {
    compat.functional.all_gather_into_tensor.default: SDMA_ALL_GATHER,
    compat.functional.all_gather_into_tensor_coalesced.default: SDMA_ALL_GATHER_COALESCED,
    compat.functional.all_gather_into_tensor_out.default: SDMA_ALL_GATHER_OUT,
}

What = Literal[
    "swapped",
    "too small",
    "nothing to hide behind",
    "group",
    "dtype",
    "route missing",
    "other ranks",
]


@dataclass(frozen=True)
class Verdict:
    """What the pass made of one gather."""

    node: fx.Node
    what: What
    why: str
    group: str
    """Name of the process group."""
    route: str = ""
    """The copy-engine route that was weighed: the one that the target prefers."""
    gather_us: float = 0.0
    """Predicted time of the gather by that route, in microseconds."""
    compute_us: float = 0.0
    """Predicted time of the compute between its start and its wait."""
    gain_us: float = 0.0
    """By how much the graph is predicted to be done sooner than with the functional collective."""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class Sdma(Pass):
    """Replace all-gathers that hide behind compute by copy-engine all-gathers."""

    name: ClassVar[str] = "sdma"
    level: ClassVar[Level] = Level.PARTITIONED

    min_mb: float = 16.0
    """Smallest size of one rank's part of a gather, in MiB, because copy engines take longer to
    start."""
    min_hidden: float = 0.5
    """Smallest share of a gather's time that the compute between its start and its wait must cover;
    0 also replaces gathers that nothing hides."""

    def __post_init__(self) -> None:
        if not self.min_mb >= 0:
            raise OptionError(
                f"pass {self.name!r}, option 'min_mb': got {self.min_mb}; expected MiB >= 0."
            )
        if not self.min_hidden >= 0:
            raise OptionError(
                f"pass {self.name!r}, option 'min_hidden': got {self.min_hidden}; expected a share "
                "of a gather's time, >= 0."
            )

    def votes(self) -> bool:
        return True

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of gathers swapped."""
        tag_foreign_gathers(graph, origin=self.name)
        verdicts = _agreed(self.judge(graph), str(self))
        for verdict in verdicts:
            _note(verdict, self.name)
            if verdict.what == "swapped":
                _swap(verdict.node, verdict.group)
        if verdicts:
            counts = Counter(verdict.what for verdict in verdicts)
            log.info(
                "sdma: %d gathers: %s",
                len(verdicts),
                ", ".join(f"{count} {what}" for what, count in sorted(counts.items())),
            )
        swapped = sum(verdict.what == "swapped" for verdict in verdicts)
        if swapped and compat.inductor_is_lowering():
            compat.lower_own_collectives()
        return swapped

    def judge(self, graph: fx.Graph) -> list[Verdict]:
        """What this rank by itself would make of each gather, in graph order: each is weighed with
        those before it swapped or not."""
        target = current_target()
        timeline, taken = Timeline(graph, target), set[fx.Node]()
        verdicts = []
        for node in graph.nodes:
            collective = _gather(node)
            if collective is not None:
                verdicts.append(self._judge(node, collective, timeline, taken, target))
                if verdicts[-1].what == "swapped":
                    taken.add(node)
        return verdicts

    def _judge(
        self,
        node: fx.Node,
        collective: Collective,
        timeline: Timeline,
        taken: set[fx.Node],
        target: Target,
    ) -> Verdict:
        def verdict(what: What, why: str, **figures: Any) -> Verdict:
            return Verdict(node, what, why, collective.group, **figures)

        if not target.routes:
            return verdict("route missing", f"{target.name} has no copy-engine route")
        unfit = _unfit_group(compat.group_ranks(collective.group), target)
        if unfit:
            return verdict("group", unfit)
        opaque = [value.dtype for value in _inputs(node) if value.is_quantized]
        if opaque:
            return verdict("dtype", f"{opaque[0]} is not plain bytes")
        if collective.nbytes < self.min_mb * _MIB:
            return verdict(
                "too small", f"{collective.nbytes / _MIB:.3g} of {self.min_mb:g} MiB a rank"
            )
        gather, compute = timeline.ride(node, True).took_us, timeline.compute_until_wait(node)
        gain = timeline.run(taken).total_us - timeline.run(taken | {node}).total_us
        figures = {
            "route": target.routes[0],
            "gather_us": gather,
            "compute_us": compute,
            "gain_us": gain,
        }
        told = f"{collective.nbytes / _MIB:.3g} MiB a rank in {gather:.0f} us by {target.routes[0]}, beside {compute:.0f} us of compute"
        if compute < self.min_hidden * gather:
            return verdict("nothing to hide behind", told, **figures)
        if self.min_hidden and gain <= 0:
            return verdict(
                "nothing to hide behind", f"{told}, would lose {-gain:.0f} us", **figures
            )
        return verdict(
            "swapped", f"{told}, {'gains' if gain > 0 else 'loses'} {abs(gain):.0f} us", **figures
        )


# --- looking --------------------------------------------------------------------------------------
def _gather(node: fx.Node) -> Collective | None:
    return collective_of(node) if node.op == "call_function" and node.target in _SWAPS else None


def _inputs(node: fx.Node) -> list[torch.Tensor]:
    given = node.args[0] if node.args else node.kwargs["input"]
    return [
        value_of(item)
        for item in (given if isinstance(given, (list, tuple)) else [given])
        if isinstance(item, fx.Node)
    ]


def _unfit_group(ranks: Sequence[int], target: Target) -> str:
    """Why no copy engine reaches all ranks of a group; "" if one does."""
    if len(ranks) == 1:
        return "one rank has nothing to gather"
    if len({rank // target.ranks_per_node for rank in ranks}) > 1:
        return f"ranks {ranks[0]} to {ranks[-1]} are not on one node of {target.ranks_per_node}"
    return (
        f"{len(ranks)} ranks; at most {MAX_RANKS} can take a route"
        if len(ranks) > MAX_RANKS
        else ""
    )


# --- agreeing -------------------------------------------------------------------------------------
def _agreed(verdicts: list[Verdict], options: str) -> list[Verdict]:
    """Swapped is what every rank of the group would swap: figures depend on shapes, which ranks may
    not share.

    A rank may recompile the same gathers alone: so they get the same answer again, as long as it
    plans for the same target."""
    agreed, target = {}, current_target()
    planned_for = hashlib.sha256(repr((target, known_figures(target))).encode()).hexdigest()
    for group in dict.fromkeys(verdict.group for verdict in verdicts):
        own = [verdict for verdict in verdicts if verdict.group == group]
        described = [
            (
                str(verdict.node.target),
                [str(value.dtype) for value in _inputs(verdict.node)],
                _params(verdict),
            )
            for verdict in own
        ]
        signature = hashlib.sha256(repr((options, described)).encode()).hexdigest()
        mine = [verdict.what == "swapped" for verdict in own]
        answers = exchange(
            group,
            "the choice of copy engines",
            [signature, mine],
            _TIMEOUT_S,
            remember=f"{signature} {planned_for}",
        )
        # Other collectives on another rank are found, and named, when the collectives themselves
        # are compared.
        alike = all(answer[0] == signature for answer in answers)
        for place, verdict in enumerate(own):
            everyone = alike and all(answer[1][place] for answer in answers)
            agreed[verdict.node] = _united(verdict, everyone)
    return [agreed[verdict.node] for verdict in verdicts]


def _united(verdict: Verdict, everyone: bool) -> Verdict:
    """A verdict in the light of what all ranks would do, or did when they compiled the same gathers
    before."""
    if verdict.what == "swapped" and not everyone:
        return replace(verdict, what="other ranks", why="not all ranks would swap it")
    if verdict.what != "swapped" and everyone:
        return replace(
            verdict, what="swapped", why=f"as in an earlier compile of these gathers; now {verdict}"
        )
    return verdict


def _params(verdict: Verdict) -> tuple[str, ...]:
    tag = tag_of(verdict.node)
    return tag.params if tag is not None else ()


# --- rewriting ------------------------------------------------------------------------------------
def _swap(node: fx.Node, group: str) -> None:
    arguments = named_arguments(node, node.target)  # type: ignore[arg-type]
    node.target = _SWAPS[node.target]
    names = [argument.name for argument in node.target._schema.arguments]
    first, size, _, *out = names
    node.args = (arguments[first], arguments[size], group)
    node.kwargs = {name: arguments[name] for name in out}


def _note(verdict: Verdict, origin: str) -> None:
    choice = chosen(verdict.group) if verdict.what == "swapped" else None
    note = f"sdma {verdict}" + (
        f"; runs by {choice.route}, since {choice.reason}"
        if choice is not None and choice.reason
        else ""
    )
    if tag_of(verdict.node) is None:
        add_tag(verdict.node, Tag("gather", (), nbytes(_inputs(verdict.node)), origin=origin))
    retag(verdict.node, note=note)
