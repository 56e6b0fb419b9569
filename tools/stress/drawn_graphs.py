"""The suite "graphs": random pipelines on random graphs of one to eight simulated ranks. Results
are compared bit for bit with those of the graphs before the passes.

Values are small integers, so that sums are exact in any order. One traced graph serves the
pipelines of several seeds, because tracing takes most of the time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from zpasses.cost.time.target import TARGETS, use_target
from zpasses.errors import OptionError, PassError
from zpasses.pipeline import pipeline as pipelines
from zpasses.pipeline.base_pass import Level
from zpasses.pipeline.pipeline import Pipeline
from zpasses.pipeline.runner import run_passes
from zpasses.ranks.agree import simulated_answers
from zpasses.simulate.equality import check_outputs, copied
from zpasses.testing import JointRecipe, RankRun, copy_graph, random_inputs, simulate
from zpasses.testing.drawing import draw_joint_recipe, draw_pipeline
from zpasses.testing.step_graphs import TracedJoint
from zpasses.testing.steps import simulate_halves
from zpasses.tools.stress.cases import CaseResult, Outcome, StressConfig

_SEEDS_PER_GRAPH = 8
_TARGETS = ("cpu", "h100", "mi300x")
_WORLDS = range(1, 9)
_EXACT = 1 << 20
"""Sums of a few results below this are exact in float32."""


def run(seeds: Iterable[int], config: StressConfig) -> Iterator[CaseResult]:
    """One pipeline on one graph per seed."""
    graphs: _Graphs | None = None
    for seed in seeds:
        started = time.perf_counter()
        if graphs is None or graphs.number != seed // _SEEDS_PER_GRAPH:
            graphs = _Graphs.drawn(seed // _SEEDS_PER_GRAPH)
        case = _Case.drawn(seed, graphs)
        outcome, detail = case.run()
        seconds = time.perf_counter() - started
        if seconds > config.case_limit_s:
            outcome, detail = "hang", f"{detail}\nIt took {seconds:.0f} s."
        yield CaseResult("graphs", case.kind, seed, outcome, f"{case}: {detail}", seconds)


@dataclass(frozen=True)
class _Graphs:
    """The joint graphs of all ranks of one drawn recipe, with inputs and expected results."""

    number: int
    recipe: JointRecipe
    traced: Sequence[TracedJoint]
    groups: Mapping[str, Sequence[int]]
    inputs: Sequence[Sequence[Any]]
    expected: Sequence[RankRun]

    @classmethod
    def drawn(cls, number: int) -> _Graphs:
        draw = random.Random(f"graph {number}")
        while True:
            recipe = draw_joint_recipe(draw.choice, world_sizes=_WORLDS, replicas=(1, 1, 2))
            drawn = cls._of(number, recipe)
            if drawn.is_exact():
                return drawn

    @classmethod
    def _of(cls, number: int, recipe: JointRecipe) -> _Graphs:
        traced, groups = recipe.traced(), recipe.groups()
        joints = [each.joint for each in traced]
        inputs = random_inputs(joints, seed=number, bound=1)
        expected = simulate(joints, copied(inputs), groups)
        return cls(number, recipe, traced, groups, inputs, expected)

    def is_exact(self) -> bool:
        """Whether the results are integers that float32 adds without rounding, in any order."""
        values = [value for run in self.expected for value in run.outputs if value is not None]
        return all(bool((value.abs() < _EXACT).all()) for value in values)


@dataclass(frozen=True)
class _Case:
    """One pipeline on one graph."""

    graphs: _Graphs
    text: str
    target: str
    partitioned: bool
    """Whether passes run at their levels, with the partitioner between them, or all on the joint
    graph."""

    @classmethod
    def drawn(cls, seed: int, graphs: _Graphs) -> _Case:
        draw = random.Random(f"pipeline {seed}")
        known = pipelines.catalogue()
        named = [name for name, entry in known.items() if isinstance(entry, Pipeline)]
        text = draw_pipeline(draw.choice, lowered=False, ordered=draw.random() < 0.7)
        if draw.random() < 0.2:
            extra = text if draw.random() < 0.3 else ""
            text = ",".join(filter(None, [draw.choice(named), extra]))
        return cls(graphs, text, draw.choice(_TARGETS), draw.random() < 0.5)

    @property
    def kind(self) -> str:
        return "forward and backward" if self.partitioned else "joint graph"

    def __str__(self) -> str:
        return f"{self.text!r} for {self.target} on {self.kind} of {self.graphs.recipe}"

    def run(self) -> tuple[Outcome, str]:
        try:
            pipeline = Pipeline.parse(self.text)
            with simulated_answers():
                world = range(self.graphs.recipe.world_size)
                ranks = [self._rewrite(rank, pipeline) for rank in world]
        except OptionError as error:
            return "crash", f"the drawn pipeline is not valid: {error}"
        except PassError as error:
            return "crash" if error.__cause__ is not None else "refused", str(error)
        try:
            outputs = self._simulate(ranks)
        except Exception as error:
            return "wrong", f"after the passes, the graphs do not run: {error}"
        try:
            for rank, (got, run) in enumerate(zip(outputs, self.graphs.expected, strict=True)):
                check_outputs(got, run.outputs, f"rank {rank}")
        except AssertionError as error:
            return "wrong", str(error)
        return "equal", "all outputs of all ranks are equal"

    def _rewrite(self, rank: int, pipeline: Pipeline) -> tuple[fx.GraphModule, ...]:
        traced = self.graphs.traced[rank]
        copied = copy_graph(traced.joint)
        with self.graphs.recipe.world(rank), use_target(TARGETS[self.target]):
            if not self.partitioned:
                pipeline(copied.graph)
                return (copied,)
            run_passes(copied.graph, pipeline.at(Level.JOINT))
            forward, backward = traced.partition(copied)
            run_passes(forward.graph, pipeline.at(Level.FORWARD))
            run_passes(backward.graph, pipeline.at(Level.BACKWARD))
            return forward, backward

    def _simulate(self, ranks: Sequence[tuple[fx.GraphModule, ...]]) -> Sequence[Sequence[Any]]:
        """Per rank the outputs in the order of the joint graph."""
        inputs, groups = copied(self.graphs.inputs), self.graphs.groups
        if not self.partitioned:
            return [run.outputs for run in simulate([each[0] for each in ranks], inputs, groups)]
        first, last = ([each[at] for each in ranks] for at in (0, 1))
        outputs = self.graphs.traced[0].outputs
        tangents = len(inputs[0]) - 2 * len(self.graphs.recipe.params)
        run = simulate_halves(first, last, inputs, groups, outputs=outputs, tangents=tangents)
        return list(run.outputs)
