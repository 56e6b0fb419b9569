"""Partitioning of a joint graph: which activations to save, and which full parameters to keep.

After a trial partition, peak memory and duration of the step are known by the cost model. The
backend then keeps full parameters from forward to backward: those that do not raise the peak, or,
with the option `memory_budget`, those that save most time within it. If the trial does not fit the
budget, backward recomputes more. The graph is then partitioned again, with marks on what to save.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.cost.bound import schedule_bound
from zpasses.cost.kept_params import (
    KeptParam,
    StepProblem,
    choose_kept,
    fitting_params,
    keepable_params,
)
from zpasses.cost.memory import liveness
from zpasses.cost.schedule_evaluation import single_plan
from zpasses.cost.schedule_problem import problem_of
from zpasses.cost.target import current_target
from zpasses.errors import MemoryBudgetError
from zpasses.graph.nodes import nbytes, value_of
from zpasses.graph.tags import GATHER_ROLES, retag, tag_of, tagged
from zpasses.option_values import parse_budget
from zpasses.ranks.vote import exchange

__all__ = ["PartitionPolicy", "Partitioned", "partition_step"]

log = logging.getLogger("zpasses")

_GIB = float(1 << 30)
_MIB = float(1 << 20)

Graphs = tuple[fx.GraphModule, fx.GraphModule]
"""Forward and backward."""


@dataclass(frozen=True)
class PartitionPolicy:
    """What a step may keep and recompute."""

    budget: str | None
    """Memory budget of the step, such as "60GiB" or "10%"; None keeps only what does not raise the
    peak, and recomputes nothing more."""
    share: float
    """Part of the bytes of the step's sharded parameters that this graph reads, from 0 to 1."""
    groups: tuple[str, ...]
    """Process groups whose ranks must partition identically."""
    recompute_elementwise: bool


@dataclass(frozen=True)
class Partitioned:
    """Forward and backward, and what was decided."""

    graphs: Graphs
    limit_bytes: int | None
    """The budget in bytes; None without a budget."""
    note: str
    """What was decided, for logs and dumps; "" if nothing was."""


_ACTIVATIONS = (1.0, 0.7, 0.4, 0.2, 0.1)
"""Fractions of the activations to save that are tried with a budget."""
_NEAR = 1.02
"""A step this close to its bound without a memory limit needs no more memory."""
_WHOLE = 0.999
"""Least share of the parameters of a graph that is a whole step."""


def partition_step(
    gm: fx.GraphModule,
    joint_inputs: Sequence[Any],
    policy: PartitionPolicy,
    **kwargs: Any,
) -> Partitioned:
    """Partition a joint graph that is marked so that backward gathers parameters again.

    Args:
        gm: the joint graph, after all passes at its level.
        joint_inputs: its inputs.
        policy: what the step may keep and recompute.
        kwargs: passed on to torch's partitioner.

    Raises:
        MemoryBudgetError: if the step does not fit the budget however much is recomputed.
    """
    return _Partitioner(gm, joint_inputs, policy, kwargs).run()


@dataclass(frozen=True)
class _Trial:
    """A partition that keeps nothing, and what it is best to keep."""

    activations: float
    graphs: Graphs
    step: StepProblem
    kept: tuple[KeptParam, ...]
    total_us: float
    peak_bytes: int
    limit_bytes: int

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    @property
    def rank(self) -> tuple[int, float]:
        """Bytes above the limit, microseconds; lower is better."""
        return max(0, self.peak_bytes - self.limit_bytes), self.total_us


