"""Run one pass's output on simulated ranks against its input, in the process that compiles.

A rank knows only its own graph. All simulated ranks therefore run it, each on inputs of its own.
Only what this rank computes is compared: the others stand for its peers. Peers that hold another
number of rows are simulated with this rank's rows, padded with zeros.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.errors import PassError
from zpasses.graph.queries import collectives, copy_graph, value_of
from zpasses.simulate.equality import check_equal, copied, random_inputs
from zpasses.simulate.semantics import PADDED_DIALECT
from zpasses.simulate.simulator import simulate

PassCheck = Callable[[fx.Graph, str, bool], None]
"""(graph after the pass, name of the pass, whether sums may be reordered) -> raises PassError."""


def start_simulation(
    graph: fx.Graph, changes_values: Callable[[fx.Graph], object] | None = None
) -> PassCheck:
    """Copy a graph before a pass. Returns the check of the graph after it: all outputs of this
    rank, and what it writes to its inputs, must be equal bit for bit.

    Args:
        changes_values: as in `zpasses.pipeline.facts.Facts`. Rewrites the copy.
    """
    reference = copy_graph(graph)
    if changes_values is not None:
        changes_values(reference.graph)
        reference.recompile()

    def check(rewritten: fx.Graph, pass_name: str, reorders_sums: bool) -> None:
        with compat.no_dispatch_modes(), _uninitialised_is_nan():  # torch may be compiling
            _check(reference, copy_graph(rewritten), pass_name, reorders_sums)

    return check


def _check(
    reference: fx.GraphModule, rewritten: fx.GraphModule, pass_name: str, reorders_sums: bool
) -> None:
    world = _World.of([reference.graph, rewritten.graph])
    inputs, expected = _run_reference(reference, world, pass_name)
    try:
        actual = _run(rewritten, inputs, world)
    except Exception as error:
        raise PassError(
            f"pass {pass_name!r}: on simulated ranks, the graph before the pass runs, but not the "
            f"graph after it: {error}"
        ) from error
    tolerance = _tolerance(reference.graph) if reorders_sums else 0.0
    for where, got, wanted in zip(_places(reference.graph), actual, expected, strict=True):
        _compare(got, wanted, f"on simulated ranks, {where}", tolerance, pass_name)


def _run_reference(
    reference: fx.GraphModule, world: _World, pass_name: str
) -> tuple[list[list[Any]], list[Any]]:
    """Inputs that the graph before the pass accepts, and what it computes of them."""
    for bound in (3, 1):  # 2 may be no valid index; 0 nearly always is
        inputs = _inputs(reference, world.size, bound)
        try:
            return inputs, _run(reference, inputs, world)
        except Exception as error:
            failure = error
    raise PassError(
        f"verify='simulate' cannot run the graph before pass {pass_name!r}: {failure} "
        "Compile this model with verify='static'."
    ) from failure


def _run(gm: fx.GraphModule, inputs: Sequence[Sequence[Any]], world: _World) -> list[Any]:
    """This rank's outputs, then its inputs as they are after the run."""
    copies = copied(inputs)
    runs = simulate(world.graphs(gm), copies, world.groups, semantics=PADDED_DIALECT)
    return [*runs[world.own].outputs, *copies[world.own]]


def _places(graph: fx.Graph) -> list[str]:
    returned = compat.pytree.tree_leaves(graph.output_node().args)
    outputs = [
        f"output {i}{f' ({item.name})' if isinstance(item, fx.Node) else ''}"
        for i, item in enumerate(returned)
    ]
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    return [*outputs, *(f"the graph input {name} after the run" for name in inputs)]


# --- inputs ---------------------------------------------------------------------------------------
def _inputs(gm: fx.GraphModule, size: int, bound: int) -> list[list[Any]]:
    places = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return [
        [_laid_out(value, value_of(node)) for node, value in zip(places, row, strict=True)]
        for row in random_inputs([gm] * size, bound=bound)
    ]


def _laid_out(drawn: Any, recorded: Any) -> Any:
    """The drawn values on the device and with the strides that the graph records."""
    if not isinstance(drawn, Tensor) or recorded.layout is not torch.strided:
        return drawn
    strides = [compat.size_hint(each) for each in recorded.stride()]
    return torch.empty_strided(
        drawn.shape, strides, dtype=drawn.dtype, device=recorded.device
    ).copy_(drawn)


