"""Partitioning of a joint graph: which activations to save, and which full parameters to keep.

After a trial partition, peak memory and duration of the step are known by the cost model. The
backend then keeps full parameters from forward to backward: those that save most time within the
option `memory_budget`, or, without it, within the memory that `schedule` may take. If the trial
does not fit the option, backward recomputes more. The graph is then partitioned again, with marks
on what to save.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zpasses.backend.counted_peaks import CountAdded
from zpasses.backend.host_advice import ANY_BYTES, LeanestPlan, host_advice
from zpasses.backend.partition_plan import Choice, Graphs, PartitionPolicy, StepPlan
from zpasses.backend.step_trials import WHOLE, StepTrials, full_params
from zpasses.cost.memory.code_memory import mark_added_by_code
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.plan.offloaded_values import SavedValue
from zpasses.cost.time.target import current_target
from zpasses.errors import MemoryBudgetError, some_of
from zpasses.graph.encoding import records_of
from zpasses.graph.host_copies import FROM_HOST, RELOAD
from zpasses.graph.queries import nbytes, value_of
from zpasses.graph.tags import params_of, tagged
from zpasses.option_values import format_size, parse_budget
from zpasses.pipeline.events import Events
from zpasses.ranks.agree import adopt

log = logging.getLogger("zpasses")

_MOST_COUNTS = 8
"""How many plans of a step have what their code takes counted."""
_EXACT = 0.001
"""Difference between what a plan and its code take that changes no plan."""


@dataclass(frozen=True)
class Partitioned:
    """Forward and backward, and what was decided."""

    graphs: Graphs
    memory_budget: str | None
    """The budget of passes that plan a schedule; None leaves them their own."""
    note: str
    """What was decided, for logs and dumps; "" if nothing was."""


def partition_step(
    gm: fx.GraphModule,
    joint_inputs: Sequence[Any],
    policy: PartitionPolicy,
    *,
    events: Events,
    copy_engines: bool = False,
    count_added: CountAdded | None = None,
    **kwargs: Any,
) -> Partitioned:
    """Partition a joint graph.

    Args:
        gm: the joint graph, after all passes at its level.
        joint_inputs: its inputs.
        policy: what the step may keep and recompute.
        events: gets the trials before anything is decided, if parameters may be kept.
        copy_engines: as in `StepTrials`.
        count_added: counts what the code of graphs takes beyond them; None leaves that out.
        kwargs: passed on to torch's partitioner.

    Raises:
        MemoryBudgetError: if the step does not fit the budget however much is recomputed.
    """
    trials = StepTrials(gm, joint_inputs, policy, kwargs, copy_engines)
    if policy.keeps and policy.share > 0:
        events.send(trials)
    return _Partitioner(trials, policy, count_added).run()


@dataclass(frozen=True)
class _Adopted:
    """The decision of the first rank, on this rank's joint graph."""

    choice: Choice
    kept: Sequence[fx.Node]
    cached: Sequence[fx.Node]
    offloaded: Sequence[SavedValue]
    memory_budget: str | None