class _Partitioner:
    def __init__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[Any],
        policy: PartitionPolicy,
        kwargs: dict[str, Any],
    ) -> None:
        self._gm, self._inputs, self._policy, self._kwargs = gm, joint_inputs, policy, kwargs

    def run(self) -> Partitioned:
        budget, share = self._policy.budget, self._policy.share
        if budget is None and share < _WHOLE:
            return Partitioned(self._partition(self._gm, 1.0), None, "")
        if budget is not None and share < _WHOLE:
            log.warning(
                "memory_budget=%r bounds each graph by itself, and this graph reads %.0f %% of the "
                "bytes of the model's sharded parameters. Compile the whole step as one graph "
                "(torch.compile(..., fullgraph=True) says what breaks it), so that the budget "
                "bounds the step.",
                budget,
                100 * share,
            )
        trial = self._fastest(budget) if budget is not None else self._fitting()
        activations, kept, limit = self._adopted(trial)
        if not kept and activations == trial.activations:
            graphs = trial.graphs
        else:
            for node in kept:
                _mark_kept(node)
            graphs = self._partition(self._gm, activations)
        note = self._note(trial, activations, kept)
        return Partitioned(graphs, limit if budget is not None else None, note)

    def _partition(self, gm: fx.GraphModule, activations: float) -> Graphs:
        return compat.partition(
            gm,
            self._inputs,
            recompute_elementwise=self._policy.recompute_elementwise,
            activation_budget=activations,
            **self._kwargs,
        )

    def _trial(self, activations: float) -> tuple[Graphs, StepProblem]:
        graphs = self._partition(compat.clone_graph_module(self._gm), activations)
        target = current_target()
        return graphs, StepProblem(*(problem_of(each.graph, target) for each in graphs))

    def _fitting(self) -> _Trial:
        """Without a budget: keep what does not raise the peak."""
        graphs, step = self._trial(1.0)
        lean = step.peak_bytes()
        kept = fitting_params(step, keepable_params(step), lean)
        return _Trial(1.0, graphs, step, tuple(kept), 0.0, lean, lean)

    def _fastest(self, text: str) -> _Trial:
        """With a budget: the fastest trial that fits."""
        budget = parse_budget(text, "option 'memory_budget'")
        best: _Trial | None = None
        limit: int | None = None
        for activations in _ACTIVATIONS:
            graphs, step = self._trial(activations)
            if limit is None:
                limit = self._limit_bytes(step, budget)
            choice = choose_kept(step, limit)
            trial = _Trial(
                activations,
                graphs,
                step,
                choice.kept,
                choice.total_us,
                choice.peak_bytes,
                limit,
            )
            if best is None or trial.rank < best.rank:
                best = trial
            elif best.fits:
                break  # recomputing more is slower
            if best.fits and best.total_us <= _NEAR * _unlimited_us(step):
                break
        assert best is not None
        if not best.fits:
            raise MemoryBudgetError(_too_little(text, best))
        return best

    def _limit_bytes(self, step: StepProblem, budget: float | int) -> int:
        if isinstance(budget, float):
            return int(step.peak_bytes() * (1 + budget))
        least = step.peak_bytes(single_plan)
        # The rest of the step needs its part of what this graph does not need.
        return least + int(self._policy.share * (budget - least)) if budget > least else budget

    def _adopted(self, trial: _Trial) -> tuple[float, list[fx.Node], int]:
        """The decision of the first rank, which all ranks adopt: they must gather identically.

        Ranks may have other shapes, and may compile a graph again when the others do not. Equal
        parameters therefore always get the same decision.

        Returns the fraction of activations to save, the full parameters to keep (nodes of the joint
        graph), and the limit in bytes.
        """
        full = [node for node, _ in tagged(self._gm.graph, "full")]
        described = [(_params(node), nbytes(value_of(node))) for node in full]
        wanted = {each.name for each in trial.kept}
        mine: list[Any] = [
            trial.activations,
            [at for at, node in enumerate(full) if node.name in wanted],
            trial.limit_bytes,
        ]
        key = hashlib.sha256(repr((described, self._policy)).encode()).hexdigest()
        for group in self._policy.groups:
            answers = exchange(
                group,
                "which parameters to keep for backward",
                [key, mine],
                remember=f"{key} {current_target()!r}",
            )
            # If another rank has other parameters, the comparison of collectives reports it later.
            if all(answer[0] == key for answer in answers):
                mine = answers[0][1]
        activations, kept, limit = mine
        return activations, [full[at] for at in kept], limit

    def _note(self, trial: _Trial, activations: float, kept: Sequence[fx.Node]) -> str:
        held = sum(nbytes(value_of(node)) for node in kept)
        parts = []
        if kept:
            names = ", ".join(name for node in kept[:3] for name in _params(node))
            more = f" and {len(kept) - 3} more" if len(kept) > 3 else ""
            parts.append(f"keeps {held / _MIB:.1f} MiB until backward: {names}{more}")
        if activations < 1.0:
            parts.append(f"saves {100 * activations:.0f} % of the activations")
        if self._policy.budget is not None:
            parts.append(
                f"predicted {trial.total_us / 1e3:.2f} ms, bound "
                f"{_bound_us(trial.step.keeping(trial.kept)) / 1e3:.2f} ms, peak "
                f"{trial.peak_bytes / _GIB:.3f} of {trial.limit_bytes / _GIB:.3f} GiB"
            )
        return "; ".join(parts)


def _bound_us(step: StepProblem) -> float:
    return sum(schedule_bound(problem).total_us for problem in (step.forward, step.backward))


def _unlimited_us(step: StepProblem) -> float:
    """The bound of the step with as much memory as it can use."""
    return _bound_us(step.keeping(keepable_params(step)))


def _params(full: fx.Node) -> tuple[str, ...]:
    tag = tag_of(full)
    return tag.params if tag is not None else ()


def _mark_kept(full: fx.Node) -> None:
    """Have the partitioner save a full parameter instead of gathering it again."""
    compat.mark_saved(full)
    retag(full, kept=True)
    _unmark_inputs(full)


def _unmark_inputs(full: fx.Node) -> None:
    queue = list(full.all_input_nodes)
    while queue:
        node = queue.pop()
        tag = tag_of(node)
        if tag is not None and tag.role in GATHER_ROLES:
            compat.unmark_recompute(node)
            queue += node.all_input_nodes


def _too_little(text: str, trial: _Trial) -> str:
    """Why a step does not fit its budget."""
    peaks = [liveness(gm.graph) for gm in trial.graphs]
    largest = max(peaks, key=lambda each: each.peak_bytes)
    holders = ", ".join(
        f"{buffer.node.name} {list(value.shape) if hasattr(value, 'shape') else ''} "
        f"{buffer.nbytes / _MIB:.1f} MiB"
        for buffer in largest.alive_at(largest.peak_node)[:5]
        for value in [value_of(buffer.node)]
    )
    missing = trial.peak_bytes - trial.limit_bytes
    graph = "forward" if largest is peaks[0] else "backward"
    return (
        f"memory_budget={text!r}: the leanest plan, which saves {100 * trial.activations:.0f} % of "
        f"the activations and keeps no parameter, needs {trial.peak_bytes / _MIB:.1f} MiB above "
        f"what rests between steps, {missing / _MIB:.1f} MiB more than the budget. At its peak, in "
        f"{graph}, the largest values are: {holders}. Raise the budget, take a smaller batch, or "
        "train on more ranks."
    )
