"""Assertions about the graphs that a pass produces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zpasses.graph.nodes import collectives, value_of
from zpasses.testing.capture import copy_graph
from zpasses.testing.semantics import Semantics
from zpasses.testing.simulator import RankRun, simulate

__all__ = ["assert_deterministic", "assert_equal_bits", "check_equal", "random_inputs"]

Graphs = fx.GraphModule | Sequence[fx.GraphModule]


def random_inputs(
    graphs: Sequence[fx.GraphModule], *, seed: int = 0, bound: int = 3
) -> list[list[Any]]:
    """Make inputs for `simulate`: one list per rank, with the shapes and dtypes that the graph's
    inputs record.

    Values are small integers, so sums are exact in any order. Incoming gradients ("tangents") are
    multiples of the number of ranks, so averages over ranks are exact too. Ranks get different
    values.

    Args:
        graphs: one graph per rank.
        bound: floating-point values lie in -bound..bound. Integers lie in 0..bound - 1, so they are
            valid indices of any dimension of at least that size.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            _random_input(node, len(graphs), bound, generator)
            for node in graph.graph.nodes
            if node.op == "placeholder"
        ]
        for graph in graphs
    ]


def _random_input(node: fx.Node, ranks: int, bound: int, generator: torch.Generator) -> Any:
    value = value_of(node)
    if not isinstance(value, Tensor):
        return getattr(getattr(value, "node", None), "hint", value)
    shape = [int(size) if isinstance(size, int) else int(size.node.hint) for size in value.shape]
    if value.dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not (value.is_floating_point() or value.is_complex()):
        return torch.randint(0, max(bound, 1), shape, generator=generator).to(value.dtype)
    drawn = torch.randint(-bound, bound + 1, shape, generator=generator)
    return (drawn * ranks if node.name.startswith("tangents") else drawn).to(value.dtype)


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
        copies = [
            [value.clone() if isinstance(value, Tensor) else value for value in values]
            for values in inputs
        ]
        runs.append((simulate(graphs, copies, groups, semantics=semantics), copies))
    (expected, expected_inputs), (actual, actual_inputs) = runs
    for rank, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        names = _output_names(
            reference if isinstance(reference, fx.GraphModule) else reference[rank]
        )
        if len(ours.outputs) != len(theirs.outputs):
            raise AssertionError(
                f"rank {rank}: the rewritten graph has {len(ours.outputs)} outputs, the reference "
                f"{len(theirs.outputs)}."
            )
        for i, (got, wanted) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
            check_equal(got, wanted, f"rank {rank}, output {i}{names.get(i, '')}")
        for i, (got, wanted) in enumerate(
            zip(actual_inputs[rank], expected_inputs[rank], strict=True)
        ):
            check_equal(got, wanted, f"rank {rank}, input {i} after the run")
    return actual


def _output_names(gm: fx.GraphModule) -> dict[int, str]:
    returned = gm.graph.output_node().args[0]
    flat = returned if isinstance(returned, (list, tuple)) else [returned]
    return {i: f" ({item.name})" for i, item in enumerate(flat) if isinstance(item, fx.Node)}


def check_equal(got: Any, wanted: Any, where: str) -> None:
    """Raise AssertionError, which names `where`, unless two values are equal bit for bit."""
    if not (isinstance(got, Tensor) and isinstance(wanted, Tensor)):
        if type(got) is not type(wanted) or got != wanted:
            raise AssertionError(
                f"{where}: is {_short(got)}, but the reference gives {_short(wanted)}."
            )
        return
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        raise AssertionError(
            f"{where}: is {_short(got)}, but the reference gives {_short(wanted)}."
        )
    if got.numel() == 0:
        return
    ours, theirs = _bits(got), _bits(wanted)
    different = (ours != theirs).any(dim=1).nonzero().flatten()
    if len(different):
        at = int(different[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
        raise AssertionError(
            f"{where}: {len(different)} of {got.numel()} elements differ. First difference at "
            f"{index}: {_element(got, at)}, but the "
            f"reference gives {_element(wanted, at)}."
        )


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of each element, uint8[elements, bytes]."""
    # A tensor of one element is contiguous whatever its stride, but only a stride of 1 can be
    # viewed as bytes.
    row = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return row.view(torch.uint8).reshape(tensor.numel(), tensor.element_size())


def _element(tensor: Tensor, at: int) -> str:
    raw = bytes(reversed(_bits(tensor)[at].tolist()))
    return f"{tensor.detach().reshape(-1)[at].item()!r} (0x{raw.hex()})"


def _short(value: Any) -> str:
    return (
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, Tensor)
        else repr(value)
    )


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