class _Partitioner:
    def __init__(
        self, trials: StepTrials, policy: PartitionPolicy, count_added: CountAdded | None
    ) -> None:
        self._trials, self._policy, self._count_added = trials, policy, count_added
        self._keeping: tuple[Choice, Graphs] | None = None
        """The last choice that keeps parameters, and its graphs."""

    def run(self) -> Partitioned:
        budget, share, gm = self._policy.budget, self._policy.share, self._trials.gm
        if budget is None and not (self._policy.keeps and share):
            return Partitioned(self._trials.partition(gm, 1.0), None, "")
        if budget is None and share < WHOLE:
            return Partitioned(*self._of_a_part())
        if budget is not None and share < WHOLE:
            log.warning(
                "memory_budget=%r bounds each graph by itself, and this graph reads %.0f %% of the "
                "bytes of the model's sharded parameters. Compile the whole step as one graph "
                "(torch.compile(..., fullgraph=True) says what breaks it), so that the budget "
                "bounds the step.",
                budget,
                100 * share,
            )
        trials = self._trials
        plan = trials.fitting(trials.rise) if budget is None else self._within(budget)
        adopted = self._adopted(plan)
        return Partitioned(
            self._graphs(adopted.choice, plan, copied=False),
            adopted.memory_budget,
            self._note(plan, adopted),
        )

    def _graphs(self, choice: Choice, plan: StepPlan, *, copied: bool = True) -> Graphs:
        """Returns the graphs of a choice, which may be that of a plan."""
        if not choice.kept and not choice.cached and choice == plan.choice:
            return plan.trial.graphs
        if self._keeping is None or self._keeping[0] != choice:
            self._keeping = choice, self._trials.graphs(choice, copied=copied)
        return self._keeping[1]

    def _of_a_part(self) -> tuple[Graphs, None, str]:
        """Returns the graphs of a part of a step, which keep nothing that the ranks do not agree
        to keep.
        """
        full = full_params(self._trials.gm)
        everything = Choice(1.0, frozenset(), frozenset())
        graphs = self._trials.graphs(everything)
        mine = _gathered_again(graphs, full)
        again, _ = adopt(
            self._policy.groups,
            "which parameters backward gathers",
            ([(params, size) for _, params, size in full], self._trials.with_gradients()),
            mine,
            merge=_in_all,
        )
        kept = [full[at] for at in mine if at not in again]
        if not kept:
            return graphs, None, ""
        names = ", ".join(name for _, params, _ in kept for name in params)
        note = f"keeps {names} until backward, because not all ranks gather them again"
        kept_names = frozenset(node.name for node, *_ in kept)
        graphs = self._trials.graphs(replace(everything, kept=kept_names), copied=False)
        return graphs, None, note

    def _within(self, budget: str) -> StepPlan:
        """With a budget: the fastest plan that fits, with what its code takes."""
        trials = self._trials
        if parse_budget(budget, "option 'memory_budget'").most_bytes is None:
            # The budget counts from its peak.
            self._count(trials.saving_all())
        limit = trials.limit_bytes(budget)
        plan = trials.fastest(limit)
        for _ in range(_MOST_COUNTS):
            if not self._count(plan):
                break
            plan = trials.fastest(limit)
        if not plan.fits:
            raise MemoryBudgetError(too_little_memory(budget, plan, self._trials))
        return trials.with_own_peak(plan, self._graphs(plan.choice, plan))

    def _count(self, plan: StepPlan) -> bool:
        """Counts what the code of a plan takes. Returns whether that changes a peak."""
        trials, choice = self._trials, plan.choice
        if self._count_added is None or trials.is_counted(choice):
            return False
        graphs = self._graphs(choice, plan)
        before = [liveness(gm.graph).peak_bytes for gm in graphs]
        added = self._count_added(graphs, trials.user_outputs)
        if added is None:
            return False
        trials.add_to_peaks(choice, added)
        for gm, sizes in zip(graphs, added, strict=True):
            mark_added_by_code(gm.graph, sizes)
        after = [liveness(gm.graph).peak_bytes for gm in graphs]
        return any(abs(now - then) > _EXACT * then for then, now in zip(before, after, strict=True))

    def _adopted(self, plan: StepPlan) -> _Adopted:
        """The decision of the first rank, which all ranks adopt: they must gather identically.

        Equal parameters always get the same decision.
        """
        full = full_params(self._trials.gm)
        described = [(params, size) for _, params, size in full]
        joint = self._trials.gm.graph.nodes
        copied = [params_of(node) for node in joint if node.target is FROM_HOST]
        choice = plan.choice
        plan_trials = self._trials.in_chunks(choice.chunks)
        mine: list[Any] = [
            choice.chunks,
            choice.activation_budget,
            _places(plan_trials.leaving_names, choice.recomputed),
            [at for at, (node, *_) in enumerate(full) if node.name in choice.kept],
            [at for at, (node, *_) in enumerate(full) if node.name in choice.cached],
            _places(
                lambda: plan_trials.leaving_names(choice.activation_budget, choice.recomputed),
                choice.offloaded,
            ),
            plan.memory_budget,
            _gathered_again(plan.trial.graphs, full),
        ]
        (chunks, activations, again, kept, cached, offloaded, budget, gathered), _ = adopt(
            self._policy.groups,
            "which parameters to keep for backward",
            (described, copied, self._trials.with_gradients(), replace(self._policy, groups=())),
            mine,
            planned_for=current_target(),
            merge=lambda plans: [*plans[0][:-1], _in_all([plan[-1] for plan in plans])],
        )
        trials = self._trials.in_chunks(chunks)
        recomputed = frozenset(_at(again, trials.leaving_names))
        planned = choice.chunks, choice.activation_budget, choice.recomputed
        is_mine = planned == (chunks, activations, recomputed)
        trial = plan.trial if is_mine else trials.trial(activations, recomputed)
        own = _gathered_again(trial.graphs, full)
        kept = [*kept, *(at for at in own if at not in {*gathered, *kept, *cached})]
        nodes = [[full[at][0] for at in some] for some in (kept, cached)]
        moved = set(_at(offloaded, lambda: trials.leaving_names(activations, recomputed)))
        saved = trials.saved_values(activations, recomputed) if offloaded else ()
        on_host = [each for each in saved if each.name in moved]
        names = [frozenset(each.name for each in some) for some in (*nodes, on_host)]
        adopted = Choice(activations, names[0], names[1], names[2], recomputed, chunks, choice.late)
        return _Adopted(adopted, nodes[0], nodes[1], on_host, budget)

    def _note(self, plan: StepPlan, adopted: _Adopted) -> str:
        choice, offloaded, parts = adopted.choice, adopted.offloaded, []
        for nodes, until in (
            (adopted.kept, "until backward"),
            (adopted.cached, "until the parameters change"),
        ):
            if nodes:
                held = sum(nbytes(value_of(records_of(node) or node)) for node in nodes)
                names = some_of([", ".join(params_of(node)) for node in nodes], 3)
                parts.append(f"keeps {format_size(held)} {until}: {names}")
        if offloaded:
            held = sum(each.nbytes for each in offloaded)
            parts.append(f"{len(offloaded)} saved values, {format_size(held)}, on the host")
        if choice.chunks > 1:
            how = ", ".join(self._trials.in_chunks(choice.chunks).chunk_notes)
            parts.append(f"computes the loss in {choice.chunks} chunks ({how})")
        if choice.activation_budget < 1.0 or choice.recomputed:
            parts.append(f"saves {100 * plan.saved_share:.0f} % of the activations")
        if self._policy.budget is not None:
            parts.append(
                f"predicted {plan.total_us / 1e3:.2f} ms, bound {plan.bound_us / 1e3:.2f} ms, peak "
                f"{format_size(plan.peak_bytes)} of {format_size(plan.limit_bytes)}"
            )
            if self._trials.residual_bytes:
                parts[-1] += f" beside {format_size(self._trials.residual_bytes)} of residuals"
        return "; ".join(parts)


