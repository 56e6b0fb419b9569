"""Trial partitions of a joint graph, and what is best kept and recomputed within a memory limit.

A trial partitions a copy of the joint graph so that it saves a fraction of the activations, some of
which may rest on the host until backward. By the cost model, peak memory and duration of the step
are then known, also if some full parameters are kept until backward. A trial is made once, and can
be planned for several limits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.backend.counted_peaks import Added, CountedPlans
from zpasses.backend.early_kernels import run_early
from zpasses.backend.late_products import run_late
from zpasses.backend.partition_marks import mark_as_partitioned, mark_kept
from zpasses.backend.partition_plan import (
    Choice,
    Graphs,
    PartitionPolicy,
    StepPlan,
    Trial,
    step_bound_us,
)
from zpasses.backend.product_sums import round_as_in
from zpasses.cost.plan.kept_params import (
    KeptParam,
    StepProblem,
    choose_kept,
    fitting_params,
    keepable_params,
)
from zpasses.cost.plan.leaving_values import LeavingValues, Recompute, rank_leaving
from zpasses.cost.plan.offloaded_values import (
    SavedValue,
    least_limit,
    saved_values,
)
from zpasses.cost.plan.recomputed_values import cheapest_first, kernels_again, recomputes
from zpasses.cost.plan.schedule_planner import plan_schedule
from zpasses.cost.plan.schedule_problem import problem_of
from zpasses.cost.plan.simple_plans import single_plan
from zpasses.cost.time.fused_kernels import fuses
from zpasses.cost.time.target import current_target
from zpasses.graph.cached_params import mark_held_in_step
from zpasses.graph.encoding import records_of
from zpasses.graph.error_feedback import residual_bytes
from zpasses.graph.host_copies import offload_saved, offloadable_values
from zpasses.graph.loss_chunks import chunk_regions
from zpasses.graph.loss_regions import find_regions
from zpasses.graph.queries import nbytes, saved_inputs, value_of
from zpasses.graph.regathers import drop_unread_parts, remove_regathers
from zpasses.graph.tags import params_of, retag, tagged
from zpasses.option_values import parse_budget

_Key = tuple[float, frozenset[str], frozenset[str]]
"""Of a trial: the fraction of the activations, and what is computed again and offloaded."""

_ACTIVATIONS = (1.0, 0.7, 0.4, 0.2, 0.1)
"""Fractions of the activations to save that are tried if no plan fits a budget on the device that
computes single values again."""
CHUNKS = (2, 4, 8, 16, 32)
"""Numbers of chunks of the loss that are tried with a budget. Each is tried in one form: gradients
in forward take less time than those in backward, and about as much memory, as both hold the same
values while they compute a chunk."""
WHOLE = 0.999
"""Least share of the parameters of a graph that is a whole step."""
_NEAR = 1.02
"""A step this close to its bound without a memory limit needs no more memory."""


class StepTrials:
    """The trials of one joint graph. Use it with the graph's target and process groups.

    `zpasses.pipeline.events.listen(StepTrials, ...)` calls a function with the trials of every
    joint graph that the backend partitions and whose parameters it may keep, before it decides.

    Args:
        gm: the joint graph after all passes at its level.
        joint_inputs: its inputs.
        policy: what the step may keep and recompute.
        options: further arguments of torch's partitioner.
        copy_engines: whether copy engines may run gathers.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[Any],
        policy: PartitionPolicy,
        options: Mapping[str, Any],
        copy_engines: bool = False,
    ) -> None:
        self.host_bytes = int(policy.host_bytes * policy.share)
        """How many bytes of the host the saved values of the graph may take."""
        self.chunks_loss = policy.chunks_loss
        self.chunk_notes: tuple[str, ...] = ()
        """What is computed in chunks, and how."""
        self._chunks, self._chunked = 1, {1: self}
        self.gm, self.share, self.repetition = gm, policy.share, policy.repetition
        self.rise = policy.rise
        """Memory budget of the passes that plan a schedule."""
        self._inputs, self._policy, self._options = joint_inputs, policy, options
        self._copy_engines = copy_engines
        self._made: dict[_Key, Trial] = {}
        self._counted = CountedPlans()
        self._saved: dict[tuple[float, frozenset[str]], list[SavedValue]] = {}
        self._recomputable: tuple[list[SavedValue], dict[str, Recompute]] | None = None
        self._leaner_gm: fx.GraphModule | None = None
        saves_all = compat.reads_changed_inputs_at_once(gm.graph)
        self._fractions = (1.0,) if saves_all else _ACTIVATIONS

    def again(self, copy_engines: bool) -> StepTrials:
        """Returns new trials of the same graph, for the current target.

        Args:
            copy_engines: as in `StepTrials`.
        """
        return StepTrials(self.gm, self._inputs, self._policy, self._options, copy_engines)

    def with_host_bytes(self, host_bytes: int) -> StepTrials:
        """Returns these trials with other memory of the host. They share what was made and counted.

        Args:
            host_bytes: how many bytes of it the step may take on each rank.
        """
        made = copy.copy(self)
        made.host_bytes = int(host_bytes * self.share)
        made._saved, made._chunked = {}, {self._chunks: made}
        return made

    @property
    def caches(self) -> bool:
        """Whether gathered parameters stay in memory after the step, as in stages 1 and 2."""
        return self._policy.caches

    @property
    def residual_bytes(self) -> int:
        """Bytes that error feedback of this graph holds."""
        return residual_bytes(self.gm.graph)

    @property
    def user_outputs(self) -> int:
        """How many values forward returns before those that it saves."""
        return int(self._options["num_fwd_outputs"])

    def with_gradients(self) -> list[str]:
        """Returns which inputs get gradients: parameters by name, and others as "". It decides what
        backward reads, and does not depend on shapes.
        """
        graph = self.gm.graph
        outputs: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
        grads = outputs[self.user_outputs :]
        inputs = graph.find_nodes(op="placeholder")
        with_grad = (node for node, grad in zip(inputs, grads, strict=False) if grad is not None)
        return sorted(name for node in with_grad for name in params_of(node) or ("",))

    def in_chunks(self, chunks: int) -> StepTrials:
        """Returns the trials of the graph whose loss is computed in chunks. Its nodes have the same
        names.
        """
        if chunks not in self._chunked:
            gm = compat.clone_graph_module(self.gm)
            made = copy.copy(self)
            made.chunk_notes = chunk_regions(gm.graph, chunks, self.chunks_loss or "forward").notes
            made.gm, made.chunks_loss, made._chunks = gm, None, chunks
            made._made, made._saved, made._chunked = {}, {}, {chunks: made}
            made._counted = CountedPlans()
            made._recomputable = made._leaner_gm = None
            self._chunked[chunks] = made
        return self._chunked[chunks]

    def chunk_counts(self) -> Iterator[int]:
        """The numbers of chunks to compare with one."""
        regions = find_regions(self.gm.graph)[0] if self.chunks_loss else ()
        yield from (each for each in CHUNKS if any(each <= one.rows for one in regions))

    def trial(self, activation_budget: float, recomputed: frozenset[str] = frozenset()) -> Trial:
        """Returns a trial with all values on the device.

        Args:
            activation_budget: fraction of the activations to save.
            recomputed: names of values that backward computes again, of `recomputable`; without
                a fraction.
        """
        key = activation_budget, recomputed, frozenset[str]()
        if key not in self._made:
            graphs, share = self._partitioned(activation_budget, recomputed)
            step = self._step(graphs, key)
            self._made[key] = Trial(
                activation_budget, graphs, step, (), recomputed, self._chunks, saved_share=share
            )
        return self._made[key]

    def trial_graphs(
        self, activation_budget: float, recomputed: frozenset[str] = frozenset()
    ) -> Graphs:
        """Returns graphs with the nodes of those of a trial, which it does not keep. Nothing runs
        early or late in them.
        """
        made = self._made.get((activation_budget, recomputed, frozenset()))
        if made:
            return made.graphs
        return self._partitioned(activation_budget, recomputed, moves=False)[0]

    def _partitioned(
        self, activation_budget: float, recomputed: frozenset[str], *, moves: bool = True
    ) -> tuple[Graphs, float]:
        """Returns the graphs of a trial, and the share of the activations that it saves."""
        gm = compat.clone_graph_module(self._joint_for(activation_budget, recomputed))
        share = activation_budget
        if recomputed:
            share -= self._mark_recomputed(gm.graph, recomputed)
        graphs = self._partition(gm, activation_budget, self._policy, early=moves, late=moves)
        return graphs, share

    def leaner_gm(self) -> fx.GraphModule:
        """Returns the joint graph that partitions are made of which save less than all: its results
        round as those of the partition that saves all.
        """
        if self._leaner_gm is None:
            gm = compat.clone_graph_module(self.gm) if fuses() else self.gm
            rewritten = fuses() and round_as_in(self.trial(1.0).graphs, gm.graph)
            self._leaner_gm = gm if rewritten else self.gm
        return self._leaner_gm

    def _joint_for(self, activation_budget: float, recomputed: frozenset[str]) -> fx.GraphModule:
        return self.leaner_gm() if activation_budget < 1.0 or recomputed else self.gm

    def _mark_recomputed(self, joint: fx.Graph, names: frozenset[str]) -> float:
        """Marks values of a joint graph, and what backward needs for them. Returns their share of
        the bytes that are saved by default.
        """
        forward, backward = self.trial(1.0).graphs
        mark_as_partitioned(joint, (forward, backward))
        chains = kernels_again(forward.graph, backward.graph, names)
        again = {node.name for chain in chains.values() for node in chain}
        for node in joint.nodes:
            if node.name in again:
                compat.mark_recompute(node)
        sizes = {
            node.name: nbytes(value_of(node))
            for node in saved_inputs(backward.graph.nodes)
            if not node.name.startswith("tangents")
        }
        return sum(sizes.get(name, 0) for name in names) / max(1, sum(sizes.values()))

    def recomputable(self) -> list[SavedValue]:
        """Returns the values that backward may compute again instead of finding them, those first
        that take the least time per byte where all of them are.
        """
        values, again = self._all_leaving()
        forward, backward = (each.graph for each in self.trial(1.0).graphs)
        return cheapest_first(values, kernels_again(forward, backward, again))

    def leaving_names(
        self, activation_budget: float = 1.0, recomputed: frozenset[str] = frozenset()
    ) -> list[str]:
        """Returns the names of what a trial saves and may leave the device, in the order in which
        forward returns it.

        Small values are among them: which values are large enough depends on the batch, and the
        places of values in this list must not.
        """
        graphs = self.trial(activation_budget, recomputed).graphs
        forward, backward = (each.graph for each in graphs)
        values = offloadable_values(forward, backward, self.user_outputs, least_bytes=0)
        return [node.name for node in values]

    def _all_leaving(self) -> tuple[list[SavedValue], dict[str, Recompute]]:
        """What may leave the device of what is saved by default, and how backward computes those
        values again that it may.
        """
        if self._recomputable is None:
            trial = self.trial(1.0)
            forward, backward = (each.graph for each in trial.graphs)
            movable = offloadable_values(forward, backward, self.user_outputs)
            values = saved_values(trial.step, movable)
            policies = {node.name: compat.recompute_policy(node) for node in self.gm.graph.nodes}
            bound = {name for name, policy in policies.items() if policy and "save" in policy[0]}
            names = {each.name for each in values} - bound if len(self._fractions) > 1 else ()
            self._recomputable = values, recomputes(forward, backward, names)
        return self._recomputable

    def offloading(self, trial: Trial, values: Sequence[SavedValue]) -> Trial:
        """Returns a trial with values of it on the host."""
        names = frozenset(each.name for each in values)
        key = trial.activation_budget, trial.recomputed, names
        if key not in self._made:
            forward, backward = map(compat.clone_graph_module, trial.graphs)
            graphs = _offloaded((forward, backward), names)
            self._made[key] = replace(
                trial, graphs=graphs, step=self._step(graphs, key), offloaded=tuple(values)
            )
        return self._made[key]

    def saved_values(
        self, activation_budget: float, recomputed: frozenset[str] = frozenset()
    ) -> list[SavedValue]:
        """Returns what may rest on the host of what a trial saves, in the order in which forward
        returns it; nothing if nothing may take memory of the host.
        """
        key = activation_budget, recomputed
        if key not in self._saved:
            trial = self.trial(*key)
            forward, backward = (each.graph for each in trial.graphs)
            values = (
                offloadable_values(forward, backward, self.user_outputs) if self.host_bytes else []
            )
            self._saved[key] = saved_values(trial.step, values)
        return self._saved[key]

    def is_counted(self, choice: Choice) -> bool:
        """Whether `add_to_peaks` has been called for a choice."""
        return self.in_chunks(choice.chunks)._counted.has(choice)

    def add_to_peaks(self, choice: Choice, added: Added) -> None:
        """Has the trial of a choice take as much memory as its code was found to. Other trials take
        what is found in addition at nodes that they have, too.
        """
        trials = self.in_chunks(choice.chunks)
        trials._counted.add(choice, _key_of(choice), added)
        for key, made in trials._made.items():
            trials._made[key] = replace(made, step=trials._step(made.graphs, key))
        trials._saved.clear()
        trials._recomputable = None

    def _step(self, graphs: Graphs, key: _Key) -> StepProblem:
        self._counted.mark(graphs, key)
        target, engines = current_target(), self._copy_engines
        problems = [problem_of(each.graph, target, copy_engines=engines) for each in graphs]
        return StepProblem(problems[0], problems[1], self.repetition)

    def fitting(self, rise: str | None) -> StepPlan:
        """Returns the plan without a budget of the step.

        Args:
            rise: memory budget of the passes that plan a schedule: kept parameters share it with
                collectives in flight. None keeps what does not raise the peak.
        """
        graphs = self.partition(compat.clone_graph_module(self.gm), 1.0)
        step = self._step(graphs, (1.0, frozenset(), frozenset()))
        trial = Trial(1.0, graphs, step, late=False)
        candidates, lean = self._keepable(trial), step.peak_bytes()
        if rise is None:
            kept = fitting_params(trial.step, candidates, lean)
            return StepPlan(trial, tuple(kept), (), 0.0, lean, lean, None)
        budget = parse_budget(rise, "option 'memory_budget'")
        limit = budget.limit_bytes(lean)
        choice = choose_kept(trial.step, candidates, limit, asked=False)
        counts_from_graphs = budget.most_bytes is None and budget.of_bytes is None
        text = f"{rise} of {lean}B" if counts_from_graphs else rise
        return StepPlan(trial, choice.kept, (), choice.total_us, choice.peak_bytes, limit, text)

    def saving_all(self) -> StepPlan:
        """Returns the plan with one gather and one reduction in flight that keeps no parameter and
        leaves out no activation. A budget in percent counts from its peak.
        """
        trial = self.trial(1.0)
        peak = trial.step.peak_bytes()
        return StepPlan(trial, (), (), 0.0, peak, peak, None)

    def with_own_peak(self, plan: StepPlan, graphs: Graphs) -> StepPlan:
        """Returns a plan with the peak of its own graphs: in a backward that gathers fewer
        parameters than that of its trial, more products may run late.
        """
        before, after = (
            {node.name: node for node in gm.graph.nodes if node.op == "call_function"}
            for gm in (plan.trial.graphs[1], graphs[1])
        )
        if [name for name in before if name in after] == [name for name in after if name in before]:
            return plan
        step = self.in_chunks(plan.trial.chunks)._step(graphs, _key_of(plan.choice))
        peak = max(
            plan_schedule(each, plan.limit_bytes).cost.peak_bytes
            for each in (step.forward, step.backward)
        )
        return replace(plan, peak_bytes=peak)

    def fastest(self, limit_bytes: int) -> StepPlan:
        """Returns the fastest plan within a limit, or that which exceeds it least if none fits."""
        best = self._fastest(limit_bytes)
        in_one = self._unlimited_us(self.trial(1.0))
        for chunks in self.chunk_counts():
            if best.fits and best.total_us <= _NEAR * in_one:
                break
            trials = self.in_chunks(chunks)
            if not best.fits or trials._unlimited_us(trials.trial(1.0)) < best.total_us:
                best = min(best, trials._fastest(limit_bytes), key=lambda each: each.rank)
        return best

    def _fastest(self, limit_bytes: int) -> StepPlan:
        """The fastest plan with this number of chunks."""
        full = self.trial(1.0)
        best = self._planned(full, limit_bytes)
        if best.fits and best.total_us <= _NEAR * self._unlimited_us(full):
            return best
        for each in self._leaner(full, limit_bytes):
            if not best.fits or self._unlimited_us(each) < best.total_us:
                best = min(best, self._planned(each, limit_bytes), key=lambda one: one.rank)
        if best.fits:
            return best
        for each in self._leanest(limit_bytes):
            if not best.fits or self._unlimited_us(each) < best.total_us:
                best = min(best, self._planned(each, limit_bytes), key=lambda one: one.rank)
        return best

    def _leaner(self, full: Trial, limit_bytes: int) -> Iterator[Trial]:
        """Yields trials with less memory than the one that saves all: with values on the host, with
        values that backward computes again, and with both.
        """
        values, again = self._all_leaving()
        rich = self._keeping_all(full)
        for host_bytes in dict.fromkeys((self.host_bytes, 0)):
            found = rank_leaving(full.step, rich, values, again, limit_bytes, host_bytes)
            for count in _counts(found):
                again_of = (each for each in found.ranked[:count] if not each.on_host)
                trial = self.trial(1.0, frozenset(each.value.name for each in again_of))
                fits = trial.step.peak_bytes() <= limit_bytes
                if fits or not host_bytes:
                    yield trial
                if not fits:
                    yield from itertools.islice(self._with_offloads(trial, limit_bytes), 1)

    def _leanest(self, limit_bytes: int = 0) -> Iterator[Trial]:
        """Yields trials with little memory, however long they take."""
        full = self.trial(1.0)
        yield full
        # Below the first of these limits, values leave although peaks remain.
        for limit in (least_limit(full.step, self.recomputable()), 0):
            yield from self._leaner(full, limit)
        for trial in map(self.trial, self._fractions):
            yield trial
            for limit in dict.fromkeys((limit_bytes, 0)):
                yield from self._with_offloads(trial, limit)

    def _with_offloads(self, trial: Trial, limit_bytes: int) -> Iterator[Trial]:
        """Yields a trial with values on the host: as few as make it fit, all that are idle at a
        peak above the limit, and half of those in between.
        """
        values = self.saved_values(trial.activation_budget, trial.recomputed)
        rich = self._keeping_all(trial)
        found = rank_leaving(trial.step, rich, values, {}, limit_bytes, self.host_bytes)
        for count in _counts(found):
            yield self.offloading(trial, [each.value for each in found.ranked[:count]])

    def _planned(self, trial: Trial, limit_bytes: int) -> StepPlan:
        choice = choose_kept(
            trial.step, self._keepable(trial), limit_bytes, caches=self.share >= WHOLE
        )
        return StepPlan(
            trial,
            choice.kept,
            choice.cached,
            choice.total_us,
            choice.peak_bytes,
            limit_bytes,
            f"{limit_bytes}B",
        )

    def limit_bytes(self, budget: str) -> int:
        """Returns the largest peak of this graph that the option `memory_budget` allows, beside the
        residuals of error feedback. They are held all the time, also by the step from which a
        percentage counts.

        Raises:
            OptionError: if the text is no memory budget.
        """
        parsed = parse_budget(budget, "option 'memory_budget'")
        step = self.trial(1.0).step
        most, least = parsed.most_bytes, step.peak_bytes(single_plan)
        if most is None:
            return parsed.limit_bytes(step.peak_bytes())
        # The rest of the step needs its part of what this graph does not need, and is taken to hold
        # as many residuals for its parameters.
        most -= int(self.residual_bytes / self.share) if self.share else 0
        return least + int(self.share * (most - least)) if most > least else most

    def least_bytes(self) -> int:
        """Returns the least limit that a plan fits."""
        found = min(each.step.peak_bytes(single_plan) for each in self._leanest())
        return min([found, *(self.in_chunks(each).least_bytes() for each in self.chunk_counts())])

    def most_bytes(self) -> int:
        """Returns a limit that is larger than the peak of any plan."""
        trial = self.trial(1.0)
        step = trial.step
        return self._keeping_all(trial).peak_bytes() + sum(
            job.full_bytes + job.launch_bytes + job.packed_bytes
            for problem in (step.forward, step.backward)
            for job in problem.jobs
        )

    def graphs(self, choice: Choice, *, copied: bool = True) -> Graphs:
        """Returns the graphs of a plan, before the passes of their levels.

        Args:
            choice: what the plan saves and keeps.
            copied: whether to leave the joint graph as it is.
        """
        if choice.chunks != self._chunks:
            return self.in_chunks(choice.chunks).graphs(choice, copied=copied)
        joint = self._joint_for(choice.activation_budget, choice.recomputed)
        gm = compat.clone_graph_module(joint) if copied else joint
        if choice.activation_budget < 1.0 or choice.recomputed:
            trial = self.trial(choice.activation_budget, choice.recomputed)
            mark_as_partitioned(gm.graph, trial.graphs)
        for node, _ in tagged(gm.graph, "full"):
            if node.name in choice.kept or node.name in choice.cached:
                mark_kept(node)
                retag(node, cached=node.name in choice.cached)
        made = self._partition(gm, 1.0, self._policy, late=choice.late)
        graphs = _offloaded(made, choice.offloaded)
        self._counted.mark(graphs, _key_of(choice))
        return graphs

    def other(self, gm: fx.GraphModule, recompute_elementwise: bool, *, caches: bool) -> Graphs:
        """Partitions another form of the joint graph with the same inputs and outputs, such as that
        of another stage.
        """
        policy = replace(self._policy, recompute_elementwise=recompute_elementwise, caches=caches)
        return self._partition(gm, 1.0, policy)

    def partition(self, gm: fx.GraphModule, activation_budget: float) -> Graphs:
        """Partitions the joint graph, or a copy of it, which is changed."""
        return self._partition(gm, activation_budget, self._policy)

    def _partition(
        self,
        gm: fx.GraphModule,
        activation_budget: float,
        policy: PartitionPolicy,
        *,
        early: bool = True,
        late: bool = False,
    ) -> Graphs:
        forward, backward = compat.partition(
            gm,
            self._inputs,
            recompute_elementwise=policy.recompute_elementwise,
            activation_budget=activation_budget,
            **self._options,
        )
        drop_unread_parts(forward.graph, backward.graph)
        remove_regathers(forward.graph)
        if policy.caches:
            mark_held_in_step(forward.graph, backward.graph)
        if early and fuses():
            run_early(backward.graph)
        if late:
            run_late(backward.graph)
        for each in (forward, backward):
            each.recompile()
        return forward, backward

    def _keepable(self, trial: Trial) -> Sequence[KeptParam]:
        return keepable_params(trial.step) if self._policy.keeps else ()

    def _unlimited_us(self, trial: Trial) -> float:
        """The bound of the step with as much memory as it can use."""
        return step_bound_us(self._keeping_all(trial))

    def _keeping_all(self, trial: Trial) -> StepProblem:
        """The step that keeps all that it can."""
        candidates = self._keepable(trial)
        cached = [each for each in candidates if self.share >= WHOLE and each.unchanged > 0]
        return trial.step.keeping([each for each in candidates if each not in cached], cached)


def _key_of(choice: Choice) -> _Key:
    return choice.activation_budget, choice.recomputed, choice.offloaded


def _counts(found: LeavingValues) -> list[int]:
    """How many values leave in the trials of a ranking."""
    fewest, most = found.fewest, len(found.ranked)
    return sorted({fewest, (3 * fewest + most) // 4, most} - {0})


def _offloaded(graphs: Graphs, names: frozenset[str]) -> Graphs:
    """Changes and returns graphs in which values rest on the host."""
    if names:
        offload_saved(graphs[0].graph, graphs[1].graph, names, "partition")
        for each in graphs:
            each.recompile()
    return graphs


def full_params(gm: fx.GraphModule) -> list[tuple[fx.Node, tuple[str, ...], int]]:
    """Returns the full parameters of a joint graph: node, names and the bytes that it holds if it
    stays.
    """
    return [
        (node, tag.params, nbytes(value_of(records_of(node) or node)))
        for node, tag in tagged(gm.graph, "full")
    ]
