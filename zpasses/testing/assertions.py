"""Assertions about the graphs that a pass produces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from zpasses.graph.queries import collectives, copy_graph
from zpasses.simulate.equality import check_equal, check_outputs, copied
from zpasses.simulate.semantics import Semantics
from zpasses.simulate.simulator import RankRun, simulate

Graphs = fx.GraphModule | Sequence[fx.GraphModule]


def assert_equal_bits(
    reference: Graphs,
    rewritten: Graphs,
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[str, Sequence[int]] | None = None,
    *,
    semantics: Mapping[Any, Semantics] | None = None,
) -> list[RankRun]:
    """Simulate two versions of a graph on copies of the same inputs, and check that all outputs of
    all ranks are equal bit for bit.

    0.0 differs from -0.0, and NaNs with different payloads differ. What the graphs write to their
    inputs must be equal as well. A pass may change the order of additions, which changes rounding,
    so use inputs whose sums are exact, such as those of `random_inputs`.

    Args:
        reference: the graph before the pass, for all ranks or one per rank.
        rewritten: the graph after it.
        inputs: one list of inputs per rank.
        groups: as for `simulate`.
        semantics: as for `simulate`.

    Returns:
        The runs of the rewritten graphs, one per rank.

    Raises:
        AssertionError: if an output or input differs. The message names the rank, the output and
            the first difference.
        SimulationError: as `simulate` does.
    """
    runs = []
    for graphs in (reference, rewritten):
        copies = copied(inputs)
        runs.append((simulate(graphs, copies, groups, semantics=semantics), copies))
    (expected, expected_inputs), (actual, actual_inputs) = runs
    for rank, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        names = _output_names(
            reference if isinstance(reference, fx.GraphModule) else reference[rank]
        )
        check_outputs(ours.outputs, theirs.outputs, f"rank {rank}", names)
        for i, (got, wanted) in enumerate(
            zip(actual_inputs[rank], expected_inputs[rank], strict=True)
        ):
            check_equal(got, wanted, f"rank {rank}, input {i} after the run")
    return actual


def _output_names(gm: fx.GraphModule) -> dict[int, str]:
    returned = gm.graph.output_node().args[0]
    flat = returned if isinstance(returned, (list, tuple)) else [returned]
    return {i: f" ({item.name})" for i, item in enumerate(flat) if isinstance(item, fx.Node)}


def assert_deterministic(
    pass_: Callable[[fx.Graph], object], graph: fx.Graph | fx.GraphModule, *, copies: int = 3
) -> None:
    """Check that rewriting copies of a graph gives the same collectives in the same order. Ranks
    rewrite their graphs separately, so a pass must be deterministic.

    The nodes of the copies have different addresses, so an order taken from a set or from `id` is
    detected.

    Args:
        pass_: a pass, a pipeline, or any function that rewrites a graph in place.
        graph: not modified.
        copies: how many copies to compare.

    Raises:
        AssertionError: names the first difference.
    """
    sequences = []
    kept = []  # keeps the addresses of earlier copies in use
    for _ in range(copies):
        rewritten = copy_graph(graph)
        kept.append(rewritten)
        pass_(rewritten.graph)
        sequences.append([each for _, each in collectives(rewritten.graph)])
    for sequence in sequences[1:]:
        for i, (first, other) in enumerate(zip(sequences[0], sequence, strict=False)):
            if first != other:
                raise AssertionError(
                    f"{pass_} is not deterministic: collective {i} is {first} in one copy, but "
                    f"{other} in another."
                )
        if len(sequence) != len(sequences[0]):
            raise AssertionError(
                f"{pass_} is not deterministic: {len(sequences[0])} collectives in one copy, "
                f"{len(sequence)} in another."
            )