def _gathered_again(
    graphs: Graphs, full: Sequence[tuple[fx.Node, tuple[str, ...], int]]
) -> list[int]:
    """Returns which of the full parameters backward gathers.

    Backward may read a parameter only to compute a value again, such as the bias of a norm, and
    which values it computes again depends on the batch. What ranks gather must not: each rank keeps
    what another one does not gather.
    """
    made = {node.name for node, _ in tagged(graphs[1].graph, "full") if node.op != "placeholder"}
    return [at for at, (node, *_) in enumerate(full) if node.name in made]


def _in_all(gathered: Sequence[list[int]]) -> list[int]:
    return [at for at in gathered[0] if all(at in each for each in gathered)]


def _places(names: Callable[[], list[str]], chosen: Collection[str]) -> list[int]:
    """Returns where the chosen names are in a list, which is made only if there are some."""
    return [at for at, each in enumerate(names()) if each in chosen] if chosen else []


def _at(places: Sequence[int], names: Callable[[], list[str]]) -> list[str]:
    """Returns the names at these places of a list, which is made only if there are some."""
    found = names() if places else []
    return [found[at] for at in places if at < len(found)]


def too_little_memory(text: str, plan: StepPlan, trials: StepTrials) -> str:
    """Returns why the leanest plan of a step, one of these trials, does not fit its budget."""
    peaks = [liveness(gm.graph) for gm in plan.trial.graphs]
    largest = max(peaks, key=lambda each: each.peak_bytes)
    holders = ", ".join(
        f"{_described(buffer.node)} {format_size(buffer.nbytes)}"
        for buffer in largest.alive_at(largest.peak_node)[:5]
    )
    missing = plan.peak_bytes - plan.limit_bytes
    on_host = f", {format_size(plan.host_bytes)} of them on the host," if plan.host_bytes else ""
    graph = "forward" if largest is peaks[0] else "backward"
    held = ""
    if trials.residual_bytes:
        held = f" has beside {format_size(trials.residual_bytes)} of residuals of error feedback"
    if plan.trial.chunks > 1:
        on_host += f", computes the loss in {plan.trial.chunks} chunks"
    advice = _host_advice(plan, trials)
    kept = "keeps every parameter that it gathers" if trials.caches else "keeps no parameter"
    return (
        f"memory_budget={text!r}: the leanest plan, which saves {100 * plan.saved_share:.0f} % of "
        f"the activations{on_host} and {kept}, needs {format_size(plan.peak_bytes, up=True)} "
        f"above what rests between steps, {format_size(missing)} more than the budget{held}. At "
        f"its peak, in {graph}, the largest values are: {holders}. {advice}"
        f"{'Or raise' if advice else 'Raise'} the budget, take a smaller batch, or train on more "
        "ranks."
    )


def _host_advice(plan: StepPlan, trials: StepTrials) -> str:
    """Returns which `host_memory` helps a step whose leanest plan does not fit."""
    share = trials.share  # of what the option allows
    movable = trials.with_host_bytes(ANY_BYTES).saved_values(1.0) if share else ()
    if sum(each.nbytes for each in movable) <= trials.host_bytes:
        return ""

    def planned(host_bytes: int) -> LeanestPlan:
        return needed(trials.with_host_bytes(host_bytes).fastest(plan.limit_bytes))

    def needed(found: StepPlan) -> LeanestPlan:
        return LeanestPlan(found.peak_bytes, math.ceil(found.host_bytes / share))

    given_bytes = math.ceil(trials.host_bytes / share)
    return host_advice(needed(plan), given_bytes, plan.limit_bytes, planned)


def _described(node: fx.Node) -> str:
    """`mm [8, 128]`: the name of a node, and the shape of the tensor that it makes or copies from
    the host, if it is one.
    """
    if node.op == "output":
        return "cached parameters that backward does not read"
    value = value_of(node.all_input_nodes[0] if node.target is RELOAD else node)
    return f"{node.name} {list(value.shape)}" if isinstance(value, torch.Tensor) else node.name
