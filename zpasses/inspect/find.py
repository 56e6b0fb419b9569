"""Graphs and steps of a dump by the names that people give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zpasses.dumps.errors import DumpError
from zpasses.dumps.format import Compile, Dump, Graph, Node, Snapshot, Step
from zpasses.errors import nearest

__all__ = [
    "NotInDumpError",
    "Picked",
    "node_named",
    "pick",
    "pick_rank",
    "picked_to_run",
    "snapshot_of",
    "step_after",
    "step_before",
    "step_title",
    "steps_after",
]


class NotInDumpError(DumpError):
    """The dump holds nothing of that name."""


@dataclass(frozen=True)
class Picked:
    """One graph of a dump, and where it is."""

    rank: int
    compile: Compile
    graph: Graph

    @property
    def title(self) -> str:
        """ "0/0 forward", as everywhere in zpasses."""
        return f"{self.compile.name} {self.graph.name}"


def pick_rank(dump: Dump, rank: int | None = None) -> int:
    """The rank asked for, or the lowest that wrote a dump.

    Raises:
        NotInDumpError: when that rank wrote none.
    """
    if not dump.ranks:
        raise NotInDumpError(
            f"{dump.path} holds no rank's graphs; was the run stopped before its first compile?"
        )
    if rank is None:
        return min(dump.ranks)
    if rank not in dump.ranks:
        held = ", ".join(map(str, sorted(dump.ranks)))
        raise NotInDumpError(
            f"{dump.path} holds nothing of rank {rank}, but of {held}; the other ranks write with "
            f"options={{'dump_ranks': 'all'}}."
        )
    return rank


def pick(
    dump: Dump,
    graph: str | None = None,
    *,
    rank: int | None = None,
    compile_name: str | None = None,
) -> list[Picked]:
    """Graphs of one rank, in the order in which they were compiled.

    Args:
        graph: "joint", "forward", ...; None for all.
        rank: None for the lowest that there is.
        compile_name: Dynamo's compile id ("0/0"), or the name of its folder; None for all compiles.

    Raises:
        NotInDumpError: when there is no such rank, compile or graph; names what is near, and what
            there is.
    """
    rank = pick_rank(dump, rank)
    compiles = dump.ranks[rank].compiles
    if compile_name is not None:
        compiles = tuple(each for each in compiles if compile_name in (each.name, each.folder))
        if not compiles:
            names = dict.fromkeys(each.name for each in dump.ranks[rank].compiles)
            raise NotInDumpError(
                f"rank {rank} of {dump.path} has no compile "
                f"{compile_name!r}.{nearest(compile_name, names)}"
            )
    everything = [Picked(rank, each, found) for each in compiles for found in each.graphs.values()]
    if graph is None:
        return everything
    found = [each for each in everything if each.graph.name == graph]
    if not found:
        names = dict.fromkeys(each.graph.name for each in everything)
        raise NotInDumpError(f"{dump.path} has no graph {graph!r}.{nearest(graph, names)}")
    return found


_RUN = ("forward", "inference", "backward")


def picked_to_run(
    dump: Dump,
    graph: str | None = None,
    *,
    rank: int | None = None,
    compile_name: str | None = None,
) -> list[Picked]:
    """As `pick`; without a name, only graphs that are run (forward, backward, inference), or all
    where none of those is there."""
    found = pick(dump, graph, rank=rank, compile_name=compile_name)
    if graph is not None:
        return found
    return [each for each in found if each.graph.name in _RUN] or found


def step_after(picked: Picked, after: str | int | None) -> Step:
    """The step of a graph after a pass.

    Args:
        after: name of the pass, the pass as pipeline text, or number of the step (0 is the graph
            before the first pass; also as text). Of several runs of one pass, the last. None for
            the last step that did not fail.

    Raises:
        NotInDumpError: when no such pass ran on the graph.
    """
    steps = picked.graph.steps
    if after is None:
        return picked.graph.last
    if isinstance(after, int) or after.isdigit():
        if int(after) < len(steps):
            return steps[int(after)]
        raise NotInDumpError(
            f"graph {picked.title} has no step {after}; expected 0 (before the first pass) to "
            f"{len(steps) - 1}."
        )
    for step in reversed(steps):
        if step.after is not None and after in (step.after, _name(step)):
            return step
    known = dict.fromkeys(_name(step) for step in steps if step.after is not None)
    raise NotInDumpError(
        f"no pass {after!r} ran on graph "
        f"{picked.title}.{nearest(after, known) if known else ' No pass did.'}"
    )


def steps_after(picked: Sequence[Picked], after: str | int | None) -> list[tuple[Picked, Step]]:
    """The step of each graph after a pass, of those in which it ran and left a graph.

    Raises:
        NotInDumpError: when it ran in none of them.
    """
    found, missing = [], None
    for each in picked:
        try:
            step = step_after(each, after)
            if step.number is not None or len(picked) == 1:
                found.append((each, step))
        except NotInDumpError as error:
            missing = error
    if missing is not None and not found:
        if len(picked) == 1:
            raise missing
        known = dict.fromkeys(
            _name(step) for each in picked for step in each.graph.steps if step.after is not None
        )
        raise NotInDumpError(
            f"no pass {after!r} ran on "
            f"{', '.join(each.title for each in picked)}.{nearest(str(after), known)}"
        )
    return found


def step_before(picked: Picked, step: Step) -> Step:
    """The step that a pass started from; the step itself for the first."""
    return picked.graph.steps[max(step.index - 1, 0)]


def snapshot_of(picked: Picked, step: Step) -> Snapshot:
    """The graph of a step.

    Raises:
        NotInDumpError: when the pass failed and left no graph.
    """
    if step.snapshot is None:
        said = f" It failed: {step.error.type}: {step.error.message}" if step.error else ""
        raise NotInDumpError(f"graph {picked.title} {step_title(step)} was not written.{said}")
    return step.snapshot


def step_title(step: Step) -> str:
    """ "before the first pass", "after bucket{cap_mb=4}"."""
    return f"after {step.after}" if step.after else "before the first pass"


def node_named(snapshot: Snapshot, name: str) -> Node:
    """Raises NotInDumpError with near names."""
    if name not in snapshot.by_name:
        raise NotInDumpError(
            f"the graph has no node {name!r}.{_some(nearest(name, snapshot.by_name))}"
        )
    return snapshot.by_name[name]


def _some(hint: str) -> str:
    return hint.partition(" Known:")[0]  # thousands of names help nobody


def _name(step: Step) -> str:
    return step.run.name if step.run is not None else (step.after or "").partition("{")[0]
