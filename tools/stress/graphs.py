"""The suite "graphs": random pipelines on random graphs of one to eight simulated ranks. Results
are compared bit for bit with those of the graphs before the passes.

Values are small integers, so that sums are exact in any order. One traced graph serves the
pipelines of several seeds, because tracing takes most of the time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from zpasses.cost.target import TARGETS, use_target
from zpasses.errors import OptionError, PassError
from zpasses.pipeline import pipeline as pipelines
from zpasses.pipeline.pipeline import Level, Pipeline, run_passes
from zpasses.ranks.vote import simulated_answers
from zpasses.testing import RankRun, copy_graph, fake_world, random_inputs, simulate
from zpasses.testing.capture import TracedJoint
from zpasses.testing.compare import check_equal
from zpasses.tools.stress.cases import CaseResult, Outcome, StressConfig
from zpasses.tools.stress.drawn_models import DrawnModel, draw_model, draw_pipeline

__all__ = ["run"]

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
        if seconds > config.limit_s:
            outcome, detail = "hang", f"{detail}\nIt took {seconds:.0f} s."
        yield CaseResult("graphs", case.kind, seed, outcome, f"{case}: {detail}", seconds)


@dataclass(frozen=True)
class _Graphs:
    """The joint graphs of all ranks of one drawn model, with inputs and expected results."""

    number: int
    model: DrawnModel
    traced: tuple[TracedJoint, ...]
    inputs: Sequence[Sequence[Any]]
    expected: Sequence[RankRun]

    @classmethod
    def drawn(cls, number: int) -> _Graphs:
        draw = random.Random(f"graph {number}")
        world = draw.choice(_WORLDS)
        while True:
            model = draw_model(draw)
            if any(value.requires_grad for value in model.inputs(0, world)):
                drawn = cls._of(number, model, world)
                if drawn.is_exact():
                    return drawn

    @classmethod
    def _of(cls, number: int, model: DrawnModel, world: int) -> _Graphs:
        traced = []
        for rank in range(world):
            with fake_world(world, rank):
                traced.append(model.traced(rank, world))
        joints = [each.joint for each in traced]
        inputs = random_inputs(joints, seed=number, bound=1)
        return cls(number, model, tuple(traced), inputs, simulate(joints, _cloned(inputs)))

    def is_exact(self) -> bool:
        """Whether the results are integers that float32 adds without rounding, in any order."""
        values = [value for run in self.expected for value in run.outputs if value is not None]
        return all(bool((value.abs() < _EXACT).all()) for value in values)

    @property
    def world(self) -> int:
        return len(self.traced)


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
        singles = [name for name in known if name not in named]
        text = draw_pipeline(draw, singles)
        if draw.random() < 0.2:
            extra = draw_pipeline(draw, singles) if draw.random() < 0.3 else ""
            text = ",".join(filter(None, [draw.choice(named), extra]))
        return cls(graphs, text, draw.choice(_TARGETS), draw.random() < 0.5)

    @property
    def kind(self) -> str:
        return "forward and backward" if self.partitioned else "joint graph"

    def __str__(self) -> str:
        return (
            f"{self.text!r} for {self.target} on {self.kind} of {self.graphs.world} ranks of "
            f"{self.graphs.model}"
        )

    def run(self) -> tuple[Outcome, str]:
        try:
            pipeline = Pipeline.parse(self.text)
            with simulated_answers():
                ranks = [self._rewrite(rank, pipeline) for rank in range(self.graphs.world)]
        except (PassError, OptionError) as error:
            if _is_failure_inside(error):
                return "crash", f"{error}"
            return "refused", str(error)
        try:
            outputs = self._simulate(ranks)
        except Exception as error:
            return "wrong", f"after the passes, the graphs do not run: {error}"
        for rank, (got, run) in enumerate(zip(outputs, self.graphs.expected, strict=True)):
            for i, (ours, theirs) in enumerate(zip(got, run.outputs, strict=True)):
                try:
                    check_equal(ours, theirs, f"rank {rank}, output {i}")
                except AssertionError as error:
                    return "wrong", str(error)
        return "equal", "all outputs of all ranks are equal"

    def _rewrite(self, rank: int, pipeline: Pipeline) -> tuple[fx.GraphModule, ...]:
        traced = self.graphs.traced[rank]
        copied = copy_graph(traced.joint)
        with fake_world(self.graphs.world, rank), use_target(TARGETS[self.target]):
            if not self.partitioned:
                pipeline(copied.graph)
                return (copied,)
            run_passes(copied.graph, pipeline.at(Level.JOINT))
            forward, backward = traced.partition(copied)
            run_passes(forward.graph, pipeline.at(Level.FORWARD))
            run_passes(backward.graph, pipeline.at(Level.BACKWARD))
            return forward, backward

    def _simulate(self, ranks: Sequence[tuple[fx.GraphModule, ...]]) -> list[Sequence[Any]]:
        """Per rank the outputs in the order of the joint graph."""
        inputs = _cloned(self.graphs.inputs)
        if not self.partitioned:
            return [run.outputs for run in simulate([graphs[0] for graphs in ranks], inputs)]
        return _simulate_step(self.graphs, ranks, inputs)


def _simulate_step(
    graphs: _Graphs, ranks: Sequence[tuple[fx.GraphModule, ...]], inputs: Sequence[Sequence[Any]]
) -> list[Sequence[Any]]:
    user = graphs.traced[0].outputs
    primals = 2 * len(graphs.model.params)
    forward = simulate([each[0] for each in ranks], [values[:primals] for values in inputs])
    given = [
        [*run.outputs[user:], *values[primals:]]
        for run, values in zip(forward, inputs, strict=True)
    ]
    backward = simulate([each[1] for each in ranks], given)
    return [(*f.outputs[:user], *b.outputs) for f, b in zip(forward, backward, strict=True)]


def _cloned(inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [[v.clone() if isinstance(v, Tensor) else v for v in row] for row in inputs]


def _is_failure_inside(error: Exception) -> bool:
    """Whether a pass failed by an exception that it did not mean to raise."""
    return error.__cause__ is not None and not isinstance(error.__cause__, (PassError, OptionError))
