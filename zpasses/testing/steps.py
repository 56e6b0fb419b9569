"""Run pipelines on graphs, and compare whole training steps on simulated ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from zpasses.graph.queries import copy_graph
from zpasses.pipeline.base_pass import Pass
from zpasses.pipeline.pipeline import Pipeline
from zpasses.pipeline.runner import PassRecord, Verify, run_passes
from zpasses.simulate.equality import check_outputs, copied, random_inputs
from zpasses.simulate.simulator import RankRun, simulate
from zpasses.testing.step_graphs import StepCapture


@dataclass(frozen=True)
class PipelineRun:
    """A graph after a pipeline."""

    graph: fx.GraphModule
    """A rewritten copy."""
    records: tuple[PassRecord, ...]
    """What each pass did."""


def run_pipeline(
    graph: fx.Graph | fx.GraphModule, pipeline: Pipeline | Pass | str, *, verify: Verify = "static"
) -> PipelineRun:
    """Run all passes of a pipeline on a copy of one graph, whatever their level, and verify the
    graph after each. Call it inside `fake_world` if a pass asks for the rank or the world size.

    Args:
        graph: the graph, which stays as it is.
        pipeline: a pipeline, one pass, or pipeline text.
        verify: how the graph is checked after each pass, as the option `verify` of a compile.

    Raises:
        PassError: if a pass raises or leaves an invalid graph.
        OptionError: if the text is not a pipeline.
    """
    if isinstance(pipeline, str):
        pipeline = Pipeline.parse(pipeline)
    passes = [pipeline] if isinstance(pipeline, Pass) else list(pipeline)
    copied = copy_graph(graph)
    records = run_passes(copied.graph, passes, verify=verify)
    copied.recompile()
    return PipelineRun(copied, tuple(records))


@dataclass(frozen=True)
class StepRun:
    """A training step on simulated ranks."""

    outputs: list[tuple[Any, ...]]
    """Per rank, in the order of the joint graph: the model's outputs, then a gradient or None for
    each input.
    """
    forward: list[RankRun]
    backward: list[RankRun]


def simulate_step(captures: Sequence[StepCapture], inputs: Sequence[Sequence[Any]]) -> StepRun:
    """Run the forward and backward graphs of all ranks, on inputs of the joint graph.

    Args:
        captures: what `capture_ranks` returns, captured with gradients.
        inputs: one list of inputs per rank, as `random_inputs` makes them for the graphs
            `before.joint`.

    Raises:
        ValueError: if a capture has no forward and backward graph.
        SimulationError: as `simulate` does.
    """
    for each in captures:
        if each.before.joint is None or each.after.forward is None or each.after.backward is None:
            raise ValueError(
                f"simulate_step: the capture of rank {each.rank} has no forward and backward "
                "graph; capture with train=True a model with gradients."
            )
    joint = _present(captures[0].before.joint)
    user = number_of_outputs(joint)
    tangents = len([node for node in _placeholders(joint) if "tangents" in node.name])
    forwards = [_present(each.after.forward) for each in captures]
    backwards = [_present(each.after.backward) for each in captures]
    groups = groups_of_captures(captures)
    return simulate_halves(forwards, backwards, inputs, groups, outputs=user, tangents=tangents)


def simulate_halves(
    forwards: Sequence[fx.GraphModule],
    backwards: Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[str, Sequence[int]],
    *,
    outputs: int,
    tangents: int,
) -> StepRun:
    """Run the forward and backward graphs of all ranks, on inputs of the joint graph.

    Args:
        outputs: number of the outputs of forward that backward does not read.
        tangents: number of the inputs at the end that only backward reads.
    """
    split = [(row[: len(row) - tangents], row[len(row) - tangents :]) for row in inputs]
    forward = simulate(forwards, [primals for primals, _ in split], groups)
    given = [[*run.outputs[outputs:], *rest] for run, (_, rest) in zip(forward, split, strict=True)]
    backward = simulate(backwards, given, groups)
    joined = [(*f.outputs[:outputs], *b.outputs) for f, b in zip(forward, backward, strict=True)]
    return StepRun(joined, forward, backward)


def assert_step_equals_reference(captures: Sequence[StepCapture], *, seed: int = 0) -> StepRun:
    """Check that the partitioned, rewritten graphs of all ranks compute bit for bit what the joint
    graphs before all passes compute. Inputs are random small integers.

    Args:
        captures: what `capture_ranks` returns.
        seed: seed of the inputs.

    Raises:
        AssertionError: if an output or gradient of a rank differs.
        SimulationError: if real ranks would hang, race or disagree.
        ValueError: if a capture has no forward and backward graph.
    """
    reference = [_present(each.before.joint) for each in captures]
    inputs = random_inputs(reference, seed=seed)
    groups = groups_of_captures(captures)
    expected = simulate(reference, copied(inputs), groups)
    run = simulate_step(captures, inputs)
    for rank, (ours, theirs) in enumerate(zip(run.outputs, expected, strict=True)):
        check_outputs(ours, theirs.outputs, f"rank {rank}")
    return run


def groups_of_captures(captures: Sequence[StepCapture]) -> dict[str, tuple[int, ...]]:
    """Process group -> its ranks, of all groups that any rank knows."""
    return {name: ranks for each in captures for name, ranks in each.groups.items()}


def number_of_outputs(joint: fx.GraphModule) -> int:
    """The number of outputs of a joint graph that are not gradients."""
    inputs = [node for node in _placeholders(joint) if "tangents" not in node.name]
    returned: Any = joint.graph.output_node().args[0]
    return len(returned) - len(inputs)


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def _present(graph: fx.GraphModule | None) -> fx.GraphModule:
    if graph is None:
        raise ValueError("the capture has no joint graph; capture a model with gradients.")
    return graph