@contextlib.contextmanager
def _uninitialised_is_nan() -> Iterator[None]:
    """Fill new memory with NaN, as torch does under deterministic algorithms."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# --- ranks ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _World:
    """Simulated ranks: this rank and its peers in every group that a graph uses.

    Groups of the same ranks are one axis, and groups that share only this rank are two. A group may
    span several axes, such as one over nodes and the groups within and between these.
    """

    axes: tuple[tuple[int, ...], ...]
    """Global ranks of the groups along each axis."""
    axes_of: Mapping[str, tuple[int, ...]]
    """Group -> its axes, the slowest first in the order of its ranks; none for one rank."""
    rank: int
    """This rank's global number."""

    @classmethod
    def of(cls, graphs: Sequence[fx.Graph]) -> _World:
        names = dict.fromkeys(each.group for graph in graphs for _, each in collectives(graph))
        axes: list[tuple[int, ...]] = []
        axes_of: dict[str, tuple[int, ...]] = {}
        rank = compat.global_rank() if names else 0
        ranks_of = {name: tuple(compat.group_ranks(name)) for name in names}
        for name, ranks in sorted(ranks_of.items(), key=lambda each: len(each[1])):
            if len(ranks) > 1 and not any(len(set(ranks) & set(axis)) > 1 for axis in axes):
                axes.append(ranks)
            found = _spanned(ranks, axes, rank)
            if found is None:
                raise PassError(
                    f"verify='simulate' cannot run a graph whose group {name!r} shares several "
                    "ranks with another group. Compile this model with verify='static'."
                )
            axes_of[name] = found
        return cls(tuple(axes), axes_of, rank)

    @property
    def _coordinates(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(len(axis)) for axis in self.axes)))

    @property
    def size(self) -> int:
        return len(self._coordinates)

    @property
    def own(self) -> int:
        return self._coordinates.index(tuple(axis.index(self.rank) for axis in self.axes))

    @property
    def groups(self) -> dict[str, list[int]]:
        found: dict[str, dict[int, tuple[int, ...]]] = {}
        for number, at in enumerate(self._coordinates):
            for name, axes in self.axes_of.items():
                place = tuple(at[i] for i in axes)
                found.setdefault(self._name(name, at), {})[number] = place
        return {name: sorted(places, key=places.__getitem__) for name, places in found.items()}

    def graphs(self, gm: fx.GraphModule) -> list[fx.GraphModule]:
        """The graph of each simulated rank: the same, on groups of its own."""
        return [self._renamed(gm, at) for at in self._coordinates]

    def _name(self, group: str, at: tuple[int, ...]) -> str:
        axes = self.axes_of[group]
        return "@".join([group, *(str(c) for i, c in enumerate(at) if i not in axes)])

    def _renamed(self, gm: fx.GraphModule, at: tuple[int, ...]) -> fx.GraphModule:
        copied = copy_graph(gm)
        for node, collective in list(collectives(copied.graph)):
            schema = node.target._schema  # type: ignore[union-attr]
            place = [argument.name for argument in schema.arguments].index("group_name")
            name = self._name(collective.group, at)
            if place < len(node.args):
                node.update_arg(place, name)
            else:
                node.update_kwarg("group_name", name)
        return copied


def _spanned(
    ranks: tuple[int, ...], axes: Sequence[tuple[int, ...]], own: int
) -> tuple[int, ...] | None:
    """Returns the axes that a group spans, the slowest first; None if it spans none exactly."""
    if len(ranks) == 1:
        return ()
    inside = [number for number, axis in enumerate(axes) if set(axis) <= set(ranks)]
    if math.prod(len(axes[number]) for number in inside) != len(ranks):
        return None
    strides = {
        number: ranks.index(axes[number][1]) - ranks.index(axes[number][0]) for number in inside
    }
    order, step, place = sorted(inside, key=lambda number: -strides[number]), 1, ranks.index(own)
    for number in reversed(order):
        axis = axes[number]
        first = place - place // step % len(axis) * step
        if axis != ranks[first : first + len(axis) * step : step]:
            return None
        step *= len(axis)
    return tuple(order)


# --- comparison -----------------------------------------------------------------------------------
def _compare(got: Any, wanted: Any, where: str, tolerance: float, pass_name: str) -> None:
    try:
        check_equal(got, wanted, where)
    except AssertionError as error:
        if not (tolerance and _is_close(got, wanted, tolerance)):
            raise PassError(f"pass {pass_name!r}: {error}") from None


def _tolerance(graph: fx.Graph) -> float:
    """Rounding errors of a few sums, in the coarsest dtype of the graph."""
    dtypes = {
        value.dtype
        for node in graph.nodes
        if isinstance(value := value_of(node), Tensor) and value.dtype.is_floating_point
    }
    return 16 * max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _is_close(got: Any, wanted: Any, tolerance: float) -> bool:
    if not (isinstance(got, Tensor) and isinstance(wanted, Tensor)):
        return False
    if got.shape != wanted.shape or got.dtype != wanted.dtype or not got.is_floating_point():
        return False
    ours, theirs = got.double(), wanted.double()
    scale = float(theirs.nan_to_num().abs().max()) if theirs.numel() else 0.0
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
